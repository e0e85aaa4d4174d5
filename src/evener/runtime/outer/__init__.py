"""Steps that a group of devices takes by itself, and what groups tell each other less often than that.

    group a   step step step step ─┐                    ┌─ all move alike
    group b   step step step step ─┴─ one outer step ───┘   `local.py`; gradients one step late: `late.py`

Inside a group everything is as without: one sum, one tally, one verdict a step.
"""
