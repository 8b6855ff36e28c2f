"""Settings of stage A, frozen, with units. Imports nothing heavy, so that `--help` answers at once."""

import glob
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from mlsm.common.settings import check, require, require_at_least
from mlsm.common.text import redacted

PLACES = (
    "corpus",
    "teacher",
    "tokenizer",
    "dictionary",
    "codebook",
    "hidden",
    "output",
)  # settings that may name files or directories
# Settings that do not change the result, except the last bits (`products`) and within the solver's tolerance.
HOW = ("retry_quarantine", "dry_run", "workers", "scheduler", "products", "solver_backend")
# Settings that say how a dictionary is learned, and mean nothing if one is given.
OF_LEARNING = ("atoms", "dictionary_tokens", "dictionary_epochs", "seed")
BUNDLED_TEXT = ("bundled",)  # the demonstration's own text
UNIT_TOKENS = 1_048_576  # default tokens per unit
MUCH_UNKNOWN = 0.02  # share of a text's characters or tokens above which users are told that they are unknown
BATCH_TOKENS = {"cpu": 8192, "cuda": 65_536}  # default tokens of a forward pass
FEWEST_A_BATCH, MOST_A_BATCH = 400, 2048  # limits of the vectors per minibatch of learning a dictionary
BATCHES_A_PASS = 128  # within these limits: see docs/benchmark-details.md


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text to read, and the directory of results."""

    corpus: tuple[str, ...] = BUNDLED_TEXT
    """Files, globs or directories: text, .jsonl (both also .gz/.xz/.bz2/.zst), .parquet; on the Hub
    hf://datasets/<owner>/<name>[@<revision>]/<files>. `bundled` is the sample of English Wikipedia that this package
    contains."""
    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that contains the document."""
    document_boundary: Literal["blank-line", "file"] = "blank-line"
    """What ends a document in a text file: an empty line, or only the end of the file."""
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict"
    """What to do with text that is not UTF-8 or contains a lone surrogate: `strict` refuses the corpus and names all
    such files; `replace` puts U+FFFD in its place; `skip` leaves the document out."""
    min_characters: int = 0
    """Leave out documents with fewer characters, not counting white space at their ends."""
    keep_duplicates: bool = False
    """Keep documents whose text is identical, character for character, to that of an earlier one, in the same file or
    another."""
    output: Path = Path("runs")
    """Directory for stores, dictionaries and diagnostics."""

    # Class attributes, not settings:
    recipe: ClassVar[str | None] = None  # the recipe's name; set by the command line, kept in stores
    origins: ClassVar[Mapping[str, str]] = {}  # setting to "flag" or its recipe; the command line sets it

    def __post_init__(self):
        check(self)
        require_at_least(self, 0, "min_characters")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(TextConfig):
    """Train a cased WordPiece tokenizer."""

    vocab_size: int = 8192
    """Entries, special tokens included. The tokenizer is saved in <output>/tokenizers/cased-<vocab-size>-<digits>; the
    digits depend on the corpus and the settings."""

    def __post_init__(self):
        super().__post_init__()
        require(self, "vocab_size", lambda value: value >= 6, "at least 6, as five entries are special")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(TextConfig):
    """The text to encode, and how it is cut."""

    held_out_by: Literal["document", "file"] = "document"
    """Hold out one document in a hundred, chosen by content, or with `file` whole files, at least one, so that no part
    of a held-out book is trained on. `file` makes a plan and stores of its own, in which small files are not joined:
    each makes a shard."""
    packing: Literal["packed", "pairs"] = "packed"
    """`packed` fills each window with text, documents one after the other. `pairs`, as in the official code, puts two
    lines of a document into a window, [CLS] A [SEP] B [SEP], and pads the rest, for text with one sentence per line. A
    teacher that has token types then sees which sentence each token belongs to."""
    max_length: int = 128
    """Window length in tokens, special tokens included; 128, as in the paper (section 4.1)."""
    max_tokens: int | None = None
    """Stop after about this many tokens: 99 % from training and 1 % from held-out documents, each to the end of a
    window; unset: the whole corpus."""
    unit_tokens: int = UNIT_TOKENS
    """About this many tokens make one unit, that is one shard. A unit has text of one file, or of several small
    ones, and whole documents. An interruption costs at most about a unit, and what was read ahead of it. 1,048,576
    tokens are less than two minutes of MiniLM's work on two cores (mlsm docs cost)."""

    def __post_init__(self):
        super().__post_init__()
        require(self, "max_length", lambda value: 8 <= value <= 65_535, "from 8, for [CLS] text [SEP], to 65,535")
        require_at_least(self, 1, "max_tokens", "unit_tokens")


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(CorpusConfig):
    """The processes that share the work; the result does not depend on them."""

    workers: int = 1
    """Processes on this machine that share the work, its cores and, one each in turn, its GPUs. 1 is only this
    process."""
    scheduler: str | None = None
    """Address of a Dask scheduler whose workers do the work instead, such as tcp://host:8786. They must see this
    machine's files under the same names; how many threads each computes with is set there."""

    def __post_init__(self):
        super().__post_init__()
        require_at_least(self, 1, "workers")
        if self.scheduler is not None and self.workers > 1:
            raise ValueError(
                f"--workers {self.workers} starts processes here, but --scheduler {self.scheduler} uses those of a "
                "cluster. Pass only one of them."
            )
        if self.scheduler is not None and "://" not in self.scheduler:
            raise ValueError(f"--scheduler {self.scheduler} is not an address. Expected one such as tcp://host:8786.")


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """The settings of every encoding command."""

    retry_quarantine: bool = False
    """Encode the units that contain quarantined documents again."""
    dry_run: bool = False
    """Estimate tokens, bytes and hours: read the text once, measure for about a minute, and write nothing."""


