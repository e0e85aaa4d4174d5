"""`evener train --join`: one device of this host takes part in a job that runs already."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from evener.core.addresses import host_and_port
from evener.core.fleet import Device, Fleet
from evener.core.tell import tell
from evener.errors import RefusedError, UsageError
from evener.session.address import address_here, choose_interface
from evener.session.journal import Outcome
from evener.session.meeting import FINISHED, GUESTS, LINGER_S, OVER, Meeting
from evener.session.members.door import knock, read_token
from evener.session.members.joiner import free_name, meeting_at, script_here
from evener.session.members.standby import Standby
from evener.session.members.wishes import ANOTHER_NAME, leave_on_sigterm
from evener.session.pulse import is_counting
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
    token = read_token(token_file)
    welcome = knock(host, port, token)
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
    os.environ["MASTER_ADDR"] = welcome.store_host
    choose_interface()
    meeting = meeting_at(welcome.store_host, welcome.store_port)
    meeting.put(GUESTS, True)
    standby = Standby(address_here(os.environ), token, token_file, welcome)
    device = _named(fleet.devices[0], meeting, [d.name for d in asked.fleet.devices], rehearse=rehearse)
    leave_on_sigterm(meeting, device.name)
    say: Callable[[str], None] = (lambda sentence: None) if quiet else tell
    say(f"the job at {address} knows {device.name}, which joins once its model is loaded and measured")
    later = Later(device=device, from_step=0, links=fleet.links)
    try:
        outcome = join(request, meeting, later, say, standby)
    finally:
        standby.close()
        if meeting.at == standby.address and (_has_ended(meeting) or meeting.first_failure()):
            meeting.put(OVER, True)
            time.sleep(LINGER_S)
    ended = "the job has ended" if _has_ended(meeting) else f"{device.name} has left the job, which goes on"
    say(f"{ended}; files: {request.run_dir}" if outcome else ended)
    return outcome


def _named(device: Device, meeting: Meeting, starting: Sequence[str], *, rehearse: bool) -> Device:
    """`device` under a name that nobody in the job has; RefusedError where a fleet file has named it."""
    if rehearse:
        if is_counting(meeting.store, device.name):
            raise RefusedError(f"there is a device {device.name} in the job", remedy=ANOTHER_NAME)
        return device
    taken = list(starting)
    while is_counting(meeting.store, name := free_name(device.name, taken)):
        taken.append(name)
    return replace(device, name=name)


def _has_ended(meeting: Meeting) -> bool:
    """Whether the run was brought to its end; its store goes with it."""
    try:
        return meeting.has(FINISHED)
    except RuntimeError:
        return True
