"""Bring the results of a run back from its hosts, and remove the run there.

`python -m cpuft.launch.results RUN_DIR COMMAND...` runs COMMAND, which writes a tar archive of the run's folder to its
standard output, and merges the archive into RUN_DIR. The archive comes from another machine, so nothing in it is
trusted: only plain files and folders are stored, and they are unpacked in a new folder, which no earlier fetch could
have prepared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import IO_ERROR, CpuftError, Interrupted
from cpuft.files import REMOVE, remove_command, write_text
from cpuft.hosts.cluster import STATE_FILE, Cluster, read_host_folder
from cpuft.launch.resume import CHECKPOINTS
from cpuft.launch.state import FINISHED, find_end, note_state
from cpuft.plan import Plan, RunPlan, Stages, Step, format_plan

Say = Callable[[str], None]
FILES_LEFT = "the run's files stay there, and cpuft doctor reports them after a day"
"""End of a line for the user that names hosts that do not answer."""
_SKIPPED = "only plain files and folders of a run are fetched; left out: "
_HERE = Path(__file__)
_SEND_RUN = _HERE.with_name("send_run.sh").read_text(encoding="utf-8")
_REMOVE_ALL_BUT_CHECKPOINTS = REMOVE + _HERE.with_name("remove_all_but_checkpoints.sh").read_text(encoding="utf-8")
_STALLED_SECONDS = 120.0
"""A sender is given up if no byte has come from it for so long. The whole may take as long as its link needs."""
_FETCH_PAUSES = (2, 5, 10, 20, 40, *(60,) * 9)
"""Seconds before each new try to fetch a run that has finished: ten minutes together."""
_REMOVE_SECONDS = 15.0
_PARTIAL_REMOVE_SECONDS = 60.0
_LAST_LINES = 6
"""Lines of output of a failed step that its error shows."""
_BLOCK = 1 << 20
_END = bytes(1024)
"""Two blocks of zeros end every complete tar archive."""
_PREFIX = ".cpuft-fetch-"
_KINDS = {
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.FIFOTYPE: "pipe",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
}
_SHOWN = 5
"""Names of entries that were not stored, in the line that says so."""
_SENDER_END_SECONDS = 10.0
"""How long a sender whose archive broke off may take to give its exit code."""


class HeadHostLostError(CpuftError):
    """The head host, or the connection to it, was lost."""

    unfetched_from = ""
    """Name of the head host, if it has the only copy of the run's record; empty otherwise."""


class NotStoredError(CpuftError):
    """The results of a run could not be stored here, or not be fetched although it has finished. The hosts keep them.

    No restart can mend this. The exit code is 74.
    """

    exit_code = IO_ERROR


def plan_results(cluster: Cluster, work: str, run_dir: str, former_hosts: Sequence[str] = ()) -> Stages:
    """Plan to fetch the run folder from the head host, and then to remove the run from all hosts.

    The result is () if the ranks work in this machine's own folders. Otherwise it has two stages: one step that
    fetches, and a step for each host that removes.

    Parameters
    ----------
    work: the run folder on the head host.
    run_dir: the run folder on this machine, which is merged with what comes.
    former_hosts: names of further hosts that have files of the run from earlier attempts.
    """
    if not cluster.works_remotely:
        return ()
    send = cluster.command_on(cluster.head, ("sh", "-c", _SEND_RUN, "send_run", work))
    program = module_command(sys.executable, "cpuft.launch.results")
    fetch = Step(f"fetch the run from {cluster.head}", (*program, run_dir, *send))
    remove = remove_command(cluster.folder, os.path.dirname(work))
    names = [*(assignment.host.name for assignment in cluster.assignments), *former_hosts]
    return ((fetch,), tuple(Step(f"remove the run from {name}", remove, host=name) for name in names))


