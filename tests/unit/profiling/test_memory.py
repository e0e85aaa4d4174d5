from evener.profiling.memory import between


def test_the_size_that_fills_the_room_is_tried_first():
    assert between({4: 10.0, 8: 18.0}, 16, 29.0) == [13, 12]
    assert between({4: 10.0, 8: 18.0}, 10, 29.0) == [9]


def test_without_two_peaks_or_room_nothing_is_tried():
    assert between({4: 10.0}, 8, 29.0) == []
    assert between({4: 10.0, 8: 18.0}, 16, None) == []
    assert between({4: 10.0, 8: 10.0}, 16, 29.0) == []
    assert between({4: 10.0, 8: 18.0}, 16, 18.5) == []
