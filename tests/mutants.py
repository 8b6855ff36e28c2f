"""Mutation testing: change single lines of the product, one at a time, and see whether the tests notice.

    python tests/mutants.py                        # 200 mutants, seed 0, as many processes as there are cores
    python tests/mutants.py --only student/train.py --count 30
    python tests/mutants.py --list                 # print the sample and run nothing

A sample is a function of (seed, count) and the code: the areas of TABLE take turns, a line is mutated at most once,
and the first mutants of a larger sample are those of a smaller one. If a line changes, the rest of the sample stays.
Each mutant runs in a copy of the tracked and new files, with a Numba cache of its own, against the test files that
TABLE names for its module, in their order, as far as they fit into 60 seconds. Seconds are those of the processor, so
that other work on the machine does not count. A mutant is noticed if a test fails, if the tests cannot be imported, or
if they hang: they need twice their time and more than 60 seconds, or do nothing for 60 seconds. Before that each test
file runs once unmutated: this measures its tests, and a test that fails there is not used.

A child is forked for each mutant from a process that has imported torch, transformers and Numba, but nothing of the
project. mutmut and cosmic-ray were considered. mutmut does not mutate decorated functions, so no Numba kernel, and maps
tests to functions by a run of the whole suite. cosmic-ray has one test command for all mutants, and starts Python and
imports torch for each. Neither gives a mutant a cache of compiled kernels of its own.

Results are kept in DIRECTORY/results.jsonl, so an interrupted run resumes. What was noticed counts until the mutated
file changes; what survived is run again if a file of tests/ changed as well. Mutants that compute the same, or differ
in nothing that is promised, are listed with the reason in equivalent_mutants.toml; they are not run. The last line is
JSON; the exit code is 1 if less than 95 % of the mutants were noticed.

Not mutated: docstrings, log and error messages, type hints, decorators, assertions, imports, strings, and the arguments
`strict`, `encoding` and `device`. Not sampled: kernels for CUDA, whose tests run in a simulator and take minutes.
"""

import argparse
import ast
import builtins
import compileall
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60  # processor time of the tests of each mutant
LONGEST_TEST = 15  # seconds; a test that takes longer is not used
IDLE = 60  # seconds without work, after which tests hang
MEMORY = 6 << 30  # bytes
GOAL = 0.95

SOLVERS = "pipeline/solvers/test_nonneg_lasso.py pipeline/solvers/test_prepared.py pipeline/solvers/test_problem.py"
SOLVERS += " pipeline/solvers/test_compiled.py"
TORCH_SOLVERS = "pipeline/solvers/test_active_set_torch.py pipeline/solvers/test_fista.py"
LEARNING = "pipeline/test_learner.py pipeline/test_dictionary.py pipeline/test_learning_checkpoint.py"
CODING = "pipeline/test_lsp.py pipeline/test_stages.py pipeline/test_overlap.py pipeline/test_encode.py"
READING = "shards/test_store.py shards/test_reader.py shards/test_verify.py"
STEP = "student/test_step.py student/test_documents.py student/test_resume.py student/test_adaptive_masks.py"
OBJECTIVES = "student/test_objectives.py student/test_hard_mlsm.py student/test_temperature.py"
OBJECTIVES += " student/test_several_stores.py"
MASKS = "student/test_masking.py student/test_weighted_masks.py student/test_mask_weights.py"
COMMIT = "common/test_durable.py faults/test_links.py faults/test_places.py faults/test_commit.py"
COMMIT += " faults/test_ending.py faults/test_workers.py"
CORPORA = "pipeline/test_corpus.py pipeline/test_sources.py pipeline/test_documents.py pipeline/test_plan.py"
CORPORA += " faults/test_corpora.py"
FINETUNING = (
    "test_heads.py test_batches.py test_metrics.py test_formats.py test_training.py test_alike.py test_suite.py"
)
FINETUNING = " ".join(f"evaluation/tasks/finetuning/{name}" for name in FINETUNING.split())
FROZEN = "evaluation/tasks/frozen/test_frozen.py evaluation/similarity/test_measures.py"
SCORING = "evaluation/tasks/scoring/test_scorer.py evaluation/tasks/scoring/test_score.py"
SCORING += " evaluation/tasks/scoring/test_files.py evaluation/tasks/scoring/test_models.py"

