"""Every generator of a process goes on where it was."""

import random

import numpy as np
import torch

from evener.runtime.checkpoints.randomness import rng_state, set_rng_state


def draw() -> list[float]:
    gaussian = [random.gauss(0, 1), float(np.random.standard_normal())]
    return [float(torch.rand(1)), random.random(), float(np.random.rand()), *gaussian]


def test_all_go_on_where_they_were() -> None:
    """Also in the middle of a pair of Gaussians, of which Python and numpy keep the second."""
    cpu = torch.device("cpu")
    for _ in range(2):
        state = {name: t.clone() for name, t in rng_state(cpu).items()}
        expected = draw()
        draw()
        set_rng_state(state, cpu)
        assert draw() == expected
