"""The order of runs in a comparison, and a real comparison on two cores."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from cpuft.config.compare import CompareConfig
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.rank_counts import Assignment
from cpuft.hosts.topology import HostFacts
from cpuft.launch.compare import limit_cores, list_runs_in_turn, refuse_different_precisions
from cpuft.launch.rank_variables import plan_settings
from cpuft.record import STEP_PHASES, read_record
from cpuft.report.comparison import compare
from tests.conftest import make_facts, run_cpuft


def test_each_round_runs_all_numbers_of_ranks_and_their_ideals() -> None:
    assert list_runs_in_turn((1, 2), CompareConfig()) == [(1, False, 1), (2, False, 1)]
    assert list_runs_in_turn((1, 4), CompareConfig(ideal=True, repeats=2)) == [
        *((1, False, 1), (4, False, 1), (4, True, 1)),
        *((1, False, 2), (4, False, 2), (4, True, 2)),
    ]


def test_a_dry_run_prints_the_plans_of_all_runs() -> None:
    words = ("compare", "--np", "1", "--repeats", "2", "--run-dir", "all", "--dry-run")
    done = run_cpuft(*words)
    assert done.returncode == 0, done.stderr
    assert all(f"all/np-1-round-{turn}/data.npz" in done.stdout for turn in (1, 2))
    # Nothing may run beside a training whose speed is measured.
    assert done.stdout.count("--is-measured=True") == 2
    done = run_cpuft(*words, "--ideal")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--ideal needs two or more ranks, because one rank has nothing to wait for: add more to --np" in done.stderr


@pytest.mark.parametrize(
    ("bf16", "precision", "said"),
    [
        (
            (True, False),
            "auto",
            "precisions (np 1 in bf16, np 2 in fp32) and could not be compared: add --precision fp32",
        ),
        ((True, False), "fp32", ""),
        ((False, True), "auto", ""),
        ((True, True), "auto", ""),
    ],
)
def test_runs_in_different_precisions_are_refused_before_the_first(
    bf16: tuple[bool, bool], precision: str, said: str
) -> None:
    facts = [replace(make_facts(number), cpu_flags=("avx512_bf16",) * has) for number, has in enumerate(bf16, start=1)]
    hosts = [Assignment(Host(f"node{number}"), 1) for number in (1, 2)]
    clusters = {
        ranks: Cluster(tuple(hosts[:ranks]), tuple(facts[:ranks]), MpiImplementation("mpirun", "intel"))
        for ranks in (1, 2)
    }
    with pytest.raises(CpuftError, match=re.escape(said)) if said else nullcontext():
        refuse_different_precisions(clusters, TrainConfig(precision=precision), {})


def test_with_equal_cores_a_rank_has_its_share_of_the_largest_run_in_every_run() -> None:
    """Of 32 cores each of four ranks has 8, and so have one rank and each of two; a single core is shared."""

    def list_threads(numbers: tuple[int, ...], facts: HostFacts) -> list[int]:
        mpi, node = MpiImplementation("mpirun", "intel"), Host("node1")
        clusters = {ranks: Cluster((Assignment(node, ranks),), (facts,), mpi) for ranks in numbers}
        planned = [
            plan_settings(cluster, LaunchConfig(np=ranks), "gloo", {})[1][0]
            for ranks, cluster in limit_cores(clusters).items()
        ]
        return [int(one.value) for settings in planned for one in settings if one.name == "OMP_NUM_THREADS"]

    assert list_threads((1, 2, 4), make_facts()) == [8, 8, 8]
    assert list_threads((1, 2), replace(make_facts(), allowed_cpus=(5,))) == [1, 1]


def test_each_seed_is_a_round_of_its_own() -> None:
    assert list_runs_in_turn((1, 2), CompareConfig(seeds=2)) == [
        (1, False, 1),
        (2, False, 1),
        (1, False, 2),
        (2, False, 2),
    ]
    words = ("compare", "--np", "1", "--seeds", "2", "--seed", "5", "--run-dir", "all", "--dry-run")
    done = run_cpuft(*words)
    assert done.returncode == 0, done.stderr
    assert all(f"all/np-1-seed-{seed}/data.npz" in done.stdout for seed in (5, 6))
    assert all(f" --seed={seed} " in done.stdout for seed in (5, 6))
    done = run_cpuft(*words, "--repeats", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seeds repeats each run already, once with each seed: leave out --repeats" in done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.proof
def test_the_ideal_is_measured_with_independent_ranks() -> None:
    words = ("--max-train-samples", "128", "--max-steps", "4", "--batch-size", "16", "--backend", "gloo")
    done = run_cpuft("compare", "--np", "2", "--ideal", "--run-dir", "all", "--no-save-model", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ideal of np 2:\n" in done.stderr
    run, ideal = read_record("all/np-2"), read_record("all/ideal-2")
    assert (run.header.independent, ideal.header.independent, ideal.evaluations) == (False, True, [])
    assert [line.samples for line in ideal.steps] == [line.samples for line in run.steps] == [32] * 4
    assert [len(line.compute_seconds) for line in (*run.steps, *ideal.steps)] == [2] * 8
    assert sum(line.bytes_sent for line in ideal.steps) == 0
    assert run.footer is not None
    assert [list(phases) for phases in run.footer.phases] == [list(STEP_PHASES)] * 2
    (row,) = compare([run, ideal]).rows
    assert row.ideal is not None
    missing = row.ideal.step_seconds - row.ideal.ideal_seconds
    assert sum(row.ideal.parts.values()) == pytest.approx(missing, rel=1e-6, abs=1e-9)
    # What is measured leaves little unexplained.
    assert abs(row.ideal.parts["rest"]) < 0.03 * row.ideal.step_seconds
    assert "np 2 reached" in done.stdout
