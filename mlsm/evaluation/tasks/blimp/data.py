"""BLiMP's minimal pairs: 67 paradigms of 1,000, in 12 phenomena (Warstadt et al. 2020, doi:10.1162/tacl_a_00321).

    paradigms = read(Path("data/blimp"))    # or read(None), from the Hub
    paradigms = [subset(paradigm, 100) for paradigm in paradigms]

A file is <paradigm>.jsonl with sentence_good and sentence_bad in every line. The module lists the paper's 12 phenomena,
because the files' `linguistics_term` has 13 values: s-selection is part of argument structure. The published files are
used unchanged, including 7 pairs of equal sentences. Not handled here: scoring.
"""

import hashlib
import json
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from mlsm.common.disk import read_file
from mlsm.common.errors import BlimpError

HUB, REVISION = "nyu-mll/blimp", "877fba0801ffb7cbd8c39c1ff314a46f053f6036"

PHENOMENA = {
    "anaphor agreement": ("anaphor_gender_agreement", "anaphor_number_agreement"),
    "argument structure": (
        "animate_subject_passive", "animate_subject_trans", "causative", "drop_argument", "inchoative", "intransitive",
        "passive_1", "passive_2", "transitive",
    ),
    "binding": (
        "principle_A_c_command", "principle_A_case_1", "principle_A_case_2", "principle_A_domain_1",
        "principle_A_domain_2", "principle_A_domain_3", "principle_A_reconstruction",
    ),
    "control/raising": (
        "existential_there_object_raising", "existential_there_subject_raising", "expletive_it_object_raising",
        "tough_vs_raising_1", "tough_vs_raising_2",
    ),
    "determiner-noun agreement": (
        "determiner_noun_agreement_1", "determiner_noun_agreement_2", "determiner_noun_agreement_irregular_1",
        "determiner_noun_agreement_irregular_2", "determiner_noun_agreement_with_adj_2",
        "determiner_noun_agreement_with_adj_irregular_1", "determiner_noun_agreement_with_adj_irregular_2",
        "determiner_noun_agreement_with_adjective_1",
    ),
    "ellipsis": ("ellipsis_n_bar_1", "ellipsis_n_bar_2"),
    "filler-gap": (
        "wh_questions_object_gap", "wh_questions_subject_gap", "wh_questions_subject_gap_long_distance",
        "wh_vs_that_no_gap", "wh_vs_that_no_gap_long_distance", "wh_vs_that_with_gap",
        "wh_vs_that_with_gap_long_distance",
    ),
    "irregular forms": ("irregular_past_participle_adjectives", "irregular_past_participle_verbs"),
    "island effects": (
        "adjunct_island", "complex_NP_island", "coordinate_structure_constraint_complex_left_branch",
        "coordinate_structure_constraint_object_extraction", "left_branch_island_echo_question",
        "left_branch_island_simple_question", "sentential_subject_island", "wh_island",
    ),
    "NPI licensing": (
        "matrix_question_npi_licensor_present", "npi_present_1", "npi_present_2", "only_npi_licensor_present",
        "only_npi_scope", "sentential_negation_npi_licensor_present", "sentential_negation_npi_scope",
    ),
    "quantifiers": (
        "existential_there_quantifiers_1", "existential_there_quantifiers_2", "superlative_quantifiers_1",
        "superlative_quantifiers_2",
    ),
    "subject-verb agreement": (
        "distractor_agreement_relational_noun", "distractor_agreement_relative_clause",
        "irregular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_2",
        "regular_plural_subject_verb_agreement_1", "regular_plural_subject_verb_agreement_2",
    ),
}  # fmt: skip
PARADIGMS = tuple(sorted(name for names in PHENOMENA.values() for name in names))