def plan_partial_cleanup(cluster: Cluster, work: str) -> Stages:
    """Plan to remove the run from all hosts, except its checkpoints: one stage with a step for each host.

    Files that may hold secrets are removed first. Each step prints the name of the newest checkpoint that it leaves.

    Parameters
    ----------
    work: the run folder on the hosts.
    """
    secrets = os.path.dirname(cluster.sent_file(work, 0))
    command = ("sh", "-c", _REMOVE_ALL_BUT_CHECKPOINTS, "remove_all_but_checkpoints", cluster.folder, secrets, work)
    names = [assignment.host.name for assignment in cluster.assignments]
    return (
        tuple(
            Step(
                f"remove the run from {name}, except its checkpoints",
                (*command, "head" if name == cluster.head else ""),
                host=name,
            )
            for name in names
        ),
    )


def write_plan(plan: RunPlan, run_dir: str) -> None:
    """Write the plan as the shell script `plan.sh` into the run folder, which replaces an earlier one."""
    write_text(Path(run_dir) / "plan.sh", format_plan(plan.full_plan, os.getcwd()))


def fetch_and_clean_up(
    plan: RunPlan, run_dir: str, cluster: Cluster, environ: Mapping[str, str], is_finished: bool, say: Say
) -> bool:
    """Fetch the run from the head host, write `plan.sh` in the run folder, and remove the run from the hosts.

    Copies of checkpoints in the run folder are removed from it if the run is finished. Nothing is removed from hosts
    that do not answer. Of a run that is not finished, the checkpoints stay on the hosts, and everything stays there if
    `plan.keep_host_copies` is set. Returns whether the run is finished, which its state says if the caller does not
    know.

    Parameters
    ----------
    plan: must have a results part, from `plan_results`.
    run_dir: the run folder on this machine.
    is_finished: whether the run is known to have succeeded. Fetching it is tried again for ten minutes.
    say: called with a line for the user, for example about hosts that do not answer and so keep their files.

    Raises HeadHostLostError: the head host could not send the run, which is not known to be finished, and its files
        stay there.
    Raises NotStoredError: this machine could not store the run, or a finished run could not be fetched; nothing is
        removed from the hosts.
    """
    _, *cleanup = plan.results
    unreachable = cluster.access.transport.unresponsive
    if is_finished:
        _fetch_finished_run(plan, run_dir, cluster, environ, say)
    else:
        try:
            fetch_results(plan, run_dir, cluster, environ, say)
        except NotStoredError:
            raise
        except CpuftError as error:
            if not plan.keep_host_copies:
                remove_all_but_checkpoints(plan, run_dir, environ, {cluster.head, *unreachable}, say)
            lost = HeadHostLostError(f"{error}; the run's record is in {cluster.work_dir(run_dir)} on {cluster.head}")
            lost.unfetched_from = cluster.head
            raise lost from None
    if os.path.isdir(run_dir):
        write_plan(plan, run_dir)
    # The connection to the supervisor may break when the last rank has ended.
    end = find_end(run_dir, plan.owner)
    if not is_finished and not (end and end.phase == FINISHED):
        unreachable.update(end.silent if end else ())
        if not plan.keep_host_copies:
            remove_all_but_checkpoints(plan, run_dir, environ, unreachable, say)
        return False
    note_state(run_dir, phase=FINISHED, exit_code=0, checkpoints={})  # a host whose disk was full could not
    shutil.rmtree(Path(run_dir, CHECKPOINTS), ignore_errors=True)
    commands, missing = Plan(command_prefixes=plan.command_prefixes), set[str]()
    for stage in cleanup:
        missing |= {step.host for step in stage if step.host in unreachable}
        steps = [step for step in stage if step.host not in unreachable]
        # A host that was lost meanwhile must not hide how the run ended.
        try:
            answers = execute.run_stage([commands.as_local(step) for step in steps], environ, _REMOVE_SECONDS)
            missing |= {step.host for step, answer in zip(steps, answers, strict=True) if answer.exit_code}
        except TimeoutError:
            missing |= cluster.access.transport.find_unresponsive([step.host for step in steps])
    if missing:
        say(f"cpuft: {', '.join(sorted(missing))} did not answer at the end of the run: {FILES_LEFT}")
    return True


