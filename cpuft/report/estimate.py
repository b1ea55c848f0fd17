"""Estimate speed, efficiency and price of a job on N hosts, from a run on few ranks and a measured network."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cpuft.config import AUTO_COMPRESSIONS, SHARDED_COMPRESSIONS
from cpuft.errors import CpuftError, counted, near_names
from cpuft.record import Measurement, Record
from cpuft.terminal import format_table

TABLE = Path(__file__).with_name("instances.csv")


@dataclass(frozen=True)
class Instance:
    """One kind of host."""

    name: str
    cores: int
    """Physical ones."""
    amx: bool
    gbits_per_second: float
    """Of its network, as the seller tells it."""
    dollars_per_hour: float
    """Approximate list price, on demand."""
    dated: str
    """When the price was looked up."""


INSTANCE_COLUMNS = tuple(Instance.__dataclass_fields__)


def parse_instances(text: str, path: str) -> dict[str, Instance]:
    """A table with a head line, commas between. Raises CpuftError naming the line that is none."""
    lines = csv.reader(io.StringIO(text, newline=""))
    found: dict[str, Instance] = {}
    try:
        if tuple(next(lines, ())) != INSTANCE_COLUMNS:
            raise ValueError(f"its head is not {','.join(INSTANCE_COLUMNS)}")
        for words in lines:
            if words:
                found[words[0]] = _parse_words(words)
    except (ValueError, csv.Error) as error:
        raise CpuftError(f"{path}, line {lines.line_num}: {error}: make it like {TABLE}") from None
    return found


def _parse_words(words: list[str]) -> Instance:
    if len(words) != len(INSTANCE_COLUMNS):
        raise ValueError(f"{len(words)} columns, not {len(INSTANCE_COLUMNS)}")
    name, cores, amx, rate, price, dated = words
    made = Instance(name, int(cores), amx == "yes", float(rate), float(price), dated)
    if not (0 < made.cores < 10**6 and 0 < made.gbits_per_second < 10**6 and 0 <= made.dollars_per_hour < 10**6):
        raise ValueError("cores, rate and price must be positive numbers")
    return made


def find_instance(name: str, path: str = "") -> Instance:
    """The kind of this name in the table at `path`, or in ours. Raises CpuftError with the names most like it."""
    table = Path(path) if path else TABLE
    try:
        found = parse_instances(table.read_text(encoding="utf-8"), str(table))
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}, which --instances names: name a table") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"--instances {path} cannot be read ({error}): name a table") from None
    if name not in found:
        raise CpuftError(f"--instance {name:.60} is not a known type of instance: {near_names(name, tuple(found))}")
    return found[name]


BUCKET_NUMBERS = 2**20
"""Gradients of so many parameters are sent at a time: `cpuft.comm.selection` has the same."""
WIRE_BYTES = {"none": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 260 / 256, "powersgd": 2.0}
"""Of one number on its way: powersgd's are those of its factors, and its words' rows go as int8."""
CODING_SECONDS = {"int8": 4e-9, "powersgd": 4e-9}
"""Of a core, for each number in blocks, by `cpuft.comm.compression.int8.measure_coding_seconds` on a Xeon with AMX, or
in factors, which took 3.5e-9 there."""
ETHERNET = 1448 / 1538
"""TCP's payload over what a frame of 1,500 bytes takes on the wire: headers of IP and TCP with time stamps, Ethernet's
own with preamble and gap (RFC 9293, IEEE 802.3)."""
CPU_SECONDS_PER_BYTE = 2e-9
"""Of a core, for each byte that a rank sends in a ring: copies, the kernel's TCP, and adding up. `cpuft bench comm`
tells yours, and `--link` takes it."""
TIE = 1.02
"""Ways that differ less in time are as fast: `cpuft.comm.selection` has the same."""
LEAST_STEPS = 4
WORTH = 0.5
SIGMAS = 2.0
"""Error bars reach so many standard errors of the recorded step to both sides."""


@dataclass(frozen=True)
class Network:
    """What joins the hosts."""

    bits_per_second: float
    latency_seconds: float
    """Half a round trip of one byte."""
    cpu_seconds_per_byte: float = CPU_SECONDS_PER_BYTE
    measured: bool = False
    """By all-reduces, so that frames' headers are counted already."""

    @property
    def bytes_per_second(self) -> float:
        """Payload."""
        return self.bits_per_second / 8 * (1.0 if self.measured else ETHERNET)

    def all_reduce_seconds(self, nbytes: float, hosts: int) -> float:
        """A ring's: 2(n-1) messages of an n-th one after another (Patarasuk and Yuan, 2009)."""
        return 2 * (hosts - 1) * (self.latency_seconds + nbytes / hosts / self.bytes_per_second)


