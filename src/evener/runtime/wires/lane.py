"""One lane between groups: every member adds up its slice of the lane's values, then tells the others.

    a/0   [ own slice | b's slice ]        scatter: each sends the others their slices, and adds up its own
    b/0   [ a's slice | own slice ]        gather:  each sends its sum to all others

All bytes over a link once in and once out: 2 (n - 1) / n of the values, as in a ring, in two rounds.

Three or more members that add up equal slices pass them round instead, a ring of hosts: each sends to one and
hears from one. Where all send to all, two streams that meet at one host hold each other up while the link of
another has nothing to carry, which took 20 % longer (docs/log.md).

    slice c    c+1 ──► c+2 adds its own ──► … ──► c has the sum ──► c+1 ──► c+2 …
"""

from collections.abc import Sequence

from torch import Tensor

from evener.core.exchange import Lane, adds_spans, goes_round
from evener.runtime.wires.arrivals import Arrivals
from evener.runtime.wires.coding import PLAIN, Coding, Lossy
from evener.runtime.wires.messages import Messages, Outgoing


class LaneEnd:
    """This device's end of `lane`. What one member added up goes to all as it is, so all have the same bits.

    `codings` are of the two rounds, which are of different threads.
    """

    def __init__(
        self, lane: Lane, there: Messages, back: Messages, codings: tuple[Coding, Coding] = (PLAIN, PLAIN)
    ) -> None:
        self.lane, self._there, self._back = lane, there, back
        self._codings = {there: codings[0], back: codings[1]}
        self._me = lane.devices.index(there.here)
        self._goes_round = goes_round(lane)
        self.arrivals = Arrivals()

    def scatter(self, values: Tensor, number: int, place: tuple, *, exact: bool) -> None:
        """Have the sum of this member's slice in its place."""
        spans = adds_spans(self.lane, len(values))
        if self._goes_round:
            self._add_round([values[slice(*span)] for span in spans], number, place, exact=exact)
            return
        mine = values[slice(*spans[self._me])]
        others = [i for i in range(len(spans)) if i != self._me]
        expected = {i: self._there.expect(self.lane.devices[i]) for i in others if len(mine)}
        sent = []
        for i in _after(self._me, others):  # not all to the same one first
            theirs = values[slice(*spans[i])]
            if len(theirs):
                sent.append(self._send(self._there, i, theirs, number, (*place, "to", i), exact=exact))
        if len(mine):
            own = mine if self._me == 0 else mine.clone()
            for i, device in enumerate(self.lane.devices):
                if i == self._me:
                    if i:
                        mine.add_(own)
                    continue
                self._take(self._there, device, expected.pop(i), mine, number, exact=exact, adds=i > 0)
        while sent:
            sent.pop().wait()

    def gather(self, values: Tensor, number: int, place: tuple, *, exact: bool) -> None:
        """Have every member's slice as that member says it."""
        spans = adds_spans(self.lane, len(values))
        if self._goes_round:
            self._tell_round([values[slice(*span)] for span in spans], number, place, exact=exact)
            return
        mine = values[slice(*spans[self._me])]
        others = [i for i in range(len(spans)) if i != self._me]
        expected = {i: self._back.expect(self.lane.devices[i]) for i in others if spans[i][1] > spans[i][0]}
        sent = []
        if len(mine):
            sent = self._tell(mine, number, place, _after(self._me, others), exact=exact)
        for i, work in list(expected.items()):
            del expected[i]
            theirs = values[slice(*spans[i])]
            self._take(self._back, self.lane.devices[i], work, theirs, number, exact=exact, adds=False)
        while sent:
            sent.pop().wait()

    def _add_round(self, slices: list[Tensor], number: int, place: tuple, *, exact: bool) -> None:
        """Slice c leaves the member behind c, and every member on its way to c adds its own."""
        n, me = len(slices), self._me
        after, before = (me + 1) % n, self.lane.devices[me - 1]
        for k in range(1, n):
            away, came = slices[(me - k) % n], slices[(me - k - 1) % n]
            work = self._there.expect(before) if len(came) else None
            sent = None
            if len(away):
                sent = self._send(self._there, after, away, number, (*place, "round", k), exact=exact)
            if work is not None:
                self._take(self._there, before, work, came, number, exact=exact, adds=True)
            if sent is not None:
                sent.wait()

    def _tell_round(self, slices: list[Tensor], number: int, place: tuple, *, exact: bool) -> None:
        """Every member's slice goes round as that member says it: passed on as the bytes that came."""
        n, me = len(slices), self._me
        after, before = (me + 1) % n, self.lane.devices[me - 1]
        payload = None
        for k in range(n - 1):
            away, came = slices[(me - k) % n], slices[(me - k - 1) % n]
            sent = None
            if k == 0 and len(away):
                (sent,) = self._tell(away, number, place, [after], exact=exact)
            elif payload is not None:
                # Before the next message is expected: it comes to where this one lies.
                self._back.outgoing(self.lane.devices[after], len(payload)).copy_(payload)
                sent = self._back.send(self.lane.devices[after], len(payload), away, number)
            payload = None
            work = self._back.expect(before) if len(came) else None
            if work is not None:
                payload = self._take(self._back, before, work, came, number, exact=exact, adds=False)
            if sent is not None:
                sent.wait()

    def _tell(self, mine: Tensor, number: int, place: tuple, others: Sequence[int], *, exact: bool) -> list:
        """Send what this member added up; where that loses bits, this member takes what it said as well."""
        first, *more = (self.lane.devices[i] for i in others)
        coding = self._coding(self._back, exact=exact)
        said, work = self._written(self._back, first, mine, number, (*place, "sum"), coding)
        sent = [work]
        for device in more:
            self._back.outgoing(device, len(said)).copy_(said)
            sent.append(self._back.send(device, len(said), mine, number))
        if coding.loses:
            coding.decode(said, mine, adds=False)
        return sent

    def _send(
        self, by: Messages, to: int, values: Tensor, number: int, place: tuple, *, exact: bool
    ) -> Outgoing:
        coding = self._coding(by, exact=exact)
        return self._written(by, self.lane.devices[to], values, number, place, coding)[1]

    def _written(
        self, by: Messages, to: str, values: Tensor, number: int, place: tuple, coding: Coding
    ) -> tuple[Tensor, Outgoing]:
        """The payload for `to`, and the message that is under way with it."""
        out = by.outgoing(to, coding.most_bytes(values))
        size = coding.encode(place, values, out)
        return out[:size], by.send(to, size, values, number)

    def _take(
        self, by: Messages, device: str, work, values: Tensor, number: int, *, exact: bool, adds: bool
    ) -> Tensor:
        """What came, as the bytes it came in, once it is in `values`."""
        coding = self._coding(by, exact=exact)
        payload = by.receive(device, work, coding.expected_bytes(values), values, number)
        self.arrivals.note(device, len(payload))
        coding.decode(payload, values, adds=adds)
        return payload

    def kept_errors(self) -> list[Tensor]:
        """What compression has not said yet of either round's values."""
        return [kept for coding in self._lossy() for kept in coding.feedback.kept_errors()]

    def settle(self, *, counts: bool, factor: float) -> None:
        """See `Feedback.settle`."""
        for coding in self._lossy():
            coding.feedback.settle(counts=counts, factor=factor)

    def _lossy(self) -> list[Lossy]:
        return [coding for coding in self._codings.values() if isinstance(coding, Lossy)]

    def _coding(self, by: Messages, *, exact: bool) -> Coding:
        coding = self._codings[by]
        return PLAIN if exact and coding.loses else coding


def _after(me: int, others: Sequence[int]) -> list[int]:
    return sorted(others, key=lambda i: i < me)
