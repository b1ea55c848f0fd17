"""Detached runs, seen from the user's machine: move a command to the head host, follow it there, fetch its results.

The command runs on the head host as if it had been typed there (`cpuft.launch.detached_head` keeps it), with the
cluster's entry, the variables and secrets that ranks get, and the files that its options name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cpuft
from cpuft import execute
from cpuft.argv import make_shell_line, module_command
from cpuft.config.fields import format_flag, format_options
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TRAINING_INPUTS, TrainConfig
from cpuft.errors import RESUMABLE, CpuftError, format_command, last_line
from cpuft.execute import Say
from cpuft.hosts.cluster import (
    DETACHED,
    FROM_STDIN,
    JOB,
    Access,
    Cluster,
    read_host_folder,
)
from cpuft.hosts.hostfile import Host, find_job_hostfile, format_hostfile
from cpuft.hosts.registry import FILE_NAME, INSIDE, format_entry
from cpuft.launch import results
from cpuft.launch.detached_head import (
    BEGUN,
    END,
    LOST,
    MODULE,
    OUTPUT,
    PAST,
    Description,
    Event,
    Order,
)
from cpuft.launch.inputs import (
    Bundle,
    LaunchNote,
    gather_missing,
    make_bundle,
    pack_files,
    pack_script,
    plan_sending,
    save_note,
)
from cpuft.launch.rank_variables import forwarded_settings, user_variables
from cpuft.launch.resume import CHECKPOINTS, remove_empty_run
from cpuft.launch.run_folder import plan_claim
from cpuft.launch.run_locks import lock_run
from cpuft.launch.run_state import RunState, begin_state, write_state
from cpuft.launch.script_command import plan_script
from cpuft.plans import Plan, Step
from cpuft.retry import retry
from cpuft.serialization import load, parse_json

_PLACE = ("cluster", "hostfile", "ssh_config")
_STAYS_HERE = ("run_dir", "detach", "check", "config", "dry_run", "script", "action")
"""Options that the moved command gets in another way, or not at all: its hosts have been checked from here."""
NO_CLUSTER = "hosts"
"""Name of the entry of hosts that are no cluster of cpuft provision."""
_EXAMINE = """
import importlib.util, json, sys
import cpuft
print(json.dumps([cpuft.__version__, *(name for name in sys.argv[1:] if not importlib.util.find_spec(name))]))
"""
_KILLED = 137
_EVENT = re.compile(rb"([0-9]{1,18}) (\{.*\})\n")
_MOST_SECONDS = 1e12
"""Greatest age of a run that a host may tell: not infinite, and a number."""
_ANSWER_SECONDS = 60.0
_LOST_SECONDS = 60.0
"""How long a viewer tries to reach a head host that does not answer."""
_CONNECTED_SECONDS = 30.0
"""A try that lasted longer had reached the head host: ssh gives up earlier."""
_RETRY_SECONDS = 3.0
_FETCH_PAUSES = (1, 2, 4, 8, 15, *(30,) * 18)
"""Seconds before each new try to fetch results: ten minutes together."""


class HeadLostError(CpuftError):
    """The head host of a detached run does not answer, or its part of the run was killed."""

    exit_code = RESUMABLE


@dataclass(frozen=True)
class Head:
    """A host that may have detached runs, and how it is reached."""

    host: Host
    access: Access
    options: tuple[str, ...] = ()
    """The options that name its cluster or hostfile, for commands in messages."""

    def action(self, *words: str) -> tuple[str, ...]:
        """Return the argv, to be run on the host, of an action of `detached_head`; `words`: its name and arguments."""
        return self.access.with_settings(*module_command(self.access.python, MODULE), *words)

    def from_here(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the argv with which this machine runs the host's `command`: unchanged if the host is this machine."""
        prefix = self.access.transport.command_prefix(self.host)
        return (*prefix, make_shell_line(command)) if prefix else command

    def ask(self, *words: str) -> str:
        """Carry out an action (`words` as for `action`) on the host, and return its output. Raises CpuftError: the
        action failed, or the host does not answer within 60 s.
        """
        answer = self.access.transport.run(self.host, self.action(*words), seconds=_ANSWER_SECONDS)
        if answer.exit_code:
            reason = last_line(answer.errors, f"exit code {answer.exit_code}")
            if answer.exit_code == CpuftError.exit_code:
                raise CpuftError(reason)
            raise CpuftError(
                f"host {self.host.name} cannot say anything about detached runs ({reason[:200]}): install the same "
                "version of cpuft there and here"
            )
        return answer.output

    def list_runs(self) -> list[Description]:
        """Return the host's detached runs, oldest first. Raises CpuftError: the host's answer is missing or unknown."""
        lines = self.ask("list").splitlines()
        try:
            found = [load(Description, parse_json(line)) for line in lines if line.startswith("{")]
            if wrong := [one.seconds for one in found if not abs(one.seconds) < _MOST_SECONDS]:
                raise ValueError(f"it.seconds is {wrong[0]}")
        except ValueError as error:
            raise CpuftError(
                f"host {self.host.name} describes its detached runs in another form ({error}): install the same "
                "version of cpuft there and here"
            ) from None
        return found