@dataclass(frozen=True, kw_only=True)
class EncodeIdsConfig(EncodingConfig, WorkersConfig):
    """Write token ids only: what the `mlm` objective needs."""

    tokenizer: str | None = None
    """Directory or Hub id of a tokenizer; `bundled` is the demonstration teacher's, the default only for the
    demonstration's own text."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "tokenizer", own_or_bundled("tokenizer", self.tokenizer, self.corpus))


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(WorkersConfig):
    """The teacher that reads the text, and how it reads."""

    teacher: str | None = None
    """Directory or Hub id of a BERT-family encoder; `bundled` is the small demonstration teacher, the default only for
    the demonstration's own text."""
    batch_tokens: int | None = None
    """Tokens that the teacher and the solver take at once; unset: 8,192, which a CPU's teacher reads in shorter passes,
    whose tensors fit its cache (mlsm docs log, 2026-11-26), and 65,536 where a GPU encodes: with fewer it waits for the
    host."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the teacher's forward pass; `auto` is float32 on a CPU and float16 on a GPU, which changes LSPs less
    than bfloat16 (mlsm docs sparse-coding). Hidden states that overflow float16 end the run: then use bfloat16 or
    float32. Each dtype makes stores of its own."""
    documents_apart: bool = False
    """Read each document of a packed window by itself: the teacher's attention stays within a document and positions
    start again with each, as with train-student's option of this name. This makes a separate store."""
    device: str = "auto"
    """`auto` (a GPU if there is one), cpu or cuda."""
    products: Literal["auto", "onednn", "torch"] = "auto"
    """Library of the teacher's float32 matrix products on a CPU: `auto` times torch's own and oneDNN's once per machine
    and uses the faster one for each shape, in all workers. Results differ in the last bits; the record of a unit names
    what was not computed by oneDNN."""

    def __post_init__(self):
        super().__post_init__()
        if getattr(self, "hidden", None) is None:  # stored vectors need no teacher
            object.__setattr__(self, "teacher", own_or_bundled("teacher", self.teacher, self.corpus))
        if self.batch_tokens is not None and self.batch_tokens < self.max_length:
            raise ValueError(f"--batch-tokens {self.batch_tokens} is less than one window of {self.max_length} tokens.")
        if self.documents_apart and self.packing == "pairs":
            raise ValueError(
                "--documents-apart is for windows that hold several documents, but with --packing pairs a window "
                "holds two sentences of one document. Pass only one of the two."
            )
        if ":" in self.device and (self.workers > 1 or self.scheduler):
            raise ValueError(
                f"--device {self.device} names one GPU, but every worker has its own. Use --device cuda or auto."
            )

    def tokens_at_once(self, device_type: str = "cpu") -> int:
        """What the teacher takes at once; "cuda" where a GPU encodes, as a batch that does not fit is halved there."""
        return self.batch_tokens or max(BATCH_TOKENS[device_type], self.max_length)

    def windows_at_once(self, device_type: str = "cpu") -> int:
        """The same in windows."""
        return self.tokens_at_once(device_type) // self.max_length


