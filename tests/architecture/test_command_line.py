"""The command line's surface: verbs, arguments, options and defaults change only on purpose."""

import json
import os
import subprocess
import sys

import pytest

from evener.cli import main as cli
from tests.architecture.source import ROOT, SRC


def surface() -> str:
    """One line a parameter: its spellings, its type and its default."""
    text = ""
    for verb in cli.VERBS:
        text += f"evener {verb}\n"
        for p in cli.load(verb).params:
            flags = ", ".join([*p.opts, *p.secondary_opts])
            wanted = "required" if p.required else f"default {p.default!r}"
            many = " ..." if p.multiple or p.nargs != 1 else ""
            text += f"    {flags}{many}  <{p.bare_type()}> {wanted}\n"
    return text


def evener(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "evener.cli.main", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_surface(golden) -> None:
    golden("cli.txt", surface())


def test_every_verb_is_listed_and_has_a_file_of_its_own() -> None:
    files = {p.stem for p in (SRC / "cli").glob("*.py")}
    assert set(cli.VERBS) <= files
    shown = evener("--help").stdout
    assert all(verb in shown for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself_and_speaks_json(verb: str) -> None:
    command = cli.load(verb)
    assert command.help
    assert any("--json" in p.opts for p in command.params)
    silent = [p.name for p in command.params if not getattr(p, "help", "x")]
    assert silent == [], "an option or argument without help"


CHECKED_LATER = {"max_step", "max_price", "per_kwh", "samples", "budget"}  # above 0, with words of their own


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_number_has_a_range_and_no_infinity(verb: str) -> None:
    """Refused while the command line is read, before torch is loaded; no NaN is in a range."""
    for p in cli.load(verb).params:
        if p.bare_type() in ("int", "float") and p.name not in CHECKED_LATER:
            assert p.min is not None, p.name
            assert p.max is not None or p.bare_type() == "int", p.name


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_cuts_no_name_of_an_option_where_80_columns_are(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert [o for p in cli.load(verb).params for o in (*p.opts, *p.secondary_opts) if o not in shown] == []


def test_a_verb_loads_only_its_own_file() -> None:
    code = (
        "import sys; from evener.cli.main import load; load('plan')\n"
        "print(*[m for m in sys.modules if m == 'torch' or m.startswith('evener.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "evener.cli.plan" in loaded
    assert not loaded & {"torch", *(f"evener.cli.{verb}" for verb in cli.VERBS if verb != "plan")}


def test_help_and_version_answer_at_once() -> None:
    """About 0.1 s of a processor: what else the machine does is not counted."""
    before = os.times()
    assert "evener 0." in evener("--version").stdout
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system <= 0.5


def test_a_wrong_option_is_an_error_with_code_and_remedy() -> None:
    done = evener("plan", "--no-such-option", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["code"] == "EV103" and "--no-such-option" in error["what"]
    assert error["remedy"] == "evener plan --help"
    assert "EV103" in done.stderr


def test_a_wrong_verb_suggests_the_right_one() -> None:
    done = evener("pln")
    assert done.returncode == 2
    assert "'plan'" in done.stderr and done.stdout == ""


def fail_with(monkeypatch: pytest.MonkeyPatch, capsys, error: BaseException):
    """Run a verb that raises `error`; give the exit code, standard output and standard error."""
    from evener.cli import plan as module

    def plan() -> None:
        raise error

    monkeypatch.setattr(module, "plan", plan)
    with pytest.raises(SystemExit) as end:
        cli.main(["plan"])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_an_interrupt_ends_with_130(monkeypatch, capsys) -> None:
    assert fail_with(monkeypatch, capsys, KeyboardInterrupt())[0] == 130


def test_an_error_of_ours_ends_with_its_own_exit_code(monkeypatch, capsys) -> None:
    error = cli.EvenerError("no luck", numbers="7 of 8", remedy="one more")
    error.exit_code = 1
    code, out, err = fail_with(monkeypatch, capsys, error)
    assert (code, out) == (1, "")
    assert "no luck" in err and "7 of 8" in err and "one more" in err


def test_an_unexpected_error_is_no_silent_success(monkeypatch, capsys) -> None:
    code, _, err = fail_with(monkeypatch, capsys, ZeroDivisionError("by nothing"))
    assert code == 2
    assert "Traceback" in err and "unexpected ZeroDivisionError: by nothing" in err


def test_a_verb_that_says_no_ends_with_1(monkeypatch, capsys) -> None:
    assert fail_with(monkeypatch, capsys, cli.typer.Exit(1))[0] == 1


@pytest.mark.parametrize("verb", ["checkpoints", "doctor", "env", "preflight", "probe", "train"])
def test_a_verb_that_plans_nothing_waits_for_no_planner(verb) -> None:
    code = f"import sys, evener.cli.{verb}; sys.exit('evener.planner' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