class Paradigm(NamedTuple):
    """Minimal pairs that isolate one contrast."""

    name: str
    pairs: list[tuple[str, str]]
    """(acceptable sentence, unacceptable sentence)"""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the pairs in their order."""
        return hashlib.sha256(json.dumps(self.pairs).encode()).hexdigest()


def read(directory: Path | None) -> list[Paradigm]:
    """All paradigms.

    directory  of the 67 files, or a checkout of github.com/alexwarstadt/blimp; None: from the Hub
    Raises     BlimpError naming file, line and what was expected
    """
    return _from_hub() if directory is None else [_parse(file, read_file(file)) for file in _files(directory)]


def choose_paradigms(names: tuple[str, ...]) -> list[str]:
    """The paradigms that are named, or whose phenomenon is named; all if there are no names. Raises BlimpError."""
    if unknown := [name for name in names if name not in PARADIGMS and name not in PHENOMENA]:
        raise BlimpError(
            f"--tasks {unknown[0]} is neither a paradigm nor a phenomenon of BLiMP."
            + "".join(f" Did you mean {name}?" for name in get_close_matches(unknown[0], [*PARADIGMS, *PHENOMENA], 1))
            + f" The phenomena: {', '.join(PHENOMENA)}."
        )
    wanted = {member for name in names for member in PHENOMENA.get(name, (name,))}
    return [paradigm for paradigm in PARADIGMS if not names or paradigm in wanted]


def subset(paradigm: Paradigm, count: int) -> Paradigm:
    """`count` pairs of a paradigm: those with the smallest SHA-256, in the file's order. So the choice does not depend
    on the order of the pairs. Raises BlimpError if there are fewer.
    """
    if count > len(paradigm.pairs):
        raise BlimpError(
            f"--per-paradigm {count}, but {paradigm.name} has {len(paradigm.pairs)} pairs. Choose a smaller number."
        )
    chosen = sorted(range(len(paradigm.pairs)), key=lambda number: _rank(paradigm.pairs[number]))[:count]
    return paradigm._replace(pairs=[paradigm.pairs[number] for number in sorted(chosen)])


def _rank(pair: tuple[str, str]) -> bytes:
    return hashlib.sha256("\0".join(pair).encode()).digest()


def _files(directory: Path) -> list[Path]:
    """The 67 files. Raises BlimpError if some are missing."""
    expected = f"BLiMP's {len(PARADIGMS)} files <paradigm>.jsonl (github.com/alexwarstadt/blimp, directory data)"
    if not directory.is_dir():
        raise BlimpError(f"--data-dir {directory} is not a directory. Expected one with {expected}.")
    if not any(directory.glob("*.jsonl")) and (directory / "data").is_dir():
        directory = directory / "data"
    files = [directory / f"{name}.jsonl" for name in PARADIGMS]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BlimpError(f"--data-dir {directory} has no {missing[0]}{more}. Expected {expected}.")
    return files


def _parse(file: Path, raw: bytes) -> Paradigm:
    pairs = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            values = json.loads(line)
            pair = values["sentence_good"], values["sentence_bad"]
            "".join(pair).encode()  # ValueError on a lone surrogate, which JSON can contain
        except (ValueError, KeyError, TypeError, RecursionError):
            pair = None
        if pair is None or not all(isinstance(sentence, str) and sentence.strip() for sentence in pair):
            raise BlimpError(
                f"{file}, line {number}: expected a JSON object with the sentences sentence_good and sentence_bad,"
                f" found {line[:60].decode(errors='replace')!r}. Fetch the file again."
            )
        pairs.append(pair)
    if not pairs:
        raise BlimpError(f"{file} is empty, expected a minimal pair as JSON in every line. Fetch the file again.")
    return Paradigm(file.stem, pairs)


def _from_hub() -> list[Paradigm]:
    from datasets import load_dataset
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        tables = [load_dataset(HUB, name, split="train", revision=REVISION) for name in PARADIGMS]
    except Exception as error:  # three libraries raise, and their classes differ between versions
        raise BlimpError(
            f"BLiMP is not in the cache and cannot be fetched from the Hub ({HUB}: {type(error).__name__}). Check the "
            "network, or download github.com/alexwarstadt/blimp and pass its directory:  --data-dir blimp"
        ) from error
    finally:
        if shown:
            enable_progress_bars()
    columns = ((table["sentence_good"], table["sentence_bad"]) for table in tables)
    return [
        Paradigm(name, list(zip(*sentences, strict=True))) for name, sentences in zip(PARADIGMS, columns, strict=True)
    ]
