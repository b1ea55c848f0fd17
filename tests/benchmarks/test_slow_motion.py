"""A cluster in slow motion: what is replayed, over which links, and that a lost overlap is seen."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.record import GradientSizes, format_line
from scripts.benchmarks.bench_slow_motion import format_row, list_cases, measure, parse_arguments
from scripts.benchmarks.slow_motion import (
    LEAST_SLOWDOWN,
    MOST_BUSY,
    Case,
    RankTimes,
    Result,
    _gather,
    choose_slowdown,
    deal_tokens,
    find_hidden_share,
    make_replay,
    plan_command,
    plan_limit,
    plan_link,
    scale_times,
    summarise,
)
from scripts.benchmarks.step_times import FILE_NAME, GradientTime, StepTimes, TimedRecord
from tests.benchmarks.timed import LAYER_TIMES, time_record
from tests.records import make_record

RECORD = time_record(
    make_record(gradient_sizes=GradientSizes(590_592, 384, tokens={"1": 600.0, "2": 1000.0, "4": 1700.0}))
)


def make_times(ready: list[float]) -> StepTimes:
    """A step of 0.3 s, whose gradients of 256 KiB become ready at these seconds of its backward pass of 0.2 s."""
    gradients = [
        GradientTime(f"layer{number}", [64, 1024], "float32", seconds, False) for number, seconds in enumerate(ready)
    ]
    return StepTimes(gradients, 16, 0.0, 0.1, 0.2, 0.2, 0.0)


def replay(folder: Path, times: StepTimes, case: Case) -> Result:
    record = make_record(gradient_sizes=GradientSizes(8 * 65536))
    folder.mkdir()
    path = folder / "record.jsonl"
    path.write_text(f"{format_line(record.header)}\n")
    (folder / FILE_NAME).write_text(json.dumps(asdict(times)))
    (result,) = measure(str(path), [case])
    return result


@pytest.mark.alone
def test_messages_hide_behind_the_backward_pass_unless_all_gradients_come_at_its_end(tmp_path: Path) -> None:
    # 2 MiB by a ring of three take 0.1 s at 224 Mbit/s: half of the backward pass.
    config = Case(ranks=3, bits_per_second=224_000_000, updates=3, slowdown=6.0)
    spread = replay(tmp_path / "spread", make_times([0.02 * n for n in range(1, 9)]), config)
    late = replay(tmp_path / "late", make_times([0.2] * 8), config)
    assert spread.ideal_seconds == pytest.approx(0.3)
    assert spread.bytes_per_step == pytest.approx(8 * 65536 * 4, rel=0.01)
    assert spread.waiting < 0.12
    assert 0.17 < late.waiting < 0.35
    assert not list(Path("/sys/class/net").glob("rank*")), "the simulated links have ended with their processes"


@pytest.mark.alone
def test_int8_is_sent_during_the_backward_pass_as_well(tmp_path: Path) -> None:
    # An eighth of a quarter of the bytes at a quarter of the rate: each of two stages of the last bucket takes 0.006 s.
    config = Case(ranks=3, bits_per_second=56_000_000, grad_compression="int8", updates=3, slowdown=6.0)
    spread = replay(tmp_path / "spread", make_times([0.02 * n for n in range(1, 9)]), config)
    assert spread.bytes_per_step == pytest.approx(8 * 65536 * 260 / 256, rel=0.02)
    assert spread.waiting < 0.12


def test_a_slowdown_too_small_for_this_machine_is_refused_with_one_that_fits() -> None:
    config, replayed = make_replay(RECORD, Case(grad_compression="bf16"))
    seconds = [0.4, 0.5]
    found = [RankTimes(seconds, 0.1, 2 * MOST_BUSY * sum(seconds) * (os.cpu_count() or 1), 1e6, 0.5)] * 4
    with pytest.raises(CpuftError, match=r"give --slowdown [0-9]+, or fewer ranks with --np"):
        summarise(config, replayed, 1.0, found)


def test_a_summary_has_the_slowest_rank_of_each_step_and_divides_by_the_slowdown() -> None:
    config, replayed = make_replay(RECORD, Case(ranks=2, grad_compression="bf16", cores=0.5))
    one = RankTimes([4.0, 5.0, 9.0], 0.02, 0.3, 1e6, 0.5)
    line = summarise(config, replayed, 10.0, [one, replace(one, step_seconds=[4.5, 4.0, 3.0])])
    assert line.step_seconds == pytest.approx(0.5)
    assert line.taken_seconds == pytest.approx(0.5 * 0.02 / 0.5)
    assert line.share + line.waiting + line.slowed == pytest.approx(1.0)


def test_the_time_of_coding_is_taken_from_computing_even_while_a_rank_waits() -> None:
    config, replayed = make_replay(RECORD, Case(ranks=2, grad_compression="int8", cores=2), 1e-9)
    layers = sum(math.prod(one.shape) for one in replayed.times.gradients if not one.by_rows)
    (row,) = (one.shape[1] for one in replayed.times.gradients if one.by_rows)
    # This rank's rows are encoded, and the means of all rows are decoded.
    assert 0 < replayed.own_tokens < replayed.tokens
    rows = (replayed.own_tokens + replayed.tokens) // 2
    assert replayed.coding_seconds == pytest.approx(1e-9 * (layers + rows * row))
    cpu = 3 * replayed.coding_seconds
    found = [RankTimes([4.0], cpu, 0.3, 1e6, 0.25)] * 2
    taken = summarise(config, replayed, 10.0, found).taken_seconds
    assert taken == pytest.approx((replayed.coding_seconds + 0.25 * 2 * replayed.coding_seconds) / 2)
    # Coding cannot take more than all of communication.
    found = [replace(found[0], cpu_seconds=replayed.coding_seconds / 2)] * 2
    assert summarise(config, replayed, 10.0, found).taken_seconds == pytest.approx(replayed.coding_seconds / 4)


# The third case has too few tokens of one rank to name all of them, and the last one too many ranks to share the rest.
@pytest.mark.parametrize(
    "tokens, own, ranks, dealt",
    [(2700, 1050, 4, 1050), (91, 31, 3, 31), (90, 20, 3, 30), (7, 7, 2, 7), (5, 5, 1, 5), (3, 2, 64, 3)],
)
def test_ranks_share_some_tokens_and_have_others_alone(tokens: int, own: int, ranks: int, dealt: int) -> None:
    found = deal_tokens(tokens, own, ranks)
    assert [len(one) for one in found] == [dealt] * ranks
    assert torch.unique(torch.cat(found)).tolist() == list(range(tokens))
    assert all(len(torch.unique(one)) == len(one) for one in found)


def test_a_rank_replays_a_scaled_step_and_the_rows_of_the_update() -> None:
    config, replayed = make_replay(RECORD, Case(ranks=4, grad_compression="int8", compute_scale=2.0))
    assert replayed.step_seconds == pytest.approx(2 * 0.321)
    assert replayed.times.gradients[1].ready_seconds == pytest.approx(0.3)
    assert replayed.tokens == 1700
    assert config.grad_compression == replayed.config.grad_compression == "int8"
    assert scale_times(LAYER_TIMES, 1.0) == LAYER_TIMES


@pytest.mark.parametrize(("rate", "compression"), [(100 * 10**9, "bf16"), (2 * 10**9, "int8"), (10**7, "powersgd")])
def test_auto_is_what_a_launch_would_choose_for_the_link(rate: int, compression: str) -> None:
    config, _ = make_replay(RECORD, Case(bits_per_second=rate, grad_compression="auto"))
    assert config.grad_compression == compression


def _end_with(code: int, pipe: Connection) -> None:
    """End like a rank that the kernel kills (code 9), or that ends by itself."""
    if code == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


@pytest.mark.parametrize(
    "codes, told",
    [((75, 9), "rank 1 was killed, probably because this machine has too little memory"), ((75, 0), "(exit code 75)")],
)
def test_a_rank_that_ends_without_a_result_is_explained(codes: tuple[int, int], told: str) -> None:
    context = multiprocessing.get_context("fork")
    pipes, processes = list[Connection](), list[BaseProcess]()
    for code in codes:
        own, other = context.Pipe()
        processes.append(context.Process(target=_end_with, args=(code, other), daemon=True))
        processes[-1].start()
        other.close()
        pipes.append(own)
    with pytest.raises(CpuftError, match=f"{re.escape(told)}.*give fewer hosts with --np"):
        _gather(pipes, time.monotonic() + 10, processes)


def test_a_record_without_times_names_the_script_that_records_them() -> None:
    with pytest.raises(CpuftError, match="scripts/record-layer-times"):
        make_replay(time_record(make_record(), None), Case())


def test_the_slowdown_grows_with_the_ranks_and_has_a_least_value() -> None:
    config, replayed = make_replay(RECORD, Case(ranks=2, grad_compression="bf16", compute_scale=10.0))
    assert choose_slowdown(config, replayed, cores=2) == LEAST_SLOWDOWN
    many = choose_slowdown(replace(config, ranks=250), replayed, cores=1)
    assert many > LEAST_SLOWDOWN
    # With many cores, the time in which a rank is woken counts: 249 * 2 * 3 messages of 1 ms are 2 % of the step.
    late = choose_slowdown(replace(config, ranks=250), replayed, cores=64)
    assert LEAST_SLOWDOWN < late < many
    assert choose_slowdown(replace(config, ranks=250), replayed, cores=128) == late
    assert late * replayed.step_seconds == pytest.approx(1.494 / 0.02, rel=0.02)


def test_only_time_in_which_a_rank_does_not_wait_counts_as_hidden() -> None:
    messages = [(1.5, 3.0), (1.0, 2.0)]
    assert find_hidden_share(messages, 0.5) == pytest.approx(0.75)
    assert find_hidden_share(messages, 9.0) == 0.0
    assert find_hidden_share([], 0.0) == 0.0


def test_each_rank_has_an_address_and_a_limit_in_both_directions() -> None:
    router, own = plan_link(255, 4711, 2.5)
    assert router[0] == "link add dev rank255 type veth peer name eth0 netns 4711"
    assert "address add 10.64.1.0/32 dev eth0" in own
    assert own[-1] == "route add default via 169.254.1.1 dev eth0 src 10.64.1.0 rto_min 500ms"
    router, own = plan_limit(3, 1e6, 500_000)
    assert router == ["qdisc add dev rank3 root tbf rate 8000000bit burst 16384 limit 500000"]
    assert own == ["qdisc add dev eth0 root tbf rate 8000000bit burst 16384 limit 500000"]
    # A fast link needs a larger burst to reach its rate.
    assert "burst 156250 limit" in plan_limit(3, 15_625_000, 500_000)[0][0]


def test_every_link_and_level_is_measured_with_every_number_of_hosts() -> None:
    words = ["run", "--np", "2,4", "--bandwidth", "1gbit,300mbit", "--grad-compression", "auto,int8", "--cores", "0.5"]
    cases = list_cases(parse_arguments([*words, "--step-seconds", "0.963"]), RECORD)
    assert [(case.ranks, case.bits_per_second, case.grad_compression) for case in cases] == [
        *((2, 10**9, "auto"), (4, 10**9, "auto"), (2, 10**9, "int8"), (4, 10**9, "int8")),
        *((2, 3 * 10**8, "auto"), (4, 3 * 10**8, "auto"), (2, 3 * 10**8, "int8"), (4, 3 * 10**8, "int8")),
    ]
    assert {(case.cores, round(case.compute_scale, 9)) for case in cases} == {(0.5, 3.0)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "1gbit,fast"], "--bandwidth 'fast' is not a bit rate"),
        (["--grad-compression", "int9"], "--grad-compression int9 is not one of auto"),
    ],
)
def test_wrong_lists_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        list_cases(parse_arguments(["run", *words]), RECORD)


@pytest.mark.parametrize("record", [time_record(make_record(), None), time_record(make_record(2))])
def test_a_record_of_several_ranks_or_without_times_is_refused(record: TimedRecord) -> None:
    with pytest.raises(CpuftError, match="is not of one rank with scripts/record-layer-times"):
        list_cases(parse_arguments(["run"]), record)


def test_a_case_that_fails_says_why_and_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="there is no folder"):
        list(measure(str(tmp_path / "record.jsonl"), [Case()] * 2))


def test_a_row_tells_what_is_left_of_the_ideal_and_where_the_rest_went() -> None:
    case = Case(4, 3 * 10**8, "int8", sync_every=8)
    result = Result(case, 6.0, 0.76, 0.90, 0.10, 0.05, 11.98e6)
    assert format_row(result) == [
        *("4", "300", "int8, every 8", "11.98", "50.0", "760.0", "1000.0", "14.0%", "10.0%", "76.0%"),
    ]


def test_all_processes_of_a_case_end_with_the_first_one() -> None:
    command = plan_command("record.jsonl", Case())
    assert command[:4] == ("setpriv", "--pdeathsig", "KILL", "unshare")
    assert "--kill-child" in command
