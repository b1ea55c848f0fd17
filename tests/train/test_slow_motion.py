"""A cluster in slow motion: what is replayed, over which links, and that a lost overlap is seen."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cpuft.config import ReplayConfig, format_arguments, parse_arguments
from cpuft.errors import CpuftError
from cpuft.launch.scaling import plan_case
from cpuft.record import (
    GradientSizes,
    GradientTime,
    Interval,
    LayerTimesLine,
    ScalingLine,
    format_line,
    parse_lines,
)
from cpuft.train.slow_motion import (
    LEAST_SLOWDOWN,
    MOST_BUSY,
    RankTimes,
    _gather,
    choose_slowdown,
    deal_tokens,
    find_hidden_share,
    make_replay,
    plan_limit,
    plan_link,
    scale_times,
    summarise,
)
from tests.records import LAYER_TIMES, make_record

RECORD = replace(
    make_record(gradient_sizes=GradientSizes(590_592, 384, tokens={"1": 600.0, "2": 1000.0, "4": 1700.0})),
    layer_times=LAYER_TIMES,
)


def make_times(ready: list[float]) -> LayerTimesLine:
    """A step of 0.3 s, whose gradients of 256 KiB become ready at these seconds of its backward pass of 0.2 s."""
    gradients = [
        GradientTime(f"layer{number}", [64, 1024], "float32", seconds, -1.0, False)
        for number, seconds in enumerate(ready)
    ]
    return LayerTimesLine(gradients, 16, 0.0, 0.1, 0.2, 0.2, 0.0)


def measure(folder: Path, times: LayerTimesLine, config: ReplayConfig) -> subprocess.CompletedProcess[str]:
    record = make_record(gradient_sizes=GradientSizes(8 * 65536))
    folder.mkdir()
    path = folder / "record.jsonl"
    path.write_text("".join(f"{format_line(line)}\n" for line in (record.header, times)))
    step = plan_case(str(path), config, as_root=os.geteuid() == 0)
    return subprocess.run(step.command, capture_output=True, text=True, timeout=120)


def read_line(done: subprocess.CompletedProcess[str]) -> ScalingLine:
    assert done.returncode == 0, done.stderr
    (line,) = parse_lines(done.stdout, "output")
    assert isinstance(line, ScalingLine)
    return line


def test_messages_hide_behind_the_backward_pass_unless_all_gradients_come_at_its_end(tmp_path: Path) -> None:
    # 2 MiB by a ring of three take 0.1 s at 224 Mbit/s: half of the backward pass.
    config = ReplayConfig(ranks=3, bits_per_second=224_000_000, updates=3, slowdown=6.0)
    spread = read_line(measure(tmp_path / "spread", make_times([0.02 * n for n in range(1, 9)]), config))
    late = read_line(measure(tmp_path / "late", make_times([0.2] * 8), config))
    assert spread.ideal_seconds == pytest.approx(0.3)
    assert spread.bytes_per_step == pytest.approx(8 * 65536 * 4, rel=0.01)
    assert spread.waiting < 0.12
    assert 0.17 < late.waiting < 0.35
    assert {one.name for one in spread.intervals} == {"forward", "backward", "update", "all_reduce", "all_to_all"}
    assert not list(Path("/sys/class/net").glob("rank*")), "the simulated links have ended with their processes"


def test_int8_is_sent_during_the_backward_pass_as_well(tmp_path: Path) -> None:
    # An eighth of a quarter of the bytes at a quarter of the rate: each of two stages of the last bucket takes 0.006 s.
    config = ReplayConfig(ranks=3, bits_per_second=56_000_000, grad_compression="int8", updates=3, slowdown=6.0)
    spread = read_line(measure(tmp_path / "spread", make_times([0.02 * n for n in range(1, 9)]), config))
    assert spread.bytes_per_step == pytest.approx(8 * 65536 * 260 / 256, rel=0.02)
    assert spread.waiting < 0.12


def test_a_slowdown_too_small_for_this_machine_is_refused_with_one_that_fits() -> None:
    config, replayed = make_replay(RECORD, ReplayConfig(grad_compression="bf16"))
    seconds = [0.4, 0.5]
    found = [RankTimes(seconds, 0.1, 2 * MOST_BUSY * sum(seconds) * (os.cpu_count() or 1), 1e6, 0.5, [])] * 4
    with pytest.raises(CpuftError, match=r"give --slowdown [0-9]+, or fewer ranks with --np"):
        summarise(config, replayed, 1.0, found)


def test_a_summary_has_the_slowest_rank_of_each_step_and_divides_by_the_slowdown() -> None:
    config, replayed = make_replay(RECORD, ReplayConfig(ranks=2, grad_compression="bf16", cores=0.5))
    one = RankTimes([4.0, 5.0, 9.0], 0.02, 0.3, 1e6, 0.5, [Interval("forward", 0.0, 1.0)])
    line = summarise(config, replayed, 10.0, [one, replace(one, step_seconds=[4.5, 4.0, 3.0])])
    assert line.step_seconds == pytest.approx(0.5)
    assert line.taken_seconds == pytest.approx(0.5 * 0.02 / 0.5)
    assert line.intervals == [Interval("forward", 0.0, 0.1)]
    assert line.share + line.waiting + line.slowed == pytest.approx(1.0)


def test_the_time_of_coding_is_taken_from_computing_even_while_a_rank_waits() -> None:
    config, replayed = make_replay(RECORD, ReplayConfig(ranks=2, grad_compression="int8", cores=2), 1e-9)
    layers = sum(math.prod(one.shape) for one in replayed.times.gradients if not one.by_rows)
    (row,) = (one.shape[1] for one in replayed.times.gradients if one.by_rows)
    # This rank's rows are encoded, and the means of all rows are decoded.
    assert 0 < replayed.own_tokens < replayed.tokens
    rows = (replayed.own_tokens + replayed.tokens) // 2
    assert replayed.coding_seconds == pytest.approx(1e-9 * (layers + rows * row))
    cpu = 3 * replayed.coding_seconds
    found = [RankTimes([4.0], cpu, 0.3, 1e6, 0.25, [])] * 2
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
    config, replayed = make_replay(RECORD, ReplayConfig(ranks=4, grad_compression="int8", compute_scale=2.0))
    assert replayed.step_seconds == pytest.approx(2 * 0.321)
    assert replayed.times.gradients[1].ready_seconds == pytest.approx(0.3)
    assert replayed.tokens == 1700
    assert config.grad_compression == replayed.config.grad_compression == "int8"
    assert scale_times(LAYER_TIMES, 1.0) == LAYER_TIMES


@pytest.mark.parametrize(("rate", "compression"), [(100 * 10**9, "bf16"), (2 * 10**9, "int8"), (10**7, "powersgd")])
def test_auto_is_what_a_launch_would_choose_for_the_link(rate: int, compression: str) -> None:
    config, _ = make_replay(RECORD, ReplayConfig(bits_per_second=rate, grad_compression="auto"))
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


def test_a_record_without_times_names_the_option_that_records_them() -> None:
    with pytest.raises(CpuftError, match="--record-layer-times"):
        make_replay(make_record(), ReplayConfig())


def test_the_slowdown_grows_with_the_ranks_and_has_a_least_value() -> None:
    config, replayed = make_replay(RECORD, ReplayConfig(ranks=2, grad_compression="bf16", compute_scale=10.0))
    assert choose_slowdown(config, replayed, cores=2) == LEAST_SLOWDOWN
    many = choose_slowdown(replace(config, ranks=250), replayed, cores=1)
    assert many > LEAST_SLOWDOWN
    # With many cores, the time in which a rank is woken counts: 249 * 2 * 3 messages of 1 ms are 2 % of the step.
    late = choose_slowdown(replace(config, ranks=250), replayed, cores=64)
    assert LEAST_SLOWDOWN < late < many
    assert choose_slowdown(replace(config, ranks=250), replayed, cores=128) == late
    assert late * replayed.step_seconds == pytest.approx(1.494 / 0.02, rel=0.02)


def test_only_time_in_which_a_rank_does_not_wait_counts_as_hidden() -> None:
    messages = [Interval("all_reduce", 1.0, 2.0, 100), Interval("all_reduce", 1.5, 3.0, 100)]
    assert find_hidden_share([Interval("forward", 0.0, 9.0), *messages], 0.5) == pytest.approx(0.75)
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


def test_a_case_is_described_by_arguments_alone() -> None:
    config = ReplayConfig(ranks=8, bits_per_second=3 * 10**8, grad_compression="int8", slowdown=12.5)
    assert parse_arguments(ReplayConfig, format_arguments(config)) == config
    command = plan_case("/runs/a/record.jsonl", config, as_root=False).command
    assert command[:4] == ("setpriv", "--pdeathsig", "KILL", "unshare")
    assert "--map-root-user" in command
    assert command[command.index(sys.executable) :][:4] == (
        sys.executable, "-m", "cpuft.train.slow_motion", "/runs/a/record.jsonl",
    )  # fmt: skip