# With --hidden all settings of text and teacher come from the store of hidden states, except these:
_FREE = {"output", "workers", "scheduler", "device", "batch_tokens"}
FROM_STORE = {field.name for field in fields(TeacherConfig)} - _FREE | {"layer", "center"}


@dataclass(frozen=True, kw_only=True)
class EncodeLogitsConfig(EncodingConfig, TeacherConfig):
    """Encode a corpus into shards of the teacher's distribution over its vocabulary, for knowledge distillation."""

    top_n: int | Literal["all"] = 64
    """Keep this many of the most probable vocabulary entries of each token, 1 to 255; `all` is the 255 that the shard
    format can store. The mass of the others is kept as one number."""
    masked: bool = False
    """Compute each token's distribution in a pass of the teacher that masks the token: seven passes over every window,
    each with another seventh of its tokens masked, so that the teacher never sees the answer. This takes seven times as
    long except for the head. By default the teacher reads the text unmasked, as in the official code. Makes a store of
    its own."""

    def __post_init__(self):
        super().__post_init__()
        refuse_top_n(self.top_n)


@dataclass(frozen=True, kw_only=True)
class EncodeHiddenConfig(EncodingConfig, TeacherConfig):
    """Encode a corpus into shards of the teacher's hidden states, scaled to unit length."""

    layer: tuple[int, ...] = (10,)
    """Layers of the teacher, 1 to its depth; each gets its own store, from one pass of the teacher. (With --quantise pq
    the centroids of each layer take one more, over their sample.) 10 of BERT-base's 12 is the best in the paper's table
    1; for other teachers see mlsm docs faq."""
    quantise: Literal["int8", "pq"] = "int8"
    """How to store hidden states: `int8` is a byte per value and a scale per token; `pq` is product quantisation by
    faiss, with --bytes per token, whose centroids are learned from a sample and kept in the store. LSPs of int8 states
    hardly differ from exact ones, those of pq do (mlsm docs hidden-states)."""
    bytes: int | None = None
    """With --quantise pq: bytes per token, 16, 32 or 64, which must divide the width of the hidden states; unset: 64,
    the most exact."""
    codebook: Path | None = None
    """With --quantise pq: use the centroids in this directory, such as the codebook/ of a store; unset: learn them from
    the corpus."""
    dictionary_tokens: int = 262_144
    """With --quantise pq: hidden vectors in the sample, drawn as for a dictionary with the same --seed. Centroids are
    learned from the first 65,536, 256 for each, as faiss advises."""
    seed: int = 42
    """Seed of that sample and of the centroids; 42, as in the official code."""
    hidden: str | None = None
    """Quantise a store of hidden states, by directory or URL, instead of reading text with a teacher. Settings of
    corpus and teacher come from that store."""

    center: ClassVar[str] = "none"  # centring of the sample

    def __post_init__(self):
        super().__post_init__()
        if self.quantise == "pq" and self.bytes is None:
            object.__setattr__(self, "bytes", 64)
        require(self, "bytes", lambda value: value in (16, 32, 64), "16, 32 or 64")
        for name in ("bytes", "codebook"):
            if self.quantise != "pq" and getattr(self, name) is not None:
                raise ValueError(f"--{name} belongs to --quantise pq. Add --quantise pq, or omit --{name}.")
        if not self.layer or len(set(self.layer)) < len(self.layer):
            raise ValueError(f"--layer needs different numbers, found {' '.join(map(str, self.layer)) or 'none'}.")
        if self.codebook is not None and len(self.layer) > 1:
            raise ValueError(f"--codebook fits one layer, but --layer names {len(self.layer)}. Encode one at a time.")
        require_at_least(self, 1, "dictionary_tokens")
        require_at_least(self, 0, "seed")


