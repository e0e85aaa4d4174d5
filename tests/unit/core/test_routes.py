import pytest

from benchmarks.random_plans import stage
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Piece, Routes
from evener.errors import PlanMismatchError


def routes(*stages: Stage, samples: int = 4, micro_batch: int = 4) -> Routes:
    pipeline = Pipeline(samples=samples, micro_batch=micro_batch, stages=stages)
    return Routes(Plan(global_batch=samples, pipelines=(pipeline,)))


def test_pieces_are_the_overlaps_of_shares():
    """The picture of the module: 3 + 1 samples become 2 + 2."""
    found = routes(stage("a", ("h/a", 3), ("h/b", 1)), stage("b", ("h/c", 2), ("h/d", 2)))
    assert found.forward_pieces(0, 0) == (
        Piece(source="h/a", target="h/c", samples=2),
        Piece(source="h/a", target="h/d", samples=1),
        Piece(source="h/b", target="h/d", samples=1),
    )
    back = {(p.target, p.source, p.samples) for p in found.backward_pieces(1, 0)}
    assert back == {(p.source, p.target, p.samples) for p in found.forward_pieces(0, 0)}
    assert found.forward_pieces(1, 0) == found.backward_pieces(0, 0) == ()


def test_a_share_without_samples_of_a_small_last_micro_batch_has_no_work():
    found = routes(stage("a", ("h/a", 3), ("h/b", 1)), samples=5)
    assert [found.samples(0, "h/b", m) for m in (0, 1)] == [1, 0]
    assert found.work("h/b") == [(0, 0)]


def test_every_member_of_a_tensor_parallel_group_gets_the_whole_share():
    group = Stage(layers=("b",), shares=(Share(devices=("h/c", "h/d"), samples=4),))
    found = routes(stage("a", ("h/a", 2), ("h/b", 2)), group)
    got: dict[str, int] = {}
    for piece in found.forward_pieces(0, 0):
        got[piece.target] = got.get(piece.target, 0) + piece.samples
    assert got == {"h/c": 4, "h/d": 4}


def test_one_device_in_two_shares_of_a_stage_is_refused():
    with pytest.raises(PlanMismatchError, match="stage 0"):
        routes(stage("a", ("h/a", 2), ("h/a", 2)))
