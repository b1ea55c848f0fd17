"""Compare runs on different numbers of ranks: speedup, efficiency, intervals, and where the missing time went."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields

from cpuft.config.train import EVALUATION_ONLY, TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.record import FILE_NAME, STEP_PHASES, BaselineLine, Record, StepLine, describe_baseline, drop_warm_up
from cpuft.report.seeds import SEED, SeedComparison, compare_seeds, note_seeds, seed_of
from cpuft.report.significance import half_width
from cpuft.serialization import load

MISSING_TIME = {
    "waiting": "waiting for gradients",
    "slowed": "compute slowed by communication",
    "uneven": "uneven work",
    "rest": "the rest",
}
"""Shares of the time of a step that the ideal does not need, and their names in a report."""


@dataclass(frozen=True)
class IdealComparison:
    """A run compared with its ideal: as many independent ranks, which exchange nothing.

    Both are measured over the same steps: without the first tenth, and only while all ranks of the ideal were training.
    """

    samples_per_second: float
    """Samples per second of the ideal: the sum of the rates of its ranks."""
    efficiency: float
    """Speed of the run divided by that of the ideal: ideal_seconds / step_seconds."""
    step_seconds: float
    ideal_seconds: float
    """Seconds that the ideal needs for as many examples as one step of the run has."""
    parts: dict[str, float]
    """Seconds of a step that the ideal does not need, by the keys of `MISSING_TIME`; empty if the record does not tell
    the times of all ranks. They add up to step_seconds - ideal_seconds, and a part may be negative."""


def _place(record: Record) -> tuple[int, int, list[str]]:
    """Return what a run and its ideal have in common."""
    return record.header.world_size, record.header.global_batch, record.header.hosts


def compare_with_ideal(run: Record, ideal: Record) -> IdealComparison | None:
    """Compare a run with its ideal over their common steps (`count_common`) without the run's first tenth.

    None if there are none, the ideal lacks the seconds of a rank, or a mean is 0.
    """
    common = slice(len(run.steps) // 10, count_common(ideal.steps, len(run.steps)))
    own, alone = run.steps[common], ideal.steps[common]
    ranks = run.header.world_size
    if not own or any(len(line.compute_seconds) != ranks for line in alone):
        return None
    # Every rank has as many examples, so the sum of their rates follows from the harmonic mean of their seconds.
    means = [statistics.fmean(rank) for rank in _by_rank(alone)]
    step = statistics.fmean(line.step_seconds for line in own)
    if not all(mean > 1e-9 for mean in (*means, step)):
        return None
    seconds = statistics.harmonic_mean(means)
    rate = statistics.fmean(line.samples for line in own) / seconds
    known = all(len(line.compute_seconds) == ranks for line in own)
    every = run.header.options.get("sync_every", 1)
    parts = _divide_missing_time(own, seconds, every if type(every) is int and every > 0 else 1) if known else {}
    return IdealComparison(rate, seconds / step, step, seconds, parts)


def count_common(steps: Sequence[StepLine], most: int) -> int:
    """Return how many steps all ranks of an ideal had made when the first rank had made all of its own.

    Until then all hosts were busy. The result is at most `most`, and more than a tenth of it even if fewer are common.
    """
    ends = [list(itertools.accumulate(rank)) for rank in _by_rank(steps)]
    first = min((rank[-1] for rank in ends), default=0.0)
    common = min((sum(end <= first for end in rank) for rank in ends), default=0)
    return min(max(common, most // 10 + 1), most)


def _divide_missing_time(steps: Sequence[StepLine], ideal_seconds: float, every: int = 1) -> dict[str, float]:
    """Return `IdealComparison.parts` of a mean step, when the ranks synchronise after every `every` updates."""
    mean = statistics.fmean(statistics.fmean(line.compute_seconds) for line in steps)
    meetings = itertools.groupby(steps, key=lambda line: (line.step - 1) // every)
    slowest = sum(max(map(sum, _by_rank(list(lines)))) for _, lines in meetings) / len(steps)
    of_rank_0 = statistics.fmean(line.compute_seconds[0] for line in steps)
    waited = statistics.fmean(line.communication_seconds for line in steps)
    step = statistics.fmean(line.step_seconds for line in steps)
    return {
        # Rank 0 also waits for the slowest rank; that part counts as uneven work.
        "waiting": waited - (slowest - of_rank_0),
        "slowed": mean - ideal_seconds,
        "uneven": slowest - mean,
        "rest": step - of_rank_0 - waited,
    }


def _average_ideals(found: Sequence[IdealComparison]) -> IdealComparison:
    names = MISSING_TIME if all(one.parts for one in found) else ()
    numbers = ((one.samples_per_second, one.efficiency, one.step_seconds, one.ideal_seconds) for one in found)
    parts = {name: statistics.fmean(one.parts[name] for one in found) for name in names}
    rate, efficiency, step, ideal = map(statistics.fmean, zip(*numbers))
    return IdealComparison(rate, efficiency, step, ideal, parts)


def _describe_ideal(label: str, against: IdealComparison) -> str:
    said = f"{label} reached {against.efficiency * 100:.0f} % of the ideal ({against.samples_per_second:.1f} samples/s)"
    missing = 1 - against.efficiency
    if missing <= 0 or not against.parts:
        return f"{said}."
    listed = ", ".join(
        f"{MISSING_TIME[name]} {seconds / against.step_seconds * 100:.1f} %" for name, seconds in against.parts.items()
    )
    return f"{said}; of its steps' time {missing * 100:.1f} % is missing: {listed}."


def _by_rank(steps: Sequence[StepLine]) -> list[tuple[float, ...]]:
    return list(zip(*(line.compute_seconds for line in steps)))


_MUST_BE_EQUAL = ("task", "model", "data", "precision")
_EQUAL_OPTIONS = (
    *("epochs", "max_steps", "max_length", "gradient_accumulation", "engine", "lora_rank", "dropout"),
    *("learning_rate", "lr_schedule", "warmup_ratio", "warmup_steps", "layerwise_lr_decay", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "class_weights", "label_smoothing"),
    *("mlm_probability", "whole_word_mask", "causal", "pack", "hard_negatives"),
    *("temperature", "similarity_loss", "matryoshka", "pooling"),
)

MOST_EFFICIENCY = 1.1
"""A larger efficiency gets a note. A little over 1 is normal, because smaller shares fit the caches better."""
_MUCH_OTHER_LOAD = 0.1
"""Share of a rank's cores from which on the load of other programs gets a note."""
_MOST_SAMPLES, _MOST_SECONDS = 1e12, 1e9
"""A larger rate or time in a record is impossible; `compare` refuses the record."""


