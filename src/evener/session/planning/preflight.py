"""Before a job on several hosts: are all pairs of processes well, and over which interface does each talk?

The verdict is printed, kept in the run's folder, and put into this process's environment, where Gloo, NCCL
and the channels between hosts look for it.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from evener.core.files import write
from evener.core.ways import Verdict
from evener.errors import EnvironmentBrokenError
from evener.planner.topology import reduction_groups
from evener.probing.peers import peer_copies
from evener.probing.preflight import Board, Party, preflight
from evener.report.plans import reduction_line
from evener.report.ways import verdict_text
from evener.session.meeting import Meeting
from evener.session.request import Request

COME_S = 300.0
"""So long the others may take to load torch: from a network's disk that can be minutes."""


def is_wanted(request: Request, meeting: Meeting) -> bool:
    """Whether a job is looked over first: as asked, else where its devices are on several hosts.

    A rehearsal's hosts are all this one.
    """
    if meeting.world_size < 2:
        return False
    if request.preflight is not None:
        return request.preflight
    return not request.rehearse and len({d.host for d in request.fleet.devices}) > 1


def look_over(request: Request, meeting: Meeting) -> Verdict | None:
    """Try every pair, set what the verdict asks for, and say why; None where no preflight is wanted.

    EnvironmentBrokenError names pairs that are dead, with what was tried; PeerLostError who did not come.
    """
    if not is_wanted(request, meeting):
        return None
    devices = request.fleet.devices
    here = devices[meeting.rank]
    party = Party(
        names=tuple(d.name for d in devices),
        number=meeting.rank,
        host=here.host,
        board=Board(dist.PrefixStore("preflight", meeting.store)),
        meeting_place=os.environ.get("MASTER_ADDR", ""),
    )
    own = [d for d in devices if d.host == here.host]
    verdict = preflight(party, copies=lambda: peer_copies(own), come_s=COME_S)
    if party.leads:
        write(Path(request.run_dir) / "preflight.json", verdict)
        if not request.quiet:
            print(verdict_text(verdict), end="", file=sys.stderr)
            for number, group in enumerate(reduction_groups(request.fleet, party.names), start=1):
                print(f"sums could go {reduction_line(number, group)}", file=sys.stderr, flush=True)
    if verdict.dead:
        raise EnvironmentBrokenError(
            "processes of the job do not reach each other",
            numbers="; ".join(w.why for w in verdict.dead),
            remedy="open ports between these hosts, GLOO_SOCKET_IFNAME with a network that all share, or the "
            "job without one of them; --no-preflight starts it as it is",
        )
    os.environ.update(verdict.variables[party.name])
    return verdict
