"""What every scheduler has in common: its contract, the launch or sweep that a job runs, and following a job."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.execute import run_command
from cpuft.record import FILE_NAME

SWEEP_FILE_NAME = "sweep.jsonl"
"""As `cpuft.sweep.study.FILE_NAME`: the file in the folder of a sweep that says what has happened."""

ANSWER_SECONDS = 120.0
"""Time limit for one answer of a scheduler."""
_POLL_SECONDS, _MOST_FAILURES = 5.0, 20
"""Pause between two looks at a job that is followed, and how many looks in a row may fail."""
_FOLDER = Path(__file__).parent
NODE_COMMAND = ("python", "-m", "cpuft.schedulers.job_node", "/work")
"""Beginning of the command of every node where cpuft itself joins the nodes, up to the folder to work in; the main node
runs the rest when all nodes are up."""
JOB_SECRET = "CPUFT_JOB_TOKEN"
"""Environment variable with the secret by which such nodes recognize each other."""


@dataclass(frozen=True)
class JobOptions:
    """Options of `cpuft submit` that every scheduler takes."""

    name: str = option(
        "", "Name of the job and of its run (default: made of the task, --np and the time)", takes="NAME"
    )
    nodes: int = option(0, "Number of hosts (default: --np divided by --ppn, else --np)", least=0, most=100_000)
    retries: int = option(9, "How often an interrupted job is started again", least=0, most=10_000)

    @property
    def scope(self) -> str:
        """Where the job's identifier is valid: a namespace or a region; "" for the scheduler's default."""
        return ""


@dataclass(frozen=True)
class ContainerOptions(JobOptions):
    """Options of schedulers that run containers."""

    image: str = option("", "Container image (required) that has cpuft and sshd", takes="NAME")
    cores: int = option(4, "CPU cores of each host, as the scheduler counts them", least=1, most=10_000)
    memory: int = option(16, "Memory of each host in GiB; a quarter of it is for /dev/shm", least=1, most=100_000)
    seconds: int = option(0, "Time limit of the job in seconds (default: no limit)", least=0, most=10**8)


@dataclass(frozen=True)
class CloudOptions(ContainerOptions):
    """Options of tools that rent the hosts of a job."""

    spot: bool = option(False, "Rent cheaper hosts that may be taken away; the job then resumes on others")


@dataclass(frozen=True)
class JobLaunch:
    """The `cpuft launch` that a job runs: its argv, and the options in it that its scheduler needs to know."""

    options: tuple[str, ...]
    """The arguments before `--`."""
    script: tuple[str, ...] = ()
    """`--` and a script of the user's with its arguments; empty for none."""
    np: int = 1
    ppn: int = 0
    """Ranks on each host; 0 if not given."""
    run_dir: str = ""
    """Folder of the run; empty if not given."""
    resume: str = ""
    """Folder of the run that the launch resumes; empty for a new run."""

    def count_hosts(self, nodes: int) -> tuple[int, int]:
        """Return (number of hosts, ranks on the host that has most): `nodes` hosts, or if that is 0, np / ppn, rounded
        up, or np without ppn; the ranks are ppn (np if that is less), or without ppn as even as possible. Raises
        CpuftError: there are more hosts than ranks, or too few for `ppn`.
        """
        hosts = nodes or (math.ceil(self.np / self.ppn) if self.ppn else self.np)
        if hosts > self.np or (self.ppn and hosts * self.ppn < self.np):
            raise CpuftError(f"--nodes {hosts} contradicts --np {self.np} and --ppn {self.ppn}: leave --nodes out")
        return hosts, min(self.ppn, self.np) if self.ppn else math.ceil(self.np / hosts)

    def to_shell(self, name: str, restarted: str, *defaults: str) -> str:
        """Return lines of POSIX shell that define the function `launch` and set its arguments, "$@".

        The function replaces its shell by `cpuft launch`, whose path the script has in $cpuft. The arguments start a
        run, or resume the one that an earlier start of the job began (resume.sh), unless the shell expression
        `restarted` is empty. The run's folder is $run: that of --resume, else of --run-dir, else runs/`name`; a value
        of $task is added to the last two. The launch's own options win over `defaults`.
        """
        argv, script = shlex.join(("launch", *defaults, *self.options)), shlex.join(self.script)
        function = f'launch() {{ exec "$cpuft" {argv} "$@" {script}; }}\n'
        if self.resume:
            return f"{function}run={shlex.quote(self.resume)} progress=.\nset --\n"
        run, progress = shlex.quote(self.run_dir.rstrip("/") or f"runs/{name}"), "logs" if self.script else FILE_NAME
        resume = read_template("resume.sh")
        return f"{function}run={run}$task progress={progress} restarted={restarted}\n{resume}"