@dataclass(frozen=True, kw_only=True)
class DictionaryConfig(TeacherConfig):
    """Learn a dictionary of LSP atoms from a teacher's hidden states."""

    layer: tuple[int, ...] = (10,)
    """Layers of the teacher, 1 to its depth; each gets its own dictionary and results, from one pass of the teacher.
    10 of BERT-base's 12 is the best in the paper's table 1; for other teachers see mlsm docs faq."""
    k: tuple[int, ...] = (3072,)
    """Number of latent semantic properties: atoms of the dictionary. 3,072 is the paper's; in its table 2, scores
    hardly depend on k. Each number gets its own dictionary and results."""
    atoms: Literal["learned", "sampled", "clusters"] = "learned"
    """How to make the atoms: `learned`, as in the paper, or one of two controls: `sampled`, k hidden states of the
    sample, drawn by --seed, from which learning would start; `clusters`, the unit-length centroids of a k-means over
    the sample. The controls make dictionaries of their own. For one label per token: --atoms clusters with --solver
    nearest."""
    lam: float = 0.05
    """Penalty of equation 2, in units of a correlation; larger means sparser. 0.05 is the official code's; the paper
    states none."""
    center: Literal["none", "mean", "position"] = "none"
    """What to subtract from hidden states before they are scaled to unit length: nothing, as in the paper; the mean
    hidden state; or the mean at each position of the window. The means are those of the raw hidden states in the
    dictionary's sample, and are stored with the dictionary. `position` removes positions from the LSPs of some teachers
    and adds them to those of others: mlsm docs centring explains how to find out. Makes dictionaries and stores of its
    own."""
    dictionary_tokens: int = 2_000_000
    """Hidden vectors in the dictionary's training sample, drawn over the whole corpus; in the paper (section 4.1.1) 2
    million."""
    dictionary_epochs: float = 2.0
    """Most passes over that sample; learning stops earlier when the held-out objective no longer falls. Two end below
    SPAMS's objective after 300 iterations (mlsm docs benchmark-details)."""
    seed: int = 42
    """Seed of the dictionary's sample and initialisation; 42, as in the official code."""

    def __post_init__(self):
        super().__post_init__()
        for name, example in (("layer", 10), ("k", 3072)):
            values = getattr(self, name)
            if values is None:  # taken from the given dictionary
                continue
            if not values:
                raise ValueError(f"--{name} needs at least one number, for example: --{name} {example}.")
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} names a number twice: {' '.join(map(str, values))}.")
        if not 0 < self.lam < 1:
            raise ValueError(
                f"--lam must be above 0 and below 1, found {self.lam}: hidden states have unit length, so no "
                "correlation exceeds 1, and from 1 on every code would be empty. The usual value is 0.05."
            )
        require(self, "k", lambda value: min(value) >= 1, "at least 1")
        require_at_least(self, 1, "dictionary_tokens")
        require_at_least(self, 0, "seed")
        require(self, "dictionary_epochs", lambda value: 0 < value < math.inf, "a positive number")


