"""Whether devices that have lost others may go on: of a job that is cut in two, one part does at most.

    a's host has the store, and b  |  c d e          3 of 5: c, d and e go on at another store, a and b end
    a's host has the store, and b  |  c d            2 of 4, and the store: a and b go on, c and d end

Who is bound to a store never goes on at another one, so it counts for its own even when it is silent.
"""

from collections.abc import Collection, Iterable

from evener.core.membership import Electorate
from evener.core.words import some

MOST_NAMED = 8
NOBODY = "nobody here was in the job before"


def may_go_on(electorates: Iterable[Electorate], present: Collection[str], store: str) -> tuple[bool, str]:
    """(whether `present` may go on at `store`, the sentence why), of all generations they may be the rest of.

    At the store at which a generation was formed half of its devices are enough, those that are bound to it
    included; at any other it takes more than half.

    Example: of a, b, c and d, formed at the store "" to which a and b are bound, a and b may go on at "", and
    c and d nowhere; b alone may at "", as a can be nowhere else.
    """
    told = NOBODY
    for electorate in electorates:
        own = electorate.store == store
        here = set(present) | set(electorate.bound if own else ())
        count, of = len(here & set(electorate.devices)), len(electorate.devices)
        missing = [d for d in electorate.devices if d not in here]
        goes_on = 2 * count >= of if own else 2 * count > of
        asked = "half are enough at their store" if own else "it takes more than half at another store"
        told = f"{count} of {of} devices are here, without {some(missing, MOST_NAMED)}; {asked}"
        if not goes_on:
            return False, told
        if not missing:
            told = f"all {of} devices are here or bound to the store"
    return told != NOBODY, told
