"""Parts of state by memory."""

import itertools

from evener.planner.parts import filled, simple


def test_water_fills_every_owner_alike_until_one_is_full() -> None:
    assert filled((6, 2, 9), (1, 1, 1), 10) == (4, 2, 4)
    assert filled((9, 9, 9), (5, 3, 2), 10) == (5, 3, 2)
    assert filled((9, 9), (1, 0), 9) == (9, 0), "no weight, no part"
    assert filled((4, 5), (1, 1), 10) is None and filled((-3, 10), (1, 1), 10) == (0, 10)


def test_no_other_parts_have_a_smaller_maximum() -> None:
    for caps in itertools.product((0, 2, 5, 8), repeat=3):
        for weights in ((1, 1, 1), (4, 2, 1), (1, 3, 3)):
            found = filled(caps, weights, 8)
            able = [p for p in itertools.product(*(range(c + 1) for c in caps)) if sum(p) == 8]
            assert (found is None) == (not able)
            if found is not None:
                assert sum(found) == 8 and all(p <= c for p, c in zip(found, caps, strict=True))
                least = min(max(x / w for x, w in zip(p, weights, strict=True)) for p in able)
                assert max(x / w for x, w in zip(found, weights, strict=True)) <= least + 1e-9


def test_proportions_in_small_numbers() -> None:
    assert simple((500, 301, 199), (1000, 1000, 1000), 1000)[0] == (5, 3, 2)
    assert simple((500, 301, 199), (500, 1000, 199), 1000)[0] == (5, 4, 1), "the third has no room for 2"
    for parts in simple((505, 301, 194), (505, 301, 194), 1000):
        assert all(p * 1000 <= c * sum(parts) for p, c in zip(parts, (505, 301, 194), strict=True))
