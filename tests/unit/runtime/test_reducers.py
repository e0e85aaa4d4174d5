"""Who sums what with whom, in which order it leaves, and that norms count each parameter once."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from evener.runtime.reducers import Reducers, reducers_for
from evener.runtime.segments import Segment, segments_of
from tests.fakes import Rendezvous

A, B, C = "lab/a", "lab/b", "lab/c"


def segments(names: dict, devices: dict, ties: dict | None = None, order: str = "") -> tuple[Segment, ...]:
    every = order or "".join(dict.fromkeys(n for held in names.values() for n in held))
    return segments_of(names, devices, ties or {}, list(every))


def test_pipelines_cut_differently_sum_each_layer_over_its_own_holders() -> None:
    names = {0: "wx", 1: "yz", 2: "w", 3: "xyz"}
    devices = {0: (A,), 1: (B,), 2: (C,), 3: (B, C)}
    found = segments(names, devices, order="wxyz")
    assert [(s.names, s.devices) for s in found] == [
        (("y", "z"), (B, C)),
        (("x",), (A, B, C)),
        (("w",), (A, C)),
    ]


def test_tied_parameters_are_one_with_the_holders_of_both() -> None:
    found = segments({0: "ex", 1: "y", 2: "h"}, {0: (A,), 1: (B,), 2: (C,)}, {"h": "e"}, order="exyh")
    tied = next(s for s in found if "e" in s.names)
    assert tied.names == ("e",) and tied.devices == (A, C) and tied.stages == {0, 2}
    assert found[-1] is tied, "it leaves with its first layer, when backward has met both"


def test_the_same_devices_are_one_group_whichever_stage_names_them_first() -> None:
    # Two groups over one set of devices would launch into the same sockets in orders of their own.
    found = segments({0: "x", 1: "y", 2: "y", 3: "x"}, {0: (A,), 1: (B,), 2: (A,), 3: (B,)}, order="xy")
    assert {s.devices for s in found} == {(A, B)}
    found = segments({0: "x", 1: "y", 2: "x", 3: "y"}, {0: (A,), 1: (B,), 2: (B,), 3: (A,)}, order="xy")
    assert {s.devices for s in found} == {(A, B)}


class Job:
    """Devices of this process with parameters of one number each; `reducers[device]`."""

    def __init__(self, names: dict[int, str], devices: dict[int, tuple[str, ...]], frozen: str = "") -> None:
        everyone = tuple(dict.fromkeys(d for row in devices.values() for d in row))
        self.meetings: dict[tuple[str, ...], Rendezvous] = {}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.reducers: dict[str, Reducers] = {}
        found = segments(names, devices)
        for here in everyone:
            stages = frozenset(s for s, row in devices.items() if here in row)
            held = {n: nn.Parameter(torch.zeros(1), n not in frozen) for s in found for n in s.names}
            self.parameters[here] = held
            self.reducers[here] = reducers_for(found, here, stages, held, self._wires(here), len(everyone))
            self.reducers[here].begin_step(0)

    def _wires(self, here: str) -> Callable:
        def among(devices: tuple[str, ...]):
            meeting = self.meetings.setdefault(devices, Rendezvous(len(devices)))
            return meeting.wire(devices.index(here))

        return among

    def backward(self, here: str, stage: int, last: bool = True, **gradients: float) -> None:
        reducers = self.reducers[here]
        reducers.begin(1.0)
        if last:
            reducers.last_backward(stage)
        sum(self.parameters[here][n].sum() * g for n, g in gradients.items()).backward()

    def end(self) -> dict[str, dict[str, float]]:
        for step in (Reducers.launch_rest, Reducers.wait):
            for reducers in self.reducers.values():
                step(reducers)
        for reducers in self.reducers.values():
            reducers.finish(1.0)
        return {
            here: {n: float(p.grad) for n, p in held.items() if p.grad is not None}
            for here, held in self.parameters.items()
        }


def test_gradients_are_summed_over_holders_and_stay_where_one_device_holds_them() -> None:
    job = Job({0: "wx", 1: "y", 2: "w", 3: "xy"}, {0: (A,), 1: (B,), 2: (C,), 3: (B,)})
    job.backward(A, 0, w=1.0, x=2.0)
    job.backward(B, 1, y=3.0)
    job.backward(B, 3, x=4.0, y=5.0)
    job.backward(C, 2, w=6.0)
    assert job.end() == {A: {"w": 7.0, "x": 6.0}, B: {"x": 6.0, "y": 8.0}, C: {"w": 7.0}}
    # 7² + 6² + 8², each parameter on one device only
    assert sum(r.square_norm() for r in job.reducers.values()) == pytest.approx(49 + 36 + 64)


def test_a_parameter_of_two_stages_of_a_device_leaves_after_the_last_backward_of_both() -> None:
    job = Job({0: "t", 1: "y", 2: "t"}, {0: (A,), 1: (B,), 2: (A, B)})
    meeting = job.meetings[A, B]
    job.backward(A, 2, t=1.0)
    job.reducers[A].done(2)
    assert meeting.launched[0] == []
    job.backward(A, 0, t=10.0)
    job.reducers[A].done(0)
    assert len(meeting.launched[0]) == 1
    job.backward(B, 2, t=100.0)
    job.backward(B, 1, y=1.0)
    assert job.end() == {A: {"t": 111.0}, B: {"t": 111.0, "y": 1.0}}


def test_the_last_backward_of_a_stage_sends_while_it_runs_and_earlier_ones_do_not() -> None:
    job = Job({0: "x", 1: "x"}, {0: (A,), 1: (B,)})
    meeting = job.meetings[A, B]
    job.backward(A, 0, last=False, x=1.0)
    assert meeting.launched[0] == []
    job.backward(A, 0, x=2.0)
    assert len(meeting.launched[0]) == 1
    assert job.end()[B] == {"x": 3.0}


def test_frozen_parameters_take_no_part_and_a_device_may_hold_nothing_else() -> None:
    job = Job({0: "x", 1: "y"}, {0: (A,), 1: (B,)}, frozen="x")
    job.backward(B, 1, y=3.0)
    assert job.end() == {A: {}, B: {"y": 3.0}}
    assert (job.reducers[A].square_norm(), job.reducers[B].square_norm()) == (0.0, 9.0)


def test_norms_of_data_parallelism_are_known_to_everybody_without_another_sum() -> None:
    job = Job({0: "xy", 1: "xy"}, {0: (A,), 1: (B,)})
    job.backward(A, 0, x=1.0, y=1.0)
    job.backward(B, 1, x=2.0, y=3.0)
    job.end()
    assert all(r.everywhere and r.square_norm() == pytest.approx(9 + 16) for r in job.reducers.values())
