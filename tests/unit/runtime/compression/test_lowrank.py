"""PowerSGD against a plain one in numpy, and what it promises by itself."""

import math

import numpy as np
import pytest
import torch

from evener.runtime.compression.codec import Feedback, codec_of
from evener.runtime.compression.lowrank import LowRank


def said(codec, data: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.empty(count)
    codec.decode(data, out)
    return out


class Plain:
    """Vogels et al. 2019, algorithm 1 for one worker, with error feedback (algorithm 2), in float64."""

    def __init__(self, start: np.ndarray, count: int) -> None:
        self.start, self.kept = start.astype(np.float64), np.zeros(count)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        columns = self.start.shape[0]
        rows = -(-len(gradient) // columns)
        delta = gradient + self.kept
        matrix = np.zeros(rows * columns)
        matrix[: len(delta)] = delta
        matrix = matrix.reshape(rows, columns)
        p = matrix @ self.start
        for i in range(p.shape[1]):  # Gram and Schmidt, column by column
            for j in range(i):
                p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
            p[:, i] /= np.linalg.norm(p[:, i])
        q = matrix.T @ p
        self.start = q
        out = (p @ q.T).reshape(-1)[: len(delta)]
        self.kept = delta - out
        return out


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("count", [37, 400, 1001])
def test_it_is_the_algorithm_of_the_paper(rank: int, count: int) -> None:
    feedback = Feedback(LowRank(rank, 5))
    draws = np.random.default_rng(rank)
    own = torch.Generator().manual_seed(5 + 7919)
    columns = math.isqrt(count - 1) + 1
    plain = Plain(torch.randn(columns, rank, generator=own).numpy(), count)
    data = torch.empty(feedback.codec.num_bytes(count), dtype=torch.uint8)
    for _ in range(6):
        gradient = draws.standard_normal(count)
        feedback.encode(("a",), torch.from_numpy(gradient).float(), data)
        found, wanted = said(feedback.codec, data, count).numpy(), plain.step(gradient)
        assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted)
        assert np.allclose(feedback.kept_errors()[0], plain.kept, atol=1e-4)


def test_a_matrix_of_low_rank_goes_whole_once_the_columns_have_turned() -> None:
    draws = torch.Generator().manual_seed(1)
    values = (torch.randn(40, 2, generator=draws) @ torch.randn(2, 40, generator=draws)).view(-1)
    codec = codec_of("powersgd2", 0).for_place()
    data = torch.empty(codec.num_bytes(1600), dtype=torch.uint8)
    codec.encode(values, data)
    assert torch.allclose(said(codec, data, 1600), values, atol=1e-4)


def test_what_goes_on_from_the_last_step_says_more_than_what_begins_anew() -> None:
    """The largest directions of one matrix, found by five steps or by one."""
    draws = torch.Generator().manual_seed(2)
    left, _ = torch.linalg.qr(torch.randn(60, 60, generator=draws))
    values = (left * 0.9 ** torch.arange(60)) @ left.T
    errors = []
    codec = codec_of("powersgd4", 3).for_place()
    data = torch.empty(codec.num_bytes(3600), dtype=torch.uint8)
    for _ in range(5):
        codec.encode(values.reshape(-1), data)
        errors.append(float((said(codec, data, 3600) - values.reshape(-1)).norm() / values.norm()))
    assert errors[-1] < 0.9 * errors[0]


def test_places_do_not_share_where_they_begin() -> None:
    feedback = Feedback(codec_of("powersgd1", 0))
    data = torch.empty(feedback.codec.num_bytes(100), dtype=torch.uint8)
    told = []
    for place in ("a", "b"):
        feedback.encode((place,), torch.arange(100.0) ** 0.5, data)
        told.append(data.clone())
    assert not torch.equal(*told)


def test_nothing_and_one_value_have_a_size() -> None:
    codec = codec_of("powersgd4", 0)
    assert codec.num_bytes(0) == 0 and codec.num_bytes(1) == 8
    data = torch.empty(8, dtype=torch.uint8)
    codec.encode(torch.tensor([3.0]), data)
    assert said(codec, data, 1) == pytest.approx(3.0)