def refuse_jobs(config: LaunchConfig, environ: Mapping[str, str]) -> None:
    """Raise CpuftError inside a job of Slurm, AWS Batch or the MPI Operator, which goes on when the user logs out, and
    ends at its own time. Nothing is raised if `config` names hosts outside of the job.
    """
    if config.cluster or config.hostfile not in ("", find_job_hostfile(environ)):
        return
    jobs = {"SLURM_JOB_ID": "a Slurm job", JOB: "a job of AWS Batch", "K_MPI_JOB_ROLE": "an MPIJob"}
    for name, what in jobs.items():
        if name in environ:
            raise CpuftError(f"this command runs in {what}, which does not need you to stay: leave out --detach")


def examine_python(head: Head, packages: Sequence[str] = ()) -> None:
    """Raise CpuftError if the head host does not answer, or lacks this version of cpuft or a module of `packages`."""
    name, python = head.host.name, head.access.python
    command = head.access.with_settings(python, "-c", FROM_STDIN, *packages)
    answer = head.access.transport.run(head.host, command, _EXAMINE)
    advice = "install it there, for example with cpuft provision hosts, or leave out --detach"
    try:
        version, *missing = load(list[str], parse_json(last_line(answer.output, "")))
    except ValueError:
        reason = last_line(answer.errors, f"exit code {answer.exit_code}")
        raise CpuftError(f"the Python of host {name}, {python}, cannot import cpuft ({reason}): {advice}") from None
    if version != cpuft.__version__:
        raise CpuftError(
            f"host {name} has cpuft {version[:40]}, and this machine has {cpuft.__version__}: install the same "
            "version on both, or leave out --detach"
        )
    if missing:
        raise CpuftError(
            f"the Python of host {name}, {python}, lacks {', '.join(missing)}, which the command needs: {advice}"
        )


def plan_move(
    verb: str,
    values: Mapping[str, Any],
    script: tuple[str, ...],
    cluster: Cluster,
    run_dir: str,
    environ: Mapping[str, str],
) -> tuple[Order, tuple[Bundle, ...]]:
    """Return what is moved to the head host, and the files that it needs there. Reads these files, and sends nothing.
    `verb` is that of the command, such as "launch", `values` are the options that the user gave, by name and typed,
    `script` the words of a script's command or (), and `run_dir` is the run folder on this machine. Raises CpuftError:
    the script does not exist, or a file cannot be sent.
    """
    identity = secrets.token_hex(6)
    settings = {one.name: one.value for one in forwarded_settings(user_variables(environ), ())}
    head = replace(cluster, assignments=cluster.assignments[:1], facts=cluster.facts[:1])
    bundles: tuple[Bundle, ...] = ()
    if script:
        command, bundles = pack_script(head, plan_script(script))
        script = ("python", *command[1:]) if command[0] in (sys.executable, cluster.python) else command
    else:
        files = {name: value for name, value in values.items() if name in TRAINING_INPUTS}
        packed, bundles = pack_files(head, TrainConfig(**files))
        values = {name: getattr(packed, name) if name in files else value for name, value in values.items()}
    if (path := values.get("conditions")) and cluster.has_own_disks:
        bundles += (make_bundle((Path(path).absolute(),), cluster.inputs),)
        values = {**values, "conditions": f"{bundles[-1].remote_folder}/{Path(path).name}"}
    names = {f"{one.remote_folder}/{path.name}": str(path) for one in bundles for path in one.sources}
    order = Order(identity, verb, run_dir, (), settings=settings, names=names)
    if not cluster.works_remotely:
        # The user is on the head host, and the command finds its hosts as it would without --detach.
        order = replace(order, work_folder=os.getcwd())
    else:
        place = f"{cluster.folder}/{DETACHED}/{identity}"
        order = replace(order, run_dir=f"{place}/run/{os.path.basename(run_dir)}")
        name, files = _describe_cluster(cluster, place)
        folder = os.getcwd() if cluster.access.entry.shares_files else ""
        order = replace(order, cluster=name, files=files, work_folder=folder)
    left_out = (*_STAYS_HERE, *(_PLACE if cluster.works_remotely else ()))
    options = format_options({name: value for name, value in values.items() if name not in left_out})
    arguments = (verb, *options, "--no-check", f"--run-dir={order.run_dir}", *(("--", *script) if script else ()))
    return replace(order, arguments=arguments), bundles