TABLE = (  # area, modules, files of tests/ that mirror them, then their neighbours; the first line that fits counts
    ("solvers", "pipeline/solvers/cuda_*.py", ""),
    ("solvers", "pipeline/solvers/cd_cuda.py", ""),
    ("solvers", "pipeline/solvers/active_set_torch.py", f"{TORCH_SOLVERS} pipeline/solvers/test_nonneg_lasso.py"),
    ("solvers", "pipeline/solvers/tensors.py", f"{TORCH_SOLVERS} pipeline/solvers/test_nonneg_lasso.py"),
    ("solvers", "pipeline/solvers/fista.py", "pipeline/solvers/test_fista.py pipeline/solvers/test_nonneg_lasso.py"),
    ("solvers", "pipeline/solvers/nearest.py", "pipeline/test_controls.py pipeline/test_lsp.py"),
    ("solvers", "pipeline/solvers/vectors.py", f"pipeline/solvers/test_vectors.py {SOLVERS}"),
    ("solvers", "pipeline/solvers/proof.py", "pipeline/solvers/test_proof.py"),
    ("solvers", "pipeline/solvers/trial.py", "pipeline/solvers/test_proof.py"),
    ("solvers", "pipeline/solvers/cd_cpu.py", f"{SOLVERS} pipeline/solvers/test_hard_problems.py"),
    ("solvers", "pipeline/solvers/__init__.py", f"{SOLVERS} {TORCH_SOLVERS}"),
    ("solvers", "pipeline/solvers/*.py", f"{SOLVERS} pipeline/test_learner.py"),
    ("dictionary", "pipeline/dictionary/centering.py", "pipeline/test_centering.py pipeline/test_dictionary.py"),
    ("dictionary", "pipeline/dictionary/near.py", f"pipeline/test_near_atoms.py {LEARNING}"),
    ("dictionary", "pipeline/dictionary/vectors.py", f"pipeline/test_learn.py pipeline/test_dictionary.py {LEARNING}"),
    ("dictionary", "pipeline/dictionary/*.py", f"{LEARNING} pipeline/test_learn.py pipeline/test_centering.py"),
    ("coding", "pipeline/targets/logits.py", f"pipeline/test_logits.py {CODING}"),
    (
        "coding",
        "pipeline/targets/lsp.py",
        f"pipeline/test_kept.py pipeline/test_proven_solver.py pipeline/test_targets.py {CODING}",
    ),
    ("coding", "pipeline/targets/hidden.py", f"pipeline/test_hidden_states.py {CODING}"),
    ("coding", "pipeline/targets/*.py", f"pipeline/test_lsp.py {CODING}"),
    ("coding", "pipeline/batch.py", f"pipeline/test_targets.py pipeline/test_overlap.py {CODING}"),
    ("coding", "pipeline/overlap.py", f"pipeline/test_overlap.py {CODING}"),
    ("coding", "pipeline/failures.py", f"faults/test_quarantine.py faults/test_workers.py {CODING}"),
    ("coding", "pipeline/precision.py", f"pipeline/test_targets.py {CODING}"),
    ("coding", "pipeline/encode.py", f"pipeline/test_encode.py pipeline/test_products.py {CODING}"),
    ("shards", "shards/codec.py", f"shards/test_codec.py {READING} shards/test_torch_dataset.py"),
    ("shards", "shards/counter.py", f"shards/test_codec.py student/test_masking.py {READING}"),
    ("shards", "shards/schema.py", f"shards/test_codec.py {READING}"),
    (
        "shards",
        "shards/reader.py",
        "shards/test_reader.py shards/test_store.py pipeline/test_targets.py shards/test_verify.py",
    ),
    ("shards", "shards/export.py", f"shards/test_export.py {READING}"),
    ("shards", "shards/derive.py", f"shards/test_derive.py {READING}"),
    ("shards", "shards/clean.py", f"shards/test_clean.py {READING}"),
    ("shards", "shards/torch_dataset.py", f"shards/test_torch_dataset.py {READING}"),
    ("shards", "shards/position.py", f"shards/test_position.py shards/test_torch_dataset.py {READING}"),
    ("shards", "shards/segments.py", "shards/test_segments.py student/test_segments.py"),
    ("shards", "shards/remote.py", f"shards/test_remote.py shards/test_hostile_server.py {READING}"),
    ("shards", "shards/copies.py", f"faults/test_foreign_stores.py {READING}"),
    ("shards", "mlsm/common/json_checks.py", f"{READING} faults/test_foreign_stores.py"),
    ("shards", "shards/members.py", f"{READING} faults/test_foreign_stores.py"),
    (
        "shards",
        "shards/manifest.py",
        f"faults/test_foreign_stores.py {READING} pipeline/test_plan.py faults/test_commit.py",
    ),
    ("shards", "shards/writer.py", f"{READING} shards/test_codec.py faults/test_commit.py"),
    ("shards", "shards/verify.py", "shards/test_verify.py shards/test_store.py faults/test_replacement.py"),
    ("shards", "shards/windows.py", f"{READING} student/test_position_baseline.py"),
    ("shards", "shards/*.py", f"{READING} shards/test_codec.py shards/test_derive.py"),
    (
        "step",
        "student/train.py",
        f"{STEP} student/test_batches.py student/test_memory.py student/test_ranks.py student/test_trainer.py",
    ),
    ("step", "student/batches.py", f"student/test_batches.py student/test_mask_later.py {STEP}"),
    ("step", "student/optimizer.py", f"student/test_muon.py {STEP} student/test_trainer.py"),
    ("step", "student/ranks.py", f"student/test_ranks.py {STEP}"),
    ("objectives", "student/objectives/base.py", f"{OBJECTIVES} student/test_step.py"),
    ("objectives", "student/objectives/losses.py", OBJECTIVES),
    ("objectives", "student/objectives/vectors.py", f"student/test_vectors.py {OBJECTIVES}"),
    ("objectives", "student/objectives/re*.py", f"student/test_vectors.py {OBJECTIVES}"),
    ("objectives", "student/objectives/sparse_rows.py", OBJECTIVES),
    (
        "objectives",
        "student/objectives/__init__.py",
        f"student/test_tied.py student/test_all_positions.py {OBJECTIVES}",
    ),
    ("objectives", "student/objectives/supersense.py", f"student/test_supersenses.py {OBJECTIVES}"),
    ("objectives", "student/objectives/position_marginals.py", f"student/test_position_baseline.py {OBJECTIVES}"),
    (
        "objectives",
        "student/objectives/*.py",
        f"{OBJECTIVES} student/test_documents.py student/test_position_baseline.py",
    ),
    ("objectives", "student/held_out.py", f"{OBJECTIVES} student/test_memory.py student/test_documents.py"),
    ("masking", "student/masks/adaptive.py", f"student/test_adaptive_masks.py {MASKS}"),
    ("masking", "student/masks/collocations.py", f"student/test_mask_weights.py {MASKS}"),
    ("masking", "student/encoders/mask_later.py", f"student/test_mask_later.py {MASKS}"),
    ("masking", "student/masks/masking.py", f"{MASKS} student/test_all_positions.py student/test_short_windows.py"),
    ("masking", "student/masks/table.py", f"student/test_mask_weights.py {MASKS}"),
    ("masking", "student/masks/words.py", f"student/test_words.py {MASKS}"),
    ("masking", "student/masks/*.py", f"{MASKS} student/test_adaptive_masks.py"),
    ("commit", "mlsm/common/disk.py", f"common/test_disk.py {COMMIT}"),
    ("commit", "mlsm/common/durable.py", f"faults/test_places.py {COMMIT}"),
    ("commit", "mlsm/common/locks.py", "common/test_workplaces.py faults/test_commit.py"),
    ("commit", "mlsm/common/workplaces.py", "common/test_workplaces.py evaluation/tasks/finetuning/test_suite.py"),
    ("commit", "pipeline/stores.py", "pipeline/test_encode.py pipeline/test_stages.py faults/test_replacement.py"),
    ("commit", "pipeline/stored.py", "pipeline/test_dictionary.py pipeline/test_learn.py pipeline/test_encode.py"),
    ("corpus", "pipeline/corpus/windows.py", f"pipeline/test_whole_documents.py pipeline/test_pairs.py {CORPORA}"),
    ("corpus", "pipeline/corpus/small_files.py", f"pipeline/test_small_files.py {CORPORA}"),
    ("corpus", "pipeline/corpus/hub.py", f"pipeline/test_hub.py {CORPORA}"),
    ("corpus", "pipeline/corpus/*.py", f"{CORPORA} pipeline/test_small_files.py"),
    ("corpus", "pipeline/plan.py", f"pipeline/test_plan.py {CORPORA}"),
    ("corpus", "pipeline/tokenizer.py", "pipeline/test_tokenizer.py"),
    (
        "corpus",
        "pipeline/sample.py",
        "pipeline/test_plan.py pipeline/test_learn.py pipeline/test_near_atoms.py pipeline/test_learning_checkpoint.py",
    ),
    ("coding", "pipeline/teacher/*.py", "pipeline/test_teacher.py pipeline/test_tokenizer.py pipeline/test_logits.py"),
    (
        "runs",
        "student/runs/checkpoint.py",
        "student/test_checkpoint.py student/test_resume.py student/test_damaged_run.py faults/test_fuzz_findings.py",
    ),
    ("runs", "student/runs/directory.py", "student/test_run.py student/test_damaged_run.py student/test_names.py"),
    ("runs", "student/runs/state.py", "student/test_run.py student/test_resume.py student/test_damaged_run.py"),
    ("runs", "student/runs/identity.py", "student/test_names.py student/test_run.py student/test_announcement.py"),
    ("runs", "student/runs/tracking.py", "student/test_tracking.py faults/test_links.py"),
    ("runs", "student/runs/hub.py", "student/test_hub.py"),
    ("runs", "student/runs/export*.py", "student/test_export_run.py student/test_export.py student/test_lsp_model.py"),
    ("runs", "student/runs/import*.py", "student/test_import_student.py"),
    ("runs", "student/runs/config.py", "student/test_export_run.py student/test_import_student.py"),
    ("runs", "student/runs/probed.py", "student/test_probe.py"),
    ("tasks", "mlsm/evaluation/tasks/finetuning/*.py", FINETUNING),
    ("tasks", "mlsm/evaluation/tasks/frozen/*.py", FROZEN),
    ("tasks", "mlsm/evaluation/tasks/scoring/*.py", SCORING),
    (
        "tasks",
        "mlsm/evaluation/tasks/blimp/*.py",
        f"evaluation/tasks/blimp/test_data.py evaluation/tasks/blimp/test_evaluate.py {SCORING}",
    ),
    (
        "statistics",
        "mlsm/common/gains.py",
        "student/test_position_baseline.py evaluation/studies/test_match_entropy.py",
    ),
    (
        "statistics",
        "mlsm/evaluation/comparison/significance.py",
        "evaluation/comparison/test_significance.py evaluation/comparison/test_effects.py",
    ),
    (
        "statistics",
        "mlsm/evaluation/comparison/effects.py",
        "evaluation/comparison/test_effects.py evaluation/comparison/test_significance.py "
        "evaluation/comparison/test_page.py evaluation/comparison/test_study.py",
    ),
    (
        "statistics",
        "mlsm/evaluation/inspection/tracking/*ing.py",
        "evaluation/inspection/tracking/test_matching.py",
    ),
    (
        "statistics",
        "mlsm/evaluation/inspection/tracking/correlation.py",
        "evaluation/inspection/tracking/test_matching.py evaluation/inspection/tracking/test_track.py",
    ),
    (
        "statistics",
        "mlsm/evaluation/similarity/[ms][ec]*.py",  # measures, scores
        "evaluation/similarity/test_measures.py evaluation/similarity/test_zero_shot.py"
        " evaluation/similarity/test_compare.py",
    ),
)
PRELOADED = ("hypothesis", "numba", "pytest", "scipy.optimize", "scipy.sparse.csgraph", "scipy.stats", "torch")
PRELOADED += ("sklearn.linear_model", "transformers.models.bert.modeling_bert", "webdataset")


