"""`evener preflight`: do the processes of a job reach each other, over which interface, how fast, right?"""

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from evener.cli.options import AsJson
from evener.core.addresses import host_and_port
from evener.core.tell import waiting

_REACH_S = 5.0
"""So long a process tries to reach the meeting place before it names it."""


def preflight(
    meet: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where all meet; process 0 opens it. Under torchrun: not needed."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=2, help="How many take part, with --meet.")] = None,
    number: Annotated[
        int | None, typer.Option(min=0, help="Which of them this is, from 0, with --meet.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What this process is called. Default: the host's name.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds to wait for the others to come.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Try every pair of processes with real data before a job: route, interface, latency, rate, correctness.

    Start it on every host: `evener preflight --meet lab1:29400 --processes 3 --number 0` on lab1, with
    --number 1 and 2 on the others; or under torchrun. Within 10 s of all being there each is told over which
    interface it should listen and why, what your NCCL_ and GLOO_ variables change, and which pairs are dead.
    Exit code 1 if one is. `evener train` does the same before a job on several hosts.
    """
    place = _place(meet, processes, number)
    from evener.probing import host_name
    from evener.probing.peers import peer_copies
    from evener.probing.preflight import Board, Party, names_of
    from evener.probing.preflight import preflight as try_all
    from evener.report.ways import verdict_object, verdict_text
    from evener.runtime.channels.places import this_host

    store, meeting_place, count, mine = _meeting(place, wait)
    board = Board(store)
    here = name or host_name()
    with waiting(f"process {mine} waits for all of the {count} processes to come to {meet or 'torchrun'}"):
        names = names_of(board, mine, count, here, come_s=wait)
    party = Party(
        names=names,
        number=mine,
        host=this_host() or here,
        board=board,
        meeting_place=meeting_place,
    )
    verdict = try_all(party, copies=lambda: peer_copies(_cards(here)), come_s=wait)
    print(verdict_text(verdict), end="", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(verdict_object(verdict)), flush=True)
    if verdict.dead:
        raise typer.Exit(1)


def _place(meet: str | None, processes: int | None, number: int | None) -> tuple[str, int, int, int] | None:
    """(host, port, processes, which one this is) of the options; None where torchrun has told it."""
    from evener.errors import UsageError
    from evener.session.launched import is_launched

    if meet is None and is_launched():
        return None
    if meet is None or processes is None or number is None or number >= processes:
        raise UsageError(
            "a preflight needs to know where to meet, how many take part and which one this is",
            numbers=f"--meet {meet}, --processes {processes}, --number {number}",
            remedy="evener preflight --meet lab1:29400 --processes 2 --number 0, --number 1 elsewhere",
        )
    host, port = host_and_port(meet, example="--meet lab1:29400")
    if not port:
        raise UsageError(f"{meet!r} is no place to meet: all must know its port", remedy="--meet lab1:29400")
    return host, port, processes, number


def _meeting(place: tuple[str, int, int, int] | None, wait: float) -> tuple[Any, str, int, int]:
    """(store, host of the meeting place, processes, which one this is)."""
    import torch.distributed as dist

    from evener.errors import EnvironmentBrokenError
    from evener.probing.trial import reach
    from evener.session.meeting import open_meeting

    if place is None:
        meeting = open_meeting()
        room = dist.PrefixStore("preflight", meeting.store)
        return room, os.environ.get("MASTER_ADDR", ""), meeting.world_size, meeting.rank
    host, port, processes, number = place
    try:
        socket.getaddrinfo(host, port)  # else torch tries a name that nobody knows for a minute
        trouble = "" if number == 0 else reach(host, port, come_s=wait, silent_s=_REACH_S)
    except OSError as e:
        trouble = f"{host} is no name that this host knows ({e.strerror})"
    try:
        if not trouble:
            store = dist.TCPStore(
                host, port, None, number == 0, timedelta(seconds=wait), wait_for_workers=False
            )
            return store, host, processes, number
    except (RuntimeError, ValueError) as e:
        trouble = str(e).partition("\n")[0]
    raise EnvironmentBrokenError(
        f"process {number} does not reach the meeting place {host}:{port}: {trouble}",
        numbers=_way_there(host),
        remedy="an address of process 0 that this host reaches, and a free port there",
    )


def _way_there(host: str) -> str:
    from evener.probing.network import route

    way = route(host)
    return f"the route there begins at {way['address']}" if "address" in way else str(way.get("error", ""))


def _cards(host: str) -> tuple[Any, ...]:
    from evener.probing import devices_here

    return tuple(d for d in devices_here(host) if d.type == "cuda")