def _describe_cluster(cluster: Cluster, folder: str) -> tuple[str, dict[str, str]]:
    """Return the name and files of a cluster's entry for the head host, without ports and users, as for its mpirun."""
    access = cluster.access
    name, config = access.entry.name or NO_CLUSTER, access.transport.config
    place = f"{folder}/{name}"
    text = ""
    if there := access.entry.ssh_config_there or (config if access.entry.shares_files else ""):
        text = f"Include {shlex.quote(there)}\n"
    elif config:
        text = Path(config).expanduser().read_text(encoding="utf-8")
        # An option of Apple's ssh client, at which that of the head host would end.
        text = f"IgnoreUnknown UseKeychain\n{text}" if sys.platform == "darwin" else text
    # A restart may need hosts that the run does not use yet.
    known = access.transport.hosts or cluster.hosts
    hosts = tuple(Host(one.name, one.slots, max_slots=one.max_slots) for one in known.values())
    entry = replace(access.entry, name=name, kind=INSIDE, options={}, python=access.python, here=cluster.head)
    entry = replace(entry, hostfile=f"{place}/hostfile", ssh_config=f"{place}/ssh_config" if text else "")
    files = {FILE_NAME: format_entry(entry), "hostfile": format_hostfile(hosts)}
    return name, files | ({"ssh_config": text} if text else {})


def plan_start(
    head: Head, order: Order, bundles: tuple[Bundle, ...], cluster: Cluster, run_dir: str, hidden: Mapping[str, str]
) -> Plan:
    """Return the plan that sends the files to the head host and starts the command there; if the head host is another
    machine, it first makes the run folder here. `hidden` has the secret variables of the command, and is empty for a
    plan that is printed. Asks the head host which files it lacks. Raises CpuftError: the head host cannot be used.
    """
    first = replace(cluster, assignments=cluster.assignments[:1], facts=cluster.facts[:1])
    state = replace(begin_state(cluster, run_dir, 0), id=order.id)
    claim = ((plan_claim(run_dir, state, False),),) if order.claimed else ()
    sending = plan_sending(bundles, gather_missing(bundles, first), first)
    stdin = json.dumps({"order": dataclasses.asdict(order), "secrets": dict(hidden)})
    why = f"start cpuft {order.verb} on {head.host.name}"
    begin = Step(why, head.action("start"), host=head.host.name, stdin=stdin)
    return Plan((*claim, *sending, (begin,)), command_prefixes=cluster.command_prefixes)


def start_detached(run: Detached, plan: Plan, note: LaunchNote, environ: Mapping[str, str], say: Say) -> int:
    """Note a run here, move its command to the head host, and show the output until the run begins or the command ends.

    Returns 0 if the run has begun, else the exit code of the command, of which nothing is left then. A
    KeyboardInterrupt does not stop a command that was started. Raises CpuftError: the command could not be started, or
    the head host is lost.
    """
    save_note(run.run_dir, replace(note, id=run.order.id, run_dir=run.run_dir), environ)
    begun, advice = False, f"check {run.head.host.name} with cpuft doctor, or leave out --detach"
    try:
        execute.run_stages(plan, 0.0, say, advice)
        begun = True
        if code := run.show(until_begun=True):
            run.head.ask("forget", run.order.id)
            begun = False
    finally:
        if not begun:
            save_note(run.run_dir, LaunchNote(), environ)
            remove_empty_run(run.run_dir)
    if code:
        say(
            f"cpuft: nothing was started: the command ended on {run.head.host.name}, which logs in to the other hosts "
            "without your ssh agent or ticket when a run is detached"
        )
        return code
    say(f"cpuft: run {run.order.id} goes on without this machine. {run.describe_commands()}")
    return 0


