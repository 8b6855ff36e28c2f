"""Train a cased WordPiece tokenizer on a corpus, saved so that `AutoTokenizer` loads it.

The directory is named after what decides its content: the corpus, which documents of it are used, and the settings. The
same request finds the finished tokenizer. Equal requests give equal files on every machine and in every process.

The `tokenizers` library learns the merges. But its trainer numbers the one-character pieces in the order of a hash
table, and breaks ties by these numbers. So this module counts the words and numbers these pieces itself.
Not handled here: other families of tokenizers. Use a directory that `AutoTokenizer` reads.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.common.disk import file_sha256, read_file
from mlsm.common.durable import publish_directory
from mlsm.common.errors import TeacherError
from mlsm.common.invocation import program
from pipeline import plan as planning
from pipeline.config import MUCH_UNKNOWN, UNIT_TOKENS, CorpusConfig, TokenizerConfig
from pipeline.corpus import open_sources
from pipeline.corpus.documents import Selection
from pipeline.job import named_by_content
from shards.copies import save_tokenizer
from shards.files import refuse_foreign_output
from shards.manifest import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
RECORD = "training.json"  # next to the files of the tokenizer: what it was trained from, and the hash of the result
MAX_LENGTH = 512  # tokens of an input, as the tokenizer states
COMMON_CHARACTERS = 1000  # the most frequent characters, which always have their own pieces
COVERAGE = 0.9995  # share of the text's characters: up to it further ones get pieces, in half of the entries at most
LONGEST_WORD = 100  # characters; longer ones are unknown
_VERSION = 2  # raise it when equal words give another tokenizer
_CHUNK = 10_000  # words that the trainer gets as one string


def make_tokenizer(config: TokenizerConfig, progress: Callable[..., None]) -> list[Path]:
    """Train as the settings say, or find the tokenizer if it exists already. Returns the directory, in a list.

    Raises  CorpusError; TeacherError if the directory was changed after it was written; OSError
    """
    refuse_foreign_output(config.output)
    sources = open_sources(config)
    rules = planning.windowing(None, CorpusConfig.max_length)  # has no effect on the documents
    selection = Selection.of(config)
    stamps = {source.name: source.stamp() for source in sources}
    plan = planning.scan(sources, None, None, rules, unit_tokens=UNIT_TOKENS, selection=selection, progress=progress)
    by_name = {source.name: source for source in sources}
    request = {
        "version": _VERSION,
        "kind": "cased WordPiece",
        "vocab_size": config.vocab_size,
        "corpus": sorted({by_name[unit.source].content_hash for unit in plan.units}),
        "invalid_utf8": config.invalid_utf8,
        "min_characters": config.min_characters,
        "keep_duplicates": config.keep_duplicates,
    }
    parent, name = config.output / "tokenizers", f"cased-{config.vocab_size}"
    directory = named_by_content(parent, name, fingerprint(request))
    if directory.exists():
        _check_finished(directory, request)
        return [directory]

    def fill(place: Path) -> None:
        texts = (text for unit in plan.units for text in planning.unit_texts(unit, by_name[unit.source]))
        progress("train tokenizer", 0, None, unit="sources")
        tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
        if len(tokenizer) < config.vocab_size:
            logger.warning("the text gives only %d of %d entries: %s", len(tokenizer), config.vocab_size, directory)
        save_tokenizer(tokenizer, place)
        for source in sources:
            source.check_unchanged(stamps[source.name])
        record = request | {"tokenizer.json": file_sha256(place / "tokenizer.json")}
        (place / RECORD).write_text(json.dumps(record, indent=1) + "\n")

    publish_directory(directory, fill, replace=False)
    return [directory]


def _check_finished(directory, request):
    """Raise TeacherError unless the directory has the unchanged result of this request."""
    try:
        record = json.loads(read_file(directory / RECORD))
        is_whole = record == request | {"tokenizer.json": file_sha256(directory / "tokenizer.json")}
    except (OSError, ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise TeacherError(
            f"{directory} is not the tokenizer that this command wrote: its files do not match {RECORD}. Move it "
            f"away, or choose another --output for  {program()} train-tokenizer"
        )


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 8192) -> "PreTrainedTokenizerFast":
    """Train on texts.

    texts       pieces of documents; their order does not matter
    vocab_size  entries, special tokens included
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    ids = {token: number for number, token in enumerate(_learn_vocabulary(words, vocab_size))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    characters = {word: count * len(word) for word, count in words.items()}
    total = sum(characters.values())
    unknown = sum(characters[word] for word in words if len(word) > LONGEST_WORD or not ids.keys() >= _pieces(word))
    if unknown > MUCH_UNKNOWN * total:
        logger.warning(
            "%.0f %% of the text's characters are in words that become [UNK], from which nothing is learned. Such "
            "words are longer than %d characters (a clause, in languages without spaces), or have characters that are "
            "too rare for this --vocab-size. Use a teacher's tokenizer of that language, or put spaces between words.",
            100 * unknown / total,
            LONGEST_WORD,
        )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    names: dict[str, Any] = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names)


def _pieces(word):
    """The pieces of one character that every piece of a word consists of."""
    return {word[0], *(f"##{character}" for character in word[1:])}


def _learn_vocabulary(words: Counter, vocab_size: int) -> list[str]:
    """Tokens in the order of their ids: special ones, characters, pieces of one character, merges as they were learned.

    The trainer would number only the characters that continue a word, "##a", in the order of a hash table. They are
    passed as special tokens, which have fixed numbers, so the merges follow only from counts and numbers.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    continue_words = {character for word in words for character in word[1:]}
    kept = _choose_characters(words, continue_words, vocab_size)
    continuing = sorted(f"##{character}" for character in continue_words & kept)
    if (least := len(SPECIAL_TOKENS) + len(kept) + len(continuing)) > vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} has no room for the {least:,} special tokens and characters of this text. Give "
            "more than that."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *continuing],
        min_frequency=2,
        initial_alphabet=sorted(kept),
        limit_alphabet=len(kept),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_repeat(words), trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda found: found[1])
    first = [*SPECIAL_TOKENS, *sorted(kept), *continuing]
    known = set(first)
    return first + [token for token, _ in learned if token not in known]


def _choose_characters(words, continue_words, vocab_size):
    """The set of characters that get pieces; words with others are unknown.

    They are the common ones, which suffice for an alphabet, and as many others as a text in Chinese or Korean needs.
    """
    characters: Counter = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    kept: set[str] = set()
    total, covered, entries = characters.total(), 0, len(SPECIAL_TOKENS)
    for character, count in sorted(characters.items(), key=lambda found: (-found[1], found[0])):
        entries += 2 if character in continue_words else 1
        if len(kept) >= COMMON_CHARACTERS and (covered >= COVERAGE * total or entries > vocab_size // 2):
            break
        kept.add(character)
        covered += count
    return kept


def _repeat(words: Counter) -> Iterator[str]:
    """Texts in which every word occurs as often as it was counted."""
    for word, count in sorted(words.items()):
        for start in range(0, count, _CHUNK):
            yield " ".join([word] * min(_CHUNK, count - start))
