"""A driver whose clock moves only by what its actions are said to cost."""

from collections.abc import Callable, Hashable
from typing import Any


class ScriptedDriver:
    """`cost(action, signature)` gives the seconds of an action; work is done for real and takes none."""

    def __init__(self, cost: Callable[[str, Hashable], float]) -> None:
        self._cost, self._now_s = cost, 100.0
        self.actions: list[tuple[str, Hashable]] = []

    def now(self) -> float:
        return self._now_s

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        result = work()
        self.actions.append((action, signature))
        self._now_s += self._cost(action, signature)
        return result