@dataclass(frozen=True)
class JobSweep(JobLaunch):
    """The `cpuft sweep` that a job runs. `np` and `ppn` are those of one run."""

    resume_options: tuple[str, ...] = ()
    """Those of its options that `cpuft sweep --resume` accepts, too."""

    def count_hosts(self, nodes: int) -> tuple[int, int]:
        """Return (`nodes`, ranks on each of them). Raises CpuftError: `nodes` is 0, or less than one run needs."""
        hosts = self.np // self.ppn
        if not nodes:
            raise CpuftError(
                "a sweep needs --nodes N: --hosts-per-run times the number of runs that are to train at the same time"
            )
        if nodes < hosts:
            raise CpuftError(f"--nodes {nodes} is less than --hosts-per-run {hosts}: raise --nodes")
        return nodes, self.ppn

    def to_shell(self, name: str, restarted: str, *defaults: str) -> str:
        """Return lines as `JobLaunch.to_shell` does, whose function `launch` continues the sweep `resume`, if given,
        or the sweep that the job began, if the shell word `restarted` does not expand to ""; else it starts a sweep.

        `defaults`, options for the signals that a launch gets, are not used: a sweep gets signals itself.
        """
        function = 'launch() { exec "$cpuft" sweep "$@"; }\n'
        begin = f"set -- {shlex.join(self.options)}"
        if self.resume:
            return f"{function}run={shlex.quote(self.resume)} progress={SWEEP_FILE_NAME}\n{begin}\n"
        names = f"run={shlex.quote(self.run_dir.rstrip('/') or f'runs/{name}')}$task progress={SWEEP_FILE_NAME}"
        return (
            f"{function}{names} restarted={restarted}\n"
            f'set -- --resume "$run" {shlex.join(self.resume_options)}\n'
            'if [ ! "$restarted" ] || [ ! -s "$run/$progress" ]; then\n'
            '    [ ! "$restarted" ] || [ ! -d "$run" ] || mv "$run" "$run-$(date +%s)" || exit 1\n'
            f'    {begin} --run-dir "$run"\n'
            "fi\n"
        )


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says about a job."""

    state: str
    """The scheduler's own word, e.g. RUNNING."""
    exit_code: int | None
    """None while the job has not ended."""
    log: str
    """All that the job has written so far; empty where that cannot be read."""
    never_starts: str = ""
    """The scheduler's reason why a waiting job can never start; empty where it can."""


Options = TypeVar("Options", bound=JobOptions)


class Scheduler(ABC, Generic[Options]):
    """A scheduler to which `cpuft submit` gives launches as jobs. `cpuft.schedulers.SCHEDULERS` registers each one.

    The job runs `cpuft launch` or `cpuft sweep` on its first host, without a hostfile. There `cpuft.hosts.cluster`
    finds the job's hosts and the transport that reaches them: from the variables of Slurm (`cpuft.hosts.slurm`), from
    the hostfile of an MPIJob (`cpuft.hosts.mpijob`), or from the cluster entry that a job's node wrote
    (`cpuft.hosts.cluster.JOB`).

    A job that ends with exit code 75 (`cpuft.errors.RESUMABLE`) was interrupted: the scheduler starts it again, at most
    `retries` times, and its run resumes from the last checkpoint.

    `scope` is the namespace or region of the jobs; empty for the default of the scheduler's client. Identifiers of jobs
    that the methods take have no scope. All methods but `render` raise CpuftError when the scheduler's client is
    missing, refuses, or does not answer in time, and when the scheduler does not know the job; the message holds the
    client's own words.
    """

    name: ClassVar[str]
    """As in `cpuft submit NAME`, and in the jobs that this prints: NAME:JOB or NAME:SCOPE/JOB."""
    options: ClassVar[type[JobOptions]]
    help: ClassVar[str]
    """One sentence for the help of `cpuft submit`."""
    takes_sweeps: ClassVar[bool] = True
    """Whether its jobs may run `cpuft sweep`: not if they end when one of their nodes is lost."""
    has_submitters_files: ClassVar[bool] = False
    """Whether a job's hosts see the environment of the machine that submits, so that cpuft has the same path there."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope

    @abstractmethod
    def render(self, options: Options, launch: JobLaunch, program: str) -> str:
        """Return the text of a job that runs a launch. Pure: the same arguments give the same text, nothing is asked.

        `program` is the path of cpuft on the job's hosts. Raises CpuftError: an option that the scheduler needs is
        missing, a value cannot stand in the text, or `launch.count_hosts` refuses --nodes: a launch has more
        hosts than ranks, or there are too few for --ppn.
        """

    @abstractmethod
    def submit(self, text: str) -> str:
        """Submit a job's text, as `render` returns it; return its identifier: JOB, or SCOPE/JOB if the client names a
        scope or one was given. CpuftError: the client fails.
        """

    @abstractmethod
    def status(self, job: str) -> JobStatus:
        """Return the state, exit code and log of a job. CpuftError: no such job, or the client fails."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job. CpuftError: no such job, or the client fails."""

    @abstractmethod
    def is_ours(self, job: str) -> bool:
        """Return whether `cpuft submit` has submitted a job; only those may be cancelled. CpuftError: no such job."""