class OtherJobError(CpuftError):
    """Two runs are not of the same job, so that their speed cannot be compared."""


@dataclass(frozen=True)
class Row:
    """One run in a comparison, or the mean of its repeats."""

    np: int
    hosts: int
    cores: int
    """Number of different hardware threads that the ranks were pinned to, on all hosts together."""
    global_batch: int
    train_seconds: float
    """Seconds of all updates, without evaluation; the mean of the repeats, as all numbers here."""
    samples_per_second: float
    """Samples per second without the first tenth of the steps."""
    samples_per_second_per_rank: float
    speedup: float
    """Samples per second of this run divided by those of the baseline."""
    efficiency: float
    """Speedup divided by (ranks / ranks of the baseline)."""
    metrics: dict[str, float]
    """Metrics of the last evaluation; empty if there was none."""
    path: str
    repeats: int
    ideal: IdealComparison | None
    """The mean of the repeats; None if no ideal was measured."""
    intervals: dict[str, float]
    """Half the width of the 95 % confidence intervals of samples_per_second, speedup, efficiency, and of the efficiency
    relative to the ideal (`ideal`); empty without repeats. Speedup and efficiency compare runs of the same round."""
    seeds: dict[str, SeedComparison] = field(default_factory=dict)
    """Metrics over seeds by name; empty if all repeats have the same seed."""
    simulated: bool = False


