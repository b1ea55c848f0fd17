"""Measure this host: the rates of its cores and of its memory, and those of training steps on some of its cores.

Writes bench-host.json, a record to send, and bench-host.html, a page with plots of this host and of those whose records
are in scripts/figures. Started by scripts/bench-host."""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cpuft import __version__
from cpuft.errors import CpuftError, counted
from cpuft.files import write_text
from cpuft.hardware import cpu_class, list_deciding
from cpuft.hosts.facts import gather
from cpuft.hosts.topology import HostFacts, parse_facts
from cpuft.record import Record, read_record
from cpuft.report import plots
from cpuft.report.plots import Line, Panel, draw
from cpuft.terminal import format_table
from scripts.benchmarks.roofline import measure_limits

FORMAT = {"format": "cpuft-bench-host", "version": 1}
FIGURES = Path("scripts/figures")
PATTERN = "bench-host-*.json"
MLPERF = {
    "teraflops_per_core": 0.30,
    "what": "BERT-large, MLPerf Training 2.1 and 3.0, 8 hosts of two Xeon Platinum 8480+ (56 cores each)",
    "source": "https://github.com/mlcommons/training_results_v3.0/tree/main/Intel/results",
    "note": "derived from 66.9 and 68.3 sequences/s per host, means of ten logs; within 25 %",
}
COLUMNS = (
    *("model", "ranks", "cores", "batch of a rank", "s per update (least to most)", "tokens/s", "TFLOP/s per core"),
    "of the peak",
)
_MASKED = 0.15
"""Share of the tokens for which the head computes: the default of --mlm-probability."""
_VOCABULARY = 30522
_RANKS = (1, 2, 4)
_CORES_OF_BATCH = 8
"""A rank with more cores than this gets a batch that is so many times larger, rounded down."""
_SECONDS = 20.0
"""Seconds that the updates of one training should take."""
_LEAST_STEPS, _MOST_STEPS = 5, 60
_TIME_LIMIT = 900.0


@dataclass(frozen=True)
class Model:
    """An encoder with random weights that is trained by masked language modelling on full sequences."""

    label: str
    hidden: int
    layers: int
    heads: int
    inner: int
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of an update of a rank with few cores."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration for --from-config."""
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        return {"model_type": "bert", **sizes, "intermediate_size": self.inner, "vocab_size": _VOCABULARY}

    def count_operations(self, tokens: int) -> float:
        """Return the floating-point operations of the products of an update: forward, and twice as many backward."""
        weights = self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.inner)
        head = _MASKED * (self.hidden**2 + self.hidden * _VOCABULARY)
        return 6.0 * tokens * (weights + head + 2 * self.layers * self.length * self.hidden)


MODELS = {
    "minilm": Model("MiniLM", 384, 6, 12, 1536, 128, 32),
    "bert-base": Model("BERT-base", 768, 12, 12, 3072, 128, 32),
    "bert-large": Model("BERT-large", 1024, 24, 16, 4096, 512, 4),
}
SHORT = {"short": Model("a tiny model", 64, 2, 2, 128, 32, 4)}


@dataclass(frozen=True)
class Point:
    """A training to measure."""

    model: str
    ranks: int
    cores: int
    """Cores of all ranks together."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="scripts/bench-host", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the record and the page [.]")
    parser.add_argument("--short", action="store_true", help="measure a tiny model only, to try the script in a minute")
    parser.add_argument("--page", type=Path, nargs="+", default=[], help="measure nothing, and draw these records")
    return parser.parse_args(words)


def count_cores(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def plan_points(models: Sequence[str], cores: int) -> list[Point]:
    """Return what is measured on a host with this number of cores: one rank of the first model on 1, 2, 4 ... of them,
    and 1, 2 and 4 ranks of each model on all."""
    alone = [Point(models[0], 1, count) for count in count_cores(cores)[:-1]]
    return alone + [Point(model, ranks, cores) for model in models for ranks in _RANKS if ranks <= cores]


def read_facts() -> HostFacts:
    """Return the facts of this host."""
    return parse_facts(json.dumps(gather([])), "this host")


@contextlib.contextmanager
def only_on(cpus: Sequence[int]) -> Iterator[None]:
    """Let processes that are started inside of the `with` block run on these hardware threads only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _send_limits(threads: int, pipe: Any) -> None:
    limits = measure_limits(threads)
    pipe.send({"cores": threads, "peak": limits.peak, "read": limits.read, "written": limits.written})


def measure_cores(cpus: Sequence[int]) -> dict[str, float]:
    """Return the limits of these cores with a thread each: operations per second from registers, and bytes per second
    that are read and written. They are 0 without a compiler."""
    mine, theirs = multiprocessing.Pipe()
    with only_on(cpus):  # a process of its own, because threads of OpenMP stay where they were started
        process = multiprocessing.get_context("spawn").Process(target=_send_limits, args=(len(cpus), theirs))
        process.start()
    theirs.close()
    try:
        return dict(mine.recv())
    except EOFError:
        raise CpuftError("the process that measures the cores has ended: see its lines above") from None
    finally:
        process.join()


