"""Where the command `evener` begins: Ctrl-C ends it without a traceback also while it is still loaded."""

from evener.cli.interrupts import orderly_interrupts


def main() -> None:
    """See `evener.cli.main.main`."""
    with orderly_interrupts():
        from evener.cli.main import main as command

        command()
