"""Formatted seconds, bytes and counts with their units."""

import pytest

from mlsm.terminal.tables import columns, duration, quantity, size


@pytest.mark.parametrize(
    "seconds, said", [(0.4, "0 s"), (45, "45 s"), (87, "1 min 27 s"), (605, "10 min 05 s"), (11100, "3 h 05 min")]
)
def test_a_duration_has_its_units(seconds, said):
    """1:27 of an estimate was read as hours by one reader and as minutes by the next."""
    assert duration(seconds) == said


def test_sizes_and_counts():
    assert [size(number) for number in (999, 22_042_822, 80_302_239_744)] == ["999 bytes", "22.0 MB", "80.3 GB"]
    assert [quantity(number, "unit") for number in (0, 1, 2000)] == ["0 units", "1 unit", "2,000 units"]


def test_columns_are_aligned_by_the_places_that_characters_take():
    assert columns(("word", "n"), [("銀行", 1), ("bank", 2)]) == ["  word  n", "  銀行  1", "  bank  2"]
    assert columns(None, [("銀", 1), ("bank", 22)], align=">")[0] == "    銀   1"