class Mutant(NamedTuple):
    """One line of a file, as it is and as it becomes. Lines count from 1."""

    file: str
    line: int
    before: str
    after: str

    def __str__(self):
        return f"{self.file}:{self.line}  {self.before.strip()}  ->  {self.after.strip()}"


# -- mutants ----------------------------------------------------------------------------------------------

OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
CALLS = {"min": "max", "any": "all", "minimum": "maximum", "argmin": "argmax", "floor": "ceil", "zeros": "ones"}
CALLS |= {"amin": "amax", "sum": "mean", "clamp_min": "clamp_max", "zeros_like": "ones_like"}
CALLS |= {other: one for one, other in CALLS.items()}
QUIET = ("logger.", "logging.", "warnings.", "print")  # calls that only say something
IGNORED_ARGUMENTS = {"strict", "encoding", "device"}


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in order; whether one can be compiled is not checked."""
    lines = source.encode().split(b"\n")  # columns of the syntax tree count bytes
    found = []
    for node, parent in _code(ast.parse(source), None):
        for line, begin, end, text in _edits(node, parent, lines):
            before = lines[line - 1]
            after = before[:begin] + text.encode() + before[end:]
            found.append(Mutant(file, line, before.decode(), after.decode()))
    return list(dict.fromkeys(found))


def _code(node, parent):
    """(node, parent) of what is mutated, without messages, hints and the like."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _called(node.value).startswith(QUIET)):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.BinOp) and isinstance(parent, ast.Assign) and isinstance(node.op, ast.BitOr):
        names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        if all(name[0].isupper() or hasattr(builtins, name) for name in names):
            return  # a union of types
    if isinstance(node, ast.keyword) and node.arg in IGNORED_ARGUMENTS:
        return
    yield node, parent
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child, node)


