"""tests/mutants.py: what it mutates and what not, how it samples, and that its lists are current."""

import mutants

SOURCE = '''
"""1 + 1 in a docstring."""
from typing import Any


def f(a: int = 3, b: Any = None, *, axis: "int | None" = 1) -> int | None:
    """a < b"""
    logger.info("%d", 1 + 2)
    if a < 2 and not b:
        raise ValueError("not " + str(a + 1))
    assert a > 0
    a += min(a, 2) * 0.5
    rows[0] = sum(a, axis=0)
    return zip(a, b, strict=True)
'''


def of_source():
    return {(one.before.strip(), one.after.strip()) for one in mutants.mutants_of("f.py", SOURCE)}


def test_each_operator_changes_one_thing():
    of_if = {after for before, after in of_source() if before.startswith("if ")}
    assert of_if == {
        "if a <= 2 and not b:", "if a < 3 and not b:", "if a < 2 or not b:", "if a < 2 and b:",
        "if (not (a < 2 and not b)):",
    }  # fmt: skip
    of_sum = {after for before, after in of_source() if before.startswith("a +=")}
    assert of_sum == {
        "a -= min(a, 2) * 0.5", "pass", "a += max(a, 2) * 0.5", "a += min(a, 3) * 0.5", "a += min(a, 2) / 0.5",
        "a += min(a, 2) * 1.0",
    }  # fmt: skip
    of_rows = {after for before, after in of_source() if before.startswith("rows")}
    assert of_rows == {
        "pass", "rows[1] = sum(a, axis=0)", "rows[0] = mean(a, axis=0)", "rows[0] = sum(a, axis=1)", "rows[0] = sum(a)",
    }  # fmt: skip
    assert ('raise ValueError("not " + str(a + 1))', "pass") in of_source()


def test_words_hints_and_messages_stay():
    mutated = {before for before, _ in of_source()}
    assert not any(line.startswith(('"""', "from", "logger", "assert", "return zip")) for line in mutated)
    of_raise = [after for before, after in of_source() if before.startswith("raise")]
    of_def = {after for before, after in of_source() if before.startswith("def")}
    assert of_raise == ["pass"] and len(of_def) == 3  # the defaults: 3 to 4, 1 to 2 and to 0
    assert all(after.endswith("-> int | None:") and '"int | None"' in after for after in of_def)


def test_a_sample_is_counted_and_of_different_lines(tmp_path):
    for file in ("student/train.py", "student/masks/masking.py", "shards/codec.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((mutants.ROOT / file).read_bytes())
    some, more, others = (mutants.sample(tmp_path, *given, None) for given in ((0, 20), (0, 40), (1, 20)))
    assert more[:20] == some != others and len({(one.file, one.line) for one in more}) == 40
    assert [mutants.tests_of(one.file)[0] for one in some[:6]] == 2 * ["shards", "masking", "step"]
    alone = mutants.sample(tmp_path, 0, 5, "student/train.py")
    assert {one.file for one in alone} == {"student/train.py"} and alone[0] in some
    for one in more:
        source = (tmp_path / one.file).read_text()
        mutated = mutants.mutate(source, one)
        compile(mutated, one.file, "exec")
        assert sum(a != b for a, b in zip(source.split("\n"), mutated.split("\n"), strict=True)) == 1


def test_what_is_not_there_any_more_is_named(tmp_path, monkeypatch):
    assert not mutants.stale_entries(mutants.ROOT)
    assert not mutants.stale_equivalents(mutants.ROOT, mutants.equivalents())
    (tmp_path / "a.py").write_text("x = 1 + y\n")
    monkeypatch.setattr(mutants, "TABLE", (("area", "a.py", ""), ("area", "b*.py", "test_c.py")))
    assert mutants.stale_entries(tmp_path) == ["TABLE: b*.py", "TABLE: tests/test_c.py"]
    known = {("a.py", "x = 1 + y", "x = 1 - y"): "why", ("a.py", "x = 1 + z", "x = 1 - z"): "why"}
    [stale] = mutants.stale_equivalents(tmp_path, known)
    assert "x = 1 + z" in stale
