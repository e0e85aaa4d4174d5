"""Runs a request: one process per device on this host, watched, and all ended when one fails.

The parent hosts the store in which the processes meet; children come from a forkserver that has torch loaded.
"""

import multiprocessing as mp
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import psutil
import torch.distributed as dist

from evener.core.addresses import host_and_port
from evener.core.claim import claimed
from evener.core.files import decode, encode
from evener.core.tell import tell
from evener.core.words import some
from evener.errors import EnvironmentBrokenError, EvenerError, PeerLostError, RefusedError
from evener.rehearsal.namespaces import enter
from evener.session.address import choose_interface
from evener.session.checkpoints.checkpointing import ANSWERED, ANSWERS, ASKED, MAY_ASK
from evener.session.journal import Outcome
from evener.session.launching.grounds import Grounds, grounds_of
from evener.session.launching.lookout import Lookout
from evener.session.launching.server import ended_server, start_server
from evener.session.meeting import (
    BEGUN,
    FINISHED,
    GUESTS,
    HOW_TO_JOIN,
    LINGER_S,
    OUTCOME,
    OVER,
    Meeting,
    is_launched,
    open_meeting,
    read_failure,
    serve_store,
)
from evener.session.members.door import Door, Welcome, new_token
from evener.session.members.joiner import meeting_at
from evener.session.members.wishes import leave_on_sigterm
from evener.session.pulse import GONE, pulse_key
from evener.session.recipe import Recipe
from evener.session.request import TOKEN_FILE, Request, at_start, folder_at, may_change_devices
from evener.session.worker import guarded_work, join

T = TypeVar("T")
LOOK_S = 5.0
ASK_S = 0.05
LEFT_S = 3.0  # at most, for processes that were killed to be gone
UNSEEN = 255  # multiprocessing's word for a process of whose end its fork server said nothing
DYING_S = 0.5  # a process that is killed lets go of its pipes a moment before it is seen to have ended
MOST_NAMED = 16
GRACE_S = 3.0  # for the others to tell why, after one process has ended in failure
_ENDED_BY = {
    -signal.SIGKILL: "SIGKILL often means the host ran out of memory: a smaller --micro-batch; ",
    -signal.SIGTERM: "SIGTERM comes from a person or from what manages the host; ",
}


def run(request: Request) -> Outcome | None:
    """The outcome of `request`; None on the processes of a torchrun job that do not lead."""
    if is_launched():
        return guarded_work(request, open_meeting())
    return launch(request)


def run_here(request: Request, recipe: Recipe) -> Outcome | None:
    """Run with a recipe object, in this process alone or as one of torchrun's."""
    return guarded_work(request, open_meeting(), recipe)


def launch(request: Request) -> Outcome:
    """Train as `request` says in one new process per device of its fleet; see `launch_for`."""
    return launch_for(request, Outcome)


def launch_for(request: Request, kind: type[T]) -> T:
    """Run `request` in one new process per device of its fleet; the outcome, a `kind`, of the leading one.

    Raises the first failure of any process, naming the device; no process is left behind.
    """
    folder = Path(folder_at(request.run_dir))
    with claimed(folder), grounds_of(request) as grounds:
        return _launch(request, kind, grounds)


def _launch(request: Request, kind: type[T], grounds: Grounds) -> T:
    request = at_start(request)
    host, open_port = grounds.host, host_and_port(request.open_at)[1]
    with grounds.meeting():
        store, port = serve_store(host)
    start_server()
    context = mp.get_context("forkserver")
    lifeline, parent_end = context.Pipe(duplex=False)
    processes, seen = [], []
    if request.checkpoint:
        store.set(MAY_ASK, "true")
    elastic = may_change_devices(request)
    door = _open_door(request, host, open_port, store) if elastic and grounds.takes_others else None
    try:
        for number, device in enumerate([*request.fleet.devices, *(x.device for x in request.later)]):
            environment = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(len(request.fleet.devices)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours; children join it as clients
                **grounds.variables(),
            }
            process = context.Process(
                target=_child,
                args=(encode(request), environment, lifeline, grounds.place(device)),
                name=device.name,
            )
            process.start()
            processes.append(process)
            with suppress(psutil.NoSuchProcess):
                seen.append(psutil.Process(process.pid))
        if not request.quiet:
            tell(f"process ids: {some([f'{p.name} {p.pid}' for p in processes], MOST_NAMED)}")
        lookout = Lookout(Path(request.run_dir) / "metrics.jsonl")
        again = _again(request)
        try:
            _watch(processes, store, lookout, elastic=elastic and len(processes) > 1, again=again)
        except (KeyboardInterrupt, SystemExit):
            _save_first(store, processes, lookout)
            raise
        store.wait([OUTCOME], timedelta(seconds=GRACE_S))
        return decode(store.get(OUTCOME), kind, "the run's outcome")
    finally:
        if door:
            door.close()
        store.set(OVER, "true")  # this end is meant: guests do not go on without the store
        parent_end.close()  # the children hear that and end
        _end(processes)
        _end_left(seen)
        if store.check([GUESTS]):
            time.sleep(LINGER_S)


