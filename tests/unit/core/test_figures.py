"""Quartiles, against torch's quantiles with straight lines between samples."""

import pytest
import torch

from evener.core.figures import quartiles


@pytest.mark.parametrize("samples", [(9, 10, 12), (3.0,), (1, 2, 3, 4, 9), (5.0, 1.0)])
def test_quartiles_are_those_between_samples(samples: tuple[float, ...]) -> None:
    wanted = torch.quantile(
        torch.tensor(samples, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double()
    )
    assert quartiles(samples) == tuple(wanted.tolist())