def _fetch_finished_run(plan: RunPlan, run_dir: str, cluster: Cluster, environ: Mapping[str, str], say: Say) -> None:
    """Fetch a run that has finished, and try again for a while: training it again would cost more.

    Raises NotStoredError: it could not be fetched; the message says where it is and how it is fetched later.
    """
    name = ("--cluster", cluster.access.cluster) if cluster.access.cluster else ()
    command = shlex.join(("cpuft", "launch", "--resume", run_dir, *name))
    where = f"Its results are in {cluster.work_dir(run_dir)} on {cluster.head}, and {command} fetches them"
    try:
        for pause in (*_FETCH_PAUSES, 0):
            try:
                return fetch_results(plan, run_dir, cluster, environ, say)
            except NotStoredError:
                raise
            except CpuftError as error:
                if not pause:
                    raise NotStoredError(f"the run has finished, but {error}. {where}") from None
                say(f"cpuft: the run has finished, and its results are fetched again in {pause} s: {error}")
            with execute.signals_raise(lambda signal_number: False):
                time.sleep(pause)
            cluster.access.transport.find_unresponsive([cluster.head])
    except Interrupted as stopped:
        say(f"cpuft: stopped by {stopped}: the run has finished. {where}")
        sys.exit(stopped.exit_code)


def fetch_results(plan: RunPlan, run_dir: str, cluster: Cluster, environ: Mapping[str, str], say: Say) -> None:
    """Fetch the run's folder from the head host into `run_dir`, however long it takes while bytes arrive.

    When this function returns, the whole folder is on this machine's disk, so that the copies on hosts may be removed.
    They must stay if it raises. `say` gets a line every 30 s, and one that names links and devices, which are not
    fetched.

    Raises NotStoredError: the folder came, but this machine could not store it.
    Raises CpuftError: the head host does not answer, could not send the folder, or has sent no byte for two minutes.
    """
    if cluster.head in cluster.access.transport.unresponsive:
        raise CpuftError(f"the head host {cluster.head} does not answer: check it with cpuft doctor")
    ((step,), *_) = plan.results

    def say_waiting(_: list[int], passed: float) -> None:
        say(f"cpuft: {step.why}: not finished after {passed:.0f} s")

    local = Plan(command_prefixes=plan.command_prefixes).as_local(step)
    (answer,) = execute.run_stage([local], environ, 0.0, say_waiting)
    lines = [line.removeprefix("cpuft: error: ") for line in answer.text.splitlines() if line.strip()]
    if answer.exit_code == IO_ERROR:
        reason = lines[-1] if lines else "no reason was given"
        raise NotStoredError(
            f"the results of the run could not be stored in {run_dir} ({reason}). Host {cluster.head} keeps them: "
            f"make room here or remove what is in the way, then fetch them with cpuft launch --resume {run_dir}"
        )
    if answer.exit_code:
        output = " | ".join(lines[-_LAST_LINES:]) or "without a message"
        raise CpuftError(f"the results of the run could not be fetched from {cluster.head} ({output})")
    for line in lines:
        if line.startswith(_SKIPPED):
            say(f"cpuft: {line}")


def remove_all_but_checkpoints(
    plan: RunPlan, run_dir: str, environ: Mapping[str, str], without: Collection[str] = (), say: Say | None = None
) -> None:
    """Remove a run from its hosts, except its checkpoints, with the steps of `plan.partial_cleanup`.

    Waits up to 60 s for the hosts. If some hosts have checkpoints, they are noted in the state in the local run folder,
    and `say` is told how to continue the run, and which hosts did not answer.

    Parameters
    ----------
    run_dir: the run folder on this machine.
    without: names of hosts on which nothing is removed.
    say: called with a line for the user; None: the user is told nothing.
    """
    steps = [step for stage in plan.partial_cleanup for step in stage if step.host not in without]
    commands = Plan(command_prefixes=plan.command_prefixes)
    try:
        answers = execute.run_stage([commands.as_local(step) for step in steps], environ, _PARTIAL_REMOVE_SECONDS)
    except TimeoutError:
        answers = [execute.Answer(execute.SSH_FAILED, "")] * len(steps)
    silent = [step.host for step, answer in zip(steps, answers) if answer.exit_code == execute.SSH_FAILED]
    if silent and say:
        say(f"cpuft: {', '.join(silent)} did not answer at the end of the run: {FILES_LEFT}")
    found = {step.host: _parse_newest_checkpoint(answer.output) for step, answer in zip(steps, answers)}
    updates = {host: update for host, update in found.items() if update >= 0}
    if updates:
        note_state(run_dir, checkpoints=updates)
    if updates and say:
        say(
            f"cpuft: checkpoints up to update {max(updates.values())} are saved on {', '.join(updates)}: continue with "
            f"{shlex.join(('cpuft', 'launch', '--resume', run_dir))}"
        )


