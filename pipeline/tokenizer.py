"""Train a cased WordPiece tokenizer on a corpus, saved the way `AutoTokenizer` loads it.

The `tokenizers` library trains; this module feeds it documents in bounded memory.
Left out: other families of tokenizers; bring a directory that `AutoTokenizer` reads.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from common.paths import utf8_name
from pipeline import plan as planning
from pipeline.config import TokenizerConfig
from pipeline.corpus import open_sources
from pipeline.corpus.documents import Selection

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def run(config: TokenizerConfig, progress: Callable[..., None]) -> list[Path]:
    """Train as the settings say; returns the directory, in a list."""
    sources = open_sources(config)
    rules = planning.windowing(None, config.max_length)
    plan = planning.scan(
        sources, None, None, rules, unit_tokens=config.unit_tokens, selection=Selection.of(config), progress=progress
    )
    by_name = {source.name: source for source in sources}
    texts = (text for unit in plan.units for text in planning.unit_texts(unit, by_name[unit.source]))
    progress("train tokenizer", 0, None, unit="sources")
    directory = config.output / "tokenizers" / f"cased-{config.vocab_size}"
    return [train_tokenizer(texts, directory, vocab_size=config.vocab_size)]


def train_tokenizer(
    texts: Iterable[str],
    output: str | Path,
    *,
    vocab_size: int = 8192,
    max_length: int = 512,
    lowercase: bool = False,
) -> Path:
    """Train on texts and save to a directory, which is returned.

    texts       pieces of documents
    vocab_size  entries, special tokens included
    max_length  tokens, the model_max_length that is stored
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        min_frequency=2,
        limit_alphabet=1000,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    with utf8_name(directory) as place:
        fast.save_pretrained(place)
    return directory
