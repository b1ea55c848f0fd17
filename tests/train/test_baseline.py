"""The baseline of a task on its own rows: metrics, cache, budget, and the process that finds it beside a training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.judge.simple_models import fit
from cpuft.record import BaselineLine, format_baseline
from cpuft.train import baseline, baseline_process
from cpuft.train.baseline import find_baseline, find_static_baseline
from cpuft.train.baseline_process import BaselineProcess
from cpuft.train.data.prepare import read_task_data
from cpuft.train.data.show import add_baselines, format_summary, summarize
from cpuft.train.data.sources import Examples
from tests.conftest import GLUE, needs_glue, wait_until
from tests.train.tiny import make_config

pytestmark = pytest.mark.usefixtures("own_cache")
DEMO = TrainConfig(task="demo")
PAIRS = "query,document\n" + "".join(f"what is thing{n},the thing{n} is this\n" for n in range(20))


def make_search_config(folder: Path, task: str) -> TrainConfig:
    config = make_config(folder, "class")
    return replace(config, task=task, train_file="rows.csv", validation_file="rows.csv")


def forget_how_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fit", "fit_linear_model", "Bm25"):
        monkeypatch.setattr(baseline, name, lambda *given: pytest.fail("it was fitted again"))


@pytest.mark.parametrize("task", ["demo", pytest.param("mrpc", marks=needs_glue)])
def test_metrics_are_those_of_a_plain_script_and_are_computed_once(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(task=task, data_dir="" if task == "demo" else str(GLUE), max_train_samples=500)
    found, data = find_baseline(config), read_task_data(config)
    train, validation = data.train.load().first(500), data.validation[""].load()
    predicted = fit("class", train.texts, train.labels, 2)(validation.texts)
    scores = (accuracy_score(validation.labels, predicted), f1_score(validation.labels, predicted))
    assert found.metrics == dict(zip(("accuracy", "f1"), scores))
    assert (found.rows, found.examples) == (500, 500)
    forget_how_to_fit(monkeypatch)
    assert find_baseline(config) == found
    with pytest.raises(BaseException, match="it was fitted again"):
        find_baseline(replace(config, max_train_samples=499))


@pytest.mark.parametrize("kind", ["class", "labels", "tags", "score"])
def test_all_kinds_of_labels_have_the_metrics_of_the_model(kind: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, kind)
    found = find_baseline(config)
    assert list(found.metrics) == list(read_task_data(config).task.metrics)
    assert all(np.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize(("task", "metric"), [("pairs", "accuracy@1"), ("rerank", "mrr@10")])
def test_search_finds_what_has_the_rare_words(task: str, metric: str, tmp_path: Path) -> None:
    rows = PAIRS
    if task == "rerank":
        rows = "query,document,label\n" + "".join(
            f"what is thing{n},the thing{n if good else n + 1} is this,{good}\n" for n in range(20) for good in (0, 1)
        )
    Path("rows.csv").write_text(rows)
    found = find_baseline(make_search_config(tmp_path, task))
    assert (found.name, found.rows, found.metrics[metric]) == ("BM25", 0, 1.0)


def test_many_texts_are_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Examples([("x" * 5, "y" * 5) for _ in range(100)], [float(number >= 50) for number in range(100)])
    data = replace(read_task_data(DEMO), train=rows)
    monkeypatch.setattr(baseline, "_MOST_CHARACTERS", 300)
    monkeypatch.setattr(baseline, "read_task_data", lambda config, check_labels: data)
    found = find_baseline(DEMO)
    assert (found.rows, found.examples) == (25, 100)
    assert format_baseline(replace(found, seconds=1.23, metrics={"accuracy": 0.5})) == (
        "baseline (word and character counts with a linear model, 25 of 100 examples, 1.2 s): accuracy 0.5000"
    )


def test_tasks_without_one_say_so(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="--task text has none"):
        find_baseline(TrainConfig(task="text"))
    rows = "".join(f"text {number},label {number}\n" for number in range(101))
    Path("rows.csv").write_text(f"text,label\n{rows}")
    config = TrainConfig(task="files", train_file="rows.csv", validation_file="rows.csv")
    with pytest.raises(CpuftError, match="it is for at most 100 classes, and there are 101"):
        find_baseline(config)
    summary = add_baselines(summarize(config), config)
    assert summary.baselines == []
    assert "note: no baseline: it is for at most 100 classes, and there are 101" in format_summary(summary)


def test_data_show_has_it_and_an_embedding_model_is_measured_before_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.csv").write_text(PAIRS)
    config = make_search_config(tmp_path, "pairs")
    summary = add_baselines(summarize(config), config)
    names = [one.name for one in summary.baselines]
    assert (names[0], names[1].endswith(" without training")) == ("BM25", True)
    assert summary.baselines[0].metrics.keys() == summary.baselines[1].metrics.keys()
    assert format_summary(summary)[-2].startswith("baseline (BM25, ")

    def fail(config: TrainConfig) -> None:
        raise CpuftError("there are no weights")

    monkeypatch.setattr("cpuft.train.data.show._measure_untrained", fail)
    summary = add_baselines(summarize(config), config)
    assert [one.name for one in summary.baselines] == ["BM25"]
    assert "the model is not measured before its training: there are no weights" in summary.notes


def test_static_embeddings_need_model2vec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model2vec", None)
    with pytest.raises(CpuftError, match="--static-model needs model2vec: "):
        find_static_baseline(DEMO, str(tmp_path))


def test_static_embeddings_equal_a_plain_script() -> None:
    from model2vec import StaticModel
    from sklearn.linear_model import LogisticRegression
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    Path("rows.csv").write_text("text,label\n" + "a b,x\nb c,x\nc d,y\nd e,y\n" * 5)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["[UNK]", *"abcde"])}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    model = StaticModel(np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32), tokenizer)
    model.save_pretrained("static")
    config = TrainConfig(task="files", train_file="rows.csv", validation_file="rows.csv")
    found = find_static_baseline(config, "static")
    texts = ["a b", "b c", "c d", "d e"] * 5
    plain = LogisticRegression(C=10.0, tol=1e-3).fit(model.encode(texts), [0, 0, 1, 1] * 5)
    right = plain.predict(model.encode(texts)) == [0, 0, 1, 1] * 5
    assert found.metrics["accuracy"] == right.mean()
    assert found.name == "static embeddings of static with a linear model"
    with pytest.raises(CpuftError, match=r"the static model rows\.csv cannot be loaded"):
        find_static_baseline(config, "rows.csv")


# The process beside a training


def run_process(is_measured: bool, during: Callable[[BaselineProcess], Any] = lambda process: None) -> Any:
    """Return the baseline of the demo as a run has it, what `during` returns, and the lines that were shown."""
    said = list[str]()
    with closing(BaselineProcess(DEMO, is_measured, said.append)) as process:
        process.end_update(None, 0.0)
        process.end_update(None, 0.0)
        seen = during(process)
        found = process.finish()
    return found, seen, said


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_process_finds_it_during_the_training_or_after_it(is_measured: bool) -> None:
    found, has_started, said = run_process(is_measured, lambda process: process._process is not None)
    wanted = find_baseline(DEMO)
    assert (has_started, isinstance(found, BaselineLine) and found.metrics) == (not is_measured, wanted.metrics)
    assert [line for line in said if "waiting" not in line] == []


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("exit 3", "no baseline: its process ended with exit code 3"),
        ("""echo '{"error": "the disk is full"}'""", "no baseline: the disk is full"),
        ("echo [", "no baseline: "),
        ("exec sleep 60", "no baseline: it was not ready 0 s after the training"),
    ],
)
def test_a_baseline_that_fails_is_one_line(program: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    popen: Any = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: popen(["sh", "-c", program], **options))
    monkeypatch.setattr(baseline_process, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(baseline_process, "_QUIET_SECONDS", 0.2 if "sleep" in program else 60.0)
    found, _, said = run_process(False)
    assert (found, len([line for line in said if "waiting" not in line])) == (None, 1)
    assert said[-1].startswith(reason)


CHILD = """
import sys, time
from cpuft.train import baseline
def wait(config):
    print("waits", flush=True)
    time.sleep(60)
baseline.find_baseline = wait
baseline.main()
"""
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid()), "--task=demo"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, os.getpriority(os.PRIO_PROCESS, child.pid), flush=True)
time.sleep(60)
"""


def test_it_ends_with_the_rank_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        number, priority = parent.stdout.readline().split()
        assert Path("/proc", number).exists()
        parent.send_signal(signal.SIGKILL)
    assert priority == "19"
    wait_until(lambda: not Path("/proc", number).exists(), "the baseline outlives the rank", seconds=20)


def test_it_does_not_begin_if_the_rank_has_ended_and_loads_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from cpuft.train import baseline; baseline.main(); "
        "print([name for name in ('torch', 'pandas', 'transformers') if name in sys.modules])"
    )
    for parent, status in ((os.getpid(), 0), (os.getppid(), 1)):
        command = [sys.executable, "-c", code, str(parent), "--task=demo"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == status, done.stderr
    command[3] = str(os.getpid())
    result, loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (json.loads(result)["examples"], loaded) == (1600, "[]")
