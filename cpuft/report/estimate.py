"""Estimate speed, efficiency and price of a job on N hosts from a run on one rank and the speed of the network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cpuft.compressions import (
    AUTO_COMPRESSIONS,
    AVX512_CODING_SHARE,
    COMPRESSION_FACTS,
    COMPRESSIONS_WITH_FEEDBACK,
    SHARDED_COMPRESSIONS,
    TIE_RATIO,
    count_buckets,
    count_coding_seconds,
    count_ring_passes,
)
from cpuft.errors import CpuftError, counted
from cpuft.network_speed import CPU_SECONDS_PER_BYTE, CPU_SECONDS_PER_MESSAGE, ETHERNET
from cpuft.record import GradientSizes, Link, Measurement, Record
from cpuft.serialization import load, parse_json
from cpuft.terminal import format_table

RING_EFFICIENCY = 0.87
"""Share of a link's rate that the messages of all-reduces use, because ranks wait for each other between them. In slow
motion, int8 between 8 hosts with 20 Mbit/s used this share; 2 and 4 simulated hosts used about 0.88."""
MESSAGE_BYTES = 350
"""Bytes that a message takes on a link besides its own: headers of its last frame, confirmations, and gloo's
announcements of it. Measured in slow motion with adapters on 16, 32 and 64 hosts at 20 Mbit/s, whose messages have 500
to 1,600 bytes."""
LEAST_STEPS = 4
"""Fewest steps after the warm-up that an estimate is made from."""
WORTH = 0.5
"""Additional hosts are worth it if they add at least this share of what they would do alone."""
SIGMAS = 2.0
"""Standard errors of the recorded step that the interval extends to each side."""


@dataclass(frozen=True)
class Network:
    """The network between the hosts."""

    bits_per_second: float
    """Rate of one host: of the wire, or of payload if `measured`."""
    latency_seconds: float
    """Half of the round-trip time of one byte."""
    cpu_seconds_per_byte: float = CPU_SECONDS_PER_BYTE
    """Core seconds per byte that a rank sends."""
    measured: bool = False
    """Whether the rate was measured with payload only, and so already counts the headers of frames."""
    cpu_seconds_per_message: float = CPU_SECONDS_PER_MESSAGE
    """Core seconds per message that a rank sends to its neighbour, without those per byte."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes of payload per second of an all-reduce: `bits_per_second` / 8, or unless `measured` 0.82 of that."""
        return self.bits_per_second / 8 * (1.0 if self.measured else ETHERNET * RING_EFFICIENCY)

    def all_reduce_seconds(self, nbytes: float, members: int) -> float:
        """Return the seconds of a ring all-reduce of `nbytes` bytes between this many ranks; 0 for one rank.

        2(n-1) messages are sent one after another (Patarasuk and Yuan, 2009). Each takes the latency, and has an n-th
        of the bytes, with 350 more unless `measured`. Of a host's ranks, only one sends messages to another host.
        """
        more = 0 if self.measured else MESSAGE_BYTES  # a measured latency contains them
        each = self.latency_seconds + (nbytes / members + more) / self.bytes_per_second
        return 2 * (members - 1) * each