@dataclass(frozen=True, kw_only=True)
class LearnConfig(DictionaryConfig):
    """Learn a dictionary of LSP atoms from a teacher's hidden states, stored ones, or a file of vectors."""

    hidden: str | None = None
    """Learn from a store of hidden states (encode-hidden) or a .npy file of vectors instead. From a store, a uniform
    sample of --dictionary-tokens of its training documents is used; settings of corpus and teacher come from the store.
    From a .npy file of float16, float32 or float64 vectors (N, width) of any model or modality, every row is used,
    scaled to unit length; only --k, --atoms, --lam, --dictionary-epochs, --seed, --device and --output apply then, and
    other flags are refused."""

    def __post_init__(self):
        super().__post_init__()
        if self.hidden is not None and self.center != "none":
            raise ValueError(
                f"--center {self.center} needs a teacher's hidden states at their own length, because encode-lsp then "
                "centres in the same way; --hidden names vectors of unit length or from elsewhere. Pass only one of "
                "the two."
            )


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(EncodingConfig, DictionaryConfig):
    """Encode a corpus into LSP shards."""

    hidden: str | None = None
    """Code a store of hidden states (encode-hidden), by directory or URL, instead of reading text with a teacher.
    Settings of corpus and teacher, --layer included, come from that store, and --center is not possible. The new store
    pairs with it."""
    dictionary: Path | None = None
    """Use the dictionary in this directory; unset: learn one from the corpus. Its centring is used, too; another
    --center is refused."""
    tolerance: float = 1e-4
    """Largest KKT violation that a code may keep, in units of a correlation; on a GPU less than 1e-4 is out of reach.
    At 1e-4 distributions differ from the exact ones by a total variation of 0.0006 on average, 0.012 at most; at 1e-3,
    the default of `nonneg_lasso` in Python, by 0.0067 and 0.10. A store of another tolerance is another store. Not for
    `--solver fista`, which has no stopping test."""
    solver: Literal["cd", "fista", "nearest"] = "cd"
    """How to code tokens: `cd` is coordinate descent to the optimum of equation 2, within --tolerance. `fista` is what
    the official code does: a fixed number of FISTA steps, whose codes are not optimal but smoother, with more non-zeros
    and no evidence that they train better students (mlsm docs sparse-coding). `nearest` is a control without sparse
    coding: the one atom with the largest correlation, with weight 1, whatever --lam and --top-n. Each makes its own
    store; the dictionary is the same."""
    solver_steps: int = 100
    """With --solver fista: number of steps; the official code does 100."""
    solver_backend: Literal["auto", "torch"] = "auto"
    """What computes `--solver cd`: `auto` is compiled for the CPU; on a GPU it is the CUDA kernels or `torch`, the same
    tolerance by plain operations of torch, whichever a trial on rows of the run found right and faster. The records of
    units name it."""
    k: tuple[int, ...] | None = None  # type: ignore[assignment]
    """Number of latent semantic properties: atoms of the dictionary; unset: 3,072, or those of --dictionary. 3,072 is
    the paper's; in its table 2, scores hardly depend on k. Our students scored less with 384 than with 1,536 or 6,144
    (mlsm docs sparse-coding). Each number gets its own store."""
    top_n: int | Literal["all"] | None = None
    """Keep this many of the largest entries of each token's distribution; unset: 32, or more if these keep less than 98
    % of the mass of the dictionary's held-out vectors on average; there is no evidence that more train better students
    (mlsm docs sparse-coding). `all` keeps every non-zero, up to the 255 that the shard format can store; if a token has
    more, the mass of the others is kept as one number and the store's records count such tokens."""

    def __post_init__(self):
        if self.k is None and self.dictionary is None:
            object.__setattr__(self, "k", DictionaryConfig.k)
        super().__post_init__()
        if self.top_n is not None:
            refuse_top_n(self.top_n)
        if self.solver == "cd":
            refuse_tolerance(self.tolerance, self.lam)
        self._refuse_settings_of_the_other_solver()
        for name in ("layer", "k"):
            count = len(getattr(self, name) or ())
            if self.dictionary is not None and count > 1:
                raise ValueError(f"--dictionary fits one {name}, but --{name} names {count}. Encode one at a time.")

    def _refuse_settings_of_the_other_solver(self):
        if self.solver != "fista" and self.solver_steps != EncodeConfig.solver_steps:
            why = {"cd": "coordinate descent stops by --tolerance", "nearest": "nearest takes none"}
            raise ValueError(
                f"--solver-steps {self.solver_steps} belongs to --solver fista; {why[self.solver]}. Add --solver "
                "fista, or omit the steps."
            )
        why = {"fista": "FISTA runs in torch anyway", "nearest": "nearest is one product"}
        if self.solver != "cd" and self.solver_backend != EncodeConfig.solver_backend:
            raise ValueError(
                f"--solver-backend {self.solver_backend} belongs to --solver cd; {why[self.solver]}. Leave one of the "
                "two out."
            )
        if self.solver != "cd" and self.tolerance != EncodeConfig.tolerance:
            why = {"fista": "FISTA stops after --solver-steps, wherever that is", "nearest": "nearest solves nothing"}
            raise ValueError(
                f"--tolerance {self.tolerance} belongs to --solver cd; {why[self.solver]}. Leave one of the two out."
            )
        require_at_least(self, 1, "solver_steps")


