"""Untrusted values: an error of one line with field, expected and found value, or the requested object."""

from dataclasses import dataclass

import pytest

from mlsm.common.errors import ShardError
from mlsm.common.json_checks import (
    Count,
    Digest,
    Name,
    Number,
    find_problem,
    object_of,
    one_of,
    optional,
    parse_as,
    parse_json,
    within,
)


@dataclass(frozen=True)
class Unit:
    id: Name
    windows: Count = 0


INNER = object_of({"kind": one_of("int8", "pq"), "bytes": optional(within(1, 255)), "sha256": optional(Digest)})
OUTER = object_of(
    {"weight": Number, "lists": list[Count], "inner": optional(INNER), "many": optional(list[INNER])}  # type: ignore
)
SOUND = {"weight": 1, "lists": [0, 2**63 - 1], "inner": {"kind": "pq", "bytes": 64}, "unknown": object()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": float("nan")}, "field weight: expected a finite number, found nan"),
        ({"weight": float("inf")}, "field weight: expected a finite number, found inf"),
        ({"weight": 10**400}, "field weight: expected a finite number, found 1000"),
        ({"weight": True}, "field weight: expected a number, found True"),
        ({"weight": "1"}, "field weight: expected a number, found '1'"),
        ({"lists": {}}, "field lists: expected a list, found {}"),
        ({"lists": [1, -1]}, "field lists[1]: expected a whole number from 0, found -1"),
        ({"lists": [2**63]}, "field lists[0]: expected a whole number of 64 bits, found 9223372036854775808"),
        ({"lists": [1.0]}, "field lists[0]: expected a whole number, found 1.0"),
        ({"inner": []}, "field inner: expected an object, found []"),
        ({"inner": {}}, "field inner.kind is missing, expected a value"),
        ({"inner": {"kind": "int4"}}, "field inner.kind: expected int8 or pq, found 'int4'"),
        (
            {"many": [{"kind": "pq"}, {"kind": "pq", "bytes": 256}]},
            "field many[1].bytes: expected a whole number <= 255",
        ),
        (
            {"inner": {"kind": "pq", "sha256": "A" * 64}},
            "field inner.sha256: expected 64 hexadecimal digits, found 'AA",
        ),
    ],
)
def test_a_problem_names_field_expectation_and_finding(change, said):
    assert find_problem(SOUND, OUTER) is None
    problem = find_problem(SOUND | change, OUTER)
    assert problem.startswith(said) and "\n" not in problem and len(problem) < 200


@pytest.mark.parametrize("values", [None, 3, [], "text", b"\xff"])
def test_what_is_no_object_at_all_is_said(values):
    assert find_problem(values, OUTER) == f"expected an object, found {values!r}"


def test_values_become_the_object_that_was_asked_for():
    assert parse_as({"id": "a.b-c", "windows": 3}, Unit, "x.json") == Unit("a.b-c", 3)
    for name in ("../a", "", "a/b", "a\n", "a" * 201):
        with pytest.raises(ShardError, match=r"x.json: field id: expected a plain name .*, found '"):
            parse_as({"id": name}, Unit, "x.json")


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b'{"a": NaN}',
        b"-Infinity",
        b"1e999",
        b'{"k": "\\ud800"}',
        b"[" * 65 + b"]" * 65,
        b"[" * 10**6,
        b"1" * 5000,
    ],
)
def test_hostile_json_is_refused_in_one_line(raw):
    with pytest.raises(ShardError, match=r"^x\.json: not readable as JSON \(.*\)$"):
        parse_json(raw, "x.json")


def test_names_of_files_that_are_not_utf8_stay_readable():
    assert parse_json(b'{"file": "\\udcff"}', "x.json") == {"file": "\udcff"}
    assert parse_json(b"[" * 64 + b"]" * 64, "x.json")


def test_half_a_surrogate_pair_as_a_name_is_a_problem_like_any_other():
    values, kind = {"\ud800": 1}, object_of({"name": optional(str)})
    assert find_problem(values, kind) == "expected texts of Unicode, found half of a surrogate pair"
    with pytest.raises(ShardError, match="a.json: expected texts of Unicode"):
        parse_as(values, kind, "a.json")
