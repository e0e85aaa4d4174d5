"""The `evener` command: finds the verb, loads only its file, and turns errors into text and exit codes.

Exit codes: 0 yes; 1 no (no plan fits, not exact); 2 wrong use or a broken environment; 130 interrupted, 141
nobody reads on (`| head`), 143 by SIGTERM.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from evener import __version__
from evener.cli.interrupts import INTERRUPTED, is_unread, leave_unread, orderly_interrupts
from evener.core.tracebacks import last_line
from evener.errors import EnvironmentBrokenError, EvenerError, UsageError

# One line each, so that `evener --help` imports no verb. evener/cli/<verb>.py has a function <verb>.
VERBS = {
    "doctor": "What this host or a job's hosts can do, what will fail, and the line that mends it.",
    "env": "Write Dockerfile, conda and pip files for the devices that share a build of torch.",
    "probe": "Measure this host's devices and links: writes a fleet file.",
    "profile": "Measure a model's layers on each kind of device: writes a profile file.",
    "plan": "Find the best plan for a fleet and a profile, and say why.",
    "cost": "What training costs on every set of devices; is a device worth its price.",
    "advise": "The changes that would help most, each with its simulated gain.",
    "simulate": "Play a plan without hardware: predicted times, device by device.",
    "preflight": "Try every pair of processes before a job: interface, rate, correctness.",
    "train": "Train a recipe on all devices, or rehearse another fleet here.",
    "watch": "Show a run while it goes on: in the terminal, or live on a page.",
    "checkpoints": "List what a run has saved, verify it, write its weights as one file.",
    "explain": "Say where a run's time goes: use and communication of each device.",
    "report": "Write a run's folder as one HTML page that works offline.",
    "predict": "Write a model's outputs for a dataset, computed by all devices together.",
    "verify": "Show that the devices together compute what one device would.",
}
_SETTINGS = {"help_option_names": ["-h", "--help"]}


def load(verb: str) -> Any:
    """The command of `verb`, from its own file; nothing else is imported."""
    # Plain text: in panels 80 columns have no room for the names of options.
    app = typer.Typer(add_completion=False, context_settings=_SETTINGS, rich_markup_mode=None)
    app.command(verb)(getattr(import_module(f"evener.cli.{verb}"), verb))
    return typer.main.get_command(app)


class _Verbs(TyperGroup):
    """Lists the verbs from the table and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else command, rest

    def invoke(self, ctx: Any) -> Any:
        """The verb. What it wrote to may be gone that is not its output: typer ends without a word then."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if is_unread():
                raise
            raise EnvironmentBrokenError(
                f"what evener wrote to, a process or a connection, has ended: {last_line(error)}",
                remedy="start again; where a process was killed, the system's log says by whom",
            ) from error


app = typer.Typer(
    cls=_Verbs,
    context_settings=_SETTINGS,
    help="Train one PyTorch model on unequal devices, with the result one device would give.",
    epilog="Usual order: probe, profile, plan, train. With --json the last line of output is one object.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # a third of the start-up time, needed only here

        python = ".".join(str(part) for part in sys.version_info[:3])
        print(f"evener {__version__} (torch {metadata.version('torch')}, Python {python})")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the versions and stop."
    ),
) -> None:
    pass


def _register(verb: str, line: str) -> None:
    @app.command(verb, help=line)
    def placeholder() -> None:  # replaced by the verb's own function when it is called
        pass


for _verb, _line in VERBS.items():
    _register(_verb, _line)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the process's own) and exit with its code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _code_of(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread():
            raise
        code = leave_unread()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = leave_unread()  # typer and rich end a command by that
    sys.exit(code)


def _code_of(args: list[str]) -> int:
    """Run the command line and return its exit code; errors are printed."""
    try:
        with orderly_interrupts():
            code = typer.main.get_command(app)(args, prog_name="evener", standalone_mode=False)
    except EvenerError as error:
        return _report(error, args)
    except typer.TyperException as error:
        return _report_wrong_use(error, args)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ImportError as error:
        return _report(_not_imported(error), args)
    except Exception as error:
        traceback.print_exc()
        what = f"unexpected {type(error).__name__}: {error}"
        return _report(EvenerError(what, remedy="report it with the traceback above and the command"), args)
    return code if isinstance(code, int) else 0


def _not_imported(error: ImportError) -> EvenerError:
    """A package that is missing or broken, as torch without one of its libraries is."""
    name = (error.name or "").partition(".")[0]
    frames = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_tb(error.__traceback__)]
    is_torch = name == "torch" or any(f.partition(".")[0] == "torch" for f in frames)
    what = "torch" if is_torch else f"the package {name}" if name else "a package"
    remedy = "evener doctor: it says what is wrong with this host's torch and what mends it"
    return EnvironmentBrokenError(
        f"{what} cannot be imported: {error}",
        remedy=remedy if is_torch else "install evener anew in an environment of its own, with its packages",
    )


def _report_wrong_use(error: typer.TyperException, args: list[str]) -> int:
    """Errors of the argument parser, worded like ours."""
    verb = next((a for a in args if a in VERBS), "")
    return _report(UsageError(error.format_message(), remedy=" ".join(f"evener {verb} --help".split())), args)


def _report(error: EvenerError, args: list[str]) -> int:
    """Print the error for a person and, with --json, as one object for a program. Returns the exit code."""
    print(error.render(), file=sys.stderr)
    if "--json" in args:
        parts = {"code": error.code, "what": error.what, "numbers": error.numbers, "remedy": error.remedy}
        print(json.dumps({"error": parts}), flush=True)
    return error.exit_code


if __name__ == "__main__":
    main()
