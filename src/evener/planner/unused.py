"""What a job allows between hosts and its plan does not use: said with the reason, never passed over."""

from msgspec.structs import replace

from evener.core.exchange import loses
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.planner.result import PlanResult


def with_unused(fleet: Fleet, job: Job, result: PlanResult) -> PlanResult:
    """`result` with a sentence, in its reasons and the plan's `why`, where allowed compression is not used.

    Example: int8 on one host: "--compress int8 is not used: the plan's devices are all on lab1".
    """
    plan = result.plan
    if not job.compress or any(loses(r.compression) for r in plan.reductions):
        return result
    hosts = list(dict.fromkeys(fleet.device(name).host for name in plan.devices))
    reasons = [r.reason for r in plan.reductions if r.reason]
    why = (
        f"the plan's devices are all on {hosts[0]}"
        if len(hosts) == 1
        else reasons[0]
        if reasons
        else "no exchange of groups of a host was predicted faster"
    )
    sentence = f"--compress {','.join(job.compress)} is not used: {why}"
    joined = f"{plan.why}; {sentence}" if plan.why else sentence
    return replace(result, plan=replace(plan, why=joined), reasons=(*result.reasons, sentence))
