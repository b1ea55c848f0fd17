"""Bring the results of a run back from its hosts, and remove the run there.

`python -m cpuft.launch.results RUN_DIR COMMAND...` merges what COMMAND sends from the run's folder on a host
(`cpuft.transfer`) into RUN_DIR. A host is not trusted, so only plain files and folders are stored.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from cpuft import execute, transfer
from cpuft.argv import module_command
from cpuft.errors import IO_ERROR, CpuftError, Interrupted, format_command, join_last_lines, list_names
from cpuft.execute import Say
from cpuft.files import REMOVE, remove_command, write_text
from cpuft.hosts.cluster import STATE_FILE, Cluster, read_host_folder
from cpuft.launch.resume import CHECKPOINTS
from cpuft.launch.run_state import FINISHED, find_end, note_state, read_usable_state
from cpuft.plans import RunPlan, Stages, Step, format_plan
from cpuft.retry import retry

_SKIPPED = "only plain files and folders of a run are fetched; left out: "
_HERE = Path(__file__)
_REMOVE_ALL_BUT_CHECKPOINTS = REMOVE + _HERE.with_name("remove_all_but_checkpoints.sh").read_text(encoding="utf-8")
_NEWEST = re.compile(r"^([0-9]+)\.[0-9]+$", re.MULTILINE)
"""The checkpoint that `remove_all_but_checkpoints.sh` prints; a login shell may print something before."""
_FETCH_PAUSES = (2, 5, 10, 20, 40, *(60,) * 9)
"""Seconds before each new try to fetch a run that has finished: ten minutes together."""
_REMOVE_SECONDS = 15.0
_PARTIAL_REMOVE_SECONDS = 60.0
_PART = ".cpuft-fetch.partial"
"""Folder in the run folder with what has come while it is fetched."""
_SHOWN = 5


class HeadHostLostError(CpuftError):
    """The head host, or the connection to it, was lost."""

    unfetched_from = ""
    """Name of the head host if it has the only copy of the run's record; empty otherwise."""


class NotStoredError(CpuftError):
    """The results could not be stored here, or not be fetched although the run has finished. The hosts keep them."""

    exit_code = IO_ERROR


def describe_left(hosts: Iterable[str]) -> str:
    """Return the line "cpuft: HOSTS did not answer ...", with sorted names, about hosts that keep files of the run."""
    names = ", ".join(sorted(hosts))
    return (
        f"cpuft: {names} did not answer at the end of the run: the run's files stay there, and cpuft doctor reports "
        "them after a day"
    )


def may_be_fetched(error: CpuftError) -> bool:
    """Return whether another try may fetch the results: False for NotStoredError, True for any other error."""
    return not isinstance(error, NotStoredError)


def plan_results(
    cluster: Cluster, work: str, run_dir: str, former_hosts: Sequence[str] = (), is_resumed: bool = False
) -> Stages:
    """Plan to fetch the run folder, `work` on the head host, and then to remove the run from all hosts and
    `former_hosts`, with `is_resumed` also what a detached command left; () if the ranks work in this machine's folders.
    """
    if not cluster.works_remotely:
        return ()
    send = cluster.transfer_on(cluster.head, "send-run", work, CHECKPOINTS)
    program = module_command(sys.executable, "cpuft.launch.results")
    fetch = Step(f"fetch the run from {cluster.head}", (*program, run_dir, *send))
    folders = cluster.list_folders(run_dir) if is_resumed else (os.path.dirname(work),)
    remove = remove_command(cluster.folder, *folders)
    names = *cluster.hosts, *former_hosts
    return ((fetch,), tuple(Step(f"remove the run from {name}", remove, host=name) for name in names))


def plan_partial_cleanup(cluster: Cluster, work: str) -> Stages:
    """Plan to remove a run, but not its checkpoints, from all hosts. Each step prints the newest checkpoint's name."""
    secrets = os.path.dirname(cluster.sent_file(work, 0))
    command = ("sh", "-c", _REMOVE_ALL_BUT_CHECKPOINTS, "remove_all_but_checkpoints", cluster.folder, secrets, work)
    kinds = {name: "head" if name == cluster.head else "" for name in cluster.hosts}
    why = "remove the run from {}, except its checkpoints"
    return (tuple(Step(why.format(name), (*command, kind), host=name) for name, kind in kinds.items()),)


def write_plan(plan: RunPlan, run_dir: str) -> None:
    """Write the plan as the shell script `plan.sh` into the run folder, which replaces an earlier one."""
    write_text(Path(run_dir) / "plan.sh", format_plan(plan.full_plan, os.getcwd()))


