"""Tables of mask weights from the text of a store: `make-mask-weights`, and what `--mask-weights` names.

    frequency  w = max(count, LEAST_COUNT)^-power: rare tokens are masked more often (WSBERT, Zhang et al. 2023)
    common     w is one number for the tokens of the most frequent words, 1 for all others. Most frequent words are
               function words, so no list of a language's function words is needed
    domain     w = log(1 + r), where r is the token's frequency in the store over that in a general store; it is the log
               ratio where r is large, stays above 0 if r is small, and is equal for all tokens of equal corpora. Or
               weights from a list of words
    pmi        w = 1, and collocations (collocations.py)

Counts are those that a store keeps of its training split, so all but pmi take seconds; pmi reads the text once. For
domain, one occurrence of every token is added to the frequencies. A table's name follows from everything that decides
its content, so the same request finds the finished table. Not handled here: informative relevance (InforMask, Sadeq et
al. 2022), which depends on the other words of a sentence and not only on the token. Mask weights that were computed
elsewhere can be given as a list of words.

Shapes: V vocabulary, C collocations.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlsm.common.disk import file_sha256
from mlsm.common.durable import make_directories, refuse_what_is_in_the_way
from mlsm.common.errors import RunError
from mlsm.common.progress import silent
from shards.manifest import fingerprint
from shards.reader import Store
from student.config import StudentConfig
from student.masks.collocations import collocations, count_ngrams
from student.masks.config import ADAPTIVE, KINDS, UNIFORM, MaskWeightsConfig, WeightsKind
from student.masks.table import LONGEST, MaskTable, read_table, vocabulary_fingerprint, write_table
from student.masks.words import LONE_SPACES, UNSPACED, continuation_flags, token_names, token_texts

logger = logging.getLogger(__name__)

ROOT = Path("runs/mask-weights")
EXAMPLES = 8  # tokens and collocations in a report
_EXTREMES = {"heaviest": -1, "lightest": 1}  # and the sign of the weights that sorts them to the front
LEAST_COUNT = 10  # rarer tokens weigh as if they occurred so often, and rarer n-grams are no collocations
MOST_FREQUENT = 50  # how many words of the store are common, ignoring case
COVERAGE = 0.5  # the largest share of the text in collocations; it decides how many there are


def make_mask_weights(config: MaskWeightsConfig, progress: Callable[..., None] = silent) -> dict:
    """Make the table of a MaskWeightsConfig, or find the finished one.

    progress  called as progress(stage, done, total, unit=...)
    Returns   dict for JSON: mask_weights (the file), name (kind and hash of the content), store, kind (the store's),
              tokens (counted), heaviest and lightest ([token, weight], of tokens that occur, frequent ones first among
              equals; absent if all are equal), collocations (how many), examples (of them), finished_before
    Raises    RunError if the store, the general one, the words and the output do not belong together; StoreError
    """
    assert config.store is not None, "the command line or Python has chosen one"
    progress("count tokens", 0, None)
    store = Store.open(config.store)
    path, finished_before = _make(config, store, ROOT, progress)
    table, counts_V, tokenizer = read_table(path), store.split("train").ordinary_counts(), store.load_tokenizer()
    seen = np.flatnonzero(counts_V)
    orders = {name: np.lexsort((-counts_V[seen], sign * table.weights_V[seen])) for name, sign in _EXTREMES.items()}
    differ = len(np.unique(table.weights_V[seen])) > 1
    shown = {name: seen[order[:EXAMPLES]] for name, order in orders.items()} if differ else {}
    return {
        "mask_weights": str(path),
        "name": table.name,
        "store": str(store.path),
        "kind": store.kind,
        "tokens": int(counts_V.sum()),
        **{
            name: list(map(list, zip(token_names(tokenizer, ids.tolist()), table.weights_V[ids].tolist(), strict=True)))
            for name, ids in shown.items()
        },
        "collocations": len(table.collocations_C5),
        "examples": [
            " ".join(token_names(tokenizer, ids_5[ids_5 >= 0].tolist())) for ids_5 in table.collocations_C5[:EXAMPLES]
        ],
        "finished_before": finished_before,
    }


def mask_tables(config: StudentConfig, store: Store) -> list[MaskTable | None]:
    """The tables that a run uses one after the other, as its settings name them. A kind is made from the run's store. A
    table is None if all tokens have the same weight, or if the weights follow the student (adaptive.py).

    Raises RunError if a table cannot be read, is for another vocabulary, or does not fit the masking unit
    """
    named = config.mask_weights if isinstance(config.mask_weights, tuple) else (config.mask_weights,)
    return [_table_of(name, config, store) for name in named]


def _table_of(name: str | None, config: StudentConfig, store: Store) -> MaskTable | None:
    if name in (None, ADAPTIVE, UNIFORM):
        return None
    path = Path(name)
    if name in KINDS:
        kind = cast(WeightsKind, name)
        path, _ = _make(MaskWeightsConfig(kind=kind), store, config.shared_directory / ROOT.name, silent)
    table = read_table(path)
    table.check_fits(store)
    if len(table.collocations_C5) and config.mask_unit == "span":
        raise RunError(
            f"--mask-weights {name} holds {len(table.collocations_C5):,} collocations, each masked as a whole, but "
            "--mask-unit span masks spans of random length. Use --mask-unit token or word."
        )
    return table


def _make(config, store, directory, progress) -> tuple[Path, bool]:
    """The file of a table, and whether it existed already. Its default name in the directory has its fingerprint."""
    used = {
        "frequency": {"power": config.power, "least_count": LEAST_COUNT},
        "domain": {},
        "common": {"most_frequent": MOST_FREQUENT, "weight": config.weight},
        "pmi": {"least_count": LEAST_COUNT, "coverage": COVERAGE},
    }
    origin: dict[str, Any] = {"kind": config.kind} | used[config.kind]
    origin |= {"plan": store.plan_id, "vocabulary": vocabulary_fingerprint(store)}
    if config.kind == "common" and _unspaced(store, _continues(store)):
        origin["unspaced"] = "each token"  # only then, so that tables of other text keep their names
    general = None if config.against is None else Store.open(config.against)
    if general is not None:
        if vocabulary_fingerprint(general) != origin["vocabulary"]:
            raise RunError(
                f"--against {general.path} has another vocabulary than {store.path}, so their tokens cannot be "
                "compared. Encode the general text with the same tokenizer (encode-ids --tokenizer)."
            )
        origin["general"] = general.plan_id
    listed_V = None
    if config.words is not None:
        listed_V = _listed(config.words, store)
        origin["words"] = file_sha256(config.words)
    path = config.output or directory / f"{config.kind}-{fingerprint(origin)[:12]}.npz"
    written = json.dumps(origin, sort_keys=True)
    if path.exists():
        try:
            if read_table(path).origin == written:
                return path, True
        except RunError as error:
            logger.info("%s", error)
        if config.output is not None:
            raise RunError(f"{path} exists and is something else. Nothing was changed. Choose another --output.")
    weights_V, found_C5 = np.ones(store.vocab_size), np.zeros((0, LONGEST), np.int32)
    if listed_V is not None:
        weights_V = listed_V
    elif general is not None:
        weights_V = np.log1p(_frequencies(store) / _frequencies(general))
    elif config.kind == "common":
        weights_V = np.where(_common(store), config.weight, 1.0)
    elif config.kind == "frequency":
        counts_V = store.split("train").ordinary_counts()
        weights_V = np.maximum(counts_V, LEAST_COUNT) ** -config.power
        average = (weights_V @ counts_V) / max(1, counts_V.sum())
        with np.errstate(over="ignore"):
            weights_V /= average or 1  # the average token gets weight 1
        if not 1e-30 < weights_V.min() <= weights_V.max() < 1e30:  # of a float32
            raise RunError(
                f"--power {config.power:g}: the weights of rare and frequent tokens are too far apart for numbers of 32"
                f" bits. Use a smaller --power (0.5 is usual)."
            )
    else:
        logger.info("counting the n-grams of %s", store.path)
        counts = count_ngrams(store.split("train"), progress)
        found_C5 = collocations(
            counts, store.split("train").ordinary_counts(), least_count=LEAST_COUNT, coverage=COVERAGE
        )
        if counts.undercount:
            logger.warning(
                "there are too many n-grams for the memory limit: counts are too low by at most %d, and collocations "
                "that occur fewer than %d times may be missing",
                counts.undercount,
                LEAST_COUNT + counts.undercount,
            )
    with refuse_what_is_in_the_way():
        make_directories(path.parent)
        vocabulary = origin["vocabulary"]
        write_table(path, MaskTable(config.kind, vocabulary, weights_V.astype(np.float32), found_C5, written))
    return path, False


def _frequencies(store):
    counts_V = store.split("train").ordinary_counts() + 1
    return counts_V / counts_V.sum()


def _continues(store):
    try:
        return continuation_flags(store.tokenizer_dir, store.vocab_size)
    except RunError:
        raise RunError(
            f"--kind common: cannot tell where words begin in the vocabulary of {store.path}, so it is unknown which "
            "words are frequent. Pass a list of words with weights (--kind domain --words FILE)."
        ) from None


def _unspaced(store, continues_V):
    """The tokens of scripts without spaces that continue a word, which there is a clause: id -> text."""
    ids = np.flatnonzero(store.split("train").ordinary_counts() * continues_V).tolist()
    texts, *_ = token_texts(store.load_tokenizer().backend_tokenizer, ids)
    return {id: text for id, text in zip(ids, texts, strict=True) if UNSPACED.match(text)}


def _common(store):
    """Whether each token is one of the most frequent words, bool (V). A token counts as a word if it starts one, or is
    of a script without spaces, and has a letter. Tokens that differ from a frequent word only in case are included."""
    counts_V, continues_V, tokenizer = (
        store.split("train").ordinary_counts(),
        _continues(store),
        store.load_tokenizer(),
    )
    words = {id: tokenizer.decode([id]).strip() for id in np.flatnonzero(counts_V * ~continues_V).tolist()}
    ids_of: dict[str, list[int]] = {}
    for id, word in (words | _unspaced(store, continues_V)).items():
        if any(map(str.isalpha, word)):
            ids_of.setdefault(word.casefold(), []).append(id)
    common = sorted(ids_of, key=lambda word: -counts_V[ids_of[word]].sum())[:MOST_FREQUENT]
    return np.isin(np.arange(store.vocab_size), [id for word in common for id in ids_of[word]])


def _listed(path, store):
    """Weights from a list of words, float64 (V): 1 for tokens in no listed word; tokens in several get the largest."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"--words: {path} cannot be read ({error}). Expected a word and a weight per line.") from None
    tokenizer, found_V = store.load_tokenizer(), np.full(store.vocab_size, -1.0)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            word, weight = line.rsplit(maxsplit=1)
            if not 0 <= float(weight) < 1e30:  # as a float32 it stays finite
                raise ValueError
        except ValueError:
            raise RunError(
                f"--words: line {number} of {path} is {line!r}. Expected a word, a space or tab, and its weight, a "
                "number of at least 0."
            ) from None
        bare, spaced = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word, f" {word}"))
        # In byte-level vocabularies a word after a space has other tokens; the form in more pieces is the rarer one.
        ids = (bare if len(bare) <= len(spaced) else []) + (spaced if len(spaced) <= len(bare) else [])
        ids = [id for id in ids if tokenizer.convert_ids_to_tokens(id) not in LONE_SPACES]  # before any word
        found_V[ids] = np.maximum(found_V[ids], float(weight))
    if (found_V < 0).all():
        raise RunError(f"--words: {path} lists no word. Expected a word and a weight per line.")
    return np.where(found_V < 0, 1.0, found_V)
