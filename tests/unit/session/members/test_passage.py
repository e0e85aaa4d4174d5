from evener.session.members.passage import Stopwatch


def test_the_parts_of_a_passage_add_up_and_nothing_is_told_without_one():
    now = [10.0]
    watch = Stopwatch(clock=lambda: now[0], now=lambda: 1000.0)
    watch.mark("forming")
    assert watch.finish(1, 0) is None
    watch.start()
    for part, took_s in (("roll call", 0.01), ("plan", 0.002), ("roll call", 0.02), ("first step", 0.05)):
        now[0] += took_s
        watch.mark(part)
    told = watch.finish(3, 17)
    assert told is not None and told.noticed_at_s == 1000.0
    assert str(told) == (
        "generation 3 had its first step 82 ms after the change was noticed: roll call 30, plan 2, "
        "first step 50 ms (measured)"
    )
    assert watch.finish(3, 17) is None
