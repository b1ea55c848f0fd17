"""The run's key, and the user's variables that may be secret: on no command line, in no plan, log or lasting file."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import PRIVATE, REMOVE, SENT
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.transport import attempt, side_by_side
from cpuft.launch import settings as environment
from cpuft.launch.mpirun import KEY
from cpuft.plan import RunPlan, Setting

_SENT = PRIVATE + REMOVE + Path(__file__).with_name("sent.sh").read_text(encoding="utf-8")
"""Writes, refreshes and removes the files. A host removes those that nobody took or refreshed for ten minutes."""
_REFRESH_SECONDS = 200.0


def plan_secrets(
    cluster: Cluster, run_dir: str, environ: Mapping[str, str]
) -> tuple[tuple[tuple[Setting, ...], ...], tuple[str, ...], tuple[str, ...]]:
    """What becomes of what may be secret: each host's settings, words before mpirun, and notes.

    Ranks here inherit it. Where other hosts take part, mpirun hands its environment to whoever is first to call itself
    a host's proxy: it has none of it.
    """
    names = sorted(name for name, value in environ.items() if environment.may_be_secret(name, value))
    notes = [f"left out, because no shell can set it: {name}" for name in environment.unspeakable_names(environ)]
    if cluster.inherits:
        notes += [f"may be secret, so ranks only inherit them: {', '.join(names)}"] if names else []
        return ((),), (), tuple(notes)
    sent = ", ".join([KEY, *sorted(environment.secrets_for_ranks(environ))])
    kept = ", ".join(sorted(set(names) - environment.secrets_for_ranks(environ).keys()))
    way = "srun" if cluster.access.transport.bootstrap else "ssh"
    notes += [f"may be secret, so each rank gets it by a file of its own, over {way}: {sent}"]
    notes += [f"may be secret, so they stay here, and ranks do without: {kept}"] if kept else []
    settings = tuple(
        (Setting(SENT, cluster.sent_file(run_dir, index), f"each rank takes {sent} from its file, which goes then"),)
        for index in range(len(cluster.assignments))
    )
    without = () if cluster.away or not names else ("env", *(word for name in names for word in ("-u", name)))
    return settings, without, tuple(notes)


@contextmanager
def secrets_there(plan: RunPlan, cluster: Cluster, work: str, environ: Mapping[str, str]) -> Iterator[None]:
    """What the processes of a run on other hosts are to have and nobody may see, in a file for each, which takes it.

    Raises CpuftError: naming every host that could not take it, with what it said.
    """
    text = json.dumps({KEY: secrets.token_hex(32)} | environment.secrets_for_ranks(environ))
    prepares = any(setting.name == SENT for stage in plan.prepare for step in stage for setting in step.settings)
    if cluster.inherits:
        yield
        return

    def send(index: int) -> None:
        names = [*map(str, range(cluster.assignments[index].ranks)), *(["prepare"] if prepares and not index else [])]
        ask(index, "send", *(f"{cluster.sent_file(work, index)}-{name}" for name in names), stdin=text)

    def ask(index: int, what: str, *paths: str, stdin: str = "") -> str:
        host = cluster.assignments[index].host
        folder = os.path.dirname(cluster.sent_file(work, index))
        words = ("sh", "-c", _SENT, "sent", what, cluster.folder, folder, *paths)
        answer = cluster.access.transport.run(host, words, stdin)
        if answer.exit_code:
            said = " ".join(answer.errors.split())[-200:]
            raise CpuftError(f"host {host.name} could not take the run's variables ({said}): look at its disk")
        return answer.output

    def answering() -> list[int]:
        silent = cluster.access.transport.silent
        return [index for index, one in enumerate(cluster.assignments) if one.host.name not in silent]

    def refresh() -> None:
        """Until every process has taken its file, tell the hosts that the launcher is still there."""
        while not over.wait(_REFRESH_SECONDS):
            answers = attempt(lambda index: ask(index, "refresh"), answering())
            if not any(answers):
                return

    over = threading.Event()
    try:
        side_by_side(send, range(len(cluster.assignments)))
        threading.Thread(target=refresh, daemon=True).start()
        yield
    finally:
        over.set()
        with suppress(CpuftError):
            side_by_side(lambda index: ask(index, "remove"), answering())