@dataclass(frozen=True)
class Comparison:
    """Runs of the same job on different numbers of ranks; others are compared with the first, with the fewest ranks."""

    task: str
    model: str
    precision: str
    epochs: float
    max_steps: int
    """Limit of the number of updates of each run; 0 for none."""
    scaling: str
    """`weak`: the batch per rank is the same in all runs. `strong`: the global batch is. `mixed`: neither is. `single`:
    all runs have the same number of ranks."""
    rows: tuple[Row, ...]
    """One row per run, or per group of repeats, ordered by the number of ranks and then by the start."""
    notes: tuple[str, ...]
    baseline: BaselineLine | None = None
    """What simple counts reach without a model: that of the first run which has one."""


def compare(records: list[Record]) -> Comparison:
    """Compare complete runs of the same job with the one with the fewest ranks, and with their ideals.

    Records of independent ranks (`Header.independent`) are the ideals. Runs that differ only in their seed and in when
    they ran are repeats, and share a row with their mean. CpuftError: a record is not complete, has impossible times
    or no examples, all are ideals (or there are none), or the jobs differ.
    """
    if all(record.header.independent for record in records):
        raise CpuftError(f"there is no run{' except the ideal' if records else ''}: give the folders of runs")
    for record in records:
        if record.footer is None:
            raise CpuftError(
                f"{record.path} is not complete ({counted(len(record.steps), 'step')} recorded): resume the run, or "
                "leave it out of the report"
            )
        if not (0 < record.footer.steady_samples_per_second < _MOST_SAMPLES and record.header.world_size > 0):
            raise CpuftError(f"{record.path} trained on no examples: leave it out of the report")
        _refuse_impossible(record)
    records = order_runs(records)
    _refuse_differences(records)
    runs, ideals = ([one for one in records if one.header.independent == independent] for independent in (False, True))
    groups = group_repeats(runs)
    rows = tuple(
        _make_row(group, groups[0], [one for one in ideals if _place(one) == _place(group[0])]) for group in groups
    )
    baseline = runs[0]
    header = baseline.header
    scaling = _find_scaling(runs)
    found = next((run.baseline for run in runs if run.baseline), None)
    try:
        epochs = load(float, header.options.get("epochs"), "its epochs")
        max_steps = load(int, header.options.get("max_steps", 0), "its max_steps")
    except ValueError as error:
        raise CpuftError(f"{baseline.path}: {error}: give a run of this version of cpuft") from None
    return Comparison(
        header.task,
        header.model,
        header.precision,
        epochs,
        max_steps,
        scaling,
        rows,
        (
            *_make_notes(rows, scaling, runs),
            *_note_ideals(rows),
            *_note_repeats(rows),
            *note_seeds(rows, runs),
            *_note_restarts(runs),
            *_note_other_load(records),
            *([f"the baseline is what can be had without a model: {describe_baseline(found)}."] if found else []),
        ),
        found,
    )


def order_runs(records: Sequence[Record]) -> list[Record]:
    """Return the records by number of ranks, and those with as many by their start."""
    return sorted(records, key=lambda record: (record.header.world_size, record.header.started))


def _refuse_impossible(record: Record) -> None:
    """Raise CpuftError if a time in the record is impossible, because somebody has edited the record."""
    for line in record.steps:
        phases = (getattr(line, f"{name}_seconds") for name in STEP_PHASES)
        if not all(abs(seconds) < _MOST_SECONDS for seconds in (line.step_seconds, *phases, *line.compute_seconds)):
            raise CpuftError(
                f"{record.path}, step {line.step}: the time of this step is impossible: leave the run out of the report"
            )


def _refuse_differences(records: list[Record]) -> None:
    """Raise CpuftError if one of the records differs from the first one in what must be equal.

    Seeds may differ if each number of ranks shares a seed with that of the first record.
    """
    first = records[0]
    seeds: dict[int, set[object]] = {}
    for record in records:
        seeds.setdefault(record.header.world_size, set()).add(seed_of(record))
    for record in records[1:]:
        pairs = [(n, getattr(first.header, n), getattr(record.header, n)) for n in _MUST_BE_EQUAL]
        # The examples of the task demo depend on the seed.
        if first.header.task == record.header.task == "demo" and seed_of(first) != seed_of(record):
            pairs = [pair for pair in pairs if pair[0] != "data"]
        pairs += [(n, first.header.options.get(n) or 0, record.header.options.get(n) or 0) for n in _EQUAL_OPTIONS]
        if not seeds[first.header.world_size] & seeds[record.header.world_size]:
            pairs.append(("seed", seed_of(first), seed_of(record)))
        differing = [f"{name} ({a} and {b})" for name, a, b in pairs if a != b]
        if differing:
            raise OtherJobError(
                f"{first.path} and {record.path} are not the same job: they differ in {', '.join(differing)}; "
                f"compare runs that differ in ranks and hosts only"
            )


