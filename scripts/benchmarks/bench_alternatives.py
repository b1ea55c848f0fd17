"""What fine-tuning reaches on GLUE tasks, and what cheaper ways reach: seconds, cost, accuracy and peak memory.

The baseline and static embeddings are timed without starting, on one core. Each other way is one or two commands on all
cores, timed from their start to the metric. The figures are kept in a file, from which the tables of
docs/when-not-to-fine-tune.md are made. Started by scripts/bench-alternatives."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, suggest_names
from cpuft.files import write_text
from cpuft.instance_types import find_instance
from cpuft.record import read_record

DATA = {"sst2": ("SST-2", 5000), "mrpc": ("MRPC", 0), "wnli": ("WNLI", 0)}
"""Name of each task, and the number of training rows that are used, the first ones; 0 for all."""
FIGURES = "bench-alternatives.json"
INSTANCE = "c7i.4xlarge"
"""The rented host whose price per core counts: its CPUs have AMX, as those that were measured."""
PEAK_GPU, PEAK_TERAFLOPS = "T4", 65
"""A GPU, and the rate of its matrix products in fp16 by its data sheet."""
_SEED = 42
_UNKNOWN = "not measured"
_COMMAND = (sys.executable, "-m", "cpuft")


@dataclass(frozen=True)
class Gpu:
    """A rented host with one GPU."""

    name: str
    offer: str
    dollars_per_hour: float
    dated: str
    source: str


GPUS = (
    Gpu(
        "T4",
        "AWS g4dn.xlarge",
        0.526,
        "2026",
        "citadelcloudmanagement.com/blogs/news/gpu-infrastructure-for-ai-workloads-cloud-vs-on-prem-cost-analysis-2026",
    ),
    Gpu(
        "A10G",
        "AWS g5.xlarge",
        1.006,
        "2026-06-17",
        "factualminds.com/blog/amazon-ec2-on-demand-pricing-instance-families-2026",
    ),
    Gpu("A10", "Lambda", 1.29, "2026-09-20", "lambda.ai/instances"),
    Gpu("H100", "Lambda", 4.29, "2026-09-20", "lambda.ai/instances"),
)
"""List prices on demand, as the sources state them."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; all but the folders have defaults."""
    parser = argparse.ArgumentParser(prog="bench-alternatives", description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder of the GLUE data, with files such as MRPC/train.tsv")
    parser.add_argument(
        "--static-model", default="", help="folder or hub name of a model of model2vec, which the way static needs"
    )
    parser.add_argument("--tasks", default=",".join(DATA), help=f"GLUE tasks to measure, of {', '.join(DATA)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"ways to measure, of {', '.join(WAYS)}")
    parser.add_argument("--shots", type=int, default=16, help="labels of each class for the way few-shot")
    parser.add_argument("--epochs", type=float, default=3.0, help="epochs of the ways lora and all")
    parser.add_argument("--max-rows", type=int, default=0, help="most training rows; 0: as many as the page has")
    where = "where the figures are kept; those of other tasks and ways stay"
    parser.add_argument("--figures", type=Path, default=Path("scripts/figures"), help=where)
    return parser.parse_args(arguments)


@dataclass
class Job:
    """One way on one data set: its files, and what its commands have taken so far."""

    folder: Path
    train: Path
    validation: Path
    options: argparse.Namespace
    seconds: float = 0.0
    peak_bytes: int = 0

    def run(self, *command: str) -> str:
        """Run a command and return what it prints. Raises CpuftError: it has failed."""
        said, log = self.folder / "said", self.folder / "log"
        start = time.perf_counter()
        with said.open("w", encoding="utf-8") as output, log.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)  # the usage is also that of the processes that it started
        process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds += time.perf_counter() - start
        self.peak_bytes = max(self.peak_bytes, usage.ru_maxrss * 1024)
        if process.returncode:
            raise CpuftError(f"{' '.join(command)} has failed:\n{said.read_text('utf-8')}{log.read_text('utf-8')}")
        return said.read_text("utf-8")

    def launch(self, *words: str) -> Path:
        """Train with one rank on all cores; return the run folder."""
        run = self.folder / "run"
        self.run(*_COMMAND, "launch", "--np", "1", "--seed", str(_SEED), "--run-dir", str(run), *words)
        footer = read_record(str(run)).footer
        assert footer is not None
        self.peak_bytes = max(self.peak_bytes, footer.peak_memory_bytes)
        return run

    @property
    def data(self) -> tuple[str, ...]:
        """The options that name the data."""
        return "--task", "files", "--train-file", str(self.train), "--validation-file", str(self.validation)

    def show(self, *words: str) -> float:
        """Compute baselines; return the accuracy of the last one. Its time is that of one core, without starting."""
        command = (*_COMMAND, "data", "show", *self.data, "--baseline", "--json", *words)
        found = json.loads(self.run(*command))["baselines"][-1]
        self.seconds, self.peak_bytes = float(found["seconds"]), 0
        return float(found["metrics"]["accuracy"])

    def fine_tune(self, *words: str) -> float:
        """Train a classifier; return its accuracy."""
        run = self.launch(*self.data, "--epochs", str(self.options.epochs), *words)
        return read_record(str(run)).metrics["accuracy"]

    def classify(self, model: str, train: Path, validation: Path) -> float:
        """Fit a linear model on the embeddings of the rows; return its accuracy."""
        module = "scripts.benchmarks.classify_embeddings"
        return float(self.run(sys.executable, "-m", module, model, str(train), str(validation)).split()[-1])


def run_baseline(job: Job) -> float:
    """Fit the baseline of cpuft."""
    return job.show()


def run_static(job: Job) -> float:
    """Fit a linear model on static embeddings."""
    return job.show("--static-model", job.options.static_model)


def run_frozen(job: Job) -> float:
    """Fit a linear model on the embeddings of MiniLM as it is."""
    return job.classify("minilm", job.train, job.validation)


def run_few_shot(job: Job) -> float:
    """Train as SetFit does: pairs of the few texts, of equal or different labels, then a linear model."""
    rows = choose_few(_read_rows(job.train), job.options.shots)
    few, pairs, validation = (job.folder / f"{name}.csv" for name in ("few", "pairs", "validation-joined"))
    _write_rows(few, rows)
    _write_rows(validation, [((_join(texts),), label) for texts, label in _read_rows(job.validation)])
    _write_rows(pairs, [((*one, *other), float(a == b)) for (one, a), (other, b) in itertools.combinations(rows, 2)])
    task = ("--task", "scored-pairs", "--similarity-loss", "mse", "--label-column", "label")
    data = ("--train-file", str(pairs), "--validation-split", "0.02")
    run = job.launch(*task, *data, "--epochs", "1", "--batch-size", "16")
    return job.classify(str(run / "model"), few, validation)


def run_lora(job: Job) -> float:
    """Train LoRA adapters and the head."""
    return job.fine_tune("--lora-rank", "16", "--learning-rate", "1e-3")


def run_all(job: Job) -> float:
    """Train all weights."""
    return job.fine_tune("--learning-rate", "1e-4")


@dataclass(frozen=True)
class Way:
    """One way to get a classifier."""

    title: str
    run: Callable[[Job], float]


WAYS = {
    "baseline": Way("baseline: word and character counts, linear model", run_baseline),
    "static": Way("static embeddings (model2vec), linear model", run_static),
    "frozen": Way("embeddings of MiniLM as it is, linear model", run_frozen),
    "few-shot": Way("few-shot: pairs of a few texts, as SetFit does, linear model", run_few_shot),
    "lora": Way("LoRA of rank 16", run_lora),
    "all": Way("all weights", run_all),
}

Row = tuple[tuple[str, ...], Any]
"""The texts of an example, one or two, and its label."""


def _join(texts: Sequence[str]) -> str:
    return " [SEP] ".join(texts)


def choose_few(rows: Sequence[Row], shots: int) -> list[Row]:
    """Return `shots` rows of each label, drawn at random, with their texts joined."""
    drawn, count = list[Row](), Counter[Any]()
    for texts, label in random.Random(_SEED).sample(rows, len(rows)):
        if count[label] < shots:
            count[label] += 1
            drawn.append(((_join(texts),), label))
    return drawn


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    names = ("text",) if len(rows[0][0]) == 1 else ("sentence1", "sentence2")
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([(*names, "label"), *((*texts, label) for texts, label in rows)])


def _read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(tuple(texts), label) for *texts, label in list(csv.reader(file))[1:]]


