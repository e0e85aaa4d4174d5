import pytest

from evener.core.claim import claimed, is_claimed
from evener.errors import UsageError


def test_two_runs_do_not_share_a_folder(tmp_path) -> None:
    with claimed(tmp_path), pytest.raises(UsageError, match="another run writes to"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_who_looks_on_knows_whether_a_run_goes_on(tmp_path) -> None:
    assert is_claimed(tmp_path) is None
    with claimed(tmp_path):
        assert is_claimed(tmp_path) is True
    assert is_claimed(tmp_path) is False
