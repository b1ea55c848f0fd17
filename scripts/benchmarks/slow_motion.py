"""A cluster in slow motion: ranks replay the times of a recorded step by waiting, and send its real messages.

`slow_motion.py RECORD CASE` measures one case of scripts/bench-slow-motion, a `Case` as JSON, and prints a `Result` as
JSON. A rank that only waits needs almost no CPU time, so that a machine with two cores carries dozens of ranks. All
times are multiplied by one factor, and the rates of the links are divided by it, so that the CPU time of the messages
becomes small beside the step. That CPU time is measured apart.

The program must be started in network and process namespaces of its own, as `plan_command` does with unshare: each
rank gets a network namespace, and a link to a router in the namespace of the program. All of them end with their
processes, so that nothing remains on the machine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import math
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from cpuft.comm import liveness, start, take_traffic
from cpuft.comm.compression.int8 import measure_coding_seconds
from cpuft.comm.compression.levels import LinkModel, choose_level
from cpuft.comm.compression.powersgd import EXACT_UPDATES, count_numbers
from cpuft.comm.compression.table import list_levels, resolve_compression
from cpuft.comm.watchdog import Operation, register
from cpuft.compressions import AUTO_COMPRESSIONS, COMPRESSION_FACTS, count_coding_seconds, count_ring_passes
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.network_speed import CPU_SECONDS_PER_BYTE, ETHERNET
from cpuft.serialization import load, parse_json
from cpuft.terminal import DEAD_PEER_SECONDS, detect_dead_peer
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.fast.acceleration import keep_freed_memory
from cpuft.train.ranks import gather_numbers
from scripts.benchmarks.step_times import GradientTime, StepTimes, TimedRecord, read_timed_record

SUMS = [0.0] * 7
"""A rank's numbers for the record in an update: as many as a message of `cpuft.train.control_messages` has."""
Wait = Callable[[], torch.Tensor]
"""Waits for the numbers of all ranks and returns them."""
WARM_UP_UPDATES = 2 + EXACT_UPDATES
"""Updates before those that are measured: powersgd sends int8 blocks before it sends factors."""
CPU_UPDATES = 4
"""Updates in which the CPU time of communication is measured."""
LEAST_SLOWDOWN = 4.0
"""With a smaller factor, the milliseconds in which a process is woken late count as waiting."""
PLANNED_BUSY = 0.25
"""Share of this machine's CPU time that the factor is chosen for."""
MOST_BUSY = 0.6
"""If a measurement uses more than this share of this machine's CPU time, ranks have waited for each other's CPU time,
and its figures say nothing about a network."""
_UPDATE_CPU_SECONDS = 0.1
"""Core seconds in which a rank replays the gradients of an update and handles its messages, without those that depend
on the number of bytes: 8 to 64 ranks with the adapters of MiniLM took 0.08 to 0.12 on an AMD EPYC (family 23, model 1).
"""
_HOP_SECONDS = 1e-3
"""How late a rank is woken by a message of another rank, while a quarter of this machine's CPU time is used."""
_CODING_REPEATS = 5
"""Measurements of the time that encoding takes, of which the shortest counts."""
_LAST_MESSAGES = 3
"""Collectives of an update that no computing hides: the last bucket, embedding rows, and the numbers for the record.
Late rows and numbers are hidden, so that the slowdown is larger than necessary then."""
_MOST_LATE = 0.02
"""Share of a step that such delays may take: they are this machine's, and not those of a network."""
_END_SECONDS = 5.0
"""How long to wait for the exit codes of ranks, to explain why one of them ended."""
_ALIGNMENT = 64
"""Bytes of a cache line."""
_LEAST_BURST_BYTES = 16 * 1024
_BURST_SECONDS = 0.01
"""Size of a burst that a link lets pass at once after it was idle. Linux needs one of some milliseconds to reach the
rate. A larger one would make slow links faster than they are: the factors of a bucket have less than 256 KiB."""
_QUEUE_BYTES = 256 * 1024
_QUEUE_SECONDS = 0.05
"""Size of a link's queue: these bytes, and those that the link sends in these seconds, as on simulated hosts."""
_RESEND_SECONDS = 0.2
"""How long Linux waits at least for the confirmation of a packet before it sends it again (TCP_RTO_MIN)."""
_PORT = 29500
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_NETWORK = "10.64"
_ROUTER = "169.254.1.1"


