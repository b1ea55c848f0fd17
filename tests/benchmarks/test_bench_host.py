"""scripts/bench-host: what it measures, a record of a whole short run, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.bench_host import (
    FIGURES,
    MODELS,
    PATTERN,
    Point,
    count_cores,
    format_page,
    main,
    plan_points,
    plan_steps,
    read_host,
    read_rates,
)
from tests.records import make_record, make_steps

HEADER = {"format": "cpuft-bench-host", "version": 1, "cpuft": "0", "time": 0.0, "cpu": "<Xeon>", "cores": 4}


def make_host(*points: dict[str, Any]) -> dict[str, Any]:
    limits = [{"cores": count, "peak": 1e12 * count, "read": 1e9, "written": 2e9} for count in (1, 2, 4)]
    return {**HEADER, "numa_nodes": 1, "memory_bytes": 1 << 34, "limits": limits, "points": list(points)}


def make_line(**values: Any) -> dict[str, Any]:
    point = {"model": "minilm", "ranks": 1, "cores": 4, "batch_size": 32, "length": 128, "steps": 5, "seconds": 0.5}
    rates = {"tokens_per_second": 8192.0, "teraflops_per_core": 0.25, "share_of_peak": 0.125}
    return {**point, "least_seconds": 0.4, "most_seconds": 0.75, **rates, **values}


def test_what_is_measured_depends_on_the_cores() -> None:
    assert [count_cores(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    one, both = Point("a", 1, 1), [Point(model, ranks, 2) for model in "ab" for ranks in (1, 2)]
    assert plan_points(["a", "b"], 2) == [one, *both]
    assert plan_points(["a"], 48)[:7] == [Point("a", 1, count) for count in (1, 2, 4, 8, 16, 32, 48)]
    assert plan_points(["a"], 48)[7:] == [Point("a", 2, 48), Point("a", 4, 48)]


def test_operations_are_those_of_the_products() -> None:
    large = MODELS["bert-large"]
    assert large.count_operations(1) == pytest.approx(6 * 24 * 12 * 1024**2, rel=0.15)  # attention and head are few
    assert large.count_operations(512) == 512 * large.count_operations(1)
    assert plan_steps(large, 2048, 4e12) == 5
    assert plan_steps(large, 2048, 4e13) == 49
    assert plan_steps(large, 2048, 0.0) == 5


def test_the_first_updates_of_a_run_do_not_count() -> None:
    record = make_record(2)
    steps = [replace(line, tokens=4096) for line in make_steps(8, [0.1, 0.1], step_seconds=2.0, samples=32)]
    steps = [*(replace(line, step_seconds=50.0) for line in steps[:2]), *steps[2:]]
    model = MODELS["minilm"]
    found = read_rates(replace(record, steps=steps), model, Point("minilm", 2, 4), 1e12)
    rate = model.count_operations(4096) / 2.0
    assert (found["steps"], found["seconds"], found["tokens_per_second"]) == (6, 2.0, 2048.0)
    assert found["teraflops_per_core"] == pytest.approx(rate / 4 / 1e12)
    assert found["share_of_peak"] == pytest.approx(rate / 1e12)


def test_the_page_shows_each_point_beside_mlperf_s() -> None:
    failed = {"model": "bert-large", "ranks": 4, "cores": 4, "batch_size": 4, "length": 512, "error": "no <memory>"}
    page = format_page([make_host(make_line(cores=1), make_line(), make_line(ranks=2), failed)])
    assert "0.30 TFLOP/s per core" in page
    assert "&lt;Xeon&gt;: 4 cores, 1 NUMA node, 16 GiB" in page
    assert "<td>0.500 (0.400 to 0.750)</td><td>8192</td><td>0.250</td><td>12%</td>" in page
    assert "not measured: no &lt;memory&gt;" in page
    assert page.count("<svg ") == 3
    assert "<Xeon>" not in page


def test_kept_records_can_be_drawn(tmp_path: Path) -> None:
    for path in FIGURES.glob(PATTERN):
        assert read_host(path)["points"]
    path = tmp_path / "bench-host.json"
    path.write_text(json.dumps(make_host(make_line())))
    assert main(["--page", str(path), "--output", str(tmp_path)]) == 0
    assert "&lt;Xeon&gt;" in (tmp_path / "bench-host.html").read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"format": "cpuft-bench-host", "version": 2}'])
def test_what_is_no_record_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["--page", str(path), "--output", str(tmp_path)]) == 2
    assert f"bench-host: {path} is no record of scripts/bench-host" in capsys.readouterr().err


@pytest.mark.proof
def test_a_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.benchmarks.bench_host", "--short", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    record = read_host(tmp_path / "bench-host.json")
    assert record["class"] in record["cpu_flags"]
    assert [one["cores"] for one in record["limits"]] == count_cores(record["cores"])
    assert [(one["ranks"], one["cores"]) for one in record["points"]] == [
        (point.ranks, point.cores) for point in plan_points(["short"], record["cores"])
    ]
    for line in record["points"]:
        assert "error" not in line, line
        assert 0 < line["least_seconds"] <= line["seconds"] <= line["most_seconds"]
        assert 0 < line["share_of_peak"] < 1
    assert (tmp_path / "bench-host.html").read_text().count("a tiny model") >= len(record["points"])