@dataclass(frozen=True)
class Detached:
    """A detached run, as this machine knows it."""

    head: Head
    order: Order
    run_dir: str
    """The run folder on this machine; "" if there is none yet."""

    def describe_commands(self) -> str:
        """Return "cpuft attach ID shows it and fetches its results; cpuft stop ID ends it", with the host's options."""
        words = format_command((self.order.id, *self.head.options))
        return f"cpuft attach {words} shows it and fetches its results; cpuft stop {words} ends it"

    def show(self, until_begun: bool = False, only_past: bool = False) -> int:
        """Print what the command prints, from its start to its end, and return its exit code. With `until_begun` return
        0 as soon as the run has begun, also if it has ended since. With `only_past` print what was printed until now,
        and return 0 if the command has not ended. The line with the path of the run folder is left out if that is not
        `run_dir`. Raises HeadLostError: the command was killed (not with `only_past`), or the head host does not
        answer for a minute; CpuftError: the host's events cannot be read.
        """
        position, heard, closing = 0, time.monotonic(), f"run: {self.order.run_dir}\n"
        while True:
            tried = time.monotonic()
            for behind, event in self._read_events(position, only_past):
                position = behind
                heard = time.monotonic()
                if event.text and (event.text != closing or self.order.run_dir == self.run_dir):
                    stream = sys.stdout if event.kind == OUTPUT else sys.stderr
                    stream.write(self._translate(event.text))
                    stream.flush()
                if event.kind == LOST and not only_past:
                    raise HeadLostError(
                        f"the command of run {self.order.id} was killed on {self.head.host.name}, or the host was "
                        f"started again: {self._advise()}"
                    )
                if event.kind == END and event.code == _KILLED:
                    print(f"cpuft: the command was killed on {self.head.host.name}: {self._advise()}", file=sys.stderr)
                if event.kind in (END, LOST, PAST) or (event.kind == BEGUN and until_begun):
                    return event.code
            if time.monotonic() - tried > _CONNECTED_SECONDS:
                heard = time.monotonic()  # a run that printed nothing, whose connection has only now broken
            if time.monotonic() - heard > _LOST_SECONDS:
                raise HeadLostError(
                    f"the head host {self.head.host.name} of run {self.order.id} does not answer. If only this "
                    "machine's network is down, the run goes on. If the host is lost, nobody restarts the run: "
                    f"{self._advise()}"
                )
            time.sleep(_RETRY_SECONDS)

    def _advise(self) -> str:
        command = ("cpuft", "launch", "--resume", self.run_dir or "RUN_FOLDER", *self.head.options)
        return f"continue it with {format_command(command)}"

    def _translate(self, text: str) -> str:
        for path, name in {self.order.run_dir: self.run_dir or self.order.run_dir, **self.order.names}.items():
            text = text.replace(path, name)
        return text

    def _read_events(self, position: int, only_past: bool) -> Iterator[tuple[int, Event]]:
        """Yield each event from a position on, with the position behind it, until the connection or the run ends."""
        words = ("follow", self.order.id, str(position), *(["past"] if only_past else []))
        command = self.head.from_here(self.head.action(*words))
        try:
            started = execute.start_process(command, os.environ, execute.PIPE)
        except FileNotFoundError:
            raise CpuftError(
                f"run {self.order.id} is shown through {command[0]}, which this machine does not have: install it"
            ) from None
        with started as process:
            assert process.stdout
            try:
                for line in process.stdout:  # one that the connection has cut is read again from its begin
                    if found := _EVENT.fullmatch(line):
                        yield int(found[1]), load(Event, parse_json(found[2].decode()))
            except ValueError as error:
                raise CpuftError(
                    f"the events of run {self.order.id} cannot be read ({error}): use the cpuft that its host has"
                ) from None
            finally:
                execute.stop_processes([process])

    def _claim(self) -> None:
        if not read_host_folder(self.run_dir):
            Path(self.run_dir).mkdir(parents=True, exist_ok=True)
            identity, _, name = self.order.claimed.partition("/")
            write_state(self.run_dir, RunState(identity, name))

    def fetch(self, say: Say) -> str:
        """Fetch the results into the run folder on this machine, and return its path; the head host then removes them.
        If they were fetched before, return MACHINE:FOLDER; if the run has no results, "". Raises NotStoredError: they
        cannot be stored; CpuftError: ten minutes of tries have failed.
        """
        send = self.head.access.transfer_command("send-run", self.order.run_dir, CHECKPOINTS)
        is_stored = False

        def fetch_now() -> str:
            nonlocal is_stored
            now = next((one for one in self.head.list_runs() if one.order.id == self.order.id), None)
            if now is None:
                raise CpuftError(f"host {self.head.host.name} does not list run {self.order.id} any more")
            if now.fetched or not now.has_results:
                return now.fetched
            if not is_stored:
                with lock_run(self.run_dir):
                    self._claim()
                    say(f"cpuft: fetching the results of run {self.order.id} from {self.head.host.name}")
                    results.fetch(Path(self.run_dir), self.head.from_here(send), refuses_earlier=True)
                is_stored = True
            self.head.ask("fetched", self.order.id, f"{socket.gethostname()}:{self.run_dir}")
            return self.run_dir

        told = "cpuft: trying again in"
        return retry(fetch_now, _FETCH_PAUSES, lambda line: say(f"{told} {line}"), results.may_be_fetched)


def list_place_options(config: LaunchConfig) -> tuple[str, ...]:
    """Return the options of `config` that say where its hosts are, such as ("--cluster=NAME",); () if it names none."""
    return tuple(f"{format_flag(name)}={value}" for name in _PLACE if (value := getattr(config, name)))
