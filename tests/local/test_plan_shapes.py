"""Random plans of every shape give a plain loop's gradients: a seeded part of benchmarks/plan_shapes.py."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.shape_instances import Instance, draw, error_of, features, plain, run_instances, with_owners
from evener.core.plan import Held, Pipeline, Plan, Share, Stage
from tests.local.pool import Pool

PER_FAMILY = 4
NO_PACKAGE = ("sequential", "text", "residual", "unet", "encoder-decoder", "lstm")


def check(pool: Pool, world_size: int, instances: list[Instance]) -> None:
    by_rank = pool.run(run_instances, world_size, instances, timeout_s=100.0)
    for instance, held in zip(instances, zip(*by_rank, strict=True), strict=True):
        error = error_of(instance, held)
        assert error <= instance.bound, f"{error:.1e} off: {instance}"


def drawn(world_size: int, families: tuple[str, ...], seed: int = 7) -> list[Instance]:
    """Instances in both dtypes by turns: the full count is the benchmark's."""
    found = draw(seed, 3 * PER_FAMILY // 2 * len(families), families)[world_size]
    return [replace(x, dtype=("float32", "float64")[i % 2]) for i, x in enumerate(found)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_plan_is_exact(pool: Pool, world_size: int) -> None:
    check(pool, world_size, drawn(world_size, NO_PACKAGE))


@pytest.mark.parametrize(("world_size", "held"), [(3, "optimizer"), (4, "gradients")])
def test_plans_whose_state_lies_in_random_parts_are_exact(pool: Pool, world_size: int, held: Held) -> None:
    """A unit that is not sent back, or by one device too few, shows in the second step's gradient."""
    rng = random.Random(world_size)
    in_float64 = drawn(world_size, NO_PACKAGE, seed=11)[1::2]
    check(pool, world_size, [with_owners(x, rng, held) for x in in_float64])


def test_hugging_face_models_from_their_config_are_exact(pool: Pool) -> None:
    pytest.importorskip("transformers")
    check(pool, 2, drawn(2, ("gpt2", "llama")))


def test_the_drawn_plans_have_every_shape() -> None:
    met = Counter(word for n in (2, 3, 4) for x in drawn(n, NO_PACKAGE) for word in features(x))
    for word in (
        *("gpipe", "1f1b", "interleaved", "zero-bubble"),
        *("not neighbours on one device", "pipelines cut differently", "shared stage"),
        *("uneven micro-batches", "frozen", "masked", "max_norm", "recompute"),
        *NO_PACKAGE,
    ):
        assert met[word] >= 2, f"{word}: {met[word]} of the drawn plans"


def test_a_wrong_gradient_is_found() -> None:
    """What `error_of` says of gradients that lack one device's part, one parameter, or one step."""
    instance = draw(1, 1, ("sequential",))[2][0]
    right = plain(instance)
    assert error_of(instance, [right, right]) == 0.0
    scaled = [{n: g * 0.99 for n, g in step.items()} for step in right]
    assert error_of(instance, [right, scaled]) == pytest.approx(0.01, rel=1e-3)
    name = next(iter(right[0]))
    short = [{n: g for n, g in step.items() if n != name} for step in right]
    assert error_of(instance, [short, short]) == float("inf")
    assert error_of(instance, [right[:1], right]) == float("inf")


def test_samples_without_weight_beside_samples_with_weight_in_a_shared_stage(pool: Pool) -> None:
    """Some devices of the last stage then get masked samples only; what they give back counts as zero."""
    first, last = ("(root)", "embed", "blocks.0"), ("blocks.1", "blocks.2", "norm", "head")
    a, b = Share(devices=("h/a",), samples=2), Share(devices=("h/b",), samples=1)
    stages = Stage(layers=first, shares=(a, b)), Stage(layers=last, shares=(b, a))
    pipeline = Pipeline(samples=6, micro_batch=3, stages=stages)
    plan = Plan(global_batch=6, pipelines=(pipeline,), schedule="1f1b")
    check(
        pool,
        2,
        [
            Instance(family="text", plan=plan, dataset_size=8, seed=seed, dtype="float64", masked=True)
            for seed in range(4)
        ],
    )
