"""How interpretable the LSPs of models are, from intruder tests on the stores that the models learned from.

    judged = read_judgements([Path("judged.json")])
    judged.aucs["0f1e..."]          # by the fingerprint of a store's target

Each file is the output of `show-lsp --intruders --json`. Not handled here: the test
(mlsm/evaluation/inspection/lsps/intruders.py), which store a model learned from (its record's identity).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mlsm.common.disk import read_file
from mlsm.common.errors import ComparisonError, ShardError
from mlsm.common.invocation import program
from mlsm.common.json_checks import Count, Number, find_problem, object_of, parse_json

_JUDGED = object_of({"target": str, "auc": Number | None})
_FILE = object_of({"judge": str, "samples": Count, "dictionaries": list[_JUDGED]})  # type: ignore[valid-type]


class Judgements(NamedTuple):
    """The results of one judge.

    judge  its name
    aucs   a store's target -> mean AUC over its LSPs, None if none of them could be judged
    """

    judge: str
    aucs: dict[str, float | None]


def read_judgements(paths: Iterable[Path]) -> Judgements:
    """The judgements in some files.

    Raises  ComparisonError if a file has no judgements, or they are not comparable
    """
    aucs: dict[str, float | None] = {}
    before: tuple | None = None
    for path in paths:
        try:
            values = parse_json(read_file(path), path)
            problem = find_problem(values, _FILE)
        except (OSError, ShardError) as error:
            problem = str(error)
        if problem:
            raise ComparisonError(
                f"--intruders {path}: {problem}. Pass the output of `{program()} show-lsp STORE --intruders --json`."
            )
        how = values["judge"], values["samples"]
        before = before or how
        if how != before:
            raise ComparisonError(
                f"--intruders {path} was judged by {how[0]} with --samples {how[1]}, the files before it by "
                f"{before[0]} with --samples {before[1]}: their results cannot be compared. Judge all of them in the "
                "same way."
            )
        for one in values["dictionaries"]:
            if aucs.setdefault(one["target"], one["auc"]) != one["auc"]:
                raise ComparisonError(
                    f"--intruders {path} has another AUC for the store of target {one['target'][:12]} than the files "
                    "before it; perhaps more text was encoded in between. Pass only one of them."
                )
    return Judgements(before[0] if before else "", aucs)
