"""`evener cost` as a person runs it: without torch, its JSON keys, its refusals."""

import json
import subprocess
import sys

import pytest

from evener.cli.cost import price_list, seconds_of
from evener.core.files import write
from evener.core.prices import Price, PriceList
from evener.errors import UsageError
from tests.unit.planner.small import GIB, fleet_of, linear_profile

NO_TORCH = "import sys; sys.modules['torch'] = None; from evener.cli.main import main; main()"


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "fleet.json", fleet_of(["a", "b"], memory=GIB))
    write(tmp_path / "profile.json", linear_profile({"a": 0.01, "b": 0.03, "c": 0.02}))
    prices = PriceList(
        prices=(Price(name="a", per_hour=8.0), Price(name="b", per_hour=1.0), Price(name="c", buy=90.0)),
        currency="EUR",
    )
    write(tmp_path / "prices.json", prices)
    return tmp_path


def run(files, *args):
    command = [sys.executable, "-c", NO_TORCH, "cost", "fleet.json", "profile.json", "--batch", "12", *args]
    return subprocess.run(
        [*command, "--allow", "unlinked"], cwd=files, capture_output=True, text=True, timeout=30
    )


def test_it_answers_with_the_promised_keys(files):
    limits = ["--samples", "1e6", "--deadline", "3h", "--budget", "20"]
    done = run(files, "--prices", "prices.json", *limits, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert {"offers", "sensible", "cheapest", "fastest", "keep", "add", "notes", "per_hour"} <= set(answer)
    assert answer["currency"] == "EUR" and answer["sets"] == answer["sets_of"] == 3
    assert answer["cheapest"]["devices"] == ["h/0", "h/1"]  # 2.1 h for 18.75; h/1 alone takes 8.3 h
    assert answer["cheapest"]["job_money"] == pytest.approx(18.75)
    assert answer["fastest"]["job_s"] == pytest.approx(7500)
    assert "a million" in done.stderr and "Worth keeping?" in done.stderr


def test_a_device_that_might_be_bought_has_its_hours(files):
    power = ["--per-kwh", "0.5", "--watts", "c=200"]
    done = run(files, "--prices", "prices.json", "--add", "c", *power, "--json")
    (worth,) = json.loads(done.stdout.splitlines()[-1])["add"]
    # 9 an hour for 12 samples in 0.09 s; split 7, 2, 3 they take 0.07 s, and 0.1 an hour goes for power
    assert worth["gain"] == pytest.approx(9 / 7 - 1)
    assert worth["extra_per_hour"] == pytest.approx(0.1)
    assert worth["payback_hours"] == pytest.approx(90 / (9 * 9 / 7 - 9.1))
    assert "paid back after" in done.stderr


def test_a_budget_that_nothing_keeps_is_said_with_what_there_is(files):
    done = run(files, "--prices", "prices.json", "--samples", "1e6", "--budget", "1")
    assert done.returncode == 0
    assert "no set does that" in done.stdout and "the cheapest costs 8.33 EUR" in done.stdout


def test_a_changed_fleet_has_its_own_cheapest_and_fastest(files):
    changes = ["--what-if", "drop h/0", "--what-if", "price h/1 16; drop h/0", "--what-if", "add b"]
    done = run(files, "--prices", "prices.json", *changes, "--json")
    worlds = json.loads(done.stdout.splitlines()[-1])["what_if"]
    assert [w["change"] for w in worlds] == ["drop h/0", "price h/1 16; drop h/0", "add b"]
    one, dear, more = worlds
    assert one["fastest"]["devices"] == ["h/1"] == one["cheapest"]["devices"]
    assert dear["cheapest"]["per_million"] == pytest.approx(16 * one["cheapest"]["per_million"])
    assert more["fastest"]["per_hour"] == pytest.approx(10.0)  # 8 and twice 1: the copy costs what it copies
    assert "What if drop h/0?" in done.stderr


def test_slices_share_the_price_of_their_card(tmp_path):
    card = {"name": "a/0", "kind": "A100-40", "price_per_hour": {"value": 2.0, "source": "assumed"}}
    links = [{"a": "a", "b": "a", "kind": "PCIe 4.0 x16"}]
    (tmp_path / "fleet.json").write_text(json.dumps({"devices": [card], "links": links}))
    words = ["cost", "fleet.json", "--model", "gpt2", "--batch", "32", "--json"]
    command = [sys.executable, "-c", NO_TORCH, *words, "--what-if", "split a/0 3g.20gb 3g.20gb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout.splitlines()[-1])
    (slices,) = answer["what_if"]
    assert slices["fastest"]["per_hour"] == pytest.approx(2.0)
    assert slices["cheapest"]["per_hour"] == pytest.approx(1.0)
    # Half the price for 42 of 108 multiprocessors: the whole card is the cheaper one.
    assert slices["cheapest"]["per_million"] > answer["cheapest"]["per_million"] * 1.2


def test_no_price_is_wrong_use(files):
    done = run(files)
    assert done.returncode == 2 and "h/0" in done.stderr and "EV103" in done.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43200), ("1.5d", 129600), ("45s", 45)])
def test_times_are_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "h", "-3h", "0h", "1 week"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError):
        seconds_of(text)


@pytest.mark.parametrize("word", ["0.79", "=1", "a=", "a=-1", "a=nan", "a=much"])
def test_what_is_no_price_is_refused(word):
    with pytest.raises(UsageError):
        price_list(None, [word], None, None, None)
