"""One device's page of a plan: its actions and reads, for the whole global batch and for a smaller one."""

from evener.core.order import GlobalBatch
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.loop.playbook import Playbook

A, B, C = "lab/a", "lab/b", "lab/c"


def stage(layers: str, *shares: tuple[str, int]) -> Stage:
    return Stage(layers=tuple(layers), shares=tuple(Share(devices=(d,), samples=n) for d, n in shares))


def hybrid(schedule: str = "gpipe") -> Plan:
    """Samples 0 to 4 in threes over a and b, which also shares the second stage with a; 5 to 7 on c."""
    two = (stage("xy", (A, 3)), stage("z", (A, 1), (B, 2)))
    pipelines = (
        Pipeline(samples=5, micro_batch=3, stages=two),
        Pipeline(samples=3, micro_batch=2, stages=(stage("xyz", (C, 2)),)),
    )
    return Plan(global_batch=8, pipelines=pipelines, schedule=schedule)


def text(book: Playbook, samples: int) -> str:
    return " ".join(map(str, book.row(samples)))


def reads(book: Playbook, samples: int) -> list[tuple[int, int]]:
    return list(book.reads(GlobalBatch(epoch=0, start=0, stop=samples)))


def test_reads_are_those_of_first_and_last_stages_in_the_order_of_forwards() -> None:
    a, b, c = (Playbook(hybrid(), d) for d in (A, B, C))
    assert text(c, 8) == "2F0 2B0 2F1 2B1 2REDUCE_GRAD STEP"
    assert reads(c, 8) == [(5, 7), (7, 8)]
    assert "1RECV_F0 1F0" in text(b, 8)
    assert reads(b, 8) == [(1, 3), (4, 5)]  # targets of 2 of 3 samples, then of 1 of 2
    forwards = [str(x) for x in a.row(8) if x.type == "F"]
    assert sorted(forwards) == ["0F0", "0F1", "1F0", "1F1"]
    by_action = dict(zip(forwards, reads(a, 8), strict=True))
    assert by_action == {"0F0": (0, 3), "0F1": (3, 5), "1F0": (0, 1), "1F1": (3, 4)}


def test_every_sample_is_read_once_as_input_and_once_as_target() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        for samples in (8, 7, 5, 2, 1):
            seen: dict[str, list[int]] = {"input": [], "target": []}
            for here in (A, B, C):
                book = Playbook(hybrid(schedule), here)
                routes = book.routes(samples)
                forwards = [x for x in book.row(samples) if x.type == "F"]
                ends = [x for x in forwards if x.stage in (0, 1, 2)]
                for action, span in zip(ends, reads(book, samples), strict=True):
                    assert action.stage is not None
                    route = routes.stages[action.stage]
                    seen["input"] += range(*span) if route.is_first else ()
                    seen["target"] += range(*span) if route.is_last else ()
            assert sorted(seen["input"]) == sorted(seen["target"]) == list(range(samples))


def test_a_smaller_batch_keeps_the_proportions_and_may_leave_a_pipeline_nothing() -> None:
    c = Playbook(hybrid(), C)
    assert reads(c, 3) == [(2, 3)]
    assert text(c, 1) == "2REDUCE_GRAD STEP" and reads(c, 1) == []
    assert text(Playbook(hybrid(), A), 1).endswith("0REDUCE_GRAD STEP")


def test_a_layer_in_the_middle_reads_nothing() -> None:
    stages = (stage("x", (A, 1)), stage("y", (B, 1)), stage("z", (C, 1)))
    plan = Plan(global_batch=2, pipelines=(Pipeline(samples=2, micro_batch=1, stages=stages),))
    assert reads(Playbook(plan, B), 2) == []
    assert reads(Playbook(plan, A), 2) == reads(Playbook(plan, C), 2) == [(0, 1), (1, 2)]