@dataclass(frozen=True)
class UpdateCosts:
    """Times and sizes of one update, from the record of a run on one rank."""

    forward_seconds: float
    """Seconds of loading data and of the forward pass."""
    backward_seconds: float
    update_seconds: float
    error_seconds: float
    """Standard error of the sum of the seconds above."""
    samples: float
    rows: int
    """Examples of the whole training, all epochs together."""
    cores: float
    """Cores of the rank that the times are for: those of its host if it is the only one there."""
    levels: tuple[str, ...]
    """Compression levels that the job may use, from exact to the fewest bytes, such as ("none", "bf16", "int8")."""
    sizes: GradientSizes
    gathered: float = 0.0
    """Bytes of weights that ranks receive from each other in an update if the optimizer is sharded."""
    last_backward: float = 1.0
    """Share of the backward passes of an update that is the last one, in which gradients are sent."""
    ready: tuple[tuple[float, float], ...] = ()
    """When gradients are ready, in order: (share of all numbers that are ready then, share of the last backward pass
    that has passed). Empty if that was not measured, by scripts/record-layer-times: they become ready evenly."""
    ranks_per_host: int = 1
    """Ranks on each host. The times above are those of one of them on its share of the host's cores."""
    coding_share: float = 1.0
    """The core seconds to encode and decode a number on these CPUs, as a share of those in COMPRESSION_FACTS."""

    @property
    def step_seconds(self) -> float:
        """Seconds of an update of one rank alone: `forward_seconds`, `backward_seconds` and `update_seconds`."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    def when_ready(self, share: float) -> float:
        """Return the share of the last backward pass after which `share` of the numbers is ready: that of the first
        entry of `ready` with so many, else of the last entry; `share` itself if `ready` is empty.
        """
        if not self.ready:
            return share
        return next((passed for numbers, passed in self.ready if numbers >= share - 1e-9), self.ready[-1][1])

    def count_members(self, hosts: int, sent_as: str) -> int:
        """Return the number of ranks on `hosts` hosts that send gradients to each other.

        With int8 and powersgd, gradients are averaged within each host first, and only one rank of each host sends.
        """
        return hosts if sent_as in COMPRESSIONS_WITH_FEEDBACK else hosts * self.ranks_per_host

    def sent_numbers(self, hosts: int, sent_as: str) -> tuple[float, float]:
        """Return how many numbers of (gradients, embedding rows) `hosts` hosts send in an update with `sent_as`."""
        tokens = self.sizes.count_tokens(hosts * self.ranks_per_host)
        if sent_as in COMPRESSIONS_WITH_FEEDBACK:  # a host sends only its own rows, and the means of all rows arrive
            tokens = (tokens + self.sizes.count_tokens(self.ranks_per_host)) / 2
        return self.sizes.parameters, tokens * self.sizes.embedding_row

    def sent_bytes(self, hosts: int, sent_as: str) -> tuple[float, float]:
        """Return (bytes of gradients or powersgd's factors, bytes of embedding rows) that an update all-reduces."""
        layers, words = self.sent_numbers(hosts, sent_as)
        facts, sent = COMPRESSION_FACTS[sent_as], self.sizes.factors if sent_as == "powersgd" else layers
        each, of_rows = facts.bytes_per_number, facts.row_bytes_per_number or facts.bytes_per_number
        if sent_as == "powersgd" and self.sizes.factors >= layers:  # all gradients are sent whole
            each = COMPRESSION_FACTS["int8"].bytes_per_number
        return each * sent, of_rows * words


@dataclass(frozen=True)
class Estimate:
    """Estimate for a number of hosts and the recorded batch per rank (weak scaling)."""

    hosts: int
    step_seconds: float
    samples_per_second: float
    """Samples per second of all hosts together."""
    least: float
    most: float
    efficiency: float
    """Samples per second divided by those of as many independent hosts."""
    train_seconds: float
    price: float
    """Price of the whole training, in the currency of the price of a host; 0 if that is unknown."""
    waited_seconds: float
    """Seconds of a step in which communication is not hidden behind the backward pass."""
    taken_seconds: float
    """Seconds of a step that communication takes from computing."""
    sent_as: str = ""
    """Compression level of the gradients: the first of the job's levels that is within 2 % of the fastest one."""


def read_job(record: Record, compression: str = "auto") -> UpdateCosts:
    """Return the job of a record: the times of a step, and the sizes of its gradients.

    The times are means of the steps without the first tenth. `compression` is the only compression level that the job
    may use; `auto` stands for the level of the recorded run, or if that had `auto`, too, for all levels that a launch
    may choose. Raises CpuftError: the run had several ranks, --sync-every or fewer than 4 steps, or lacks the sizes of
    its gradients, or of what `compression` sends.
    """
    header, steady = record.header, record.steps[len(record.steps) // 10 :]
    if (most := max([header.world_size, *(line.world_size for line in record.resumptions)])) != 1:
        raise CpuftError(f"{record.path} ran on {most} ranks: an estimate needs a run with --np 1")
    epochs, every = header.options.get("epochs"), header.options.get("sync_every", 1)
    if type(every) is int and every > 1:
        raise CpuftError(f"{record.path} ran with --sync-every {every}: an estimate needs a run without that option")
    if len(steady) < LEAST_STEPS:
        raise CpuftError(f"{record.path} has {counted(len(record.steps), 'step')}: run {LEAST_STEPS} or more")
    if not header.gradient_sizes.parameters:
        raise CpuftError(f"{record.path} does not hold the sizes of its gradients: run the job again")
    seconds = [one.data_seconds + one.forward_seconds + one.backward_seconds + one.update_seconds for one in steady]
    if not (sum(seconds) > 0 and any(one.samples > 0 for one in steady) and find_cores(record) > 0):
        raise CpuftError(f"{record.path} lacks the times, examples or cores of its steps: give another run")
    return UpdateCosts(
        statistics.mean(line.data_seconds + line.forward_seconds for line in steady),
        statistics.mean(line.backward_seconds for line in steady),
        statistics.mean(line.update_seconds for line in steady),
        statistics.stdev(seconds) / math.sqrt(len(seconds)),
        statistics.mean(line.samples for line in steady),
        round(header.examples * epochs) if isinstance(epochs, (int, float)) else header.examples,
        find_cores(record),
        _find_levels(record, compression),
        header.gradient_sizes,
        _count_gathered_bytes(record),
        coding_share=AVX512_CODING_SHARE if "avx512f" in header.cpu_flags else 1.0,
    )


def _count_gathered_bytes(record: Record) -> float:
    """Return the bytes of all weights as ranks compute with them, or 0 if the optimizer is not sharded."""
    header, options = record.header, record.header.options
    if options.get("shard", "none") == "none":
        return 0.0
    is_fast = options.get("fast_path", True)
    words = header.parameters - header.gradient_sizes.parameters if header.gradient_sizes.embedding_row else 0
    # Embeddings have 4 bytes per weight in any case.
    return (2.0 if is_fast and header.precision == "bf16" else 4.0) * header.gradient_sizes.parameters + 4.0 * words


def _find_levels(record: Record, compression: str) -> tuple[str, ...]:
    """Return the compression levels that a job may use, from exact to the fewest bytes (`read_job`)."""
    asked = str(record.header.options.get("grad_compression", "auto")) if compression == "auto" else compression
    allowed = SHARDED_COMPRESSIONS if _count_gathered_bytes(record) else tuple(COMPRESSION_FACTS)
    known = [level for level in allowed if level != "powersgd" or record.header.gradient_sizes.factors]
    if asked == "auto":
        exact = AUTO_COMPRESSIONS.index("bf16" if record.header.precision == "bf16" else "none")
        return tuple(level for level in AUTO_COMPRESSIONS[exact:] if level in known)
    if asked not in known:
        raise CpuftError(f"the bytes that {asked} sends are not known: give --compression {', '.join(known)}")
    return (asked,)


def find_cores(record: Record) -> float:
    """Return the number of hardware threads that ranks were pinned to, at most a control group's quota; 0: unknown."""
    bound = float(len({cpu for rank in record.header.ranks for cpu in rank.cpus}))
    return min(bound, record.header.cpu_quota or bound)


def scale_cores(job: UpdateCosts, cores: float, ranks_per_host: int = 1) -> UpdateCosts:
    """Return the job for hosts of `cores` cores that these ranks share equally: with half the cores, twice the time."""
    cores /= ranks_per_host
    factor = job.cores / cores
    return replace(
        job,
        forward_seconds=job.forward_seconds * factor,
        backward_seconds=job.backward_seconds * factor,
        update_seconds=job.update_seconds * factor,
        error_seconds=job.error_seconds * factor,
        cores=cores,
        ranks_per_host=ranks_per_host,
    )


def find_network(measured: Sequence[Measurement], sent_as: str) -> Network:
    """Return the network that fits measured all-reduces best, by least squares of relative errors.

    Of several backends, the one with the highest rate counts. CpuftError: there are no all-reduces of two sizes in the
    type, float32 if `sent_as` is "none", else bfloat16.
    """
    dtype = "float32" if sent_as == "none" else "bfloat16"
    rows = [
        m for m in measured if m.operation == "all_reduce" and m.dtype == dtype and m.ranks > 1 and m.median_seconds > 0
    ]
    by_backend = {name: [m for m in rows if m.backend == name] for name in {m.backend for m in rows}}
    fits = {n: _fit(found) for n, found in by_backend.items() if len({m.nbytes for m in found}) > 1}
    if not fits:
        raise CpuftError(f"--link holds no all-reduces of {dtype} in two sizes: measure with cpuft bench comm --np 2")
    return max(fits.values(), key=lambda network: network.bits_per_second)


def read_doctor_links(text: str, path: str) -> Network | None:
    """Return the medians of links in `cpuft doctor --json`; None for another text. CpuftError: no link was measured."""
    try:
        links = load(list[Link], load(dict[str, Any], parse_json(text)).get("links"), "links")
    except ValueError:
        return None
    # A host that went away meanwhile has received nothing.
    measured = [one for one in links if not one.error and one.bits_per_second > 0 and 0 <= one.latency_us < math.inf]
    if not measured:
        raise CpuftError(f"--link {path}: the doctor could measure no link: look at the errors of cpuft doctor")
    rate = statistics.median(link.bits_per_second for link in measured)
    # The doctor counts payload only, so the headers of frames are counted already, as with all-reduces.
    return Network(rate, statistics.median(link.latency_us for link in measured) / 1e6, measured=True)


def _fit(rows: Sequence[Measurement]) -> Network:
    """Fit latency and rate: seconds = steps x latency + bytes x factor / rate, each equation divided by its seconds."""
    equations = []
    for row in rows:
        steps, seconds = 2 * (row.ranks - 1), row.median_seconds
        equations.append((steps / seconds, steps * row.nbytes / row.ranks / seconds))
    aa, ab, bb = (sum(e[i] * e[j] for e in equations) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(e[i] for e in equations) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency = max(0.0, (a * bb - b * ab) / determinant)
    slowness = max((b * aa - a * ab) / determinant, 1e-15)
    largest = max(rows, key=lambda row: row.nbytes)
    sent = 2 * (largest.ranks - 1) / largest.ranks * largest.nbytes
    busy = statistics.median(largest.busy) * largest.median_seconds / sent
    return Network(8 / slowness, latency, busy, measured=True)


def estimate_hosts(job: UpdateCosts, network: Network, hosts: int, price: float = 0.0) -> Estimate:
    """Estimate a step and the whole training on `hosts` hosts, at this price of a host per hour (0 if unknown).

    The interval of samples per second reaches from twice the known CPU cost of communication to none, and includes two
    standard errors of the recorded step.
    """
    steps = {level: _step(job, network, hosts, level)[0] for level in job.levels}
    sent_as = next(level for level in job.levels if steps[level] <= TIE_RATIO * min(steps.values()))
    step, waited, taken = _step(job, network, hosts, sent_as)
    error = SIGMAS * job.error_seconds
    slow = _step(job, network, hosts, sent_as, cpu_factor=2.0)[0] + error
    fast = max(_step(job, network, hosts, sent_as, cpu_factor=0.0)[0] - error, step / 2)
    samples = hosts * job.ranks_per_host * job.samples
    rate = samples / step
    seconds = job.rows / rate
    whole = (seconds, seconds / 3600 * hosts * price)
    rates = (rate, samples / slow, samples / fast, job.step_seconds / step)
    return Estimate(hosts, step, *rates, *whole, waited, taken, sent_as)


def _step(
    job: UpdateCosts, network: Network, hosts: int, sent_as: str, cpu_factor: float = 1.0
) -> tuple[float, float, float]:
    """Return the seconds of a step, those of waiting in it, and those that communication takes from computing, if it
    takes `cpu_factor` times the known CPU time.
    """
    if hosts == 1:
        return job.step_seconds, 0.0, 0.0
    whole, words = job.sent_bytes(hosts, sent_as)
    members = job.count_members(hosts, sent_as)
    # A sharded optimizer needs half an all-reduce of the gradients and half an all-reduce of the weights.
    share = 0.5 if job.gathered else 1.0
    buckets = count_buckets(sent_as, job.sizes.parameters, members)
    # With powersgd, the mean of one factor is needed to compute the other one.
    exchanges = buckets * (2 if sent_as == "powersgd" else 1)
    each = share * exchanges / buckets * network.all_reduce_seconds(whole / exchanges, members)
    # Each bucket is sent when it is ready and the one before it has been sent.
    backward, end = job.backward_seconds * job.last_backward, 0.0
    rows = network.all_reduce_seconds(words, members) if words else 0.0
    has_late_rows = bool(words) and COMPRESSION_FACTS[sent_as].has_late_rows and job.ranks_per_host == 1
    if has_late_rows:
        # Embedding rows of the update before are sent first, from the end of its last backward pass on.
        end = max(0.0, rows - (job.step_seconds - backward))
    for number in range(1, buckets + 1):
        end = max(end, job.when_ready(number / buckets) * backward) + each
    after = 0.0 if has_late_rows else rows
    after += network.all_reduce_seconds(job.gathered, members) / 2 if job.gathered else 0.0
    waited = max(0.0, end - backward) + after
    # While a rank waits, communication takes nothing from computing.
    sending = buckets * each + after + rows * has_late_rows
    hidden = 1.0 - waited / sending if sending else 1.0
    messages = 2 * (members - 1) * (exchanges + bool(words) + bool(job.gathered)) + hosts * job.ranks_per_host - 1
    sent = count_ring_passes(members) * (share * whole + words + job.gathered / 2)
    if members < hosts * job.ranks_per_host:
        # The sending rank receives its host's sum of all gradients in fp32, and sends the other ranks the mean.
        sent += 2 * 4 * sum(job.sent_numbers(hosts, "none"))
    cpu = cpu_factor * (sent * network.cpu_seconds_per_byte + messages * network.cpu_seconds_per_message)
    numbers, row_numbers = job.sent_numbers(hosts, sent_as)
    coding = job.coding_share * count_coding_seconds(sent_as, numbers, job.sizes.factors, row_numbers)
    taken = (max(0.0, hidden) * cpu + coding) / job.cores
    return job.step_seconds + taken + waited, waited, taken


def count_worthwhile_hosts(estimates: Sequence[Estimate]) -> int:
    """Return the largest number of hosts that is worth it, going up the ascending `estimates`, at least one.

    A number is worth it if the hosts that it adds do at least half of what they would do alone; the first one that is
    not ends the search.
    """
    best = estimates[0]
    alone = best.samples_per_second / best.hosts
    for one in estimates[1:]:
        if (one.samples_per_second - best.samples_per_second) < WORTH * alone * (one.hosts - best.hosts):
            break
        best = one
    return best.hosts


def describe_job(job: UpdateCosts, network: Network, source: str) -> list[str]:
    """Return three notes on what an estimate is made from: "from SOURCE: ...", "network: ...", "weak scaling: ..."."""
    whole, words = job.sent_numbers(2, "none")
    return [
        f"from {source}: a step of one host takes {job.step_seconds * 1e3:.0f} ms on {job.cores:g} cores; an update of "
        f"two hosts sends {whole / 1e6:.1f} million gradients and {words / 1e6:.1f} million numbers of embedding rows.",
        f"network: {network.bits_per_second / 1e9:.3g} Gbit/s, {network.latency_seconds * 1e6:.0f} us one way; sending "
        f"takes {network.cpu_seconds_per_byte * 1e9:.2g} ns of a core per byte"
        f"{', as measured' if network.measured else ''}; the interval reaches from none of that cost to twice as much.",
        f"weak scaling: the batch per rank is fixed; hours and price are for {job.rows:,} examples, all epochs "
        "together.",
    ]


def format_estimates(estimates: Sequence[Estimate], notes: Sequence[str], title: str) -> str:
    """Return a table of estimates, with notes (how many hosts are worth it, then `notes`); a newline ends the text."""
    worth = count_worthwhile_hosts(estimates)
    verdict = f"worth it: up to {counted(worth, 'host')}; the last ones do at least half of what they would do alone."
    rows = [_make_cells(one) for one in estimates]
    return format_table([*rows[0]], [[*cells.values()] for cells in rows], title, [verdict, *notes])


def _make_cells(one: Estimate) -> dict[str, str]:
    return {
        "hosts": str(one.hosts),
        "step ms": f"{one.step_seconds * 1e3:.0f}",
        "samples/s": f"{one.samples_per_second:.1f}",
        "at least": f"{one.least:.1f}",
        "at most": f"{one.most:.1f}",
        "efficiency": f"{one.efficiency:.0%}",
        "waiting": f"{one.waited_seconds / one.step_seconds:.0%}",
        "CPU for network": f"{one.taken_seconds / one.step_seconds:.0%}",
        "gradients as": one.sent_as if one.hosts > 1 else "-",
        "hours": f"{one.train_seconds / 3600:.3g}",
        "price": f"{one.price:.3g}" if one.price else "-",
    }


def estimates_to_json(estimates: Sequence[Estimate], notes: Sequence[str]) -> dict[str, Any]:
    """Return `predictions` (a list with the fields of each estimate), `worth` (`count_worthwhile_hosts`), `notes`."""
    return {
        "predictions": [asdict(one) for one in estimates],
        "worth": count_worthwhile_hosts(estimates),
        "notes": list(notes),
    }
