"""Efficiency against the sum of the devices, and where each lost second went: the causes add up to the gap.

In a step of T seconds device r, which alone does s_r samples/s, could have done s_r·T samples and did n_r:

    u_r    = n_r / s_r                useful seconds: what its samples take alone
    lost_r = T - u_r                  the rest, split by cause c: m_rc - n_r·q_rc
                                      (m_rc measured seconds of a step, q_rc seconds of a sample alone)

Both Σ_c m_rc = T and Σ_c n_r·q_rc = u_r, so the causes of a device add up to lost_r. A device that is left
out loses all of T. Over all devices, weighted by what they are worth (S = Σ s_r, N = Σ n_r):

    Σ_r s_r/S · lost_r  =  T - N/S  =  T·(1 - efficiency)  =  step_s - ideal_step_s  =  gap_s
"""

from collections.abc import Sequence

import msgspec

from evener.core.figures import Figure
from evener.core.plan import Plan
from evener.core.records import StepRecord
from evener.core.trace import CAUSES
from evener.errors import PlanMismatchError, UnknownNameError, UsageError
from evener.report.results import LEFT_OUT, LOSS_CAUSES, DeviceReport, Evaluation, RunReport, Solo
from evener.report.steps import TypicalStep, typical_step

UNBOUNDED = "if its memory held the model"
WARMUP_STEPS = 3


def report_by_prediction(
    records: Sequence[StepRecord], plan: Plan, *, evaluation: Evaluation | None = None
) -> RunReport | None:
    """The report of steps under `plan`, by the solo rates that the plan predicts.

    None where it predicts too little to tell what each device does alone. UsageError where no step was whole.
    """
    solo = predicted_solo(plan)
    if plan.prediction is None or not any(solo.values()):
        return None
    if not plan.is_data_parallel and not plan.prediction.useful_samples:
        return None
    every = plan.fewer.every or 1 if plan.fewer and plan.fewer.how == "local" else 1
    typical = typical_step(records, global_batch=plan.global_batch, warmup_steps=WARMUP_STEPS, every=every)
    return account(typical, plan, solo, evaluation=evaluation)


def account(
    typical: TypicalStep,
    plan: Plan,
    solo: dict[str, Solo | None],
    *,
    evaluation: Evaluation | None = None,
) -> RunReport:
    """The report of a run whose typical step is `typical`.

    `solo` holds every offered device; None stands for a device that cannot do the job alone (the model
    does not fit): it adds nothing to the sum, and a note says so.

    Formulas: the module's text. Example: solo 8, 4, 2 and 2 samples/s, 16 samples in T = 1.25 s give
    12.8 of 16 samples/s, efficiency 0.8 and a gap of 0.25 s a step.
    A plan of several stages needs the `useful_samples` of its prediction.
    Raises UnknownNameError for a device without solo rate, PlanMismatchError for one without measured
    seconds, UsageError for samples that do not sum up.
    """
    samples = _samples(plan)
    rates = _rates(plan, solo)
    _check_seconds(plan, typical)
    T = typical.step_s  # noqa: N806 as in the formulas above
    reasons = {x.device: x.reason for x in plan.left_out}
    devices = tuple(
        _used_device(name, samples[name], T, typical.seconds[name], rates[name])
        if name in samples
        else _left_out_device(name, T, rates.get(name), reasons.get(name, "the plan gives no reason"))
        for name in solo
    )
    ideal = sum(x.samples_per_s.value for x in rates.values())
    used = sum(rates[name].samples_per_s.value for name in samples)
    rate = plan.global_batch / T
    predicted = plan.prediction
    return RunReport(
        efficiency=rate / ideal,
        efficiency_used=rate / used,
        samples_per_s=rate,
        ideal_samples_per_s=ideal,
        step_s=T,
        predicted_step_s=predicted.step_s if predicted else None,
        prediction_error=predicted.step_s / T - 1 if predicted else None,
        predicted_source=predicted.source if predicted else None,
        heldout_loss=evaluation.heldout_loss if evaluation else None,
        evaluation=evaluation,
        devices=devices,
        global_batch=plan.global_batch,
        ideal_step_s=plan.global_batch / ideal,
        gap_s=T - plan.global_batch / ideal,
        lost_s=_weighted(devices, ideal),
        notes=typical.notes + _solo_notes(solo, rates, samples),
        **_passed_on(typical),
    )


def predicted_solo(plan: Plan) -> dict[str, Solo | None]:
    """The solo rates that the plan's prediction holds, for runs that did not measure them.

    Their source is the prediction's. A left-out device without one cannot do the job alone: None. A used one
    that cannot has the rate it would reach if its memory held the model, with a note.
    """
    solo: dict[str, Solo | None] = {x.device: None for x in plan.left_out}
    if (told := plan.prediction) is not None:
        for name, rate in told.solo_samples_per_s.items():
            seconds = told.solo_seconds.get(name, {})
            solo[name] = Solo(samples_per_s=Figure(value=rate, source=told.source), seconds=seconds)
        for name, rate in told.unbounded_samples_per_s.items():
            solo[name] = Solo(samples_per_s=Figure(value=rate, source=told.source, note=UNBOUNDED))
    return solo


