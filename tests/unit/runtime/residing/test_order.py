"""Which layer is sent for next: the chain's order until another was seen."""

from evener.runtime.residing.order import Order


def visits(order: Order, layers: list[int]) -> list[int | None]:
    return [order.enter(layer) for layer in layers]


def test_the_chain_is_the_first_guess_both_ways():
    order = Order(4)
    order.begin_forward(learns=True)
    assert visits(order, [0, 1, 2, 3]) == [1, 2, 3, 2]
    order.begin_backward()
    assert visits(order, [3, 2, 1, 0]) == [2, 1, 0, 1]


def test_what_was_seen_once_is_expected_again():
    order = Order(4)
    order.begin_forward(learns=True)
    visits(order, [2, 0, 3])
    order.begin_backward()
    visits(order, [3, 2])  # nothing was saved of 0
    order.begin_forward(learns=True)
    assert visits(order, [2, 0, 3]) == [0, 3, 2]
    order.begin_backward()
    assert visits(order, [3, 2]) == [2, 0]  # behind the last comes the next forward: 2 is here, then 0


def test_a_forward_that_no_backward_follows_is_followed_by_itself():
    order = Order(3)
    order.begin_forward(learns=False)
    assert visits(order, [0, 1, 2]) == [1, 2, 0]


def test_another_way_through_the_model_is_no_error():
    order = Order(3)
    order.begin_forward(learns=True)
    visits(order, [0, 1, 2])
    order.begin_backward()
    visits(order, [2, 1, 0])
    order.begin_forward(learns=True)
    assert visits(order, [0, 2]) == [1, 1]
    order.begin_backward()
    assert order.is_elsewhere(2)
    order.enter(2)
    assert not order.is_elsewhere(2)
