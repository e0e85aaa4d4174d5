"""`evener train --join`: one device of this host takes part in a job that runs already."""

import os
from pathlib import Path

from msgspec.structs import replace

from evener.core.addresses import host_and_port
from evener.core.fleet import Fleet
from evener.errors import UsageError
from evener.session.address import choose_interface
from evener.session.journal import Outcome
from evener.session.members.door import knock, read_token
from evener.session.members.joiner import free_name, meeting_at, script_here
from evener.session.members.wishes import leave_on_sigterm
from evener.session.request import Later, folder_at
from evener.session.worker import join


def visit(
    address: str,
    token_file: Path,
    fleet: Fleet,
    *,
    script: Path | None = None,
    run_dir: Path | None = None,
    rehearse: bool = False,
    quiet: bool = False,
) -> Outcome | None:
    """Join the job at `address` with the one device of `fleet`; the outcome if it comes to lead the run.

    RefusedError when the job does not want it, UsageError for several devices.
    """
    if len(fleet.devices) != 1:
        raise UsageError(
            f"{len(fleet.devices)} devices were named, and each joins by itself",
            numbers=", ".join(d.name for d in fleet.devices),
            remedy="--devices with one of them, and the same command again for the next",
        )
    host, port = host_and_port(address)
    welcome = knock(host, port, read_token(token_file))
    asked = welcome.request
    if asked.rehearse != rehearse:
        wanted = "a rehearsal" if asked.rehearse else "no rehearsal"
        raise UsageError(f"the job is {wanted}", remedy="--rehearse with the job's fleet file and --devices")
    request = replace(
        asked,
        script=script_here(asked.script, script),
        run_dir=folder_at(run_dir or Path(asked.run_dir)),
        quiet=quiet,
    )
    taken = [d.name for d in asked.fleet.devices]
    (device,) = fleet.devices
    device = device if rehearse else replace(device, name=free_name(device.name, taken))
    os.environ["MASTER_ADDR"] = welcome.store_host
    choose_interface()
    meeting = meeting_at(welcome.store_host, welcome.store_port)
    leave_on_sigterm(meeting, device.name)
    return join(request, meeting, Later(device=device, from_step=0, links=fleet.links))
