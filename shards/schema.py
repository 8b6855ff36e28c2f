"""Names, limits and byte layout of LSP shards, format version 1.

A store is one directory, named by its target fingerprint:

    target.json            how the stored distributions were made (the settings that are hashed)
    tokenizer/             a copy, so that students need no other files
    dictionary/            the atoms and how they were learned (absent when k = 0)
    codebook/              centroids.npy of product-quantised hidden states (absent elsewhere)
    units/<unit>-<12 hex digits>.tar   one shard per unit of work; the digits are the first of its SHA-256
    units/<unit>.json      its record, which names the shard; the record is the commit
    plans/<plan>.json      an ordered list of units: an index over them
    plans/<plan>.yaml      the command that wrote it, as a recipe

A shard is a USTAR archive with fixed times, owners and modes, so equal input gives equal bytes:

    __meta__/meta.json     format, target, unit, k, bits per atom index, octaves, vocabulary, length; hidden: how hidden
                           states are stored, in stores of these alone
    000000.<column>.npy    block 0, about 65,536 tokens; WebDataset yields it as one dict of arrays
    ...
    __stats__/sums.*.npy   uint32 token_counts (V), special tokens included, and, when k > 0, float64 mass (k) of the
                           kept entries, scaled to 1 for each token, before the 8 bits: sums over the unit; of hidden
                           states before quantisation float64 hidden_sum and hidden_squares (d)
    __end__/end.json       offset, length and SHA-256 of every member group's raw bytes; no end, no shard

WebDataset skips the names between double underscores. `datasets.load_dataset("webdataset", data_files=...)` does not,
and refuses a shard ("don't share the same prefix or the same types"): write the store as Parquet (`export-store`) and
open that by `load_dataset("parquet", data_files=...)`. Columns of a block of W windows, T tokens, R
document runs, E stored entries:

    ids          uint16 (T), uint32 when the vocabulary is larger than 65,536
    lengths      uint16 (W)   tokens of each window, special tokens included
    run_starts   uint32 (R)   token position in the block at which a document's run begins
    run_records  uint32 (R)   that document's record, counted from the unit's first, with those that were left out
    nnz          uint8  (T)   entries of each token; 0 for special tokens, unknown ones ([UNK]) and empty codes
    atoms        uint8  (1.5 E, rounded up) for k <= 4096: entry e is the 12 bits from bit 12 e on,
                 little end first; uint16 (E) for k <= 65,536; uint32 (E) beyond.
                 Strictly increasing within a token.
    weights      uint8  (E)   row maximum x 2^(-octaves x code / 255). The maximum is not stored: divide these
                 numbers by their sum, so that a row sums to 1
    tail         uint8  (T)   mass that was dropped: 2^(-code / 16), code 255 meaning none
                 Codes are rounded to the nearest; of equal entries at the cut, those of the lower atoms are kept
    layout       uint8  (2)   bits of an atom index, octaves: what plain WebDataset readers need

A store of hidden states (`encode-hidden`) has k = 0 and, instead of the last five, one row of b bytes for every token:

    hidden       int8   (T b) b = d codes in -127 to 127; the row is scale x code
    scales       float32 (T)  the largest absolute value of the row / 127; 0 if a token has no row
    or, product-quantised:
    hidden       uint8  (T b) byte m is the centroid of piece m of the row: centroids.npy holds (b, 256, d / b)
    coded        uint8  (T)   1 if a token has a row, else 0

Special tokens and windows whose encoding failed have no row.

Not handled here: how bytes become arrays (codec.py), how files become visible (writer.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

FORMAT_VERSION = 1
KINDS = ("ids", "lsp", "logits", "hidden")  # of stores, the plainest first: `encode-<kind>` makes one
BLOCK_TOKENS = 65_536
MAX_ENTRIES = 255  # most entries of one token, as nnz is one byte
LSP_OCTAVES = 12  # real codes span far less; rounding to 8 bits costs 3e-5 nats
LOGITS_OCTAVES = 24  # a vocabulary's probabilities span more: 12 would cost 1.7e-3 nats
MAX_OCTAVES = 100  # beyond 118 the smallest of 255 weights is a subnormal float32, then 0
TAIL_STEPS_PER_OCTAVE = 16
NO_TAIL = 255
SHARD_MTIME = 0


def kind_of(target: Mapping) -> str:
    """The kind of a store, from its target: one of KINDS. `encode-<kind>` makes it."""
    return target["settings"].get("kind", "lsp" if target["k"] else "ids")


def index_bits(k: int) -> int:
    """Bits of one stored atom index: 0 (ids only), 12, 16 or 32."""
    if k == 0:
        return 0
    if k <= 4096:
        return 12
    return 16 if k <= 65_536 else 32


def ids_dtype(vocab_size: int) -> str:
    """The NumPy type name of stored token ids."""
    return "uint16" if vocab_size <= 65_536 else "uint32"


def windows_per_block(max_length: int) -> int:
    """Windows in a full block; it depends only on the window length, so the blocks of stores of one plan align."""
    return max(1, BLOCK_TOKENS // max_length)


@dataclass(frozen=True)
class HiddenLayout:
    """How a store keeps hidden states."""

    width: int
    """How many values a hidden state has."""
    quantise: str
    """`int8` or `pq`."""
    bytes: int
    """Bytes per row: the width for int8, a divisor of the width for pq."""

    @classmethod
    def of_settings(cls, settings: Mapping) -> "HiddenLayout | None":
        """The layout that the settings of a store state; None for a store of another kind."""
        if settings.get("kind") != "hidden":
            return None
        quantise = settings["quantise"]
        return cls(settings["width"], quantise["name"], quantise.get("bytes", settings["width"]))

    @property
    def dtype(self) -> str:
        """The NumPy type name of the stored codes."""
        return "int8" if self.quantise == "int8" else "uint8"

    @property
    def mark(self) -> str:
        """The column whose value is not 0 if the token has a row."""
        return "scales" if self.quantise == "int8" else "coded"


@dataclass(frozen=True)
class ShardMeta:
    """The facts that a reader needs before it decodes a block; the content of `__meta__/meta.json`."""

    target: str
    """Fingerprint of the settings that name the store (target.json)."""
    unit: str
    """Content address of the text behind this shard."""
    k: int
    """Number of LSPs; 0 when only token ids are stored."""
    vocab_size: int
    """Size of the vocabulary: all token ids are smaller."""
    max_length: int
    """Tokens in a full window, special tokens included."""
    weight_octaves: int = LSP_OCTAVES
    """Range of the 8-bit weight codes, in octaves below the row's maximum."""
    index_bits: int = field(default=-1)
    """Bits of an atom index; follows from k."""
    format: int = FORMAT_VERSION
    """Version of this layout."""
    hidden: HiddenLayout | None = None
    """How hidden states are stored; None in stores of other kinds, whose meta.json has no such entry."""

    def __post_init__(self):
        if self.index_bits == -1:
            object.__setattr__(self, "index_bits", index_bits(self.k))
        if self.max_length > 65_535:
            raise ValueError(f"windows of {self.max_length} tokens do not fit the format; the limit is 65,535")
        if not 1 <= self.weight_octaves <= MAX_OCTAVES:
            raise ValueError(f"weights over {self.weight_octaves} octaves do not fit the format's 1 to {MAX_OCTAVES}")

    @classmethod
    def of_unit(cls, target: Mapping, unit: str) -> "ShardMeta":
        """The ShardMeta of a unit of the store that has this target."""
        return cls(
            target["target"],
            unit,
            target["k"],
            target["vocab_size"],
            target["max_length"],
            target["weight_octaves"],
            hidden=HiddenLayout.of_settings(target["settings"]),
        )

    def as_dict(self) -> dict:
        values = asdict(self)
        if self.hidden is None:
            del values["hidden"]
        return values
