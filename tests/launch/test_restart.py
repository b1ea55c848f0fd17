"""After each end of an attempt: is the run restarted, where, and from which update?"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts import transport as transport_module
from cpuft.hosts.cluster import Cluster, gather_cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.rank_counts import Assignment
from cpuft.launch import restart
from cpuft.launch.failures import Failure
from cpuft.launch.plan import Job, plan_run
from cpuft.launch.restart import (
    AttemptResult,
    RestartDecision,
    RestartHistory,
    RestartPolicy,
    choose_hosts,
    clean_up_lost_hosts,
    describe_restart,
    find_limit,
    find_resumed_run,
    make_attempt,
    plan_next_attempt,
    run_with_restarts,
)
from cpuft.launch.results import HeadHostLostError, NotStoredError
from cpuft.launch.resume import HostCopy, find_newest_update
from cpuft.launch.run_state import FINISHED, LaterStartError, RunState, StateWriter, format_state, write_state
from cpuft.launch.stop_request import StopRequest
from cpuft.plans import RunPlan, Step
from cpuft.rank.process import FOREIGN_STORE_ENTRY, OUT_OF_MEMORY, format_failure
from cpuft.rank.world import World
from cpuft.record import read_measurements
from cpuft.retry import retry
from tests.launch.test_plan import make_cluster
from tests.launch.test_resume import HEADER, TRAIN, write_run
from tests.records import make_state, make_steps


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return gather_cluster(LaunchConfig())


def script(restarts: int, run_dir: str = "run", **options: float) -> Job:
    config = LaunchConfig(**{"np": 1, "max_restarts": restarts} | options)  # type: ignore[arg-type]
    return Job(os.path.abspath(run_dir), config, TrainConfig(), ("true",))


def run(
    job: Job, cluster: Cluster, *ends: Callable[[Path], int], request: StopRequest | None = None
) -> tuple[int, list[RunPlan], list[str], list[float]]:
    """Return the exit code, the plan of each attempt, the printed lines, and the seconds left for each attempt."""
    plans, said, left, folder = list[RunPlan](), list[str](), list[float](), Path("run").absolute()

    def start(plan: RunPlan, run_dir: str, where: Cluster, seconds: float) -> int:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        plans.append(plan)
        left.append(seconds)
        return ends[len(plans) - 1](folder / "logs" / "rank-0.err")

    plan = plan_run(job, cluster)
    return run_with_restarts(job, plan, cluster, start, said.append, request), plans, said, left


def fails(code: int, text: str = "") -> Callable[[Path], int]:
    def end(log: Path) -> int:
        log.write_text(f"{text}\n{format_failure(World(0, 1, 0, 1), 'localhost', code)}\n")
        return code

    return end


def lost(log: Path) -> int:
    raise HeadHostLostError("the master does not answer: look at it")


def refused(log: Path) -> int:
    raise CpuftError("no such rows: name others")


def unreached(log: Path) -> int:
    error = CpuftError("host b cannot be used over ssh (Connection reset by peer: look at it)")
    error.is_transient = True
    raise error


def ends(log: Path) -> int:
    return 0


KEEP = Step("keep the run's checkpoints", ("echo", "000000008.0"), host="localhost")
KILLED, AGAIN = fails(137), "on localhost starts from the beginning, because no checkpoint had been saved yet"


def test_a_run_is_restarted_after_each_loss_until_it_finishes(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, KILLED, lost, ends)
    assert (code, [plan.resumed for plan in plans]) == (0, [False, True, True])
    assert said == [
        f"cpuft: restart 1 of 3: rank 0 on localhost was killed by SIGKILL; 1 rank {AGAIN}",
        f"cpuft: restart 2 of 3: the connection to the head host was lost; 1 rank {AGAIN}",
    ]


def test_a_connection_that_fails_before_the_ranks_start_is_retried(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(2), cluster, unreached, ends)
    why = "host b cannot be used over ssh (Connection reset by peer: look at it)"
    assert (code, len(plans), said) == (0, 2, [f"cpuft: restart 1 of 2: {why}; 1 rank {AGAIN}"])
    with pytest.raises(CpuftError, match=r"^host b cannot be used over ssh"):
        run(script(1), cluster, unreached, unreached)


@pytest.mark.parametrize(
    "fails, passes, tries, ends_well",
    [(0, True, 1, True), (2, True, 3, True), (3, True, 3, False), (1, False, 1, False)],
)
def test_planning_a_restart_is_retried_after_a_failed_connection(
    fails: int, passes: bool, tries: int, ends_well: bool
) -> None:
    asked: list[int] = []

    def plan() -> int:
        asked.append(1)
        if len(asked) > fails:
            return 7
        error = CpuftError("no way: look")
        error.is_transient = passes
        raise error

    with suppress(CpuftError):
        assert retry(plan, (0.0, 0.0)) == 7
    assert (len(asked), len(asked) > fails) == (tries, ends_well)


def test_hosts_that_are_lost_at_the_same_moment_are_all_found() -> None:
    """The ranks have missed one of them; another one does not answer either."""
    three, asked = make_cluster((1, 1, 1)), list[str]()
    names = [assignment.host.name for assignment in three.assignments]

    class Transport(transport_module.SshTransport):
        def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
            asked.extend(names)
            self.unreachable.add("node3")
            return {"node3"}

    three = replace(three, access=replace(three.access, transport=Transport()))
    Path("run").mkdir()
    StateWriter("run", make_state(unreachable=(names[1],))).end(1)
    attempt = make_attempt(os.path.abspath("run"), three, 1, lambda: 1)
    assert attempt.unreachable == {names[1], names[2]}
    assert asked == [names[0], names[2]]


def test_hosts_keep_their_files_until_the_last_attempt_has_ended(cluster: Cluster) -> None:
    """Each attempt is told to keep them, and the hosts with checkpoints are printed once at the end."""
    plan = replace(plan_run(script(0), cluster), partial_cleanup=((KEEP,),))
    starts, said = list[RunPlan](), list[str]()

    def start(plan: RunPlan, run_dir: str, where: Cluster, seconds: float) -> int:
        starts.append(plan)
        Path(run_dir, "logs").mkdir(parents=True)
        return 1

    assert run_with_restarts(script(0), plan, cluster, start, said.append) == 1
    assert [plan.keep_host_copies for plan in starts] == [True]
    assert [line.partition(":")[0] for line in said] == ["cpuft"]
    assert "checkpoints up to update 8 are saved on localhost" in said[0]


def test_lost_hosts_that_answer_again_are_cleaned_up_at_the_end(cluster: Cluster) -> None:
    asked = list[tuple[str, ...]]()

    class Transport(transport_module.SshTransport):
        def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
            self.unreachable.update({"c"}.intersection(names))
            return self.unreachable

        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
            asked.append((host.name, *argv[-2:]))
            if host.name == "d":
                raise CpuftError("host d cannot be used over ssh")
            return Answer(0, "", "")

    last = replace(cluster, works_remotely=True, uid=7, access=replace(cluster.access, transport=Transport()))
    used = {name: Host(name) for name in ("localhost", "b", "c", "d")}
    said = list[str]()
    clean_up_lost_hosts(RestartHistory(last, used_hosts=used), last, "/runs/mrpc", 3, said.append)
    work = last.work_dir("/runs/mrpc")
    folder = os.path.dirname(work)
    words = ((work, "3"), (folder, f"{last.folder}/detached/{os.path.basename(folder)}/run"))
    left = ("localhost", work, "2")  # the lost hosts may have started something there
    assert sorted(asked) == sorted([left, *((name, *two) for name in ("b", "d") for two in words)])
    assert [line.partition(" did not")[0] for line in said] == ["cpuft: c, d"]
    asked.clear()
    clean_up_lost_hosts(
        RestartHistory(last, used_hosts={"b": Host("b")}),
        replace(last, works_remotely=False),
        "/runs/mrpc",
        3,
        said.append,
    )
    clean_up_lost_hosts(RestartHistory(last), last, "/runs/mrpc", 3, said.append)
    assert (asked, len(said)) == ([], 1)


def test_hosts_that_did_not_answer_when_the_run_was_resumed_are_cleaned_up_at_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("hosts").write_text("localhost\nb\nc\n")
    Path("run").mkdir()
    write_state(str(Path("run").absolute()), RunState("0" * 12, hosts=("b", "localhost")))
    used = list[RestartHistory]()
    monkeypatch.setattr(restart, "clean_up_lost_hosts", lambda history, *others: used.append(history))
    job = replace(script(0), config=LaunchConfig(np=1, hostfile="hosts"))
    for is_resumed in (True, False):
        plan = RunPlan(resumed=is_resumed)
        assert run_with_restarts(job, plan, cluster, lambda *given: 0, print) == 0
    assert [set(one.used_hosts) for one in used] == [{"localhost", "b"}, set()]


def test_a_run_that_finished_before_the_connection_was_lost_is_only_fetched(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Transport(transport_module.SshTransport):
        def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
            return set()

        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
            return ANSWER

    fetched = list[str]()

    def fetch(plan: RunPlan, run: str, *others: object) -> bool:
        fetched.append(run)
        return True

    monkeypatch.setattr("cpuft.launch.restart.fetch_and_clean_up", fetch)
    away = replace(cluster, works_remotely=True, access=replace(cluster.access, transport=Transport()))

    def start(plan: RunPlan, run_dir: str, where: Cluster, seconds: float) -> int:
        error = HeadHostLostError("the connection was lost: look at it")
        error.unfetched_from = "localhost"
        raise error

    said = list[str]()
    assert run_with_restarts(script(3, "/runs/mrpc"), RunPlan(), away, start, said.append) == 0
    assert (fetched, said) == (["/runs/mrpc"], [])


class Answering(transport_module.SshTransport):
    """Hosts that answer. What they have of a run is in SAID, one answer for each question, and the last one stays."""

    def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return set()

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        if argv[-1] != "0123456789ab/run":
            return super().run(host, argv, stdin, seconds)
        answer = SAID.pop(0) if len(SAID) > 1 else SAID[0]
        if answer is None:
            raise transport_module.HostError(host.name, transport_module.UNREACHABLE, "the connection broke")
        return answer


SAID: list[Answer | None] = []
ANSWER = Answer(0, json.dumps({"exists": True, "states": [format_state(make_state(phase=FINISHED))]}))


@pytest.mark.parametrize(
    "said",
    [
        [ANSWER],
        [None, None, ANSWER],  # the question fails, and is asked again
        [None, None, None, ANSWER],  # the host is back when a restart is planned
    ],
)
def test_a_run_that_has_finished_is_never_started_again(
    said: list[Answer | None], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results cannot be fetched."""
    SAID[:] = said
    monkeypatch.setattr("cpuft.launch.restart._RETRY_PAUSES", (0.0, 0.0))
    monkeypatch.setattr("cpuft.launch.results._FETCH_PAUSES", ())
    monkeypatch.setattr("cpuft.launch.restart.remove_all_but_checkpoints", lambda *given: pytest.fail("removed"))
    transport = Answering()
    away = replace(
        cluster,
        works_remotely=True,
        command_prefixes={"localhost": ()},
        access=replace(cluster.access, transport=transport),
    )
    folder, starts = Path("run").absolute(), list[int]()
    folder.mkdir()
    write_state(str(folder), make_state())

    def start(plan: RunPlan, run_dir: str, where: Cluster, seconds: float) -> int:
        starts.append(1)
        error = HeadHostLostError("the connection was lost: look at it")
        error.unfetched_from = "localhost"
        raise error

    plan = replace(plan_run(script(3, str(folder)), away), results=((Step("fetch", ("false",)),), ()))
    with pytest.raises(NotStoredError, match=r"^the run has finished, but the results of the run could not be fetched"):
        run_with_restarts(replace(script(3, str(folder)), environ=os.environ), plan, away, start, lambda line: None)
    assert len(starts) == 1


