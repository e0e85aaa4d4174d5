"""Recompute lowers a peak as the cost model says and changes no gradient: the benchmark, made small."""

from benchmarks.recompute import compare


def test_recompute_lowers_the_peak_as_predicted() -> None:
    figures, bars = compare(3)
    assert [str(bar) for bar in bars if not bar.passed] == []
    assert len(bars) == 8
    for device in figures.values():
        kept, again = device["peak_bytes"]
        assert again < 0.5 * kept