def _parse_newest_checkpoint(output: str) -> int:
    """Return the update of the checkpoint that `remove_all_but_checkpoints.sh` printed last; -1 for none."""
    names = re.findall(r"^([0-9]+)\.[0-9]+$", output, re.MULTILINE)
    return int(names[-1]) if names else -1


class _Source:
    """The sender's output, as a file for `tarfile` that remembers the last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.end = b""
        self.is_over = False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, at the end none. Raises CpuftError: none have come for two minutes."""
        if not select.select([self._stream], [], [], _STALLED_SECONDS)[0]:
            raise CpuftError(f"the host has sent nothing for {_STALLED_SECONDS:.0f} s")
        block = os.read(self._stream.fileno(), size)
        self.is_over = not block
        self.end = (self.end + block)[-len(_END) :]
        return block

    def drain(self) -> None:
        """Read the rest, so that the sender can end."""
        while self.read(_BLOCK):
            pass


def fetch(run_dir: Path, command: Sequence[str]) -> list[str]:
    """Run `command` and merge the archive that it writes into `run_dir`. An empty archive changes nothing.

    All files are on this machine's disk when this function returns. Files in `run_dir` are replaced by those of the
    archive with the same name, other files stay, and older logs are kept as `logs-N`. Where a file takes a folder's
    place, or a folder a file's or a link's, the older one is renamed to `NAME.old-N`.

    Returns
    -------
    Names of the archive's links, pipes and devices, which are not stored, each with its kind, for example "logs/x
    (symbolic link)".

    Raises CpuftError: the command failed, or has sent nothing for two minutes.
    Raises NotStoredError: the archive is incomplete or leads out of the folder, or this machine's disk does not take
    the files.
    """
    run_dir = Path(os.path.realpath(run_dir))
    # On the disk of the run's folder, which may be a link to another disk or a mount point.
    place = run_dir if run_dir.is_dir() else run_dir.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            part = folder / "run"
            skipped = _receive(part, command)
            if part.exists():
                _store(part, run_dir)
            return skipped
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
    except OSError as error:
        raise NotStoredError(f"{error.filename2 or error.filename or run_dir}: {error.strerror}") from None


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of fetches that were killed; a fetch that still runs holds a lock on its folder."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _receive(part: Path, command: Sequence[str]) -> list[str]:
    """Extract what the command sends into `part`; return the names of what was skipped."""
    sender = execute.start_with_output(command, os.environ)
    assert sender.stdout is not None
    source = _Source(sender.stdout)
    try:
        skipped = extract(source, part)
        source.drain()
        code = sender.wait()
    except NotStoredError:
        # An archive that breaks off is the sender's failure, if the sender failed.
        if source.is_over and execute.wait_for_exit(sender, _SENDER_END_SECONDS):
            raise CpuftError(f"the host could not send the run (exit code {execute.exit_code_of(sender)})") from None
        raise
    finally:
        execute.stop_processes([sender])
        sender.stdout.close()
    if code:
        raise CpuftError(f"the host could not send the run (exit code {code})")
    if source.end != _END:
        raise NotStoredError("the archive from the host is incomplete")
    return skipped