def fetch_and_clean_up(plan: RunPlan, run_dir: str, cluster: Cluster, is_finished: bool, say: Say) -> bool:
    """Fetch the run from the head host, and remove it from the hosts that answer; return whether the run is finished.

    With `is_finished`, fetching is tried for ten minutes. Otherwise the state that comes may say that the run is
    finished. Of an unfinished run, the checkpoints stay on the hosts, or everything with `plan.keep_host_copies`.
    Raises HeadHostLostError: the head host could not send a run that is not known to be finished. Raises
    NotStoredError: results exist and could not be fetched or stored.
    """
    unreachable = cluster.access.transport.unreachable
    if is_finished:
        _fetch_finished_run(plan, run_dir, cluster, say)
    else:
        try:
            fetch_results(plan, run_dir, cluster, say)
        except NotStoredError:
            raise
        except CpuftError as error:
            if not plan.keep_host_copies:
                remove_all_but_checkpoints(plan, run_dir, {cluster.head, *unreachable}, say)
            lost = HeadHostLostError(f"{error}; the run's record is in {cluster.work_dir(run_dir)} on {cluster.head}")
            lost.unfetched_from = cluster.head
            raise lost from None
    if os.path.isdir(run_dir):
        write_plan(plan, run_dir)
    # The connection to the supervisor may break when the last rank has ended.
    end = find_end(run_dir, plan.owner)
    if not is_finished and not (end and end.phase == FINISHED):
        unreachable.update(end.unreachable if end else ())
        if not plan.keep_host_copies:
            remove_all_but_checkpoints(plan, run_dir, unreachable, say)
        return False
    note_state(run_dir, phase=FINISHED, exit_code=0, checkpoints={})  # a host whose disk was full could not
    shutil.rmtree(Path(run_dir, CHECKPOINTS), ignore_errors=True)
    removal = [step for stage in plan.results[1:] for step in stage]
    missing = {step.host for step in removal if step.host in unreachable}
    steps = [step for step in removal if step.host not in unreachable]
    answers = execute.run_stage(plan.full_plan, steps, _REMOVE_SECONDS)
    missing |= {step.host for step, answer in zip(steps, answers, strict=True) if answer.exit_code}
    if missing:
        say(describe_left(missing))
    return True


def _fetch_finished_run(plan: RunPlan, run_dir: str, cluster: Cluster, say: Say) -> None:
    """Fetch a run that has finished, and try again for a while: training it again would cost more."""
    name = ("--cluster", cluster.access.entry.name) if cluster.access.entry.name else ()
    command = format_command(("cpuft", "launch", "--resume", run_dir, *name))
    where = f"Its results are in {cluster.work_dir(run_dir)} on {cluster.head}, and {command} fetches them"

    def fetch_now() -> None:
        cluster.access.transport.unreachable.discard(cluster.head)  # it may answer again
        fetch_results(plan, run_dir, cluster, say)

    told = "cpuft: the run has finished, and its results are fetched again in"
    try:
        with execute.signals_raise():
            retry(fetch_now, _FETCH_PAUSES, lambda line: say(f"{told} {line}"), may_be_fetched)
    except NotStoredError:
        raise
    except CpuftError as error:
        raise NotStoredError(f"the run has finished, but {error}. {where}") from None
    except Interrupted as stopped:
        say(f"cpuft: stopped by {stopped}: the run has finished. {where}")
        sys.exit(stopped.exit_code)


def fetch_results(plan: RunPlan, run_dir: str, cluster: Cluster, say: Say) -> None:
    """Fetch the run's folder from the head host into `run_dir`. When this returns, all of it is on the disk here, and
    hosts' copies may be removed; they must stay if it raises. Raises NotStoredError: not all could be stored here;
    CpuftError: the head host could not send it.
    """
    if cluster.head in cluster.access.transport.unreachable:
        raise CpuftError(f"the head host {cluster.head} does not answer: check it with cpuft doctor")
    ((step,), *_) = plan.results
    (answer,) = execute.run_stage(plan.full_plan, [step], 0.0, lambda line: say(f"cpuft: {line}"))
    lines = [line.removeprefix("cpuft: error: ") for line in answer.text.splitlines() if line.strip()]
    if answer.exit_code == IO_ERROR:
        reason = lines[-1] if lines else "no reason was given"
        raise NotStoredError(
            f"the results of the run could not be stored in {run_dir} ({reason}). Host {cluster.head} keeps them: "
            f"make room here or remove what is in the way, then fetch them with cpuft launch --resume {run_dir}"
        )
    if answer.exit_code:
        output = join_last_lines("\n".join(lines))
        raise CpuftError(f"the results of the run could not be fetched from {cluster.head} ({output})")
    for line in lines:
        if line.startswith(_SKIPPED):
            say(f"cpuft: {line}")