def test_a_run_that_finished_on_an_earlier_head_host_is_fetched_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """node1 was lost when its ranks had finished, node2 went on, and node1 answers again when node2 has failed."""
    last = replace(make_cluster((1, 1)), works_remotely=True, command_prefixes={"node1": (), "node2": ()})
    hosts = tuple(assignment.host for assignment in last.assignments)

    def gather(config: LaunchConfig, hosts: Sequence[Host], *others: object) -> Cluster:
        return replace(last, assignments=tuple(Assignment(host, 1) for host in hosts[: config.np]))

    def ask(*given: object) -> tuple[tuple[HostCopy, ...], list[CpuftError]]:
        return (HostCopy(hosts[0], True, state=make_state(phase=FINISHED)), HostCopy(hosts[1], True, has_data=True)), []

    for name, fake in {
        "read_hosts": lambda config: hosts,
        "kill_ranks": lambda *given: None,
        "_find_unreachable": lambda *given: set[str](),
        "clean_up_left_out_hosts": lambda *given: pytest.fail("removed"),
        "gather_cluster": gather,
        "gather_host_copies": ask,
    }.items():
        monkeypatch.setattr(f"cpuft.launch.restart.{name}", fake)
    second = replace(last, assignments=last.assignments[1:])
    error = HeadHostLostError("the connection to node2 was lost: look at it")
    error.unfetched_from = "node2"
    tried, job = AttemptResult(1, error=error), script(3, "/runs/run")
    plan, cluster, _ = plan_next_attempt(job, RestartHistory(last), RunPlan(), second, tried, "why")
    (fetch,), removals = plan.results
    assert (plan.ranks, cluster.head, fetch.why) == ((), "node1", "fetch the run from node1")
    assert [step.host for step in removals] == ["node1", "node2"]