def _child(request_json: bytes, environment: dict[str, str], lifeline: Connection, place: str) -> None:
    """The main function of a device's process, which lives in the namespace `place` if there is one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
    if place:
        enter(place)
    os.environ.update(environment)
    choose_interface()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    mp.set_start_method(None, force=True)  # data loader workers start as they do in any script
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    from evener.session.prediction.process import predict_to_file

    request = decode(request_json, Request, "the request")
    number, starting = int(environment["RANK"]), len(request.fleet.devices)
    meeting: Meeting | None = None
    try:
        if number >= starting:
            join(
                request,
                meeting_at(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
                request.later[number - starting],
            )
            return
        meeting = open_meeting()
        if may_change_devices(request):
            leave_on_sigterm(meeting, request.fleet.devices[number].name)
        if request.predict:
            predict_to_file(request, meeting)
        else:
            guarded_work(request, meeting)
    except EvenerError as e:
        if isinstance(e, PeerLostError | RefusedError) and (meeting is None or meeting.goes_on()):
            # The others go on, so nobody else tells.
            tell(f"{mp.current_process().name} ends: {e.what}")
        os._exit(e.exit_code)  # told to the store; loader workers and Gloo threads need no goodbye


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(2)


def _watch(processes: list, store: dist.Store, lookout: Lookout, *, elastic: bool, again: str) -> None:
    """Return when all ended well; raise as soon as the first failure is known; say when nothing moves.

    With `elastic`, a process that was ended from outside is told to the others, who go on without it once
    they have begun.
    """
    running = {p.sentinel: p for p in processes}
    killed: EvenerError | None = None  # why the others had to end, where they cannot go on
    while running:
        for sentinel in wait(list(running), timeout=LOOK_S):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                _check_server(process.exitcode, again)
                if elastic and not store.check([FINISHED]):
                    store.set(pulse_key(process.name), GONE)
                lost = _why(process, store, patient=not elastic, again=again)
                killed = lost if process.exitcode < 0 else killed
                others = store.check([BEGUN]) and (running or store.check([OUTCOME]))
                if not (elastic and isinstance(lost, PeerLostError) and others):
                    raise (killed or lost) if isinstance(lost, PeerLostError) else lost
                tell(f"{lost.what}; the others go on")
        for sentence in lookout.look(list(running.values())):
            tell(sentence)


def _check_server(code: int, again: str) -> None:
    """EnvironmentBrokenError where the fork server is gone: it alone sees how the devices' processes end.

    Without it all of them look as if they had ended with `code` 255, while they go on.
    """
    end = time.monotonic() + (DYING_S if code == UNSEEN else 0.0)
    while (number := ended_server()) is None and time.monotonic() < end:
        time.sleep(ASK_S)
    if number is not None and code == UNSEEN:
        raise EnvironmentBrokenError(
            "the server that the devices' processes come from was ended from outside; no device was lost",
            numbers=f"process id {number}",
            remedy=again,
        )


def _save_first(store: dist.Store, processes: list, lookout: Lookout) -> None:
    """Return when one more checkpoint is saved, where the steps look for that, or when nobody is left.

    Says when nothing moves, as before.
    """
    if not store.check([ANSWERS]):
        return
    tell("saves a checkpoint, then ends; once more (Ctrl-C or SIGTERM) ends it at once")
    store.set(ASKED, "true")
    while not store.check([ANSWERED]) and (living := [p for p in processes if p.is_alive()]):
        for sentence in lookout.look(living):
            tell(sentence)
        time.sleep(ASK_S)


def _again(request: Request) -> str:
    """How to go on after this job has ended."""
    if request.checkpoint:
        return (
            f"--run-dir {request.run_dir} --resume latest goes on from the newest checkpoint, or begins "
            "again where there is none yet"
        )
    return "start again; with --checkpoint-every, --resume latest would go on from the newest checkpoint"


def _why(process, store: dist.Store, *, patient: bool, again: str) -> EvenerError:
    """The failure told first; a process that said nothing was ended from outside. `again` is how to go on."""
    code = process.exitcode
    killed = code < 0
    end = time.monotonic() + (0.2 if killed or not patient else GRACE_S)
    while time.monotonic() < end:
        failure = read_failure(store)
        if failure:
            return failure.as_error()
        time.sleep(0.02)
    how = f"was ended by {signal.Signals(-code).name}" if killed else f"ended with exit code {code}"
    return PeerLostError(
        f"the process of {process.name} {how} and said nothing",
        numbers=f"process id {process.pid}",
        remedy=f"{_ENDED_BY.get(code, '')}{again}",
    )


def _open_door(request: Request, host: str, port: int, store: dist.TCPStore) -> Door:
    """Where devices join this job; the token is in the run's folder.

    How is told by the leading process, which has the recipe: some of them let nobody join.
    """
    folder = Path(request.run_dir)
    welcome = Welcome(store_host=host, store_port=store.port, request=request)
    door = Door(new_token(folder), welcome, tell, host=host, port=port)
    if not request.quiet:
        more = " --rehearse FLEET.json --devices NAME" if request.rehearse else ""
        command = (
            f"evener train {request.script} --join {host}:{door.port} --token-file {folder / TOKEN_FILE}"
        )
        store.set(HOW_TO_JOIN, encode(f"others may join: {command}{more}").decode())
    return door


def _end(processes: list) -> None:
    """End every process that still runs: SIGTERM would only ask it to leave the job in good order."""
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


def _end_left(seen: list[psutil.Process]) -> None:
    """End those of a job's processes that are still there, as they are once their fork server is gone."""
    for process in seen:
        with suppress(psutil.NoSuchProcess):  # also where its number is another process's by now
            process.kill()
    psutil.wait_procs(seen, timeout=LEFT_S)
