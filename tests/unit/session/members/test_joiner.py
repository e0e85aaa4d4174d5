import threading

import torch.distributed as dist

from evener.session.meeting import FINISHED, Meeting
from evener.session.members.joiner import _has_begun, free_name
from evener.session.members.roll import begin


def test_a_name_that_the_job_has_gets_a_number():
    assert free_name("lab/cpu", ["lab/gpu0"]) == "lab/cpu"
    assert free_name("lab/cpu", ["lab/cpu", "lab/cpu-2"]) == "lab/cpu-3"


def test_who_joins_lets_the_others_come_to_their_step_boundary():
    """Story: a joiner began the next generation once it was granted, and the step in flight was lost."""
    meeting, said = Meeting(dist.HashStore(), 0, 1), []
    joiner = threading.Thread(target=lambda: said.append(_has_begun(meeting, 2)))
    joiner.start()
    assert not meeting.has("generation/2/begun") and not said
    begin(meeting, 2, "lab/a")
    joiner.join(5)
    assert said == [True]
    meeting.put(FINISHED, True)
    assert not _has_begun(meeting, 3)
