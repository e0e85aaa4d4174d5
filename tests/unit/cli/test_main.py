"""What the command says where a package is missing."""

from collections.abc import Callable
from typing import Any

import pytest

from evener.cli import main as command


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("torch", "torch cannot be imported"),
        ("torch.distributed", "torch cannot be imported"),
        ("numpy", "the package numpy cannot be imported"),
    ],
)
def test_a_package_that_is_not_there_is_no_defect_of_evener(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(app: Any) -> Callable[..., int]:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(command.typer.main, "get_command", lacking)
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "job.py"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and "EV601" in told and "Traceback" not in told
    assert ("evener doctor" in told) == missing.startswith("torch")
