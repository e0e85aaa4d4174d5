"""What a device holds goes with it from one generation to the next."""

import pytest
import torch
from torch import nn

from evener.session.members.member import Belongings


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_what_an_optimiser_keeps_is_where_its_parameter_is(place: str) -> None:
    """A parameter that a plan moved from a card to its host had its averages on the card."""
    before, after = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=place))
    keeper, optimizer = torch.optim.AdamW([before]), torch.optim.AdamW([after])
    before.grad = torch.ones(3)
    keeper.step()
    Belongings(live={"w": (before, keeper)}).take_over({"w": after}, optimizer)
    kept = optimizer.state[after]
    assert {kept[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {place}
    assert kept["step"].device.type == "cpu" and kept["step"].item() == 1
    assert (kept is keeper.state[before]) == (place == "cpu")
