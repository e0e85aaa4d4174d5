"""What `evener train` refuses before anything starts."""

import pytest

from evener.cli.main import main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "3", "--epochs", "1"], "--steps and --epochs exclude each other"),
        (["--plan", "plan.json", "--fewer", "local:4"], "--sums, --compress or --fewer exclude each other"),
        (["--plan", "plan.json", "--compress", "int8"], "--sums, --compress or --fewer exclude each other"),
        (["--plan", "plan.json", "--sums", "ring"], "--sums, --compress or --fewer exclude each other"),
    ],
)
def test_options_that_exclude_each_other(words, told, capsys) -> None:
    """A plan's own way was taken, and the option dropped without a word."""
    with pytest.raises(SystemExit) as done:
        main(["train", "job.py", *words])
    assert done.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())
