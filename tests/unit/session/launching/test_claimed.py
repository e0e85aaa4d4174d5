import pytest

from evener.errors import UsageError
from evener.session.request import claimed


def test_two_runs_do_not_share_a_folder(tmp_path) -> None:
    with claimed(tmp_path), pytest.raises(UsageError, match="another run writes to"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass
