"""Numbers as words and rows as aligned text."""

import pytest

from evener.core.figures import Figure
from evener.report.tables import (
    amount,
    clock_time,
    duration,
    percent,
    render,
    size,
    sourced,
    table,
    unit_for,
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1.2, "1.2 s"),
        (0.1234, "123.4 ms"),
        (5.67e-5, "56.7 µs"),
        (-0.002, "-2 ms"),
        (3450, "57.5 min"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("seconds", "words"), [(45, "0:45"), (3723, "1:02:03"), (59.7, "1:00")])
def test_clock_times(seconds, words):
    assert clock_time(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(512, "512 B"), (1.5 * 2**30, "1.5 GiB"), (3 * 2**40, "3 TiB"), (5000 * 2**40, "4.883 PiB")],
)
def test_sizes(num_bytes, words):
    assert size(num_bytes) == words


def test_percent_amount_and_unit():
    assert (percent(0.05), percent(0.05, sign=True)) == ("5.0 %", "+5.0 %")
    assert amount(-1e-9, 1000) == "0.00"
    assert (unit_for(20), unit_for(1.2), unit_for(0.001)) == ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))


def test_a_source_carries_its_spread_where_known():
    assert sourced(Figure(value=1, source="measured", spread=0.01)) == "measured ± 1.0 %"
    assert sourced(Figure(value=1, source="assumed")) == "assumed"


def test_tables_align_and_leave_names_alone():
    text = render("[bold]head[/bold] :smile:", table(("device", "n"), [("lab/[red]x", "1"), ("b", "200")]))
    assert text.splitlines() == [
        "[bold]head[/bold] :smile:",
        "device        n",
        "lab/[red]x    1",
        "b           200",
    ]


def test_long_sentences_are_not_wrapped():
    sentence = "word " * 3000
    assert render(sentence).count("\n") == 1


def test_a_difference_of_many_times_is_a_multiple():
    assert [percent(p, sign=True) for p in (0.5, -0.5, 153.074)] == ["+50.0 %", "-50.0 %", "154.1 x"]