@dataclass(frozen=True)
class Job:
    """What one rank does in an update, from a record of one rank."""

    forward_seconds: float
    """Data and forward."""
    backward_seconds: float
    update_seconds: float
    error_seconds: float
    """Standard error of their sum."""
    samples: float
    """Rows of an update."""
    rows: int
    """Of the whole training, all epochs."""
    cores: float
    ways: tuple[str, ...]
    """What gradients may be sent as."""
    parameters: int
    factors: int
    row: int
    words: dict[str, float]
    gathered: float = 0.0
    """Bytes of weights that ranks have from each other, where the optimizer is shared out."""

    @property
    def step_seconds(self) -> float:
        """Of one rank alone."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    def sent_numbers(self, hosts: int) -> tuple[float, float]:
        """Of an update: what travels in backward, and the words', which do so after it."""
        words = self.words.get(str(hosts)) or interpolate(self.words, hosts)
        return self.parameters, words * self.row

    def sent_bytes(self, hosts: int, sent_as: str) -> tuple[float, float]:
        """The same, on its way."""
        layers, words = self.sent_numbers(hosts)
        in_factors = sent_as == "powersgd"
        layers = self.factors if in_factors else layers
        return WIRE_BYTES[sent_as] * layers, WIRE_BYTES["int8" if in_factors else sent_as] * words


@dataclass(frozen=True)
class Prediction:
    """So many hosts, a rank each, every rank with the recorded batch: weak scaling."""

    hosts: int
    step_seconds: float
    samples_per_second: float
    least: float
    """Samples a second, where the error bar begins."""
    most: float
    efficiency: float
    """Of so many times one host."""
    train_seconds: float
    """Of all epochs."""
    price: float
    """Of all hosts for that long; 0 without a price."""
    waited_seconds: float
    """Of a step: communication that backward does not hide."""
    taken_seconds: float
    """Of a step: what communication takes from compute."""
    sent_as: str = ""
    """Gradients: of those that the job allows, what is fastest."""


def interpolate(words: dict[str, float], hosts: int) -> float:
    """Different words among more rows: between two known numbers of ranks a power law (Heaps' law)."""
    known = sorted((int(ranks), count) for ranks, count in words.items())
    if not known:
        return 0.0
    after = min((index for index, (ranks, _) in enumerate(known) if ranks >= hosts), default=len(known) - 1)
    (low, few), (high, many) = known[max(0, after - 1)], known[after]
    if low == high or not few:
        return many
    return few * math.pow(hosts / low, math.log(many / few) / math.log(high / low))


