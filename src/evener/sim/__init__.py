"""The simulator: schedule + costs + faults → trace. Two evaluators that agree, a fast and an able one."""

from evener.cost.actions import plan_costs
from evener.sim.run import Run, World, play
from evener.sim.shrink import shrink
from evener.sim.step import Outcome, evaluate, simulate, step_seconds

__all__ = [
    "Outcome",
    "Run",
    "World",
    "evaluate",
    "plan_costs",
    "play",
    "shrink",
    "simulate",
    "step_seconds",
]
