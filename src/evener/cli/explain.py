"""`evener explain`: where a run's time goes, device by device."""

import json
import sys

from evener.cli.options import AsJson, RunFolder
from evener.core.words import printable
from evener.report.explain import explanation
from evener.report.page.files import read_run


def explain(run: RunFolder, as_json: AsJson = False) -> None:
    """Say where a run's time goes: use and communication of each device, and what cost most.

    Reads the step that evener train --profile-step N profiled: kernels or operators, messages and waits. A
    run without one is explained by its trace, one that was stopped by the records of its steps: actions as
    the run timed them, not what is inside of them.
    """
    told = explanation(run, read_run(run))
    stream = sys.stderr if as_json else sys.stdout
    for line in told.text().splitlines():
        print(printable(line), file=stream)
    if as_json:
        print(json.dumps(told.as_json()), flush=True)
