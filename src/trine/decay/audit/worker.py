"""The process in which one target runs: `python -m trine.decay.audit.worker JOB EVENTS`.

JOB is a JSON object; every step is appended to the file EVENTS as a line of JSON, so that whoever started this process
knows what it was doing when it stopped.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MEMORY = ("state_in", "state_out", "has_gradients", "has_state")


def main(arguments: list[str]) -> int:
    """Examine the target of one job."""
    job, path = json.loads(arguments[0]), Path(arguments[1])
    sys.path.insert(0, os.getcwd())
    with path.open("a", encoding="utf-8") as stream:

        def say(event: str, **facts: Any) -> None:
            stream.write(json.dumps({"event": event, **facts}) + "\n")
            stream.flush()

        say("started")
        _examine(job, say)
    return 0


def _examine(job: dict[str, Any], say: Any) -> None:
    import torch

    from trine.decay.audit.examine import Verdict, examine, select
    from trine.decay.audit.inputs import Fault
    from trine.decay.audit.lab import Lab
    from trine.decay.audit.target import TargetError, load

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    try:
        target = load(job["target"])
    except TargetError as error:
        say("refused", text=str(error))
        return
    device = job["device"]
    if device.startswith("cuda") and not torch.cuda.is_available():
        say("refused", text=f"device: found no card for {device!r}")
        return
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    say("loaded", name=target.name, version=target.version, form=target.form, machine=machine, versions=versions)
    lab = Lab(target, device, job["quick"], beat=lambda case: say("case", case=str(case)))
    memory = job.get("memory") or {}
    lab.patience = job["patience"]
    lab.fault = Fault(**memory.get("fault", {}))
    for name in MEMORY:
        if name in memory:
            setattr(lab, name, memory[name])
    done = [Verdict(**v) for v in job["done"]]
    probes = select(job["probes"])
    for verdict in examine(
        lab, probes, done, job["shrink"], job["target"], begin=lambda probe: say("probe", probe=probe.name)
    ):
        known = {"fault": vars(lab.fault), **{name: getattr(lab, name) for name in MEMORY}}
        say("verdict", verdict=verdict.as_dict(), memory=known)
    say("lost" if lab.lost else "done")
    if lab.lost:
        # What is left of the device's state may raise, or hang, while the interpreter is taken apart.
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
