"""Make the bundled text again: a sample of whole articles of English Wikipedia, chosen by a hash of their content.

    python pipeline/bundled_text/make.py DIRECTORY

DIRECTORY contains wiki_en_2014_train_00.txt.xz to wiki_en_2014_train_03.txt.xz: one paragraph per line, a blank line
between articles. The sample has the same layout. Equal source files give equal text; the README has its SHA-256.
"""

import hashlib
import lzma
import sys
from pathlib import Path

NAME = "wikipedia-en-2014.txt.xz"
PARTS = [f"wiki_en_2014_train_0{part}.txt.xz" for part in range(4)]
ARTICLES = 2_700  # 2.1 million tokens of the bundled teacher's tokenizer: quickstart reads two million


def sample(texts: list[str], articles: int = ARTICLES) -> str:
    """The articles with the smallest hashes, in the order of their hashes, without repeats.

    The order is arbitrary, so the start of the sample is a fair sample too. The hash is not only of the article's text:
    that hash decides in the pipeline what is held out, and would hold out the whole sample.
    """
    found = {article.strip("\n") for text in texts for article in text.split("\n\n")} - {""}
    ordered = sorted(found, key=lambda article: hashlib.sha256(f"bundled text\n{article}".encode()).digest())
    return "\n\n".join(ordered[:articles]) + "\n"


def main(directory: Path) -> None:
    """Write the sample next to this file, and print what the README states about it."""
    text = sample([lzma.decompress((directory / part).read_bytes()).decode() for part in PARTS]).encode()
    stored = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    Path(__file__).with_name(NAME).write_bytes(stored)
    print(f"{ARTICLES:,} articles, {len(text.split()):,} words, {len(text):,} bytes, {len(stored):,} compressed")
    print(f"SHA-256 of the text: {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
