from dataclasses import replace

from evener.runtime.tidying import Held, why_tidy

CROWDED = Held(used=3, peak=9, reserved=8, free=1, retries=2)


def test_memory_goes_back_where_the_allocator_had_to_try_again():
    assert "no room 2 times" in why_tidy(CROWDED, 0)


def test_it_stays_where_nothing_failed_nothing_is_unused_or_there_is_room():
    assert why_tidy(CROWDED, 2) == ""
    assert why_tidy(replace(CROWDED, used=8), 0) == ""
    assert why_tidy(replace(CROWDED, free=6), 0) == ""
