"""Schedules as values: device → ordered actions, spelt as torch.distributed.pipelining spells them.

2F0          forward of stage 2, micro-batch 0       2SEND_F0  2RECV_F0   activations
2B0          whole backward                          2SEND_B0  2RECV_B0   gradients
2I0  2W0     backward in its input and weight part   2REDUCE_GRAD         sum gradients of a stage
STEP         the optimiser's step, once, last
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from evener.core.figures import Value

ActionType = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "STEP"]
_SPELLING = re.compile(r"^(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD)(\d*)$")


class Action(Value, frozen=True, kw_only=True):
    """One thing a device does. `stage` is absent for STEP, `micro_batch` for STEP and REDUCE_GRAD."""

    type: ActionType
    stage: int | None = None
    micro_batch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else str(self.stage)
        micro_batch = "" if self.micro_batch is None else str(self.micro_batch)
        return f"{stage}{self.type}{micro_batch}"


_WORDS = {"F": "forward", "B": "backward", "I": "backward to the input", "W": "backward to the weights"}


def in_words(action: Action) -> str:
    """What a device computes, for a person. Example: 2F0 is "forward of micro-batch 0 on stage 2 (2F0)"."""
    what = _WORDS.get(action.type)
    if what is None:
        return str(action)
    return f"{what} of micro-batch {action.micro_batch} on stage {action.stage} ({action})"


def of_micro_batch(kind: str, stage: int, micro_batch: int) -> Action:
    """The action of `kind` ("F", "SEND_B", ...) for one micro-batch. Example: ("F", 2, 0) is 2F0."""
    return Action(type=kind, stage=stage, micro_batch=micro_batch)  # type: ignore[arg-type]


def parse_action(text: str) -> Action:
    """The action spelt `text`; ValueError shows the spelling wanted. parse_action(str(a)) == a."""
    if text == "STEP":
        return Action(type="STEP")
    match = _SPELLING.match(text)
    if not match or (match[2] == "REDUCE_GRAD") != (match[3] == ""):
        raise ValueError(f"{text!r} is no action; write 2F0, 2B0, 2SEND_F0, 2REDUCE_GRAD or STEP")
    micro_batch = int(match[3]) if match[3] else None
    return Action(type=match[2], stage=int(match[1]), micro_batch=micro_batch)  # type: ignore[arg-type]


def forward_only(row: Iterable[Action]) -> Iterator[Action]:
    """The forwards of a row, with what they send and receive."""
    return (action for action in row if action.type in ("F", "SEND_F", "RECV_F"))


class Schedule(Value, frozen=True, kw_only=True):
    """What each device does, in order."""

    actions: dict[str, tuple[Action, ...]]

    def __str__(self) -> str:
        return "".join(f"{device}: {' '.join(str(a) for a in row)}\n" for device, row in self.actions.items())


def parse_schedule(text: str) -> Schedule:
    """A schedule from its printed form, one device a line. parse_schedule(str(s)) == s."""
    rows = {}
    for line in text.splitlines():
        if line.strip():
            device, colon, actions = line.partition(": ")
            if not colon:
                raise ValueError(f"a line must read 'device: actions', got {line!r}")
            rows[device] = tuple(parse_action(word) for word in actions.split())
    return Schedule(actions=rows)