def own_or_bundled(name: str, given: str | None, corpus: tuple[str, ...]) -> str:
    """The given teacher or tokenizer; if none is given, the bundled one, only for the demonstration's own text.

    name    "teacher" or "tokenizer"
    Raises  ValueError, which names the choices, if none was given for other text
    """
    if given is None and corpus != BUNDLED_TEXT:
        example = "google-bert/bert-base-cased"
        raise ValueError(
            f"--corpus {redacted(' '.join(corpus))} is your own text, but no --{name} is given. Pass a Hub id, such as "
            f"--{name} {example}, a directory or, to try it out, --{name} bundled, the small demonstration {name}."
        )
    return given if given is not None else "bundled"


def refuse_tolerance(tolerance: float, lam: float) -> None:
    """Raise ValueError when a solver's tolerance does not fit the penalty."""
    if not 0 < tolerance < lam:
        is_default = tolerance == EncodeConfig.tolerance
        advice = "Give --tolerance as well, below --lam" if is_default else "The usual value is 0.0001"
        raise ValueError(
            f"--tolerance must lie between 0 and --lam {lam}, found {tolerance}: it is how far a correlation may "
            f"exceed the penalty. {advice}."
        )


def refuse_top_n(top_n: int | str) -> None:
    """Raise ValueError when the shard format cannot hold so many entries of a token."""
    if top_n != "all" and not (isinstance(top_n, int) and 1 <= top_n <= 255):
        raise ValueError(
            f"--top-n must lie between 1 and 255, or be `all`, found {top_n}: "
            "the shard format counts the entries of a token in one byte."
        )


def with_absolute_paths(values: Mapping) -> dict:
    """The same dict with absolute paths; `bundled` and Hub names do not change."""
    known = {name: _absolute(value) if name in PLACES else value for name, value in values.items()}
    if "output" in known:  # it need not exist yet
        known["output"] = os.path.abspath(known["output"])
    return known


def _absolute(value):
    if isinstance(value, list):
        return [_absolute(entry) for entry in value]
    if not isinstance(value, str) or "://" in value or value == "bundled":
        return value
    path = os.path.expanduser(value)
    if os.path.exists(path):
        return os.path.abspath(path)
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), path)) if glob.has_magic(path) else value


def minibatch_size(vectors: int) -> int:
    """How many vectors a minibatch has for a sample of this size: 400 for up to 51,200, 2,048 for 262,144 or more, and
    in between enough for 128 updates per pass. Large minibatches would update the atoms of a small sample too seldom
    (docs/benchmark-details.md)."""
    return min(MOST_A_BATCH, max(FEWEST_A_BATCH, vectors // BATCHES_A_PASS))