def make_node_command(options: ContainerOptions, launch: JobLaunch, program: str, job_id: str) -> tuple[int, list[str]]:
    """Return (number of hosts, argv that each of them runs) for a service that starts the same command on all hosts.

    `job_id` is shell for an identifier that all starts of the job share, and no other job. CpuftError: --nodes does not
    fit.
    """
    begin = f"cpuft={program} CPUFT_JOB_UID={job_id}\n{read_template('has_begun.sh')}"
    lines = launch.to_shell(options.name, '$(has_begun "$run")', "--grace-period", "20")
    return launch.count_hosts(options.nodes)[0], [*NODE_COMMAND, "sh", "-c", f'{begin}{lines}launch "$@"\n']


def run_with_secret(*argv: str, stdin: str = "", seconds: float = ANSWER_SECONDS) -> str:
    """Run a client as `run_client` does, with a new CPUFT_JOB_TOKEN (64 hexadecimal digits) in this environment."""
    return run_client(*argv, stdin=stdin, environ={**os.environ, JOB_SECRET: secrets.token_hex(32)}, seconds=seconds)


def run_client(
    *argv: str, stdin: str = "", environ: Mapping[str, str] | None = None, seconds: float = ANSWER_SECONDS
) -> str:
    """Run a scheduler's client, and return its standard output. CpuftError: it fails, or takes over `seconds`."""
    answer = run_command(argv, seconds, stdin, environ)
    if answer.exit_code:
        message = " ".join(answer.text.split())[-500:] or f"exit code {answer.exit_code}, without a message"
        advice = "correct that and run the command again"
        if "timed out after" in message:
            advice = "what was asked may have been done all the same, so look before you run the command again"
        raise CpuftError(f"{argv[0]} failed ({message}): {advice}")
    return answer.output


def fetch_log(*argv: str) -> str:
    """Return what a client prints of a job's log; "" if it fails, as before the job starts, or takes over 120 s."""
    answer = run_command(argv, ANSWER_SECONDS)
    return "" if answer.exit_code else answer.output


@contextmanager
def explain_answers(client: str) -> Iterator[None]:
    """Turn Attribute-, Lookup-, Type- and ValueError into CpuftError: `client` has answered as another version does."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CpuftError(
            f"the answer of {client} has a form that cpuft does not know ({error!r:.100}): ask {client} itself for the "
            "job, or use the version that docs/schedulers.md names"
        ) from None


def read_template(name: str) -> str:
    """Return the text of the file `name` in this folder, such as "resume.sh"."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def fill_template(name: str, options: ContainerOptions, values: dict[str, Any]) -> str:
    """Return a YAML template of this folder in which `values[key]`, or an option (else KeyError), replaces text `$key`.

    A template may have several documents. Keys of mappings whose value is None are left out. Raises CpuftError:
    `options` name no image.
    """
    import yaml

    if not options.image:
        raise CpuftError("no container image is given: add --image NAME, an image that has cpuft and sshd")
    known = vars(options) | values

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled for key, value in node.items() if (filled := fill(value)) is not None}
        if isinstance(node, list):
            return [fill(item) for item in node]
        return known[node[1:]] if str(node).startswith("$") else node

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(str, represent)
    filled = map(fill, yaml.safe_load_all(read_template(name)))
    return str(yaml.dump_all(filled, Dumper=dumper, sort_keys=False, width=120))


def follow_job(scheduler: Scheduler[Any], job: str, say: Callable[[str], None]) -> int:
    """Pass a job's log to `say` as it grows, looking every 5 s, until the job ends; return the job's exit code.

    After a restart the log may begin again; then all of it is passed on. Raises CpuftError: the job can never start, or
    the scheduler has failed 20 times in a row.
    """
    shown, failures = "", 0
    while True:
        try:
            status = scheduler.status(job)
        except CpuftError:
            failures += 1
            if failures == _MOST_FAILURES:
                raise
        else:
            failures = 0
            if status.never_starts:
                name = f"{scheduler.name}:{'/'.join(filter(None, (scheduler.scope, job)))}"
                raise CpuftError(
                    f"job {name} can never start ({status.never_starts}): end it with cpuft submit cancel {name}, then "
                    "ask for less, e.g. with --nodes or a smaller --np"
                )
            say(status.log.removeprefix(shown))
            shown = status.log or shown
            if status.exit_code is not None:
                return status.exit_code
        time.sleep(_POLL_SECONDS)