@dataclass(frozen=True)
class Case:
    """How many ranks replay a recorded step, over which links, and what is sent."""

    ranks: int = 4
    """Each is on a simulated host of its own."""
    bits_per_second: int = 10**9
    """Rate of the link of each host, before it is slowed down."""
    grad_compression: str = "none"
    sync_every: int = 1
    updates: int = 6
    """Number of updates that are measured."""
    slowdown: float = 0.0
    """Factor by which times are multiplied and rates divided; 0 chooses it."""
    compute_scale: float = 1.0
    """Factor by which the recorded times are multiplied first."""
    cores: float = 1.0
    """Cores of a host, which communication shares with computing."""


@dataclass(frozen=True)
class Result:
    """What the ranks of a case needed for a step.

    All seconds are those of hosts that are not slowed down: measured seconds divided by `slowdown`. They are medians
    over the updates, of the slowest rank in each.
    """

    case: Case
    """With the compression that was chosen."""
    slowdown: float
    ideal_seconds: float
    """Seconds of the step of a rank that does not communicate."""
    step_seconds: float
    """Seconds of the step with communication, whose own CPU time is not in it."""
    taken_seconds: float
    """Seconds that the CPU time of communication takes from computing, derived from `cpu_seconds`."""
    cpu_seconds: float
    """CPU seconds of communication in a step of one rank, not divided by `slowdown`."""
    bytes_per_step: float
    """Mean bytes that a rank gave to collectives in a step."""

    @property
    def total_seconds(self) -> float:
        """Seconds of the step with all costs of communication."""
        return self.step_seconds + self.taken_seconds

    @property
    def share(self) -> float:
        """Share of the ideal speed that is left."""
        return self.ideal_seconds / self.total_seconds

    @property
    def waiting(self) -> float:
        """Share of the step in which a rank waits."""
        return (self.step_seconds - self.ideal_seconds) / self.total_seconds

    @property
    def slowed(self) -> float:
        """Share of the step that the CPU time of communication takes from computing."""
        return self.taken_seconds / self.total_seconds


def plan_command(record: str, case: Case) -> tuple[str, ...]:
    """Return the command that measures a case. If it or this program ends, the kernel ends all its ranks and links.

    A user who is not root makes network namespaces inside a user namespace of their own.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    namespaces = (*user, "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
    inside = (sys.executable, __file__, record, json.dumps(dataclasses.asdict(case)))
    return ("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, *inside)


@dataclass(frozen=True)
class Replay:
    """What a rank replays: the times of a step, as they are on hosts that are not slowed down, and what is sent."""

    times: StepTimes
    tokens: int
    """Distinct tokens in an update of all ranks, whose embedding rows are sent."""
    own_tokens: int
    """Distinct tokens in an update of one rank."""
    config: TrainConfig
    """How gradients or parameters are sent."""
    coding_seconds: float
    """Core seconds in which a rank encodes and decodes the messages of an update."""

    @property
    def before_seconds(self) -> float:
        """Seconds of a step before its last backward pass."""
        return self.times.data_seconds + self.times.forward_seconds + self.times.backward_seconds - self.last

    @property
    def last(self) -> float:
        """Seconds of the last backward pass."""
        return self.times.last_backward_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without communication."""
        return self.times.data_seconds + self.times.forward_seconds + self.times.backward_seconds + self.update_seconds

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's step."""
        return self.times.update_seconds


def scale_times(times: StepTimes, factor: float) -> StepTimes:
    """Return the times of a step on hosts that need `factor` times as long for it."""
    gradients = [replace(one, ready_seconds=one.ready_seconds * factor) for one in times.gradients]
    return replace(
        times,
        gradients=gradients,
        data_seconds=times.data_seconds * factor,
        forward_seconds=times.forward_seconds * factor,
        backward_seconds=times.backward_seconds * factor,
        last_backward_seconds=times.last_backward_seconds * factor,
        update_seconds=times.update_seconds * factor,
    )


class Timer:
    """Waits until moments that are counted from a start. `factor` 0 means that nothing waits."""

    def __init__(self, factor: float) -> None:
        self.factor, self.origin = factor, time.monotonic()

    def begin(self) -> None:
        """Count from now on."""
        self.origin = time.monotonic()

    def wait_until(self, seconds: float) -> None:
        """Wait until `seconds` times the factor have passed since the last `begin`; return at once if they have."""
        remaining = self.origin + seconds * self.factor - time.monotonic()
        if self.factor and remaining > 0:
            time.sleep(remaining)