def remove_all_but_checkpoints(
    plan: RunPlan, run_dir: str, without: Collection[str] = (), say: Say | None = None
) -> None:
    """Remove a run, but not its checkpoints, from its hosts except those in `without`. Note the checkpoints in the run
    state here, and tell the user with `say` how to continue. A host that does not answer raises nothing.
    """
    steps = [step for stage in plan.partial_cleanup for step in stage if step.host not in without]
    answers = execute.run_stage(plan.full_plan, steps, _PARTIAL_REMOVE_SECONDS)
    unreachable = [step.host for step, answer in zip(steps, answers) if answer.exit_code]
    if unreachable and say:
        say(describe_left(unreachable))
    found = {step.host: _NEWEST.findall(answer.output) for step, answer in zip(steps, answers)}
    updates = {host: int(names[-1]) for host, names in found.items() if names}
    if updates:
        note_state(run_dir, checkpoints=updates)
    if updates and say:
        say(
            f"cpuft: checkpoints up to update {max(updates.values())} are saved on {', '.join(updates)}: continue with "
            f"{plan.format_resume(run_dir)}"
        )


def fetch(run_dir: Path, command: Sequence[str], refuses_earlier: bool = False) -> list[str]:
    """Merge the files that `command` sends (`transfer.connect`) into `run_dir`, when all of them are on the disk here.

    After a broken connection, the next call goes on. Files with the same name are replaced, other files stay, and older
    logs are kept as `logs-N`. Where a file takes the place of a folder, or a folder that of a file or link, the older
    one becomes `NAME.old-N`. With `refuses_earlier`, nothing of an earlier start than what is here is stored.

    Returns names of the links, pipes and devices there, which are not sent, such as "logs/x (symbolic link)". Raises
    NotStoredError: what comes cannot be stored or is refused; CpuftError: the host could not send all of it.
    """
    run_dir = Path(os.path.realpath(run_dir))
    try:
        with transfer.open_part(f"{run_dir}/{_PART}") as part:
            with transfer.connect(command) as stream:
                files, others = transfer.receive(stream, part, syncs=True)
            if files:
                _store(Path(part), run_dir, refuses_earlier)
    except transfer.TransferError as error:
        code = f" (exit code {error.exit_code})" if error.exit_code else ""
        raise CpuftError(f"the host could not send the run: {error}{code}") from None
    except transfer.RefusedError as error:
        raise NotStoredError(str(error)) from None
    except OSError as error:
        raise NotStoredError(f"{error.filename2 or error.filename or run_dir}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # nothing has come
    return [f"{one.name} ({one.kind})" for one in others]


def _store(part: Path, run_dir: Path, refuses_earlier: bool) -> None:
    here, there = read_usable_state(run_dir), read_usable_state(part)
    is_own = there is not None and read_host_folder(str(part)) == read_host_folder(str(run_dir))
    is_earlier = is_own and here and there and there.owner < here.owner
    # No host may say which folders on other hosts are those of the run, nor hide a later start of it.
    if is_earlier or not is_own:
        if is_earlier and refuses_earlier:
            raise transfer.RefusedError(
                f"the run was started again in {run_dir} since, and what is there stays: give another folder with "
                "--run-dir"
            )
        (part / STATE_FILE).unlink(missing_ok=True)
    own = [run_dir / "logs"] if _is_folder(part / "logs") else []
    for logs in (*own, *sorted(part.glob("logs-*"))):
        if _is_folder(logs):
            logs.rename(_free_name(run_dir / "logs", "-"))
    _merge(part, run_dir)


def _merge(part: Path, target: Path) -> None:
    for source in sorted(part.iterdir()):
        place = target / source.name
        if os.path.lexists(place) and _is_folder(source) != _is_folder(place):
            place.rename(_free_name(place, ".old-"))
        if not _is_folder(source) or not place.exists():
            source.replace(place)
        else:
            _merge(source, place)
    transfer.sync(str(target))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _free_name(path: Path, mark: str) -> Path:
    number = 1
    while os.path.lexists(taken := path.with_name(f"{path.name}{mark}{number}")):
        number += 1
    return taken


def main() -> None:
    """Store a run as `fetch` does. Exits with 74 (EX_IOERR) if the files could not be stored here, 1 if not sent."""
    run_dir, *command = sys.argv[1:]
    try:
        with execute.signals_raise():
            skipped = fetch(Path(run_dir), command)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(IO_ERROR if isinstance(error, NotStoredError) else 1)
    except Interrupted as stopped:
        sys.exit(stopped.exit_code)
    if skipped:
        print(f"{_SKIPPED}{list_names(skipped, _SHOWN)}")


if __name__ == "__main__":
    main()