def plan_steps(model: Model, tokens: int, peak: float) -> int:
    """Return the number of updates of `tokens` each, which probably take 20 seconds at a quarter of the peak rate."""
    expected = model.count_operations(tokens) / (0.25 * peak) if peak else _SECONDS / _LEAST_STEPS
    return max(_LEAST_STEPS, min(_MOST_STEPS, int(_SECONDS / expected)))


def write_words(path: Path, lines: int) -> str:
    """Write lines of random words, so that many rows of the word embedding have gradients, as with a real text."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=1 + number % 6)) for number in range(5000)]
    path.write_text("".join(" ".join(generator.choices(words, k=12)) + "\n" for _ in range(lines)), encoding="utf-8")
    return str(path)


def train(point: Point, model: Model, cpus: Sequence[int], peak: float, folder: Path) -> dict[str, Any]:
    """Measure a training with `cpuft launch` on these hardware threads, and return its line of the record."""
    batch = model.batch * max(1, point.cores // point.ranks // _CORES_OF_BATCH)
    steps = plan_steps(model, batch * model.length * point.ranks, peak)
    config, run_dir = folder / f"{point.model}.json", folder / f"{point.model}-{point.ranks}-{point.cores}"
    config.write_text(json.dumps(model.settings), encoding="utf-8")
    words = ["--task", "text", "--train-file", str(folder / "text.txt"), "--validation-file", str(folder / "few.txt")]
    words += ["--from-config", str(config), "--tokenizer", "minilm", "--max-length", str(model.length)]
    words += ["--batch-size", str(batch), "--max-steps", str(steps), "--np", str(point.ranks)]
    words += ["--no-save-model", "--checkpoint-every", "0", "--no-check", "--max-restarts", "0"]
    command = [sys.executable, "-m", "cpuft", "launch", *words, "--run-dir", str(run_dir)]
    environ = os.environ | {"CPUFT_STATE": str(folder / "state")}
    line: dict[str, Any] = {"model": point.model, "ranks": point.ranks, "cores": point.cores}
    line |= {"batch_size": batch, "length": model.length}
    with only_on(cpus):
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=_TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return line | {"error": f"took longer than {_TIME_LIMIT:.0f} s"}
    if process.returncode:
        return line | {"error": next((one for one in reversed(errors.splitlines()) if one.strip()), "failed")[:300]}
    return line | read_rates(read_record(str(run_dir)), model, point, peak)


def read_rates(record: Record, model: Model, point: Point, peak: float) -> dict[str, Any]:
    """Return what a run reached, without its first quarter of updates, at least one, in which memory is new."""
    steps = record.steps[max(1, len(record.steps) // 4) :]
    seconds = [step.step_seconds for step in steps]
    rate = model.count_operations(steps[0].tokens) / median(seconds)
    return {
        "steps": len(steps),
        "seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "tokens_per_second": steps[0].tokens / median(seconds),
        "teraflops_per_core": rate / point.cores / 1e12,
        "share_of_peak": rate / peak if peak else 0.0,
        "peak_memory_bytes": record.footer.peak_memory_bytes if record.footer else 0,
        "precision": record.header.precision,
        "kernels": record.header.kernels,
        "torch": record.header.versions.get("torch", ""),
    }


def measure(is_short: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the record of this host. It names neither the host nor its user."""
    facts, models = read_facts(), SHORT if is_short else MODELS
    cpus = [core.threads[0] for core in facts.cores]
    record: dict[str, Any] = {
        **FORMAT,
        "cpuft": __version__,
        "time": time.time(),
        "cpu": facts.cpu_model,
        "class": cpu_class(facts.cpu_flags),
        "cpu_flags": list_deciding(facts.cpu_flags),
        "machine": platform.machine(),
        "kernel": facts.kernel,
        "cores": len(cpus),
        "hardware_threads": sum(len(core.threads) for core in facts.cores),
        "sockets": len({core.socket for core in facts.cores}),
        "numa_nodes": facts.numa_nodes,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
        "limits": [],
        "points": [],
    }
    for count in count_cores(len(cpus)):
        record["limits"].append(measure_cores(cpus[:count]))
        say(format_limits(record["limits"][-1]))
    peaks = {int(one["cores"]): one["peak"] for one in record["limits"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_words(folder / "text.txt", 200 if is_short else 20_000)
        write_words(folder / "few.txt", 20)
        for point in plan_points([*models], len(cpus)):
            line = train(point, models[point.model], cpus[: point.cores], peaks[point.cores], folder)
            record["points"].append(line)
            say(format_table(COLUMNS, [list_cells(line)]).splitlines()[-1])
    return record


def format_limits(line: dict[str, float]) -> str:
    """Return a line for the terminal."""
    rates = f"{line['peak'] / 1e12:.2f} TFLOP/s from registers, memory {line['read'] / 1e9:.0f} GB/s read"
    return f"{line['cores']:4.0f} cores: {rates}, {line['written'] / 1e9:.0f} GB/s written"


def list_cells(line: dict[str, Any]) -> list[str]:
    """Return what COLUMNS name of a point."""
    batch = f"{line['batch_size']} x {line['length']}"
    cells = [_label(line["model"]), str(line["ranks"]), str(line["cores"]), batch]
    if "error" in line:
        return [*cells, f"not measured: {line['error']}", "", "", ""]
    seconds = f"{line['seconds']:.3f} ({line['least_seconds']:.3f} to {line['most_seconds']:.3f})"
    rates = f"{line['tokens_per_second']:.0f}", f"{line['teraflops_per_core']:.3f}", f"{line['share_of_peak']:.0%}"
    return [*cells, seconds, *rates]


def _label(model: str) -> str:
    return (MODELS | SHORT)[model].label if model in MODELS | SHORT else model


def read_host(path: Path) -> dict[str, Any]:
    """Return a record. Raises CpuftError: the file is not one."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {name: record[name] for name in FORMAT} == FORMAT:
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise CpuftError(f"{path} is no record of scripts/bench-host: give a bench-host.json")


def format_page(records: Sequence[dict[str, Any]]) -> str:
    """Return the HTML page of these hosts."""
    template = Path(plots.__file__).with_name("page.html").read_text(encoding="utf-8")
    style = template[template.index("<style>") : template.index("</style>")]
    told = f"{html.escape(str(MLPERF['what']))}: {MLPERF['teraflops_per_core']:.2f} TFLOP/s per core"
    source = f'<a href="{MLPERF["source"]}">logs of MLPerf</a>, {html.escape(str(MLPERF["note"]))}'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>cpuft bench-host</title>\n{style}</style></head>\n'
        f"<body><h1>cpuft bench-host</h1>\n<p>To compare with: {told} ({source}).</p>\n"
        f"{''.join(map(_format_host, records))}</body></html>\n"
    )


def _format_host(record: dict[str, Any]) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(record["time"]))
    size = f"{counted(record['cores'], 'core')}, {counted(record['numa_nodes'], 'NUMA node')}"
    title = f"{record['cpu']}: {size}, {record['memory_bytes'] / 2**30:.0f} GiB, cpuft {record['cpuft']}, {day}"

    def row(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>\n"

    rows = "".join(row("td", list_cells(line)) for line in record["points"])
    table = f'<div class="wide"><table class="numbers named">\n{row("th", COLUMNS)}{rows}</table></div>'
    figures = "".join(f"<figure><figcaption>{told}</figcaption>{svg}</figure>\n" for told, svg in draw_host(record))
    return f'<h2>{html.escape(title)}</h2>\n{table}\n<div class="figures">{figures}</div>\n'


def draw_host(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return captions and SVGs: the rates of cores, of memory, and of ranks."""
    limits, points = record["limits"], [one for one in record["points"] if "error" not in one]
    cores = [float(one["cores"]) for one in limits]
    models = list(dict.fromkeys(one["model"] for one in points))

    def list_lines(x: str, fixed: str, value: int) -> list[Line]:
        """Return a line for each model, of its points with one value of a field, over another field."""
        kept = [[one for one in points if one["model"] == name and one[fixed] == value] for name in models]
        rates = [[one["teraflops_per_core"] * one["cores"] for one in found] for found in kept]
        return [
            Line(_label(name), [float(one[x]) for one in found], rate, colour=number)
            for number, (name, found, rate) in enumerate(zip(models, kept, rates, strict=True))
        ]

    peak = Line("registers", cores, [one["peak"] / 1e12 for one in limits], dashed=True)
    memory = [
        Line(name, cores, [one[name] / 1e9 for one in limits], colour=number)
        for number, name in enumerate(("read", "written"))
    ]
    found = {
        "Updates of one rank, and products from registers.": (
            ("cores", "TFLOP/s"),
            [peak, *list_lines("cores", "ranks", 1)],
        ),
        "Updates with all cores, which the ranks share.": (
            ("ranks", "TFLOP/s"),
            list_lines("ranks", "cores", record["cores"]),
        ),
        "Memory.": (("cores", "GB/s"), memory),
    }
    return [draw(Panel(told, told, axes, lines, "o", counts=True)) for told, (axes, lines) in found.items()]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or only draw. Returns 2 for an error that the user can correct."""
    options = parse_arguments(words)
    try:
        paths = [*options.page, *sorted(FIGURES.glob(PATTERN))]
        records = [read_host(path) for path in dict.fromkeys(paths)]
        if not options.page:
            record = measure(options.short, lambda text: print(text, flush=True))
            records.insert(0, record)
            write_text(options.output / "bench-host.json", json.dumps(record, indent=1) + "\n")
        page = options.output / "bench-host.html"
        write_text(page, format_page(records))
    except CpuftError as error:
        print(f"bench-host: {error}", file=sys.stderr)
        return 2
    told = "" if options.page else f"record to send: {options.output / 'bench-host.json'}\n"
    print(f"{told}page: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
