"""Dealing: whatever the ranks, workers and batch sizes, and wherever it stops, the global order is the same."""

from itertools import count, islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.position import Share

pytestmark = pytest.mark.promise("16 other numbers …")


def items_of(share, total):
    numbers = (share.item(number) for number in count())
    return [item for item in islice(numbers, total) if item < total]


@pytest.mark.parametrize(("ranks", "workers"), list(product(range(1, 5), range(1, 5))))
def test_every_item_goes_to_exactly_one_worker(ranks, workers):
    shares = [Share(r, ranks, w, workers) for r in range(ranks) for w in range(workers)]
    for total in range(40):
        dealt = [items_of(share, total) for share in shares]
        assert sorted(sum(dealt, [])) == list(range(total))
        assert [len(items) for items in dealt] == [share.items_before(total) for share in shares]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_a_loader_that_asks_its_workers_in_turn_gets_the_order_of_one_worker(ranks, workers, length):
    for rank in range(ranks):
        in_turn = [Share(rank, ranks, n % workers, workers).item(n // workers) for n in range(length)]
        assert in_turn == [Share(rank, ranks).item(n) for n in range(length)]


@pytest.mark.parametrize("share", [(1, 1), (-1, 2), (0, 0), (0, 1, 2, 2)])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ValueError, match="rank"):
        Share(*share)
