from evener.profiling.peaks import line_through, work_bytes


def test_a_line_through_two_sizes_has_no_negative_part():
    assert line_through((2, 30), (4, 50)) == (10, 10)
    assert line_through((4, 50), (2, 30)) == (10, 10)
    assert line_through((2, 10), (4, 40)) == (0, 10)
    assert line_through((2, 50), (4, 30)) == (50, 0)
    assert line_through((4, 40), (4, 40)) == (0, 10)


def test_work_is_what_is_above_all_that_is_saved():
    saved = {"a": 10.0, "b": 15.0}
    peaks = {"a": (12, 11), "b": (20, 24), "": (3, 31)}
    assert work_bytes(["a", "b"], peaks, saved.__getitem__) == {"a": 2, "b": 6}


def test_without_a_peak_there_is_no_work():
    assert work_bytes(["a"], {}, lambda _: 10.0) == {"a": 0}
