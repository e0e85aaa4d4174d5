"""Gradient buckets hold each gradient once, in backward order, within the limit."""

import pytest

from evener.core.buckets import fill_buckets


def test_the_worked_example():
    assert fill_buckets((6, 1, 4, 4, 4), limit=8) == [[4, 3], [2, 1], [0]]


@pytest.mark.parametrize("sizes", [(), (3,), (100, 1, 1), (1,) * 30, (9, 9, 1, 8)])
def test_each_once_in_backward_order_within_the_limit(sizes):
    buckets = fill_buckets(sizes, limit=8)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))
    assert all(len(b) == 1 or sum(sizes[i] for i in b) <= 8 for b in buckets)


def test_a_limit_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="limit"):
        fill_buckets((1,), limit=0)
