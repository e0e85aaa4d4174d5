"""How large posted buffers are: both ends compute it alike, so that no part finds too small a one."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from evener.runtime.channels.gloo import DEPTH, Capacities


def test_a_larger_message_comes_in_parts_and_then_in_one() -> None:
    rooms = Capacities(4096)
    assert [rooms.use(6000) for _ in range(2)] == [(4096, 8192), (4096, 8192)]
    assert rooms.use(8000) == (8192, 8192)


@given(st.lists(st.integers(1, 100_000), max_size=30), st.data())
def test_every_part_fits_its_buffer(sizes: list[int], data: st.DataObject) -> None:
    """The receiver sees a part only after it was sent, and posts as many as it has taken."""
    first = data.draw(st.sampled_from([4096, 5000, 65536]))
    sender, receiver = Capacities(first), Capacities(first)
    posted = deque([first] * DEPTH)
    for total in sizes:
        left = total
        while left > 0:
            room, _ = sender.use(total)
            assert room == posted[0], "the sender knows the buffer that its part will find"
            posted.popleft()
            left -= room
            _, again = receiver.use(total)
            posted.append(again)