def _called(node):
    """Dotted name of what an expression calls; empty if it is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _edits(node, parent, lines):
    """(line, first byte, byte after the last, text instead) of every mutation of a node."""

    def whole(text):
        if node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset, text

    def between(left, operator, right):
        """The operator between two nodes, if it and its surroundings are in one line."""
        was, becomes = OPERATORS.get(type(operator), ("", ""))
        if not was or left.end_lineno != right.lineno or _is_text(left) or _is_text(right):
            return
        gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        pattern = re.escape(was).replace(r"\ ", r"\s+")
        if found := re.search(rf"\b{pattern}\b" if was[0].isalpha() else pattern, gap):
            first = left.end_col_offset
            yield right.lineno, first + found.start(), first + found.end(), becomes

    def negated(test):
        if test.lineno == test.end_lineno:
            text = lines[test.lineno - 1][test.col_offset : test.end_col_offset].decode()
            yield test.lineno, test.col_offset, test.end_col_offset, f"(not ({text}))"

    match node:
        case ast.Compare():
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(left, operator, right)
        case ast.BoolOp():
            for left, right in itertools.pairwise(node.values):
                yield from between(left, node.op, right)
        case ast.BinOp():
            yield from between(node.left, node.op, node.right)
        case ast.AugAssign():
            yield from between(node.target, node.op, node.value)
            yield from whole("pass")
        case ast.UnaryOp() if node.lineno == node.operand.lineno and not isinstance(node.op, ast.UAdd):
            yield node.lineno, node.col_offset, node.operand.col_offset, ""
        case ast.Constant(value=bool()):
            yield from whole(str(not node.value))
        case ast.Constant(value=int()):
            yield from whole(str(node.value + 1))
            if node.value == 1:
                yield from whole("0")
        case ast.Constant(value=float()):
            yield from whole(repr(2 * node.value) if node.value else "1.0")
        case ast.If() | ast.While() | ast.IfExp():
            yield from negated(node.test)
        case ast.comprehension():
            for test in node.ifs:
                yield from negated(test)
        case ast.Return() if isinstance(parent, ast.If | ast.For | ast.While):
            yield from whole("pass")
        case ast.Raise() | ast.Break() | ast.Continue():
            yield from whole("pass")
        case ast.Expr(value=ast.Call()):
            yield from whole("pass")
        case ast.Assign() if all(isinstance(target, ast.Subscript) for target in node.targets):
            yield from whole("pass")
        case ast.Assign(targets=[ast.Attribute(value=ast.Attribute())]):
            yield from whole("pass")
        case ast.Call():
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CALLS and node.func.lineno == node.func.end_lineno:
                yield node.lineno, node.func.end_col_offset - len(name), node.func.end_col_offset, CALLS[name]
            for keyword in node.keywords:
                if keyword.arg and keyword.arg not in IGNORED_ARGUMENTS and keyword.lineno == keyword.end_lineno:
                    row, begin, end = lines[keyword.lineno - 1], keyword.col_offset, keyword.end_col_offset
                    if comma := re.search(rb",\s*$", row[:begin]):
                        begin = comma.start()
                    else:
                        end += re.match(rb"(,\s*)?", row[end:]).end()
                    yield keyword.lineno, begin, end, ""


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def compiles_to_other_code(mutant: Mutant, source: str) -> bool:
    try:
        tree = ast.parse(mutate(source, mutant))
    except (SyntaxError, ValueError):
        return False
    return ast.dump(tree) != _dump(source)


@functools.cache
def _dump(source):
    return ast.dump(ast.parse(source))


def mutate(source: str, mutant: Mutant) -> str:
    lines = source.split("\n")
    assert lines[mutant.line - 1] == mutant.before
    lines[mutant.line - 1] = mutant.after
    return "\n".join(lines)


def tests_of(file: str) -> tuple[str, list[str]]:
    """Area of a module and its test files; no tests if it is not mutated."""
    for area, pattern, tests in TABLE:
        if fnmatch(file, pattern):
            return area, [f"tests/{name}" for name in dict.fromkeys(tests.split())]
    return "", []


def sample(tree: Path, seed: int, count: int, only: str | None) -> list[Mutant]:
    """The first `count` mutants of a seed, or of the modules that a pattern names."""
    places = {}
    for path in sorted(tree.rglob("*.py")):
        file = str(path.relative_to(tree))
        area, tests = tests_of(file)
        if not tests or (only and not fnmatch(file, only)):
            continue
        source, seen = path.read_text(encoding="utf-8"), {}
        of_line = {}
        for mutant in mutants_of(file, source):
            of_line.setdefault(mutant.line, []).append(mutant)
        for mutants in of_line.values():
            text = mutants[0].before
            seen[text] = seen.get(text, 0) + 1  # equal lines of a file
            mutants.sort(key=lambda one: _rank(seed, file, one.before, one.after))
            places.setdefault(area, []).append((_rank(seed, file, text, seen[text]), mutants, source))
    ranked = [[place[1:] for place in sorted(of_area, key=lambda place: place[0])] for of_area in places.values()]
    turns = (place for turn in itertools.zip_longest(*ranked) for place in turn if place is not None)
    chosen = []
    for mutants, source in turns:
        if len(chosen) == count:
            break
        chosen += [mutant for mutant in mutants if compiles_to_other_code(mutant, source)][:1]
    return chosen


def _rank(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()


# -- one run of tests, in a child -------------------------------------------------------------------------


class Job(NamedTuple):
    """Test files to run in a copy of the source; `mutant` and `chosen` (their tests that are used) None: as it is."""

    tests: list[str]
    mutant: Mutant | None = None
    chosen: set | None = None
    seconds: float = 0  # that the chosen tests take unmutated


class Reporter:
    """A plugin of pytest: selects and orders tests, and notes which failed and the processor time of each."""

    def __init__(self, job):
        self.job, self.seconds, self.failed, self.broken = job, {}, [], []

    @pytest.hookimpl(trylast=True)  # after conftest.py, which puts slow files first
    def pytest_collection_modifyitems(self, items):
        if self.job.chosen is not None:
            items[:] = [item for item in items if item.nodeid in self.job.chosen]
        items.sort(key=lambda item: self.job.tests.index(item.nodeid.partition("::")[0]))

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        began = sum(os.times()[:4])
        outcome = yield
        self.seconds[item.nodeid] = sum(os.times()[:4]) - began
        return outcome

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)


def preload() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    inside = {str(ROOT), str(ROOT / "tests")}
    sys.path[:] = [path for path in sys.path if path and os.path.realpath(path) not in inside]
    os.environ.pop("PYTHONPATH", None)
    for module in PRELOADED:
        importlib.import_module(module)
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert not ours & sys.modules.keys(), f"imported already: {ours & sys.modules.keys()}"
    gc.collect()
    gc.freeze()


def be_pytest(job: Job, tree: Path, slot: Path) -> None:
    """Run tests in this process, which is a child, and write slot/report.json."""
    import numba

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(slot / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(stream, number)
    os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(slot / "tmp"), "NUMBA_CACHE_DIR": str(slot / "numba")}
    tempfile.tempdir = None
    numba.core.config.reload_config()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    reporter = Reporter(job)
    options = ["-c", "setup.cfg", "--rootdir", ".", "-n", "0", "-p", "no:cacheprovider"]
    options += ["-x"] if job.mutant else []
    code = pytest.main([*options, *job.tests], plugins=[reporter])
    origin = None
    if job.mutant:
        name = job.mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        origin = getattr(sys.modules.get(name), "__file__", None)
    found = {"code": int(code), "failed": reporter.failed, "broken": reporter.broken, "seconds": reporter.seconds}
    (slot / "report.json").write_text(json.dumps(found | {"origin": origin}))


def run(job: Job, source: Path, slot: Path) -> dict:
    """Run a job in a child. Returns its report; "timed_out" or "died" says how it ended without one."""
    tree = slot / "tree"
    for name in ("tree", "tmp", "numba"):
        shutil.rmtree(slot / name, ignore_errors=True)
    shutil.copytree(source, tree, symlinks=True)
    (slot / "tmp").mkdir()
    (slot / "report.json").unlink(missing_ok=True)
    compiled = slot / "compiled"  # of the code as it is
    if compiled.exists() and not (job.mutant and job.mutant.file.startswith("pipeline/solvers/")):
        shutil.copytree(compiled, slot / "numba")
    if job.mutant:
        path = tree / job.mutant.file
        path.write_text(mutate(path.read_text(encoding="utf-8"), job.mutant), encoding="utf-8")
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()
    began = time.monotonic()
    child = os.fork()
    if not child:
        try:
            be_pytest(job, tree, slot)
        finally:
            os._exit(0)
    timed_out, busy = False, (began, 0.0)  # when the tests had last used a second more of the processor
    try:
        while not timed_out and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.2)
            now, used = time.monotonic(), sum(_descendants().values())
            busy = (now, used) if abs(used - busy[1]) >= 1 else busy
            timed_out = job.mutant is not None and (used > max(60, 2 * job.seconds) or now > busy[0] + IDLE)
    finally:
        _end_descendants()
    report = {"wall": round(time.monotonic() - began, 1), "timed_out": timed_out, "died": False}
    try:
        report |= json.loads((slot / "report.json").read_text())
    except (OSError, ValueError):
        report |= {"died": not timed_out, "failed": [], "broken": [], "seconds": {}, "origin": None, "code": -1}
    if not job.mutant and (slot / "numba").exists():
        shutil.rmtree(compiled, ignore_errors=True)
        (slot / "numba").rename(compiled)
    if report["origin"] and not report["origin"].startswith(str(tree)):
        raise RuntimeError(f"{job.mutant.file} was imported from {report['origin']}, not from the copy {tree}")
    return report


def _descendants():
    """Processes that descend from this one, which adopts orphans: number -> processor time, ended children's too."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields, process = path.read_text().rpartition(")")[2].split(), int(path.parent.name)
            parents[process] = int(fields[1])
            seconds[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = {process for process, parent in parents.items() if parent == os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return {process: seconds[process] for process in found}


def _end_descendants():
    """Kill the tests and what they left behind."""
    while processes := _descendants():
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


# -- all of them ------------------------------------------------------------------------------------------


def in_slots(jobs: list[Job], processes: int, directory: Path, done) -> None:
    """Run jobs in some processes; calls done(number of the job, its report) in them."""
    reading, writing = os.pipe()
    os.set_blocking(writing, True)
    slots = []
    for slot in range(min(processes, len(jobs))):
        if child := os.fork():
            slots.append(child)
            continue
        code = 1
        try:
            os.close(writing)
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
            ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            place = directory / f"slot{slot}"
            place.mkdir(exist_ok=True)
            while number := os.read(reading, 4):
                (number,) = struct.unpack("i", number)
                done(number, run(jobs[number], directory / "source", place))
            code = 0
        except KeyboardInterrupt:
            pass
        finally:
            sys.stdout.flush()
            if code and sys.exc_info()[0] not in (None, SystemExit, KeyboardInterrupt):
                sys.excepthook(*sys.exc_info())
            os._exit(code)
    os.close(reading)
    with suppress(BrokenPipeError):
        for number in range(len(jobs)):
            os.write(writing, struct.pack("i", number))
    os.close(writing)
    codes = [os.waitpid(slot, 0)[1] for slot in slots]
    if any(codes):
        sys.exit("a process of the run ended; start it again to resume")


def copy_source(directory: Path) -> Path:
    """A fresh copy of the tracked and new files, in DIRECTORY/source."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    source = directory / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    compileall.compile_dir(source, quiet=2)
    return source


def digest(paths) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def read_lines(path: Path) -> list[dict]:
    """Records of a file of JSON lines, without one that was cut."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def append(path: Path, record: dict) -> None:
    with open(path, "a") as file:  # one write of one line
        file.write(json.dumps(record) + "\n")


def baseline(files: list[str], source: Path, directory: Path, processes: int) -> dict[str, dict]:
    """Processor time of every test of some files unmutated, by file; without tests that fail or take long."""
    product = digest(path for path in source.rglob("*.py") if path.relative_to(source).parts[0] != "tests")
    keys = {file: f"{product}-{digest([source / file])}" for file in files}
    kept = directory / "baseline.jsonl"
    known = {record["key"]: record for record in read_lines(kept)}
    missing = [file for file in files if keys[file] not in known]

    def done(number, report):
        file = missing[number]
        append(kept, {"key": keys[file], **{name: report[name] for name in ("seconds", "failed", "broken", "died")}})
        print(f"unmutated  {file}  {len(report['seconds'])} tests  {report['wall']} s", flush=True)

    in_slots([Job([file]) for file in missing], processes, directory, done)
    known = {record["key"]: record for record in read_lines(kept)}
    usable = {}
    for file in files:
        record = known[keys[file]]
        for test in [*record["failed"], *record["broken"], *[file] * record["died"]]:
            print(f"not used, since it fails unmutated: {test}", flush=True)
        seconds = record["seconds"].items()
        usable[file] = {test: s for test, s in seconds if test not in record["failed"] and s <= LONGEST_TEST}
    return usable


def choose(files: list[str], usable: dict[str, dict]) -> tuple[set, float]:
    """Tests that fit into SECONDS, in the order of their files; and their seconds."""
    chosen, spent = set(), 0.0
    for file in files:
        for test, seconds in usable[file].items():
            if spent + seconds <= SECONDS:
                chosen.add(test)
                spent += seconds
    return chosen, spent


def outcome_of(report: dict) -> tuple[str, str]:
    """("killed", by what) or ("survived", what to know of it)."""
    if report["timed_out"]:
        return "killed", "time-out"
    if report["died"]:
        return "killed", "the process died"
    if report["broken"]:
        return "killed", f"import of {report['broken'][0]}"
    if report["failed"]:
        return "killed", report["failed"][0]
    if report["code"] not in (0, 1):
        return "killed", f"pytest's exit code {report['code']}"
    return "survived", "" if report["origin"] else "no test imported it"


def equivalents() -> dict[tuple[str, str, str], str]:
    """Reasons by (file, line, mutated line), without indentation."""
    listed = tomllib.loads(Path(__file__).with_name("equivalent_mutants.toml").read_text(encoding="utf-8"))
    return {(one["file"], one["before"], one["after"]): one["reason"] for one in listed["mutant"]}


def stale_entries(tree: Path) -> list[str]:
    """Modules and test files of TABLE that are not in a tree."""
    tests = {f"tests/{name}" for _, _, names in TABLE for name in names.split()}
    patterns = [pattern for _, pattern, _ in TABLE if not list(tree.glob(pattern))]
    return [f"TABLE: {name}" for name in [*patterns, *sorted(tests)] if name in patterns or not (tree / name).is_file()]


def stale_equivalents(tree: Path, reasons: dict[tuple[str, str, str], str]) -> list[str]:
    """Entries of equivalent_mutants.toml whose line is not in a tree, or is not mutated like that."""
    found = []
    for file, before, after in reasons:
        path = tree / file
        mutants = mutants_of(file, path.read_text(encoding="utf-8")) if path.is_file() else []
        if (before, after) not in {(one.before.strip(), one.after.strip()) for one in mutants}:
            found.append(f"equivalent_mutants.toml: {file}: {before}  ->  {after}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PATTERN", help="mutants of these modules, such as 'student/runs/*'")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="by default the cores")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "mlsm-mutants")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    directory = given.directory.resolve()
    lock = open(directory / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"another run uses {directory}. Wait for its end, or pass another --directory.")
    source = copy_source(directory)
    mutants = sample(source, given.seed, given.count, given.only)
    if not mutants:
        sys.exit(f"{given.only} has no line to mutate, or TABLE of {Path(__file__).name} names no tests for it.")
    if given.list:
        print(*mutants, sep="\n")
        return
    reasons = equivalents()
    if stale := [*stale_entries(source), *stale_equivalents(source, reasons)]:
        sys.exit("\n".join(["not there any more, so correct or remove it:", *stale]))
    tests = digest((source / "tests").rglob("*.py"))
    results = directory / "results.jsonl"
    keys = {one: [digest([source / one.file]), one.line, one.after] for one in mutants}

    def known():
        """Outcomes by mutant, as far as they still hold."""
        found = {}
        of_key = {tuple(key): one for one, key in keys.items()}
        for record in read_lines(results):
            one = of_key.get(tuple(record["key"]))
            if one and (record["outcome"] == "killed" or record["tests"] == tests):
                found[one] = record
        return found

    equivalent = [one for one in mutants if (one.file, one.before.strip(), one.after.strip()) in reasons]
    open_ones = [one for one in mutants if one not in equivalent and one not in known()]
    counts = f"{len(mutants)} mutants, {len(equivalent)} of them equivalent, {len(open_ones)} to run"
    print(f"{counts}; results are kept in {directory}", flush=True)
    preload()
    files = list(dict.fromkeys(file for one in open_ones for file in tests_of(one.file)[1]))
    usable = baseline(files, source, directory, given.processes)
    jobs = []
    for one in open_ones:
        chosen, seconds = choose(tests_of(one.file)[1], usable)
        jobs.append(Job(tests_of(one.file)[1], one, chosen, seconds))

    def done(number, report):
        outcome, by = outcome_of(report)
        one = open_ones[number]
        record = {"key": keys[one], "outcome": outcome, "by": by, "tests": tests, "seconds": report["wall"]}
        append(results, record)
        shown = f"killed by {by}" if outcome == "killed" else f"SURVIVED {by}".strip()
        print(f"{number + 1}/{len(jobs)}  {one}  [{shown}]  {report['wall']} s", flush=True)

    in_slots(jobs, given.processes, directory, done)
    outcomes = known()
    survivors = [one for one in mutants if one in outcomes and outcomes[one]["outcome"] == "survived"]
    killed = len(mutants) - len(equivalent) - len(survivors)
    for one in equivalent:
        print(f"equivalent  {one}  ({reasons[one.file, one.before.strip(), one.after.strip()]})")
    for one in survivors:
        print(f"SURVIVED  {one}")
    noticed = killed / max(1, killed + len(survivors))
    by_area = {}
    for one in mutants:
        counts = by_area.setdefault(tests_of(one.file)[0], {"killed": 0, "survived": 0, "equivalent": 0})
        counts["equivalent" if one in equivalent else "survived" if one in survivors else "killed"] += 1
    totals = {"seed": given.seed, "count": len(mutants), "killed": killed, "survived": len(survivors)}
    totals |= {"equivalent": len(equivalent), "noticed": round(noticed, 4), "by_area": by_area}
    print(json.dumps(totals))
    sys.exit(noticed < GOAL)


if __name__ == "__main__":
    main()