class _ReplayedGradient(torch.autograd.Function):
    """Passes a number on; its backward pass waits, and then returns a gradient for one parameter."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, parameter: torch.Tensor, make: Callable[[], torch.Tensor]) -> Any:
        ctx.make = make
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], ctx.make(), None


@dataclass(frozen=True)
class SharedNumbers:
    """Numbers in memory that all ranks on this machine share, so that it holds more of them."""

    noise: dict[str, torch.Tensor]
    """Random numbers by the name of their dtype: one-dimensional. Each gradient is a view of their beginning."""
    zeros: mmap.mmap
    """The memory of all parameters. Ranks write nothing but zeros to it."""


def share_numbers(gradients: Sequence[GradientTime], ranks: int) -> SharedNumbers:
    """Return the numbers for ranks that are forked afterwards; the noise is longer than a gradient by their number."""
    count = max(torch.Size(one.shape).numel() for one in gradients) + ranks
    memory = mmap.mmap(-1, sum(_count_weight_bytes(one) for one in gradients))
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0))
    by_dtype = {dtype: noise.to(getattr(torch, dtype)) for dtype in {one.dtype for one in gradients}}
    return SharedNumbers(by_dtype, memory)


def _count_weight_bytes(gradient: GradientTime) -> int:
    """Return the bytes of a parameter's weights, rounded up to whole cache lines."""
    nbytes = torch.Size(gradient.shape).numel() * getattr(torch, gradient.dtype).itemsize
    return -(-int(nbytes) // _ALIGNMENT) * _ALIGNMENT


class ReplayedModel(nn.Module):
    """A model with the parameters of the recorded one, whose backward pass waits instead of computing.

    Parameters
    ----------
    gradients: in the order in which they become ready.
    timer: counts from the begin of the backward pass.
    numbers: of the parameters and their gradients.
    """

    def __init__(self, gradients: Sequence[GradientTime], timer: Timer, numbers: SharedNumbers) -> None:
        super().__init__()
        self._gradients, self._timer, self._noise = gradients, timer, numbers.noise
        self._embedding: nn.Embedding | None = None
        self._parameters_by_name = nn.ParameterDict()
        # A model lists its parameters from the first layer on, which is the last one to get its gradients.
        begin = 0
        for number, one in reversed(list(enumerate(gradients))):
            dtype, count = getattr(torch, one.dtype), torch.Size(one.shape).numel()
            # Each is a block of memory of its own, as in the recorded model: a block is never divided between buckets.
            weight = nn.Parameter(
                torch.frombuffer(numbers.zeros, dtype=dtype, count=count, offset=begin).view(one.shape)
            )
            begin += _count_weight_bytes(one)
            if one.by_rows:
                self._embedding = nn.Embedding(one.shape[0], one.shape[1], _weight=weight)
            else:
                self._parameters_by_name[str(number)] = weight

    def get_input_embeddings(self) -> nn.Embedding | None:
        """Return the embedding whose gradient is exchanged by rows, or None."""
        return self._embedding

    def _find_parameter(self, number: int) -> torch.Tensor:
        if self._gradients[number].by_rows:
            assert self._embedding is not None
            return self._embedding.weight
        parameter: torch.Tensor = self._parameters_by_name[str(number)]
        return parameter

    def forward(self) -> torch.Tensor:
        """Return a number, of which every parameter has a gradient. It does not wait."""
        untyped: Any = _ReplayedGradient
        number = torch.zeros((), requires_grad=True)
        # The function that is called last is the first one in the backward pass.
        for index in reversed(range(len(self._gradients))):
            made = partial(self._make_gradient, index)
            number = untyped.apply(number, self._find_parameter(index), made)
        return number

    def _make_gradient(self, number: int) -> torch.Tensor:
        one = self._gradients[number]
        self._timer.wait_until(one.ready_seconds)
        return self._noise[one.dtype][: torch.Size(one.shape).numel()].view(one.shape)


def deal_tokens(tokens: int, own: int, ranks: int) -> list[torch.Tensor]:
    """Return the tokens of each rank, int64: `tokens` different ones together, and about `own` on each of the ranks.

    Some tokens are on all ranks, and each of the others is on one rank: these stand for frequent and for rare words.
    """
    if ranks == 1:
        return [torch.arange(tokens)]
    rare = max(0, tokens - own) // (ranks - 1)
    common = tokens - rare * ranks
    if common < 0:
        rare, common = tokens // ranks, tokens % ranks
    return [
        torch.cat([torch.arange(common), torch.arange(common + rank * rare, common + (rank + 1) * rare)])
        for rank in range(ranks)
    ]


@dataclass
class RankTimes:
    """What one rank measured."""

    step_seconds: list[float]
    """Seconds of each measured step, in slow motion."""
    cpu_seconds: float
    """CPU seconds of communication in a step."""
    total_cpu_seconds: float
    """CPU seconds of all measured steps."""
    nbytes: float
    """Mean bytes that the rank gave to collectives in a step."""
    hidden: float
    """Share of the time of messages, between 0 and 1, in which the rank was not waiting."""


def replay(
    replayed: Replay, slowdown: float, updates: int, numbers: SharedNumbers, limit_link: Callable[[], None]
) -> RankTimes:
    """Replay the updates of one rank, which belongs to torch's default group. Collective.

    Its link is not limited at first, and the CPU time of communication is measured then: over a slow link, messages
    arrive in more and smaller pieces, which takes more CPU time than on the hosts that are simulated.

    Parameters
    ----------
    numbers: see `ReplayedModel`.
    limit_link: limits the links of all ranks to their rates.
    """
    timer = Timer(slowdown)
    model = ReplayedModel(replayed.times.gradients, timer, numbers)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.0)
    exchange = choose_exchange(replayed.config, dist.get_world_size())(model, optimizer, replayed.config, "fp32")
    tokens, sums = deal_tokens(replayed.tokens, replayed.own_tokens, dist.get_world_size()), list[Wait]()
    period = replayed.config.sync_every
    for update in range(WARM_UP_UPDATES * period):
        _run_update(exchange, replayed, Timer(0.0), update + 1, tokens, sums)
    cpu_seconds = _measure_cpu(exchange, replayed, tokens, sums)
    limit_link()
    seconds, messages = list[float](), list[tuple[float, float]]()
    take_traffic()
    dist.barrier()
    # Whole periods are measured, after one that is not: an average of parameters is waited for one period after it has
    # been sent, and so are late embedding rows.
    count = sent_updates = -(-updates // period) * period
    for update in range(period):
        _run_update(exchange, replayed, timer, update + 1, tokens, sums)
    cpu = time.process_time()
    sent_updates += period  # some of their messages are sent later, so the bytes of all updates are counted
    end = register.end

    def note_end(operation: Operation) -> None:
        if operation.nbytes and id(operation) in register.pending:
            messages.append((operation.started, time.monotonic()))
        end(operation)

    with patch.object(register, "end", note_end):
        for update in range(count):
            begun = time.monotonic()
            _run_update(exchange, replayed, timer, update + 1, tokens, sums)
            seconds.append(time.monotonic() - begun)
    total_cpu = time.process_time() - cpu
    _finish_messages(exchange, sums)
    nbytes = take_traffic() / sent_updates
    ideal = replayed.step_seconds * slowdown
    hidden = find_hidden_share(messages, max(0.0, sum(seconds) - ideal * count))
    return RankTimes(seconds, cpu_seconds, total_cpu, nbytes, hidden)


def _finish_messages(exchange: Exchange, sums: list[Wait]) -> None:
    """Wait until no message of this rank is under way, nor the numbers for the record."""
    exchange.finish_messages()
    while sums:
        sums.pop(0)()


def _measure_cpu(exchange: Exchange, replayed: Replay, tokens: Sequence[torch.Tensor], sums: list[Wait]) -> float:
    """Return the CPU seconds of communication in an update: those of updates with it, less those without it."""
    count = CPU_UPDATES * replayed.config.sync_every
    dist.barrier()
    begin = time.process_time()
    for update in range(count):
        _run_update(exchange, replayed, Timer(0.0), update + 1, tokens, sums)
    _finish_messages(exchange, sums)
    dist.barrier()
    between = time.process_time()
    for _ in range(count):
        exchange.begin_pass(is_last=False)
        torch.autograd.backward(exchange.forward_model())
        exchange.clear_gradients()
    return max(0.0, 2 * between - begin - time.process_time()) / count


def _run_update(
    exchange: Exchange, replayed: Replay, timer: Timer, update: int, tokens: Sequence[torch.Tensor], sums: list[Wait]
) -> None:
    """Run one update as `cpuft.train.loop.train` does.

    `sums`: the function that waits for the numbers of the update before. That of this update takes its place.
    """
    timer.begin()
    timer.wait_until(replayed.before_seconds)

    # The timer counts from the begin of the backward pass while gradients become ready.
    timer.begin()
    exchange.begin_pass(is_last=True)
    torch.autograd.backward(exchange.forward_model())
    timer.wait_until(replayed.last)

    exchange.average_gradients(lambda: tokens)

    timer.begin()
    timer.wait_until(replayed.update_seconds)
    exchange.clear_gradients()
    exchange.synchronize_parameters(update % replayed.config.sync_every == 0, wait=False)

    # The control message, which the ranks of a training read in the next update. With updates shorter than a second, a
    # training sends fewer.
    sums.append(gather_numbers(SUMS))
    while len(sums) > 1:
        sums.pop(0)()


def find_hidden_share(messages: Sequence[tuple[float, float]], waiting_seconds: float) -> float:
    """Return the share of the time with messages under way in which the rank was not waiting: 0 to 1, 0 for none.

    Only in this time does the CPU time of sending and receiving take something from computing. `messages`: when each
    began and ended.
    """
    seconds, until = 0.0, -math.inf
    for begin, end in sorted(messages):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return min(1.0, max(0.0, 1.0 - waiting_seconds / seconds)) if seconds else 0.0


# The simulated network: a router, with a link to each rank's network namespace.


def address_of(rank: int) -> str:
    """Return the address of a rank: 10.64.0.1 for rank 0, and so on."""
    return f"{_NETWORK}.{(rank + 1) // 256}.{(rank + 1) % 256}"


def plan_link(rank: int, process: int, slowdown: float) -> tuple[list[str], list[str]]:
    """Return the commands that connect a rank to the router: those of the router, and those of the rank's namespace.

    Each is a line for `ip -batch`. Routes instead of a bridge, because the kernel remembers the neighbours of all
    namespaces in one table, in which hosts of one bridge would all need entries of each other.

    The time after which TCP sends a packet again is multiplied by the slowdown, too. Otherwise, packets that only wait
    in the queue of a slow link would count as lost and be sent twice, and TCP would send less at a time.

    Parameters
    ----------
    process: a process in the rank's namespace.
    slowdown: the factor by which all times are multiplied.
    """
    patience = f"rto_min {round(1e3 * _RESEND_SECONDS * slowdown)}ms"
    address, link = address_of(rank), f"rank{rank}"
    router = [
        f"link add dev {link} type veth peer name eth0 netns {process}",
        f"address add {_ROUTER}/32 dev {link}",
        f"link set dev {link} up",
        f"route add {address}/32 dev {link}",
    ]
    own = [
        "link set dev lo up",
        f"address add {address}/32 dev eth0",
        "link set dev eth0 up",
        f"route add {_ROUTER}/32 dev eth0 scope link",
        f"route add default via {_ROUTER} dev eth0 src {address} {patience}",
    ]
    return router, own


def plan_limit(rank: int, bytes_per_second: float, queue_bytes: int) -> tuple[list[str], list[str]]:
    """Return the commands that limit a rank's link: for the end of the router, and for the rank's own end.

    Each is a line for `tc -batch`.

    Parameters
    ----------
    bytes_per_second: rate of the link in each direction.
    queue_bytes: size of the link's queue.
    """
    burst = max(_LEAST_BURST_BYTES, round(bytes_per_second * _BURST_SECONDS))
    limit = f"root tbf rate {max(1, round(bytes_per_second * 8))}bit burst {burst} limit {queue_bytes}"
    return [f"qdisc add dev rank{rank} {limit}"], [f"qdisc add dev eth0 {limit}"]


def _run_commands(program: str, commands: Sequence[str]) -> None:
    """Run commands of ip or tc. Raises CpuftError: one fails."""
    done = subprocess.run([program, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode:
        raise CpuftError(
            f"the simulated network cannot be made, because {program} failed ({done.stderr.strip()[:200]}): "
            f"install iproute2, and check that the kernel has veth and tbf"
        )


def _call_libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name} failed")


def _run_rank(
    rank: int,
    size: int,
    pipe: Connection,
    slowdown: float,
    case: Case,
    replayed: Replay,
    numbers: SharedNumbers,
) -> None:
    """Run a rank in its own network namespace; the pipe gets a RankTimes, or the text of an error."""
    try:
        _call_libc("prctl", _PR_SET_PDEATHSIG, _SIGKILL)
        _call_libc("unshare", _CLONE_NEWNET)
        pipe.send("ready")
        _run_commands("ip", pipe.recv())
        pipe.send("connected")
        pipe.recv()
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": address_of(0), "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        timeout = 120.0 + 20 * replayed.step_seconds * slowdown
        store = TCPStore(address_of(0), _PORT, size, rank == 0, timedelta(seconds=timeout))
        # Probes of a connection wait in queues as slow as all other messages.
        patient = partial(detect_dead_peer, seconds=DEAD_PEER_SECONDS * slowdown)
        with patch.object(liveness, "detect_dead_peer", patient):
            start("gloo", timeout, PrefixStore("world", store), rank, size)

        def limit_link() -> None:
            pipe.send("measured")
            _run_commands("tc", pipe.recv())
            pipe.send("limited")
            pipe.recv()

        # Each rank's gradients begin at another place, so that no two ranks have the same.
        own = replace(numbers, noise={dtype: noise[rank:] for dtype, noise in numbers.noise.items()})
        found = replay(replayed, slowdown, case.updates, own, limit_link)
        dist.barrier()
        pipe.send(found)
        # The store of rank 0 must not end before the others have.
        pipe.recv()
    except Exception as error:  # the process ends without a traceback
        pipe.send(f"rank {rank}: {str(error) or type(error).__name__}")
    finally:
        os._exit(0)


def run_ranks(case: Case, replayed: Replay, slowdown: float) -> list[RankTimes]:
    """Start all ranks, each with a simulated link to the others, and return what they have measured, in their order.

    Raises CpuftError: a rank failed, or they need more than three times as long as planned.
    """
    context, size = multiprocessing.get_context("fork"), case.ranks
    seconds = 120 + 3 * (case.updates + 2 * case.sync_every) * slowdown * (
        replayed.step_seconds + _message_seconds(case, replayed)
    )
    end = time.monotonic() + seconds
    rate = case.bits_per_second / 8
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    numbers = share_numbers(replayed.times.gradients, size)
    # torch's optimizers import this. Ranks share the memory of what has been imported before they are forked, as
    # long as the garbage collector does not write to its objects.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    for rank in range(size):
        own, other = context.Pipe()
        given = (rank, size, other, slowdown, case, replayed, numbers)
        process = context.Process(target=_run_rank, args=given, daemon=True)
        process.start()
        other.close()
        pipes.append(own)
        processes.append(process)
    gc.unfreeze()
    _gather(pipes, end, processes)
    queue = _QUEUE_BYTES + round(rate * _QUEUE_SECONDS)
    links = [plan_link(rank, one.pid or 0, slowdown) for rank, one in enumerate(processes)]
    limits = [plan_limit(rank, rate / slowdown, queue) for rank in range(size)]
    _run_commands("ip", ["link set dev lo up", *(command for router, _ in links for command in router)])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _send(pipes, [own for _, own in links])
    _gather(pipes, end, processes)
    _send(pipes, ["start"] * size)
    _gather(pipes, end, processes)
    _run_commands("tc", [command for router, _ in limits for command in router])
    _send(pipes, [own for _, own in limits])
    _gather(pipes, end, processes)
    _send(pipes, ["go on"] * size)
    found = _gather(pipes, end, processes)
    _send(pipes, ["end"] * size)
    return found


def _send(pipes: Sequence[Connection], messages: Sequence[object]) -> None:
    for pipe, message in zip(pipes, messages, strict=True):
        pipe.send(message)


def _gather(pipes: Sequence[Connection], end: float, processes: Sequence[BaseProcess]) -> list[Any]:
    """Receive an object from the pipe of every process.

    Raises CpuftError: it is the text of an error, it does not come in time, or a process has ended without it.
    """
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in found]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise CpuftError(f"{len(waiting)} of {len(pipes)} ranks did not end in time: give fewer hosts with --np")
        for number, pipe in enumerate(pipes):
            if number not in found and pipe in ready:
                try:
                    found[number] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise CpuftError(_explain_end(number, processes)) from None
                if isinstance(found[number], str) and found[number].startswith("rank "):
                    raise CpuftError(_find_killed(processes) or found[number])
    return [found[number] for number in range(len(pipes))]


def _find_killed(processes: Sequence[BaseProcess]) -> str:
    """Return the message for a rank that was killed; empty if there is none.

    If the kernel runs out of memory, it kills one rank, and the others then end by themselves, or with errors of their
    own, perhaps before the first one is noticed.
    """
    for process in processes:
        process.join(_END_SECONDS / len(processes))
    killed = [rank for rank, process in enumerate(processes) if process.exitcode == -_SIGKILL]
    why = "probably because this machine has too little memory: give fewer hosts with --np"
    return f"rank {killed[0]} was killed, {why}" if killed else ""


def _explain_end(rank: int, processes: Sequence[BaseProcess]) -> str:
    """Return the message for a rank that has ended without a result, or for one that has failed, if there is one."""
    if killed := _find_killed(processes):
        return killed
    failed = next((number for number, process in enumerate(processes) if process.exitcode), rank)
    code = processes[failed].exitcode
    return f"rank {failed} ended without a result (exit code {code}): try again, or give fewer hosts with --np"


def _message_seconds(case: Case, replayed: Replay) -> float:
    """Return the seconds in which a rank sends the messages of an update, if nothing else delays them."""
    return 2 * _count_bytes(replayed, case.ranks) / (case.bits_per_second / 8 * ETHERNET)


def _count_bytes(replayed: Replay, ranks: int) -> float:
    """Return about how many bytes a rank gives to collectives in an update."""
    trained = [torch.empty(one.shape, device="meta") for one in replayed.times.gradients if not one.by_rows]
    row = next((one.shape[1] for one in replayed.times.gradients if one.by_rows), 0)
    rows = row * replayed.tokens, row * replayed.own_tokens
    levels = {one.name: one for one in list_levels(trained, rows, ranks, 0.0)}
    level = levels[resolve_compression(replayed.config.grad_compression, "fp32")]
    return level.layer_bytes + level.row_bytes


def choose_slowdown(case: Case, replayed: Replay, cores: int) -> float:
    """Return the factor with which the ranks leave this machine mostly idle, and are not woken late, at least 4.

    Parameters
    ----------
    cores: of this machine.
    """
    # Each byte is sent, received and added, and gradients are copied once more into buckets.
    numbers = sum(torch.Size(one.shape).numel() for one in replayed.times.gradients)
    each = 4 * CPU_SECONDS_PER_BYTE * _count_bytes(replayed, case.ranks) + 4e-9 * numbers
    coding = 2 * replayed.coding_seconds
    step = replayed.step_seconds + _message_seconds(case, replayed) / 2
    busy = case.ranks * (_UPDATE_CPU_SECONDS + each + coding)
    late = 2 * (case.ranks - 1) * _LAST_MESSAGES * _HOP_SECONDS
    return max(LEAST_SLOWDOWN, busy / (PLANNED_BUSY * cores * step), late / (_MOST_LATE * step))


def choose_compression(
    case: Case, times: StepTimes, tokens: int, own_tokens: int, precision: str, coding_seconds: float
) -> str:
    """Return the compression that a launch would choose for these links with --grad-compression auto.

    It is the level with the shortest estimated step, from the bytes of an update, the rate of the links and the
    recorded times.

    Parameters
    ----------
    tokens: distinct ones in an update of all ranks.
    own_tokens: distinct ones in an update of one rank.
    coding_seconds: core seconds to encode and decode one number with int8.
    """
    if case.grad_compression != "auto":
        return case.grad_compression
    trained = [torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta") for one in times.gradients]
    layers = [one for one, time in zip(trained, times.gradients, strict=True) if not time.by_rows]
    row = next((one.shape[1] for one in times.gradients if one.by_rows), 0)
    levels = list_levels(layers, (row * tokens, row * own_tokens), case.ranks, coding_seconds / case.cores)
    names = AUTO_COMPRESSIONS[AUTO_COMPRESSIONS.index(resolve_compression("auto", precision)) :]
    passes = count_ring_passes(case.ranks)
    rate = case.bits_per_second / 8 * ETHERNET
    link = LinkModel(passes / rate, 0.0, passes * CPU_SECONDS_PER_BYTE / case.cores)
    compute = times.forward_seconds + times.backward_seconds
    return choose_level([level for level in levels if level.name in names], compute, link)[0].name


def make_replay(
    record: TimedRecord, case: Case, coding_seconds: float = COMPRESSION_FACTS["int8"].coding_seconds
) -> tuple[Case, Replay]:
    """Return the case with a chosen compression, and what its ranks replay.

    Parameters
    ----------
    coding_seconds: core seconds to encode and decode one number with int8, also on the simulated hosts.

    Raises CpuftError: the record does not have the times of a step.
    """
    if record.layer_times is None:
        raise CpuftError(
            f"{record.path} does not hold when gradients become ready: train again with scripts/record-layer-times"
        )
    times = scale_times(record.layer_times, case.compute_scale)
    rows = next((one.shape[0] for one in times.gradients if one.by_rows), 0)
    tokens, own = (min(rows, round(record.header.gradient_sizes.count_tokens(ranks))) for ranks in (case.ranks, 1))
    # Only the rows of an update's tokens are sent, so that others would only take memory.
    gradients = [replace(one, shape=[tokens, *one.shape[1:]]) if one.by_rows else one for one in times.gradients]
    times = replace(times, gradients=gradients)
    chosen = choose_compression(case, times, tokens, own, record.header.precision, coding_seconds)
    case = replace(case, grad_compression=chosen)
    train = TrainConfig(grad_compression=chosen, sync_every=case.sync_every)
    shapes = [torch.Size(one.shape) for one in times.gradients if not one.by_rows]
    numbers, factors = sum(shape.numel() for shape in shapes), sum(map(count_numbers, shapes))
    row_numbers = sum((tokens + own) // 2 * one.shape[1] for one in times.gradients if one.by_rows)
    coding = count_coding_seconds(chosen, numbers, factors, row_numbers) / case.sync_every
    return case, Replay(times, tokens, own, train, coding * coding_seconds / COMPRESSION_FACTS["int8"].coding_seconds)


def summarise(case: Case, replayed: Replay, slowdown: float, found: Sequence[RankTimes]) -> Result:
    """Return the result of what the ranks have measured.

    Raises CpuftError: they used too much CPU time of this machine.
    """
    steps = [max(one) for one in zip(*(rank.step_seconds for rank in found), strict=True)]
    # With --sync-every, one update in N waits for messages: means over whole periods count, not medians.
    step = statistics.median(steps) if case.sync_every == 1 else statistics.fmean(steps)
    cpu = statistics.fmean(rank.cpu_seconds for rank in found)
    hidden = statistics.fmean(rank.hidden for rank in found)
    # Encoding and decoding always take time from computing. Their CPU time is not multiplied by the slowdown, so that
    # almost none of it is in the measured step.
    coding = min(cpu, replayed.coding_seconds)
    cores = os.cpu_count() or 1
    busy = sum(rank.total_cpu_seconds for rank in found) / (sum(steps) * cores)
    if busy > MOST_BUSY:
        fits = slowdown * busy / PLANNED_BUSY
        raise CpuftError(
            f"{case.ranks} ranks used {busy:.0%} of the CPU time of this machine, so that they waited for cores and "
            f"not for the network: give --slowdown {fits:.0f}, or fewer ranks with --np"
        )
    return Result(
        case,
        slowdown,
        ideal_seconds=replayed.step_seconds,
        step_seconds=step / slowdown,
        taken_seconds=(coding + hidden * (cpu - coding)) / case.cores,
        cpu_seconds=cpu,
        bytes_per_step=statistics.fmean(rank.nbytes for rank in found),
    )


def main(record: str, text: str) -> None:
    """Measure one case and print its result. Raises CpuftError: a rank failed, or this machine is too small."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as the ranks of a training do
    coding = min(measure_coding_seconds() for _ in range(_CODING_REPEATS))
    case, replayed = make_replay(read_timed_record(record), load(Case, parse_json(text)), coding)
    slowdown = case.slowdown or choose_slowdown(case, replayed, os.cpu_count() or 1)
    found = run_ranks(case, replayed, slowdown)
    print(json.dumps(dataclasses.asdict(summarise(case, replayed, slowdown, found))), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CpuftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