def read_job(record: Record, compression: str = "auto") -> Job:
    """The job of a record. Raises CpuftError when it does not have what a prediction needs."""
    header, steady = record.header, record.steps[len(record.steps) // 10 :]
    if header.world_size != 1:
        raise CpuftError(f"{record.path} ran on {header.world_size} ranks: a prediction needs a run on one")
    if len(steady) < LEAST_STEPS:
        raise CpuftError(f"{record.path} has {counted(len(record.steps), 'step')}: run {LEAST_STEPS + 1} or more")
    if not header.travels.parameters:
        raise CpuftError(f"{record.path} does not tell of its gradients: run it anew with this version of cpuft")
    seconds = [one.data_seconds + one.forward_seconds + one.backward_seconds + one.update_seconds for one in steady]
    return Job(
        statistics.mean(line.data_seconds + line.forward_seconds for line in steady),
        statistics.mean(line.backward_seconds for line in steady),
        statistics.mean(line.update_seconds for line in steady),
        statistics.stdev(seconds) / math.sqrt(len(seconds)),
        statistics.mean(line.samples for line in steady),
        count_rows(record),
        find_cores(record),
        find_ways(record, compression),
        header.travels.parameters,
        header.travels.factors,
        header.travels.row,
        header.travels.words,
        count_gathered(record),
    )


def count_gathered(record: Record) -> float:
    """Bytes of all weights as ranks compute with them, words' in fp32; 0 where no optimizer is shared out."""
    header, options = record.header, record.header.options
    if options.get("shard", "none") == "none":
        return 0.0
    is_fast = options.get("fast_path", True) and not options.get("compile")
    words = header.parameters - header.travels.parameters if header.travels.row else 0
    return (2.0 if is_fast and header.precision == "bf16" else 4.0) * header.travels.parameters + 4.0 * words


def count_rows(record: Record) -> int:
    """Rows of all epochs, whether the run came to their end or not."""
    epochs = record.header.options.get("epochs")
    return round(record.header.rows * epochs) if isinstance(epochs, (int, float)) else record.header.rows


def find_ways(record: Record, compression: str) -> tuple[str, ...]:
    """What gradients may be sent as: this compression, or for auto the recorded one, or what a launch may choose."""
    asked = str(record.header.options.get("grad_compression", "auto")) if compression == "auto" else compression
    allowed = SHARDED_COMPRESSIONS if count_gathered(record) else tuple(WIRE_BYTES)
    known = [way for way in allowed if way != "powersgd" or record.header.travels.factors]
    if asked == "auto":
        exact = AUTO_COMPRESSIONS.index("bf16" if record.header.precision == "bf16" else "none")
        return tuple(way for way in AUTO_COMPRESSIONS[exact:] if way in known)
    if asked not in known:
        raise CpuftError(f"what {asked} sends is not known beforehand: give --compression {', '.join(known)}")
    return (asked,)


def find_cores(record: Record) -> float:
    """Hardware threads of the run's one rank, or what of them its control group allows."""
    bound = float(len({cpu for rank in record.header.ranks for cpu in rank.cpus}))
    return min(bound, record.header.cores_allowed or bound)


def scale_cores(job: Job, cores: float) -> Job:
    """The job on a host with so many cores of the same kind."""
    factor = job.cores / cores
    return replace(
        job,
        forward_seconds=job.forward_seconds * factor,
        backward_seconds=job.backward_seconds * factor,
        update_seconds=job.update_seconds * factor,
        error_seconds=job.error_seconds * factor,
        cores=cores,
    )


def find_network(measured: Sequence[Measurement], sent_as: str) -> Network:
    """The link that fits measured all-reduces best, in least squares of relative errors, over the fastest backend.

    Raises CpuftError: fewer than two sizes of an all-reduce of that type, or ranks of one host only.
    """
    dtype = "float32" if sent_as == "none" else "bfloat16"
    rows = [m for m in measured if m.operation == "all_reduce" and m.dtype == dtype and m.ranks > 1]
    by_backend = {name: [m for m in rows if m.backend == name] for name in {m.backend for m in rows}}
    fits = {n: _fit(found) for n, found in by_backend.items() if len({m.nbytes for m in found}) > 1}
    if not fits:
        raise CpuftError(f"--link holds no all-reduces of {dtype} in two sizes: measure with cpuft bench comm --np 2")
    return max(fits.values(), key=lambda network: network.bits_per_second)


def _fit(rows: Sequence[Measurement]) -> Network:
    """seconds = steps x latency + bytes x factor / rate, each equation divided by its seconds; two unknowns."""
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


def predict(job: Job, network: Network, hosts: int, price: float = 0.0) -> Prediction:
    """A step on `hosts` hosts, and the whole training; `price` is of a host and an hour."""
    steps = {way: _step(job, network, hosts, way)[0] for way in job.ways}
    sent_as = next(way for way in job.ways if steps[way] <= TIE * min(steps.values()))
    step, waited, taken = _step(job, network, hosts, sent_as)
    error, cost = SIGMAS * job.error_seconds, network.cpu_seconds_per_byte
    slow = _step(job, replace(network, cpu_seconds_per_byte=2 * cost), hosts, sent_as)[0] + error
    fast = max(_step(job, replace(network, cpu_seconds_per_byte=0.0), hosts, sent_as)[0] - error, step / 2)
    rate = hosts * job.samples / step
    seconds = job.rows / rate
    return Prediction(
        hosts,
        step,
        rate,
        hosts * job.samples / slow,
        hosts * job.samples / fast,
        job.step_seconds / step,
        seconds,
        seconds / 3600 * hosts * price,
        waited,
        taken,
        sent_as,
    )


def _step(job: Job, network: Network, hosts: int, sent_as: str) -> tuple[float, float, float]:
    """Seconds of a step, what of them waits, and what of them communication's own work takes from compute."""
    if hosts == 1:
        return job.step_seconds, 0.0, 0.0
    whole, words = job.sent_bytes(hosts, sent_as)
    # An optimizer that is shared out takes half an all-reduce of gradients, and half one of weights.
    share = 0.5 if job.gathered else 1.0
    sent = share * whole + words + job.gathered / 2
    sending = 2 * (hosts - 1) / hosts * sent * network.cpu_seconds_per_byte
    taken = (sending + CODING_SECONDS.get(sent_as, 0.0) * sum(job.sent_numbers(hosts))) / job.cores
    backward = job.backward_seconds + taken
    buckets = max(1, math.ceil(job.parameters / BUCKET_NUMBERS))
    each = share * network.all_reduce_seconds(whole / buckets, hosts)
    # The first bucket is ready after its share of backward, and each waits for the one before it.
    waited = max(backward / buckets + buckets * each, backward + each) - backward
    waited += network.all_reduce_seconds(words, hosts) if words else 0.0
    waited += network.all_reduce_seconds(job.gathered, hosts) / 2 if job.gathered else 0.0
    waited += network.all_reduce_seconds(16, hosts)  # loss and tokens
    return job.forward_seconds + backward + waited + job.update_seconds, waited, taken


def count_worth(predictions: Sequence[Prediction]) -> int:
    """The most hosts that are worth it: those last added bring at least half of what they would bring alone."""
    best = predictions[0]
    alone = best.samples_per_second / best.hosts
    for one in predictions[1:]:
        if (one.samples_per_second - best.samples_per_second) < WORTH * alone * (one.hosts - best.hosts):
            break
        best = one
    return best.hosts


COLUMNS = ("hosts", "step ms", "samples/s", "from", "to", "efficiency", "waiting", "taken", "sent as", "hours", "price")


def describe_job(job: Job, network: Network, source: str) -> list[str]:
    """What predictions are made of, for a reader who wants to know how far to trust them."""
    whole, words = job.sent_numbers(2)
    return [
        f"from {source}: a step of one host takes {job.step_seconds * 1e3:.0f} ms on {job.cores:g} cores; "
        f"{whole / 1e6:.1f} million gradients and {words / 1e6:.1f} million of words' (two hosts) travel an update.",
        f"link: {network.bits_per_second / 1e9:.3g} Gbit/s, {network.latency_seconds * 1e6:.0f} us one way; sending "
        f"takes {network.cpu_seconds_per_byte * 1e9:.2g} ns of a core for a byte"
        f"{', as measured' if network.measured else ''}; bars reach from nothing of that to twice.",
        f"weak scaling: the batch a rank is fixed; hours and price are of {job.rows:,} rows, all epochs together.",
    ]


def format_outlook(predictions: Sequence[Prediction], notes: Sequence[str], title: str) -> str:
    """For a terminal."""
    worth = count_worth(predictions)
    verdict = (
        f"worth it: up to {counted(worth, 'host')}; those added last bring at least half of what they could alone."
    )
    return format_table(COLUMNS, [_format_row(one) for one in predictions], title, [verdict, *notes])


def _format_row(one: Prediction) -> list[str]:
    return [
        str(one.hosts),
        f"{one.step_seconds * 1e3:.0f}",
        f"{one.samples_per_second:.1f}",
        f"{one.least:.1f}",
        f"{one.most:.1f}",
        f"{one.efficiency:.0%}",
        f"{one.waited_seconds / one.step_seconds:.0%}",
        f"{one.taken_seconds / one.step_seconds:.0%}",
        one.sent_as if one.hosts > 1 else "-",
        f"{one.train_seconds / 3600:.3g}",
        f"{one.price:.3g}" if one.price else "-",
    ]


def estimates_to_json(predictions: Sequence[Prediction], notes: Sequence[str]) -> dict[str, Any]:
    """One object for programs."""
    return {
        "predictions": [asdict(one) for one in predictions],
        "worth": count_worth(predictions),
        "notes": list(notes),
    }
