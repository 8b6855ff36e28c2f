"""Settings of show-lsp. Imports nothing heavy."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import Positional, check, require_at_least, require_utf8


@dataclass(frozen=True, kw_only=True)
class ShowLspConfig:
    """Show what latent semantic properties (LSPs) represent: an overview, single LSPs, a word, a text, similar tokens,
    or all of it as static pages."""

    store: Positional[str | None] = None
    """A store (directory or URL), a dictionary, or a student (run or export); unset: the newest finished store under
    ./runs."""
    lsp: tuple[int, ...] = ()
    """Show these LSPs, counted from 0: where they are heaviest, which LSPs are active with them, and what their atoms
    are close to."""
    word: str | None = None
    """Show the LSPs of this word over its sampled occurrences, upper and lower case together."""
    text: str | None = None
    """Show the LSPs that the teacher finds in the tokens of this text and, with --student, the student's predictions
    next to them. It may contain the mask token."""
    student: str | None = None
    """With --text: the student to compare with the teacher, a finished run, an export or a Hub id. With --scale: the
    probe. With --html: a softmax probe of a student of the store's LSPs; each page then shows which words it predicts
    where the LSP is heaviest, with the LSP and without it."""
    scale: tuple[str, ...] = ()
    """With --text: show which words a softmax probe predicts when the probabilities of LSPs in its student's prediction
    are multiplied. 230=0 removes LSP 230, 17=3 makes LSP 17 three times as probable. The words are those at the text's
    mask tokens or, if it has none, at every token masked in turn. The probe is --student; unset: the newest finished
    one of the store's LSPs under runs/probes."""
    teacher: str | None = None
    """With --text or --intruders: where the store's teacher is now; unset: where the store says."""
    intruders: bool = False
    """Measure how interpretable the LSPs are: do the teacher's word embeddings separate the words where an LSP is
    heaviest from words that do not belong to it?"""
    judge: str | None = None
    """With --intruders: the encoder whose word embeddings judge instead of the teacher's, such as
    sentence-transformers/all-MiniLM-L6-v2, by directory or Hub id."""
    against: tuple[str, ...] = ()
    """With --intruders: other stores of the same tokenizer whose LSPs are judged by the same embeddings."""
    similar_to: str | None = None
    """Show tokens that share the LSP profile of a token: WINDOW:TOKEN of the store, as all views print it, or with
    --text the number of one of its tokens, counted from 0."""
    vectors: Path | None = None
    """With a dictionary: show its LSPs in the vectors of this .npy file. For a file that encode-images made, patches of
    images are shown; for any other, the numbers of its rows. Combine with --lsp or --html."""
    html: Path | None = None
    """Write all LSPs as pages into this directory; open DIR/index.html in any browser. The list of a store's
    LSPs starts with those that are easiest to recognise; its column heads sort it in other ways. An older view there is
    replaced."""
    samples: int = 2_000_000
    """Most tokens to read of the store's training split, in windows spread over it; of --vectors, most vectors."""
    diagnostic: Path | None = None
    """Directory of a choose-layer diagnostic, whose word senses name the LSPs; unset: looked for under DIR/diagnostics
    if the store is in DIR/stores."""

    def __post_init__(self):
        check(self)
        views = {
            "--lsp": bool(self.lsp),
            "--word": self.word is not None,
            "--intruders": self.intruders,
            "--html": self.html is not None,
            "--text or --similar-to": self.text is not None or self.similar_to is not None,
        }
        if sum(views.values()) > 1:
            given = ", ".join(name for name, wanted in views.items() if wanted)
            raise ValueError(f"{given} are different things to show. Pass only one of them")
        if self.text is None and ((self.student and self.html is None) or (self.teacher and not self.intruders)):
            raise ValueError(
                '--student and --teacher are for a text. Add --text "...", or --html DIR for pages with the words of a'
                " --student that is a probe"
            )
        if self.student and self.similar_to is not None:
            raise ValueError("--similar-to compares LSPs of the teacher. Omit --student")
        if self.factors and (self.text is None or self.similar_to is not None or self.teacher is not None):
            raise ValueError(
                '--scale changes a student\'s prediction for a text. Add --text "...", without --teacher and'
                " --similar-to"
            )
        if (self.against or self.judge) and not self.intruders:
            raise ValueError("--against and --judge are only for judging LSPs. Add --intruders")
        if self.judge and self.teacher:
            raise ValueError("--judge replaces the teacher's embeddings. Pass either --judge or --teacher")
        require_utf8(self, "text", "word")
        require_at_least(self, 1, "samples")

    @property
    def factors(self) -> dict[int, float]:
        """The factor for the probability of each LSP, {LSP: factor}.

        Raises  ValueError if an entry is not LSP=FACTOR, its factor is out of range, or an LSP is named twice
        """
        found: list[tuple[int, float]] = []
        for entry in self.scale:
            lsp, _, factor = entry.partition("=")
            try:
                found.append((int(lsp), float(factor)))
            except ValueError:
                raise ValueError(f"--scale takes LSP=FACTOR, such as 230=0 or 17=3, found {entry!r}") from None
            if not 0 <= found[-1][1] < 1e9:
                raise ValueError(f"--scale {entry}: expected a factor from 0, which removes the LSP, to below 1e9")
        if twice := [lsp for lsp, count in Counter(lsp for lsp, _ in found).items() if count > 1]:
            raise ValueError(f"--scale names LSP {twice[0]} twice. Name it once")
        return dict(found)