def measure(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one way on one task. Raises CpuftError: the data are not there, or a command failed."""
    from scipy.stats import binomtest

    from cpuft.train.data.sources import read_data

    data = read_data(TrainConfig(task=name, data_dir=options.data_dir))
    train, validation = data.train.first(options.max_rows or DATA[name][1]).load(), data.validation[""].load()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), Path(folder, "train.csv"), Path(folder, "validation.csv"), options)
        for path, examples in ((job.train, train), (job.validation, validation)):
            _write_rows(path, list(zip(examples.texts, map(int, examples.labels))))
        accuracy = WAYS[way].run(job)
    labels = [int(label) for label in validation.labels]
    interval = binomtest(round(accuracy * len(labels)), len(labels)).proportion_ci(method="wilson")
    return {
        "task": name,
        "way": way,
        "labels": options.shots * len(set(labels)) if way == "few-shot" else len(train),
        "rows": len(labels),
        "largest_class": max(Counter(labels).values()) / len(labels),
        "seconds": job.seconds,
        "accuracy": accuracy,
        "least": interval.low,
        "most": interval.high,
        "peak_bytes": job.peak_bytes,
    }


def read_machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    from cpuft.hardware import choose_precision
    from cpuft.train.precision import measure_products, read_cpu

    cpu = read_cpu()
    precision = choose_precision("auto", False, cpu.flags).name
    return {
        "time": time.time(),
        "cpu": cpu.model.replace("(R)", ""),
        "cores": len(os.sched_getaffinity(0)),
        "precision": precision,
        "products": measure_products(precision),
    }


def keep_figures(folder: Path, machine: dict[str, Any], found: dict[str, Any]) -> None:
    """Put the figures of one way on one task into the file of figures; those of others stay."""
    path = folder / FIGURES
    kept = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else []
    kept = [one for one in kept if (one["task"], one["way"]) != (found["task"], found["way"])]
    write_text(path, json.dumps({"machine": machine, "figures": [*kept, found]}, indent=1, sort_keys=True) + "\n")


def read_figures(folder: Path) -> dict[str, Any]:
    """Return what `keep_figures` has kept."""
    found: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    return found


def _price_hour(kept: dict[str, Any]) -> float:
    """Return the price of an hour of the cores that were measured, in US dollars."""
    instance = find_instance(INSTANCE)
    return instance.dollars_per_hour / instance.cores * int(kept["machine"]["cores"])


def format_alternatives(kept: dict[str, Any]) -> str:
    """Return the table of all ways, and below it the machine and the price that it is for."""
    lines = [["data", "way", "labels", "seconds", "US cents", "accuracy (95 % interval)", "peak memory"]]
    lines.append(["---"] * len(lines[0]))
    found = {(one["task"], one["way"]): one for one in kept["figures"]}
    shown = [way for way in WAYS if any(name == way for _, name in found)]
    for task, (title, _) in DATA.items():
        largest = next((one["largest_class"] for (name, _), one in found.items() if name == task), None)
        lines.append([title, "always the largest class", "", "", "", f"{largest:.3f}" if largest else _UNKNOWN, ""])
        lines += [["", WAYS[way].title, *_format_cells(found.get((task, way)), _price_hour(kept))] for way in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_cells(one: dict[str, Any] | None, hour: float) -> list[str]:
    if one is None:
        return ["", "", "", _UNKNOWN, ""]
    cents = 100 * hour * one["seconds"] / 3600
    seconds = f"{one['seconds']:.1f}" if one["seconds"] < 10 else f"{one['seconds']:.0f}"
    accuracy = f"{one['accuracy']:.3f} ({one['least']:.3f} to {one['most']:.3f})"
    memory = f"{one['peak_bytes'] / 2**30:.1f} GB" if one["peak_bytes"] else ""
    return [str(one["labels"]), seconds, f"{cents:.2g}", accuracy, memory]


def format_machine(kept: dict[str, Any]) -> str:
    """Return sentences on the machine that was measured, and on the price of its cores."""
    machine, instance = kept["machine"], find_instance(INSTANCE)
    day = time.strftime("%Y-%m-%d", time.gmtime(machine["time"]))
    return (
        f"Measured on {machine['cores']} cores of an {machine['cpu']} on {day}. An hour of them costs "
        f"${_price_hour(kept):.3f}: the list price of as many cores of AWS {INSTANCE} in {instance.dated}."
    )


def format_gpu_hours(kept: dict[str, Any]) -> str:
    """Return the table of prices of GPUs, and how fast each must be to be cheaper than the cores that were measured."""
    lines = [["GPU", "rented as", "US dollars per hour", "is cheaper if it is faster than these cores by", "price of"]]
    lines.append(["---"] * len(lines[0]))
    for one in GPUS:
        ratio = one.dollars_per_hour / _price_hour(kept)
        lines.append([one.name, one.offer, f"{one.dollars_per_hour:.3f}", f"{ratio:.1f}", f"{one.dated}, {one.source}"])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    rate, precision = kept["machine"]["products"]["teraflops"], kept["machine"]["precision"]
    return (
        f"{table}\n\nThese cores multiply matrices with {rate:.2f} TFLOP/s ({precision}, measured); the data sheet of "
        f"a {PEAK_GPU} says {PEAK_TERAFLOPS} (fp16)."
    )


def run(options: argparse.Namespace) -> None:
    """Measure the ways, keep each figure as soon as it is there, and print the tables."""
    names, ways = options.tasks.split(","), options.ways.split(",")
    for option, given, known in (("--tasks", names, DATA), ("--ways", ways, WAYS)):
        for name in given:
            if name not in known:
                raise CpuftError(f"{option}: {name!r} is unknown: {suggest_names(name, tuple(known))}")
    machine = read_machine()
    for name, way in itertools.product(names, ways):
        found = measure(name, way, options)
        print(json.dumps(found), flush=True)
        keep_figures(options.figures, machine, found)
    kept = read_figures(options.figures)
    print(format_alternatives(kept), format_machine(kept), format_gpu_hours(kept), sep="\n\n")


def main() -> int:
    """Run. Returns 2 for an error that the user can correct."""
    try:
        run(parse_arguments())
    except (CpuftError, OSError) as error:
        print(f"bench-alternatives: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
