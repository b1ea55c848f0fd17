"""Print what this host has of a run: copies of its state, its newest checkpoint, and what its record says.

The launcher sends this file to each host on standard input and runs it there with RUN as its argument: the run's folder
below that of this user. It imports nothing of cpuft and prints a JSON object with the fields of `HostCopy`.
"""

import json
import os
import re
import sys
from typing import Any


def describe_run(work: str) -> "dict[str, Any]":
    """Return the fields of `HostCopy` for the run in the folder `work`, with the JSON texts of all copies of its state,
    also of what its detached command fetched, as `states`; only `states` if no start of the run has files here.
    """
    folder, checkpoints = os.path.dirname(work), f"{work}/checkpoints"
    root, run = os.path.split(folder)
    fetched = f"{root}/detached/{run}/run/{os.path.basename(work)}"
    states = [text for text in [_read(f"{place}/state.json") for place in (work, folder, fetched)] if text]
    if not os.path.isdir(folder):
        return {"states": states}
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
    whole = [name for name in names if re.match(r"[0-9]{1,15}\.[0-9]{1,9}$", name)]
    records = [_read(f"{place}/record.jsonl") for place in [work] + [f"{checkpoints}/{name}" for name in whole]]
    notes = [_read(f"{checkpoints}/{name}").strip() for name in names if re.match(r"rank-[0-9]+\.last$", name)]
    counts = [text.count('"kind": "step"') for text in records] + [int(text) for text in notes if text.isdecimal()]
    return {
        "exists": True,
        "is_active": _is_locked(f"{work}.lock"),
        "checkpoint_update": max([-1] + [int(name.split(".")[0]) for name in whole]),
        "steps": max(counts),
        "header": next((text.split("\n")[0] for text in records if text), ""),
        "has_data": os.path.isfile(f"{work}/data.npz"),
        "states": states,
    }


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _is_locked(path: str) -> bool:
    import fcntl  # the launcher imports this file on Windows, too

    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


if __name__ == "__main__":
    print(json.dumps(describe_run(f"/var/tmp/cpuft-{os.getuid()}/{sys.argv[1]}")))