def group_jobs(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records in groups of the same job, in the order of their first records. Ideals alone are left out."""
    groups: list[list[Record]] = []
    for record in records:
        for group in groups:
            with suppress(CpuftError):
                _refuse_differences([*group, record])
                group.append(record)
                break
        else:
            groups.append([record])
    return [group for group in groups if not all(record.header.independent for record in group)]


def _find_scaling(records: list[Record]) -> str:
    per_rank = {record.header.global_batch / record.header.world_size for record in records}
    in_all = {record.header.global_batch for record in records}
    if len({record.header.world_size for record in records}) == 1:
        return "single"
    if len(per_rank) == 1:
        return "weak"
    return "strong" if len(in_all) == 1 else "mixed"


def _count_cores(record: Record) -> int:
    ranks, is_one = record.header.ranks, record.header.simulated  # simulated hosts have the threads of one machine
    return len({("" if is_one else place.host, cpu) for place in ranks for cpu in place.cpus})


def shares_cores(row: Row, base: Row) -> bool:
    """Return whether a run had more ranks than the baseline (`base`) but not more cores (hardware threads) or hosts."""
    return row.np > base.np and row.cores <= base.cores and row.hosts <= base.hosts


def has_equal_cores(row: Row, base: Row) -> bool:
    """Return whether both ran on one real host with equally many cores per rank, and `row` on more ranks and cores."""
    is_one_host = row.hosts == base.hosts == 1 and not (row.simulated or base.simulated)
    return is_one_host and row.np > base.np and row.cores > base.cores and row.cores * base.np == base.cores * row.np


def group_repeats(runs: Sequence[Record]) -> list[list[Record]]:
    """Return groups of runs that differ only in seed, start, slice_by and examples, in order of their first runs."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        header = run.header
        options = sorted(item for item in header.options.items() if item[0] not in (SEED, *EVALUATION_ONLY))
        alike = (header.world_size, header.global_batch, header.ranks, header.versions, options)
        groups.setdefault(repr(alike), []).append(run)
    return list(groups.values())


def list_settings(runs: Sequence[Record]) -> tuple[list[tuple[str, str]], ...]:
    """Return three lists of (name, value): what differs between runs, equal options unlike their defaults, the rest.

    The rest includes versions. Values that differ are joined: "1e-5 and 2e-5", or of more runs "1e-5, 2e-5, 2e-5".
    Names have spaces instead of underscores.
    """
    defaults = {one.name: _format_setting(one.default) for one in fields(TrainConfig)}
    lists: tuple[list[tuple[str, str]], ...] = ([], [], [])
    headers = [run.header for run in runs]
    options = [{"task": one.task, "model": one.model, **one.options} for one in headers]
    others = [
        {"ranks": one.world_size, "number format": one.precision, "checksum of the data": one.data, **one.versions}
        for one in headers
    ]
    for found in (options, others):
        for name in dict.fromkeys(itertools.chain.from_iterable(found)):
            values = [_format_setting(one.get(name, "")) for one in found]
            is_usual = found is others or values[0] == defaults.get(name)
            differs = len(set(values)) > 1
            value = (" and " if len(values) == 2 else ", ").join(values) if differs else values[0]
            lists[0 if differs else 2 if is_usual else 1].append((name.replace("_", " "), value))
    return lists


def _format_setting(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value)) or "not given"


