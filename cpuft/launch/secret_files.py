"""Give ranks the environment variables that may be secret, in private files that they remove."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import PRIVATE, REMOVE
from cpuft.hosts.cluster import STATE_FILE, Cluster
from cpuft.hosts.transport import map_hosts, try_hosts
from cpuft.launch.mpirun import KEY
from cpuft.launch.run_state import LATER_START, WAIT_FOR_OTHER, LaterStartError, RunState, format_state
from cpuft.plans import RunPlan, Setting
from cpuft.secret_variables import SECRETS_PREFIX, may_be_secret, secrets_for_ranks

_SECRET_FILES = PRIVATE + REMOVE + Path(__file__).with_name("secret_files.sh").read_text(encoding="utf-8")
_REFRESH_SECONDS = 200.0
"""How often this machine tells the hosts that secret files are still needed. Otherwise they remove them in 10 min."""
_STORE_SECONDS = 20.0
"""How long a host may take to write these small files before it counts as frozen."""


def plan_secrets(
    cluster: Cluster, run_dir: str, environ: Mapping[str, str]
) -> tuple[tuple[tuple[Setting, ...], ...], tuple[str, ...], tuple[str, ...]]:
    """Plan how ranks get environment variables that may be secret, which `secrets_on_hosts` sends. Return for each host
    the settings that name its files with secrets, words before mpirun that hide the secrets from it, and notes.

    If all ranks run on this machine, they inherit the variables: no settings and words. Otherwise mpirun must not have
    them in its environment, which it hands to the first process that claims to be its proxy on a host.
    """
    names = sorted(name for name, value in environ.items() if may_be_secret(name, value))
    if cluster.inherits:
        notes = [f"may be secret, so ranks only inherit them: {', '.join(names)}"] if names else []
        return ((),), (), tuple(notes)
    sent = ", ".join([KEY, *sorted(secrets_for_ranks(environ))])
    local = ", ".join(sorted(set(names) - secrets_for_ranks(environ).keys()))
    channel = "srun" if cluster.access.transport.bootstrap else "ssh"
    notes = [f"may be secret, so each rank gets them in a file of its own, over {channel}: {sent}"]
    notes += [f"may be secret, so they stay on this machine, and ranks do not get them: {local}"] if local else []
    files = [cluster.sent_file(run_dir, index) for index in range(len(cluster.assignments))]
    reason = f"each rank reads {sent} from its file and removes the file"
    settings = tuple((Setting(SECRETS_PREFIX, file, reason),) for file in files)
    is_far = cluster.works_remotely and bool(cluster.command_prefixes.get(cluster.head))
    without = () if is_far or not names else ("env", *(word for name in names for word in ("-u", name)))
    return settings, without, tuple(notes)


@contextmanager
def secrets_on_hosts(
    plan: RunPlan, cluster: Cluster, work: str, environ: Mapping[str, str], state: RunState
) -> Iterator[None]:
    """Provide a new key of the run and the user's secret variables on its hosts inside the `with` block: one private
    file for each process, unless all ranks inherit the variables.

    Each process removes its file when it reads it. The others are removed at the end, and by the hosts themselves if
    this machine is silent for ten minutes. Each host with a disk of its own also gets the first state of this start. A
    host that has the state of a later start, or of another launcher's start of the same number, refuses both:
    LaterStartError. Raises CpuftError: a host cannot store its file.
    """
    if cluster.inherits:
        yield
        return
    text = format_state(state) + json.dumps({KEY: secrets.token_hex(32)} | secrets_for_ranks(environ))
    prepares = any(one.name == SECRETS_PREFIX for stage in plan.prepare for step in stage for one in step.settings)
    begun = f"{os.path.dirname(work)}/{STATE_FILE}" if cluster.works_remotely else ""

    def send(index: int) -> None:
        names = [*map(str, range(cluster.assignments[index].ranks)), *(["prepare"] if prepares and not index else [])]
        try:
            run(index, "send", begun, *(f"{cluster.sent_file(work, index)}-{name}" for name in names), stdin=text)
        except CpuftError as error:
            if error.is_transient:
                failed.add(cluster.assignments[index].host.name)
            raise

    def run(index: int, action: str, *paths: str, stdin: str = "") -> str:
        host = cluster.assignments[index].host
        folder = os.path.dirname(cluster.sent_file(work, index))
        command = ("sh", "-c", _SECRET_FILES, "secret_files", action, cluster.folder, folder, *paths)
        transport = cluster.access.transport
        # srun may wait long for a busy controller, and refreshing for an uplink that is busy with the inputs.
        seconds = _STORE_SECONDS if action == "send" and not transport.bootstrap else 60.0
        answer = transport.run(host, command, stdin, seconds)
        reason = " ".join(answer.errors.split())[-200:]
        if answer.exit_code == LATER_START:
            refusing.add(index)
            raise CpuftError(f"host {host.name} works for another start of the run ({reason}): {WAIT_FOR_OTHER}")
        if answer.exit_code:
            raise CpuftError(f"host {host.name} could not store the run's secret variables ({reason}): check its disk")
        return answer.output

    def list_reachable() -> list[int]:
        left_out = cluster.access.transport.unreachable | failed
        return [index for index, name in enumerate(cluster.hosts) if name not in left_out]

    def refresh() -> None:
        """Tell the hosts that the launcher is still there, until every process has read its file."""
        while not is_over.wait(_REFRESH_SECONDS):
            answers = try_hosts(lambda index: run(index, "refresh"), list_reachable())
            if answers and not any(answers):
                return

    is_over, refusing, failed = threading.Event(), set[int](), set[str]()
    try:
        map_hosts(send, range(len(cluster.assignments)))
        threading.Thread(target=refresh, daemon=True).start()
        yield
    except CpuftError as error:
        if refusing:
            raise LaterStartError(str(error)) from None
        raise
    finally:
        is_over.set()
        with suppress(CpuftError):
            map_hosts(lambda index: run(index, "remove", begun, stdin=format_state(state)), list_reachable())