def test_a_restart_uses_the_same_folder_on_hosts_before_there_is_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody would find what a host got that was lost while it got it."""
    last = replace(make_cluster((1, 1)), works_remotely=True, command_prefixes={"node1": (), "node2": ()})
    hosts = tuple(assignment.host for assignment in last.assignments)
    for name, fake in {
        "read_hosts": lambda config: hosts,
        "kill_ranks": lambda *given: None,
        "_find_unreachable": lambda *given: {"node1"},
        "clean_up_left_out_hosts": lambda *given: None,
        "gather_cluster": lambda *given: replace(last, assignments=last.assignments[1:], token="another"),
        "gather_host_copies": lambda *given: ((HostCopy(hosts[1]),), []),
    }.items():
        monkeypatch.setattr(f"cpuft.launch.restart.{name}", fake)
    tried, job = AttemptResult(75, unreachable=frozenset({"node1"})), script(2, "/runs/none")
    plan, cluster, _ = plan_next_attempt(job, RestartHistory(last), RunPlan(), last, tried, "why")
    assert plan.ranks
    assert cluster.work_dir("/runs/none") == last.work_dir("/runs/none")


def test_a_failed_restart_names_the_host_that_has_files_and_not_a_spare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transport(transport_module.SshTransport):
        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
            raise CpuftError(f"host {host.name} is broken")

    last = make_cluster((1, 1))
    last = replace(last, works_remotely=True, access=replace(last.access, transport=Transport()))
    for name, fake in {
        "read_hosts": lambda config: (Host("spare"), *last.hosts.values()),
        "kill_ranks": lambda *given: None,
        "_find_unreachable": lambda *given: {"node1"},
        "clean_up_left_out_hosts": lambda *given: None,
        "gather_cluster": lambda *given: last,
    }.items():
        monkeypatch.setattr(f"cpuft.launch.restart.{name}", fake)
    tried, job = AttemptResult(75, unreachable=frozenset({"node1"})), script(2, "/runs/none")
    with pytest.raises(CpuftError, match="host node2 is broken"):
        plan_next_attempt(job, RestartHistory(last), RunPlan(), last, tried, "why")


def test_a_restart_does_not_take_a_host_that_could_not_be_asked_for_one_without_checkpoints(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAID[:] = [None]
    monkeypatch.setattr("cpuft.launch.restart._RETRY_PAUSES", (0.0, 0.0))
    away = replace(
        cluster,
        works_remotely=True,
        command_prefixes={"localhost": ()},
        access=replace(cluster.access, transport=Answering()),
    )
    folder = Path("run").absolute()
    folder.mkdir()
    write_state(str(folder), make_state())
    code, plans, said, _ = run(script(3), away, KILLED, KILLED)
    assert (code, len(plans)) == (137, 1)
    assert "not restarted: rank 0 on localhost was killed by SIGKILL, and host localhost cannot be used" in said[0]


def is_told_to_go(log: Path) -> int:
    StateWriter(str(log.parents[1]), make_state("localhost", leaving=("localhost",))).end(75)
    return fails(75)(log)


def test_a_restart_continues_in_the_folder_on_the_disk_of_the_host(cluster: Cluster) -> None:
    """This machine is the only host that remains. Its checkpoints are not in the run folder."""
    on_disk = replace(cluster, works_remotely=True, command_prefixes={"localhost": ()})
    Path("run").mkdir()
    write_state("run", make_state())
    code, plans, _, _ = run(script(1), on_disk, KILLED, ends)
    folders = [step.command[-1] for plan in plans for stage in plan.make for step in stage]
    assert (code, folders) == (0, 2 * [on_disk.work_dir(str(Path("run").absolute()))])
    assert [len(plan.results) for plan in plans] == [2, 2]


def test_a_host_with_an_interruption_notice_is_not_used_again(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, is_told_to_go)
    assert (code, len(plans)) == (75, 1)
    assert said == ["cpuft: not restarted: host localhost received an interruption notice, and no other host is left"]


def test_after_the_last_restart_its_result_is_returned(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(1), cluster, KILLED, KILLED)
    assert (code, len(plans), said[1]) == (
        137,
        2,
        "cpuft: not restarted: this was restart 1 of 1, and --max-restarts allows no more",
    )
    with pytest.raises(HeadHostLostError):
        run(script(1), cluster, KILLED, lost)


@pytest.mark.parametrize(
    "end, code, why, last",
    [
        (KILLED, 137, "rank 0 on localhost was killed by SIGKILL", []),
        (lost, 143, "the connection to the head host was lost", ["cpuft: the master does not answer: look at it"]),
    ],
)
def test_a_run_that_was_asked_to_end_is_not_restarted(
    end: Callable[[Path], int], code: int, why: str, last: list[str], cluster: Cluster
) -> None:
    request = StopRequest(60.0)

    def end_after_signal(log: Path) -> int:
        assert request.handle_signal(signal.SIGTERM)
        return end(log)

    ended, plans, said, _ = run(script(3), cluster, end_after_signal, request=request)
    assert (ended, len(plans)) == (code, 1)
    assert said == [f"cpuft: not restarted: {why}, and SIGTERM had asked the run to end", *last]


def test_the_same_error_ends_the_run(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, fails(1, "ValueError"), fails(1, "ValueError"))
    told = "cpuft: not restarted: rank 0 on localhost failed (exit code 1), the same error as before"
    assert (code, len(plans), said[1]) == (1, 2, told)


@pytest.mark.parametrize("restarts, end", [(0, KILLED), (3, fails(2))])
def test_rejected_options_and_runs_without_restarts_end_at_once(
    cluster: Cluster, restarts: int, end: Callable[[Path], int]
) -> None:
    code, plans, said, _ = run(script(restarts), cluster, end)
    assert (code in (2, 137), len(plans), said) == (True, 1, [])


def test_an_error_before_the_start_is_raised_as_it_is(cluster: Cluster) -> None:
    with pytest.raises(CpuftError, match=r"^no such rows: name others$"):
        run(script(3), cluster, refused)


@pytest.mark.parametrize(
    "error",
    [
        NotStoredError("the results could not be stored: make room here"),
        LaterStartError("another launcher has started the run again: wait"),
    ],
)
def test_what_is_left_on_hosts_of_results_or_of_another_launcher_stays_and_there_is_no_restart(
    error: CpuftError, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(log: Path) -> int:
        raise error

    cleaned = list[object]()
    monkeypatch.setattr("cpuft.launch.restart.remove_all_but_checkpoints", lambda *given: cleaned.append(given))
    with pytest.raises(type(error), match=str(error)):
        run(script(3), cluster, KILLED, end)
    assert cleaned == []


def test_all_attempts_share_the_time_limit(cluster: Cluster) -> None:
    code, _, _, left = run(script(3, time_limit=100.0), cluster, KILLED, ends)
    assert code == 0
    assert 0 < left[1] < left[0] <= 100


def test_another_engine_than_torch_is_not_restarted(cluster: Cluster) -> None:
    assert find_limit(Job("", LaunchConfig(np=1, max_restarts=3), TrainConfig(engine="ipex")), cluster) == 0


def test_the_newest_checkpoint_here_and_on_hosts_is_found(tmp_path: Path) -> None:
    assert find_newest_update(str(tmp_path), ()) == 0
    for name in ("000000012.0", "000000020.0.new", "000000007.1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_newest_update(str(tmp_path), ()) == 12
    assert (
        find_newest_update(str(tmp_path), (HostCopy(Host("node2"), checkpoint_update=15), HostCopy(Host("node3"))))
        == 15
    )


@pytest.mark.parametrize("recorded, updates", [(15, 15), (0, 0), (-1, 14)])
def test_updates_are_counted_in_the_record_or_on_the_hosts_if_it_is_lost(
    tmp_path: Path, recorded: int, updates: int
) -> None:
    """The local record may be that of an earlier attempt."""
    write_run(tmp_path / "run", HEADER, *make_steps(20, [0.1]))
    copies = (HostCopy(Host("b"), checkpoint_update=12, steps=14), HostCopy(Host("c"), checkpoint_update=-1))
    found = find_resumed_run(Job(str(tmp_path / "run"), LaunchConfig(np=4), TrainConfig()), copies, recorded)
    assert (found.updates, found.host_copies) == (updates, copies)
    assert (found.np, found.train, found.measured) == (2, TRAIN, read_measurements(HEADER))
    nothing = find_resumed_run(Job("nowhere", LaunchConfig(np=4), TRAIN), copies, recorded)
    assert (nothing.np, nothing.global_batch, nothing.measured) == (4, 64, None)


RAISED = 'step 1\nTraceback (most recent call last):\n  File "train.py", line 5\nValueError: odd <at 0x{}>\n'
LOST_PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:6330\n"
WAITED = "cpuft comm: rank 0: all_reduce #6 did not arrive: rank 1 (no answer)\n"


def decide(result: AttemptResult, *earlier_errors: str) -> RestartDecision:
    return RestartPolicy(9, errors={*earlier_errors}).decide(result)


def failed(code: int, text: str = "", *missed: int) -> tuple[Failure, ...]:
    return (Failure(2, "node3", code, text, frozenset(missed)), Failure(0, "node1", 1, LOST_PEER))


@pytest.mark.parametrize(
    "ended, verdict",
    [
        (AttemptResult(75, unreachable=frozenset({"node2"})), RestartDecision(True, "host node2 was lost")),
        (
            AttemptResult(75, failed(2), frozenset({"node3", "node2"})),
            RestartDecision(True, "hosts node2, node3 were lost"),
        ),
        (
            AttemptResult(75, failed(75), leaving=frozenset({"node3"})),
            RestartDecision(True, "host node3 received an interruption notice"),
        ),
        (
            AttemptResult(75, error=HeadHostLostError("x")),
            RestartDecision(True, "the connection to the head host was lost"),
        ),
        (AttemptResult(137, failed(137)), RestartDecision(True, "rank 2 on node3 was killed by SIGKILL")),
        (AttemptResult(143, failed(143)), RestartDecision(True, "rank 2 on node3 was killed by signal 15")),
        (AttemptResult(75, failed(75)), RestartDecision(False, "rank 2 on node3 was interrupted")),
        (AttemptResult(1, failed(1, LOST_PEER)), RestartDecision(True, "rank 2 on node3 lost another rank")),
        (
            AttemptResult(1, failed(1, f"cpuft: error: {FOREIGN_STORE_ENTRY}: wait")),
            RestartDecision(True, "rank 2 on node3 lost another rank"),
        ),
        (AttemptResult(2), RestartDecision(False, "its options or data were rejected")),
        (AttemptResult(74), RestartDecision(False, "a disk was full")),
        (AttemptResult(74, failed(74)), RestartDecision(False, "rank 2 on node3 found a full disk")),
        (AttemptResult(2, failed(2)), RestartDecision(False, "rank 2 on node3 rejected its options or data")),
    ],
)
def test_losses_cause_a_restart_and_rejected_input_does_not(ended: AttemptResult, verdict: RestartDecision) -> None:
    assert decide(ended, "") == verdict


@pytest.mark.parametrize(
    "first, again, why",
    [
        (
            AttemptResult(1, failed(1, RAISED.format("7f01")), update=5),
            RAISED.format("7f02"),
            "node3 failed (exit code 1)",
        ),
        (AttemptResult(139, failed(139), update=5), "", "node3 failed (killed by signal 11)"),
        (
            AttemptResult(75, failed(75, WAITED, 1), update=5, hosts=("a", "b")),
            WAITED,
            "rank 1 on b did not answer the other ranks",
        ),
        (AttemptResult(255, update=5), "", "mpirun failed"),
    ],
)
def test_the_same_error_at_the_same_update_causes_one_restart(first: AttemptResult, again: str, why: str) -> None:
    verdict = decide(first)
    assert verdict.restart
    failures = tuple(Failure(one.rank, one.host, one.code, again, one.missed) for one in first.failures)
    second = decide(AttemptResult(first.code, failures, update=5, hosts=first.hosts), verdict.error_id)
    assert not second.restart
    assert second.reason.endswith(f"{why}, the same error as before at update 5")
    assert decide(AttemptResult(first.code, failures, update=6), verdict.error_id).restart


def test_memory_shortage_at_the_same_update_causes_one_restart() -> None:
    """The kernel killed the rank, or an allocation failed."""
    python = 'Traceback (most recent call last):\n  File "train.py", line 5\nMemoryError\n'
    torch = "Traceback (most recent call last):\nRuntimeError: DefaultCPUAllocator: can't allocate memory\n"
    for code, text in ((137, f"{OUT_OF_MEMORY}\n"), (1, python), (1, torch)):
        first = decide(AttemptResult(code, failed(code, text), update=5))
        assert (first.restart, first.reason) == (True, "rank 2 on node3 ran out of memory")
        second = decide(AttemptResult(code, failed(code, text), update=5), first.error_id)
        assert (second.restart, second.reason) == (
            False,
            "rank 2 on node3 ran out of memory, the same error as before at update 5",
        )
        assert decide(AttemptResult(code, failed(code, text), update=6), first.error_id).restart


def test_another_error_at_the_same_update_causes_a_restart() -> None:
    verdict = decide(AttemptResult(1, failed(1, RAISED)))
    assert decide(AttemptResult(1, failed(1, RAISED.replace("ValueError", "KeyError"))), verdict.error_id).restart


@pytest.mark.parametrize("asked, hosts, count", [(-1, 1, 0), (-1, 2, 3), (0, 4, 0), (2, 1, 2)])
def test_a_run_on_several_hosts_may_be_restarted_three_times_by_default(
    cluster: Cluster, asked: int, hosts: int, count: int
) -> None:
    assert find_limit(script(asked), replace(cluster, assignments=hosts * cluster.assignments)) == count


@pytest.mark.parametrize(
    "hosts, silent, before, np, left, ranks",
    [
        ("a b c d", "c", {"a": 1, "b": 1, "c": 1, "d": 1}, 4, "a b d", 3),
        ("a b c d", "a", {"a": 2, "b": 2, "c": 2, "d": 1}, 7, "b c d", 5),
        ("a b c", "a", {"a": 2, "b": 2}, 4, "b c", 4),
        ("a b=1 c", "c", {"a": 2, "c": 2}, 4, "a b=1", 3),
        ("a b c", "", {"a": 1, "b": 1, "c": 1}, 3, "a b c", 3),
        ("a b", "a b", {"a": 1, "b": 1}, 2, "", 0),
    ],
)
def test_hosts_keep_their_number_of_ranks_and_spare_hosts_replace_lost_ones(
    hosts: str, silent: str, before: dict[str, int], np: int, left: str, ranks: int
) -> None:
    def parse(text: str) -> tuple[Host, ...]:
        pairs = [word.partition("=") for word in text.split()]
        return tuple(Host(name, int(slots or 0)) for name, _, slots in pairs)

    assert choose_hosts(parse(hosts), silent.split(), before, np) == (parse(left), ranks)


@pytest.mark.parametrize(
    "hosts, ranks, update, end",
    [
        (["a", "b"], 4, 120, "4 ranks on a, b continue after update 120"),
        (["a"], 1, 120, "1 rank on a continues after update 120"),
        (["a", "b"], 2, 0, "2 ranks on a, b start from the beginning, because no checkpoint had been saved yet"),
        (["a"], 1, 0, "1 rank on a starts from the beginning, because no checkpoint had been saved yet"),
    ],
)
def test_the_line_that_announces_a_restart(hosts: list[str], ranks: int, update: int, end: str) -> None:
    assert describe_restart(1, 3, "host c was lost", hosts, ranks, update) == f"restart 1 of 3: host c was lost; {end}"