def _pair_rounds(group: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return pairs of the runs of two groups: those with the same seed, or all if no seed is common, in their order."""
    pairs = list[tuple[Record, Record]]()
    for seed in dict.fromkeys(map(seed_of, group)):
        pairs += zip(*([one for one in runs if seed_of(one) == seed] for runs in (group, others)))
    return pairs or list(zip(group, others))


def _rate(record: Record) -> float:
    """Return samples per second without the first steps: one slow step would decide a comparison of short runs."""
    return record.footer.steady_samples_per_second if record.footer else 0.0


def _make_row(group: Sequence[Record], baseline: Sequence[Record], ideals: Sequence[Record]) -> Row:
    first, rates = group[0], [_rate(run) for run in group]
    times = first.header.world_size / baseline[0].header.world_size
    speedups = [_rate(own) / _rate(other) for own, other in _pair_rounds(group, baseline)]
    against = [found for run, ideal in _pair_rounds(group, ideals) if (found := compare_with_ideal(run, ideal))]
    samples = {
        "samples_per_second": rates,
        "speedup": speedups,
        "efficiency": [speedup / times for speedup in speedups],
        "ideal": [found.efficiency for found in against],
    }
    return Row(
        first.header.world_size,
        len(first.header.hosts),
        _count_cores(first),
        first.header.global_batch,
        statistics.fmean(run.footer.train_seconds for run in group if run.footer),
        statistics.fmean(rates),
        statistics.fmean(rates) / first.header.world_size,
        statistics.fmean(speedups),
        statistics.fmean(speedups) / times,
        {name: statistics.fmean(run.metrics.get(name, first.metrics[name]) for run in group) for name in first.metrics},
        first.path,
        len(group),
        _average_ideals(against) if against else None,
        {name: half_width(values) for name, values in samples.items() if len(values) > 1},
        compare_seeds(group, baseline),
        first.header.simulated,
    )


def _note_ideals(rows: Sequence[Row]) -> list[str]:
    found = [_describe_ideal(f"np {row.np}", row.ideal) for row in rows if row.ideal]
    if not found:
        return []
    return [
        "the ideal: as many independent ranks on the same examples at once, without the first tenth of the steps.",
        *found,
        *(
            f"np {row.np} was faster than its ideal: another program used the hosts; measure both again."
            for row in rows
            if row.ideal and row.ideal.efficiency - row.intervals.get("ideal", 0.0) > MOST_EFFICIENCY
        ),
    ]


def _note_repeats(rows: Sequence[Row]) -> list[str]:
    base, notes = rows[0], list[str]()
    if any(row.intervals for row in rows):
        notes.append("\u00b1 is half the width of the mean's 95 % confidence interval (Student's t over the repeats).")
    for row in rows:
        if row is not base and abs(row.speedup - 1) <= row.intervals.get("speedup", -1.0):
            notes.append(f"np {row.np} and np {base.np}: no clear difference in speed.")
        if row.ideal and abs(row.ideal.efficiency - 1) <= row.intervals.get("ideal", -1.0):
            notes.append(f"np {row.np} and its ideal: no clear difference.")
    return notes


def _note_other_load(records: Sequence[Record]) -> list[str]:
    """Return a note if other programs took much of the cores of a rank, unless the ranks shared their cores anyway."""
    busy = [
        f"{run.footer.other_load * 100:.0f} % in {'an ideal of ' * run.header.independent}np {run.header.world_size}"
        for run in records
        if run.footer and run.footer.other_load > _MUCH_OTHER_LOAD
        if _count_cores(run) == sum(len(place.cpus) for place in run.header.ranks)
    ]
    advice = "all ranks wait for the slowest one, so repeat the comparison on idle hosts."
    taken = f"other programs, or other guests of the machine, took a part of a rank's cores ({', '.join(busy)})"
    return [f"{taken}: {advice}"] if busy else []


def _note_restarts(records: Sequence[Record]) -> list[str]:
    notes = []
    for record in records:
        ranks = record.header.world_size
        others = [line for line in record.resumptions if line.world_size != ranks and not line.restart_reason]
        if others:
            listed = " and ".join(f"on {counted(one.world_size, 'rank')} after update {one.step}" for one in others)
            notes.append(
                f"np {ranks} was resumed {listed}: its times, its speedup and its efficiency are not those of "
                f"{counted(ranks, 'rank')}, so leave it out where they matter."
            )
        again = [line for line in record.resumptions if line.restart_reason]
        if again:
            lost = f"{sum(line.lost_seconds for line in again):.0f} s"
            made = counted(sum(line.repeated for line in again), "update")
            on = " and ".join(str(line.world_size) for line in again)
            why = "; ".join(line.restart_reason for line in again)
            notes.append(
                f"np {ranks} was restarted {counted(len(again), 'time')}, on {on} ranks, which took {lost} and "
                f"repeated {made} ({why}): its times are not those of an undisturbed run."
            )
    return notes


def _note_limits(row: Row, scaling: str, records: Sequence[Record]) -> list[str]:
    """Return a note on what kept the ranks of one host from a linear speedup, if they missed a tenth of it."""
    missing = 1 - row.efficiency
    if missing < 0.1:
        return []
    steps = drop_warm_up(next(record for record in records if record.path == row.path).steps)
    seconds = sum(line.step_seconds for line in steps)
    waiting = sum(line.communication_seconds for line in steps) / seconds if seconds > 0 else 0.0
    batches = "smaller batches, " if scaling == "strong" else ""
    return [
        f"np {row.np} misses {missing:.0%} of a linear speedup: it waits for gradients in {waiting:.0%} of its time. "
        f"What else is missing is slower computing: {batches}memory or a physical core that the ranks share, or other "
        "programs on this machine."
    ]


def _make_notes(rows: tuple[Row, ...], scaling: str, records: list[Record]) -> list[str]:
    base = rows[0]
    notes = [
        f"speedup and efficiency are relative to np {base.np} ({counted(base.hosts, 'host')}).",
        "samples/s, speedup and efficiency leave out the first tenth of the steps; train seconds include it.",
    ]
    if any(row.simulated for row in rows):
        notes.append(
            "simulated hosts are parts of one machine and share its memory and caches: the figures show what the "
            "network and cpuft cost, not how fast as many machines are."
        )
    if scaling == "weak":
        notes.append(
            "weak scaling: the batch per rank is fixed, so the global batch grows with the ranks"
            f"{'' if records[0].header.options.get('max_steps') else ', and there are fewer updates'}; compare the "
            "metrics."
        )
    if scaling == "strong":
        notes.append("strong scaling: the global batch is fixed, so every run makes the same updates.")
    if scaling == "mixed":
        notes.append("neither the batch per rank nor the global batch is the same in all runs.")
    if len({record.footer.samples for record in records if record.footer}) > 1:
        notes.append("the runs trained on different numbers of examples: compare samples/s, not train seconds.")
    notes += [
        f"np {row.np} is {row.speedup:.2f} times as fast as np {base.np}, more than its ranks explain: another program "
        f"used the hosts in the meantime, or cores were idle at np {base.np}; measure both again before you trust it."
        for row in rows[1:]
        if row.efficiency > MOST_EFFICIENCY
    ]
    if has_equal_cores(rows[-1], base):
        run = base.path.removesuffix(f"/{FILE_NAME}")
        shown = f": cpuft estimate {run} --bandwidth 1gbit shows by how much" if base.np == 1 else ""
        notes.append(
            f"each rank has {counted(base.cores // base.np, 'core')} of one host, as if it had a host of its own. Such "
            f"hosts would share no memory, which is faster, and send gradients over a network, which is slower{shown}."
        )
        notes += _note_limits(rows[-1], scaling, records)
    same_cores = [row.np for row in rows[1:] if shares_cores(row, base)]
    if same_cores:
        listed = ", ".join(map(str, same_cores))
        notes.append(
            f"np {listed} did not run on more cores than np {base.np} ({counted(base.cores, 'core')}): the speedup "
            "shows what splitting the work gains or costs, not what more hosts gain."
        )
    if len({(record.header.cpu_model, tuple(record.header.cpu_flags)) for record in records}) > 1:
        notes.append("the head hosts of the runs have different CPUs.")
    if len({tuple(sorted(record.header.versions.items())) for record in records}) > 1:
        notes.append("the runs used different software versions.")
    return notes
