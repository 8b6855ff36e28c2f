"""Settings of make-mask-weights, and the names of corruptions. Imports nothing heavy."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mlsm.common.settings import Positional, check, require

WeightsKind = Literal["frequency", "common", "domain", "pmi"]
KINDS: tuple[str, ...] = get_args(WeightsKind)
ADAPTIVE = "adaptive"  # instead of a kind or file: weights that follow the student (adaptive.py)
UNIFORM = "uniform"  # the same: all tokens alike
_PERCENT = "(?:0|[1-9][0-9]?|100)"  # one spelling of a number, as it names runs


def corruption_shares(corruption: str) -> tuple[int, int, int]:
    """Per cent of the masked tokens that become [MASK], become a random token, stay as they are. They add up to 100.

    Raises ValueError if it is neither `mask`, which is (100, 0, 0), nor three such numbers that hide some, as 80-10-10
    """
    if corruption == "mask":
        return 100, 0, 0
    is_three = re.fullmatch(f"{_PERCENT}-{_PERCENT}-{_PERCENT}", corruption)
    shares = [int(share) for share in corruption.split("-")] if is_three else []
    if sum(shares) != 100 or 100 in (shares[0], shares[2]):
        raise ValueError(
            "--corruption takes mask, or per cent of [MASK], random and unchanged tokens that add up to 100, such as "
            f"80-10-10, found {corruption!r}."
        )
    masked, random, kept = shares
    return masked, random, kept


@dataclass(frozen=True, kw_only=True)
class MaskWeightsConfig:
    """Make a table of how often each token is to be masked, for `train-student --mask-weights FILE`."""

    store: Positional[str | None] = None
    """Store directory or URL whose training text is counted; unset: the newest finished one under ./runs."""
    kind: WeightsKind = "frequency"
    """`frequency`: rare tokens more often, w = count^-power. `common`: the 50 most frequent words, most of them
    function words, more often than all others, or with a --weight below 1 less often. `domain`: what is more frequent
    than in --against, w = log(1 + ratio of the frequencies), or a list of words (--words). `pmi`: all tokens alike, and
    collocations of 2 to 5 tokens masked as one."""
    power: float = 0.5
    """frequency: how strongly rare tokens are preferred; 0 not at all."""
    weight: float = 10.0
    """common: what the tokens of common words weigh; all others weigh 1."""
    against: str | None = None
    """domain: a store of general text with the same vocabulary."""
    words: Path | None = None
    """domain: a text file with a word and its weight on each line. Tokens of no listed word weigh 1."""
    output: Path | None = None
    """The file; unset: runs/mask-weights/<kind>-<fingerprint>.npz."""

    def __post_init__(self):
        check(self)
        if self.kind == "domain" and (self.against is None) == (self.words is None):
            raise ValueError(
                "--kind domain needs either --against STORE or --words FILE to know which tokens to prefer."
            )
        if self.kind != "domain" and (self.against is not None or self.words is not None):
            raise ValueError(f"--against and --words are for --kind domain, found {self.kind}. Omit them.")
        for name, kind in (("power", "frequency"), ("weight", "common")):
            if self.kind != kind and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"--{name} is for --kind {kind}, found {self.kind}. Omit it.")
        require(self, "power", lambda value: 0 <= value < math.inf, "0 or a positive number")
        require(self, "weight", lambda value: 0 <= value < 1e30, "a number from 0")  # as a float32 it stays finite
