"""Tensor-parallel groups: equal devices of a host that act as one, where the job allows it.

A team stands in a search like a device of its own: it is named after its first member, runs at the speed
measured for its degree, and each member holds its part.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evener.core.job import Job
from evener.core.profile import Profile
from evener.planner.groups import ALLOW, Group, degrees_of

_MOST_CHOICES = 12


def team_choices(groups: Sequence[Group], profile: Profile, job: Job) -> Iterator[tuple[Group, ...]]:
    """The groups as they are, then with teams: one degree for each kind, up to a dozen combinations.

    Those whose degrees are alike come first: unlike ones make stages of unlike speed. Kinds without a
    measurement at degree 1 only appear in teams. Without the job's leave there are no teams.
    """
    kinds = list(dict.fromkeys(g.kind for g in groups))
    degrees = []
    for kind in kinds:
        largest = max(len(g.names) for g in groups if g.kind == kind)
        if ALLOW in job.allow:
            degrees.append([d for d in degrees_of(profile, kind) if d <= largest] or [1])
        else:
            degrees.append([1])
    combinations = sorted(itertools.product(*degrees), key=lambda c: max(c) / min(c))
    for chosen in combinations[:_MOST_CHOICES]:
        degree = dict(zip(kinds, chosen, strict=True))
        yield tuple(t for g in groups if (t := _teamed(g, degree[g.kind])).names)


def _teamed(group: Group, degree: int) -> Group:
    if degree == 1:
        return group
    names = group.names
    teams = tuple(names[i : i + degree] for i in range(0, len(names) - degree + 1, degree))
    return replace(group, names=tuple(t[0] for t in teams), teams=teams, degree=degree)