def extract(source: _Source, part: Path) -> list[str]:
    """Extract the plain files and folders of a tar archive into `part`, a path where nothing is.

    Owners are not restored. Files get at most mode 755 and at least 600, folders at least 700. Each file is synced to
    the disk.

    Returns
    -------
    Names of links, pipes and devices, which are not stored, each with its kind, for example "logs/x (symbolic link)".

    Raises NotStoredError: it is no tar archive, a name leads out of the folder, or a name is there twice.
    Raises OSError: a file cannot be written.
    """
    skipped = []
    try:
        stream = cast(IO[bytes], source)  # reading is all that is done with it
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2, errors="surrogateescape") as archive:
            for member in archive:
                path = part.joinpath(*_split(member.name))
                if member.isdir():
                    _make_folders(path, part)
                    path.chmod(member.mode & 0o755 | 0o700)
                elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                    _make_folders(path.parent, part)
                    _write(archive, member, path)
                else:
                    skipped.append(f"{member.name} ({_KINDS.get(member.type, 'special file')})")
                vars(archive)["members"] = []  # it would remember all of them
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise NotStoredError(f"the host did not send a readable tar archive ({error})") from None
    for folder, _, _ in os.walk(part):
        _sync(Path(folder))
    return skipped


def _split(name: str) -> list[str]:
    """Return the components of a member's name below the run's folder."""
    components = [component for component in name.split("/") if component not in ("", ".")]
    if name.startswith("/") or ".." in components or "\0" in name:
        raise NotStoredError(
            f"the host sent a file named {name!r}, which is outside the run folder: "
            "cpuft never does that, so check the host before you use it again"
        )
    return components


def _make_folders(path: Path, part: Path) -> None:
    """Make a folder below `part`, and the folders above it. Raises NotStoredError: a file has one of the names."""
    missing = [folder for folder in (path, *path.parents) if folder == part or part in folder.parents]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise NotStoredError(
                    f"the host sent {folder.relative_to(part)} both as a file and as a folder"
                ) from None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise NotStoredError(f"the host sent {member.name} twice") from None
    with os.fdopen(file, "wb") as output:
        shutil.copyfileobj(content, output, _BLOCK)
        output.flush()
        os.fchmod(file, member.mode & 0o755 | 0o600)
        with contextlib.suppress(OverflowError, OSError, ValueError):  # a time that no file system knows
            os.utime(file, (member.mtime, member.mtime))
        os.fsync(file)


def _sync(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _store(part: Path, run_dir: Path) -> None:
    """Move the extracted folder to its place."""
    if read_host_folder(str(part)) != read_host_folder(str(run_dir)):
        (part / STATE_FILE).unlink(missing_ok=True)  # no host may say which folders on other hosts are those of the run
    if not run_dir.is_dir():
        os.rename(part, run_dir)
        _sync(run_dir.parent)
        return
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
    _sync(target)


def _is_folder(path: Path) -> bool:
    """Whether `path` is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _free_name(path: Path, mark: str) -> Path:
    """Return NAME, the mark, and the first number from 1 that makes a name which is not taken."""
    number = 1
    while os.path.lexists(taken := path.with_name(f"{path.name}{mark}{number}")):
        number += 1
    return taken


def _stop(signal_number: int, frame: object) -> None:
    raise Interrupted(signal_number)


def main() -> None:
    """Store a run as `fetch` does. The arguments are RUN_DIR and the command that sends the run.

    Exits with 0, 74 (EX_IOERR) if the results could not be stored here, 1 if they could not be sent, or 143 after
    SIGTERM. Prints a line on standard error for an error, or on standard output if something was left out.
    """
    run_dir, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    try:
        skipped = fetch(Path(run_dir), command)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(IO_ERROR if isinstance(error, NotStoredError) else 1)
    except Interrupted as stopped:
        sys.exit(stopped.exit_code)
    if skipped:
        more = f" and {len(skipped) - _SHOWN} more" if skipped[_SHOWN:] else ""
        print(f"{_SKIPPED}{', '.join(skipped[:_SHOWN])}{more}")


if __name__ == "__main__":
    main()