def lost_by_cause(samples: float, seconds: dict[str, float], solo: Solo) -> dict[str, float]:
    """Seconds of a step that each cause took beyond what `samples` take alone; negative where it took less.

    Sums to (sum of `seconds`) - samples ÷ solo rate. Example: 8 samples at 8 a second alone, 5 ms of each
    the optimizer's: a step of 1.0 s compute, 0.05 optimizer and 0.2 wait loses 0.04 + 0.01 + 0.2 = 0.25 s.
    """
    alone = solo.seconds_of(samples)
    return {cause: seconds.get(cause, 0.0) - alone[cause] for cause in CAUSES}


def _used_device(
    name: str, samples: float, step_s: float, seconds: dict[str, float], solo: Solo
) -> DeviceReport:
    return DeviceReport(
        name=name,
        samples_per_step=samples,
        busy=(seconds["compute"] + seconds["optimizer"]) / step_s,
        seconds=seconds,
        lost_s={LEFT_OUT: 0.0, **lost_by_cause(samples, seconds, solo)},
        solo_samples_per_s=solo.samples_per_s,
    )


def _left_out_device(name: str, step_s: float, solo: Solo | None, reason: str) -> DeviceReport:
    return DeviceReport(
        name=name,
        samples_per_step=0,
        busy=0.0,
        seconds={},
        lost_s={cause: step_s if cause == LEFT_OUT else 0.0 for cause in LOSS_CAUSES},
        solo_samples_per_s=solo.samples_per_s if solo else None,
        left_out=reason,
    )


def _weighted(devices: tuple[DeviceReport, ...], ideal: float) -> dict[str, float]:
    """Σ_r s_r/S · lost_rc for every cause c: seconds of a step of the whole job."""
    worth = [(d.solo_samples_per_s.value / ideal, d) for d in devices if d.solo_samples_per_s]
    return {cause: sum(weight * d.lost_s[cause] for weight, d in worth) for cause in LOSS_CAUSES}


def _samples(plan: Plan) -> dict[str, float]:
    """Whole-model samples that each device's work is worth a step; they sum to the global batch."""
    useful = plan.prediction.useful_samples if plan.prediction else {}
    if not useful:
        if not plan.is_data_parallel:
            raise UsageError(
                "a plan of several stages says what each device's layers are worth in its prediction alone",
                remedy="a plan with its prediction, as `evener plan` makes it",
            )
        return dict(plan.samples_by_device())
    total = sum(useful.values())
    if set(useful) != set(plan.devices) or abs(total - plan.global_batch) > 1e-9 * plan.global_batch:
        raise UsageError(
            "useful_samples must name the plan's devices and sum to the global batch",
            numbers=f"they name {', '.join(useful)} and sum to {total}, the batch is {plan.global_batch}",
        )
    return useful


def _rates(plan: Plan, solo: dict[str, Solo | None]) -> dict[str, Solo]:
    """The solo rates there are; every device offered to the plan must be named, used ones with a rate."""
    rates = {name: x for name, x in solo.items() if x is not None}
    offered = (*plan.devices, *(x.device for x in plan.left_out))
    missing = [x for x in offered if x not in solo] + [x for x in plan.devices if solo.get(x, 0) is None]
    if missing:
        raise UnknownNameError(
            f"no solo rate for {', '.join(missing)}",
            numbers=f"rates are there for {', '.join(rates) or 'no device'}",
            remedy="measure each offered device alone",
        )
    return rates


def _check_seconds(plan: Plan, typical: TypicalStep) -> None:
    for name in plan.devices:
        if name not in typical.seconds:
            raise PlanMismatchError(
                f"the step records hold no seconds of {name}, which the plan uses",
                numbers=f"they hold {', '.join(typical.seconds) or 'no device'}",
                remedy="the records of a run of this plan",
            )


def _solo_notes(
    solo: dict[str, Solo | None], rates: dict[str, Solo], used: dict[str, float]
) -> tuple[str, ...]:
    notes = []
    unable = [name for name in solo if name not in rates]
    if unable:
        notes.append(f"{', '.join(unable)} cannot do the job alone and adds nothing to the sum of solo rates")
    too_small = [name for name, x in rates.items() if x.samples_per_s.note == UNBOUNDED]
    if too_small:
        notes.append(
            f"{', '.join(too_small)} cannot hold the model: alone they do nothing, and count with what their "
            "layers take, as if memory sufficed"
        )
    unsplit = [name for name in used if not rates[name].seconds]
    if unsplit:
        notes.append(
            f"the solo rate of {', '.join(unsplit)} is not split by cause: what optimizer and input take "
            "alone counts as compute, so compute may show a gain that optimizer and input give back"
        )
    return tuple(notes)


def _passed_on(typical: TypicalStep) -> dict:
    """The fields that the report takes over from the typical step as they are."""
    names = ("spread", "steps", "steps_used", "steps_skipped", "warmup_steps", "loss_first", "loss_last")
    return {name: value for name, value in msgspec.structs.asdict(typical).items() if name in names}
