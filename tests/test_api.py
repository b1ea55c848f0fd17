"""The Python API: launches and comparisons from a program, functions on ranks, and the notebook of the guide."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pytest

import cpuft
from cpuft.api import (
    ComparedRuns,
    RankError,
    Run,
    compare,
    launch,
    parse_options,
    pickle_call,
    read_predicted_rows,
    write_rows,
)
from cpuft.config.compare import CompareConfig
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from tests.conftest import list_children
from tests.records import make_record, make_steps
from tests.report.test_comparison import write_record

ROOT = Path(__file__).parents[1]
DEMO: dict[str, Any] = {"task": "demo", "max_train_samples": 64, "max_steps": 2, "batch_size": 16}
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


def test_the_import_is_cheap() -> None:
    code = "import sys; before = {*sys.modules}; import cpuft; print(*sorted({*sys.modules} - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("cpuft")] == ["cpuft"]
    assert not {"click", "cloudpickle", "numpy", "paramiko", "rich", "torch", "tqdm", "yaml"} & set(loaded)


def test_the_package_launch_can_be_called() -> None:
    assert callable(importlib.import_module("cpuft.launch.run_folder").choose_run_dir)
    with pytest.raises(CpuftError, match=r"there is no option 'tsk': did you mean task\?"):
        cpuft.launch(tsk="mrpc")
    assert cpuft.Run is Run
    assert cpuft.compare is compare
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = cpuft.lunch


def test_options_are_those_of_the_command_line() -> None:
    given = {"np": 4, "hostfile": Path("hosts"), "fast_path": False, "learning_rate": 1e-4, "eval_every": 10}
    values = parse_options(given | {"train_file": ["a.csv", "b.csv"], "cluster": None}, LaunchConfig, TrainConfig)
    assert values == {
        "np": 4,
        "hostfile": "hosts",
        "fast_path": False,
        "learning_rate": 1e-4,
        "eval_every": "10",
        "train_file": "a.csv,b.csv",
    }
    assert parse_options({"np": (1, 2)}, CompareConfig, LaunchConfig) == {"np": "1,2"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "mprc"}, "'mprc' is not a value of --task: did you mean mrpc?"),
        ({"np": 0}, "--np '0' is not valid: give a whole number of 1 or more"),
        ({"np": True}, "--np 'True' is not valid: give a whole number"),
        ({"learning_rate": {}}, "learning_rate is a dict: give a text, number, True or False, or a list of texts"),
        ({"run_dir": "a\nb"}, "contains the control character"),
        ({"model": "minilm", "from_config": "bert-base"}, "model and from_config exclude each other: leave out one"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuftError, match=re.escape(message)):
        launch(options)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: launch(cast(Any, 3)),
            "int is no function and no options: give a function, TrainConfig or dict",
        ),
        (lambda: launch(len, batch_size=3), "batch_size is for a training, and the function has arguments"),
        (lambda: launch(task="demo", args=(1,)), "args and kwargs are for a function"),
        (lambda: compare(np=(1, 1)), "--np 1,1: the number 1 is there twice"),
        (lambda: compare(min_np=2), "min_np is an option of cpuft.launch only: leave it out"),
        (lambda: Run(Path("none")), "there is no folder .*/none: give the folder of an earlier run"),
        (lambda: Run(Path()).load_model(), "has no folder model"),
    ],
)
def test_a_wrong_call_is_one_clear_error(call: Any, message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        call()
    assert list(Path().iterdir()) == []


def test_another_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            launch(len)
        except CpuftError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "call it in the main thread of the program" in str(raised[0])


LOCK = threading.Lock()


def uses_a_lock() -> None:
    """A function with a variable that cannot be pickled."""
    LOCK.acquire()


def test_what_cannot_be_pickled_is_named() -> None:
    held = threading.Lock()
    with pytest.raises(CpuftError, match=r"^argument 2 of add, a lock, cannot be pickled \(.*\): make it"):
        pickle_call(add, (1, held), {})
    with pytest.raises(CpuftError, match=r"^argument 'b' of add, a lock, cannot be pickled"):
        pickle_call(add, (1,), {"b": held})
    with pytest.raises(CpuftError, match=r"^the variable 'LOCK' that uses_a_lock uses, a lock, cannot be pickled"):
        pickle_call(uses_a_lock, (), {})
    with pytest.raises(CpuftError, match=r"^the variable 'held' that <lambda> uses, a lock, cannot be pickled"):
        pickle_call(lambda: held.acquire(), (), {})
    with pytest.raises(CpuftError, match="cannot be pickled"):
        launch(add, args=(1, held))
    assert list(Path().iterdir()) == []


def add(a: Any, b: Any) -> Any:
    """A function of this module."""
    return a + b


def look(place: str, **found: Any) -> dict[str, Any]:
    """Return what a function finds on its rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    modes = [os.stat(f"{os.environ['CPUFT_RUN_DIR']}/function{name}").st_mode & 0o777 for name in ("", "/call")]
    dist.destroy_process_group()
    return {"rank": dist.get_rank(), "total": total.item(), "modes": modes, "place": place, "sum": add(1, 2)} | found


@needs_cores
def test_a_function_runs_on_every_rank_and_its_results_come_back() -> None:
    run = cpuft.launch(look, np=2, args=("here",), kwargs={"text": "word"})
    assert run.results == [
        {"rank": rank, "total": 3.0, "modes": [0o700, 0o600], "place": "here", "sum": 3, "text": "word"}
        for rank in (0, 1)
    ]
    assert run.folder.parent == Path("runs").absolute()
    assert run.folder.name.startswith("look-np2-")
    assert not (run.folder / "function").exists()
    assert "word" not in (run.folder / "plan.sh").read_text()


@needs_cores
def test_an_error_on_a_rank_is_raised_here(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("rank one\x1b[2J cannot")

    with pytest.raises(RankError, match=r"^rank 1 on .* failed \(exit code 1\)") as caught:
        cpuft.launch(fail, np=2, run_dir="run")
    said = capsys.readouterr().err
    assert ("Traceback" in said, said.count("rank 1 on")) == (False, 1)  # the exception has it
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert text.splitlines()[-1] == "ValueError: rank one\\x1b[2J cannot"
    assert not Path("run/function").exists()


@needs_cores
def test_a_backend_that_is_not_formed_is_refused() -> None:
    def choose() -> None:
        import torch.distributed as dist

        dist.init_process_group("nccl")

    with pytest.raises(
        CpuftError, match=r'^the function calls init_process_group\("nccl"\), but has a group of gloo already'
    ):
        cpuft.launch(choose)


INTERRUPTED = """
import time, cpuft
def wait():
    print("waits", flush=True)
    time.sleep(600)
try:
    cpuft.launch(wait, np=2, run_dir="run")
except KeyboardInterrupt:
    print("caught", flush=True)
"""


@needs_cores
def test_ctrl_c_ends_all_ranks() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert process.stdout.read() == "caught\n"
        assert process.wait(30) == 0
        assert time.monotonic() - begun < 20
    finally:
        process.kill()
        process.wait()
    assert list_children() == set()
    assert not Path("run/function").exists()


def test_rows_of_every_kind_become_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for rows, columns, first in (
        (["a", "b"], ("text",), {"text": "a"}),
        ([("a", "b")], ("text1", "text2"), {"text1": "a", "text2": "b"}),
        ([["a", "b", "c"], ["d"]], ("tokens",), {"tokens": ["a", "b", "c"]}),
        ([{"premise": "a"}], (), {"premise": "a"}),
    ):
        assert write_rows(rows, path) == columns
        assert json.loads(path.read_text().splitlines()[0]) == first
    for wrong in (["a", ("a", "b")], [3], [("a", "b", "c")]):
        with pytest.raises(CpuftError, match="rows differ in kind: give texts,"):
            write_rows(wrong, path)
    with pytest.raises(CpuftError, match="a row has a value that is no text"):
        write_rows([{"text": b"x"}], path)


@pytest.mark.parametrize(
    "rows, written",
    [
        ("one text", [{"text": "one text"}]),
        ({"premise": "a", "hypothesis": "b"}, [{"premise": "a", "hypothesis": "b"}]),
        (pandas.DataFrame({"text": ["a", "b"]}), [{"text": "a"}, {"text": "b"}]),
        (pandas.Series(["a", "b"]), [{"text": "a"}, {"text": "b"}]),
        (np.array(["a", "b"]), [{"text": "a"}, {"text": "b"}]),
        ((text for text in "ab"), [{"text": "a"}, {"text": "b"}]),
    ],
)
def test_what_is_predicted_are_rows(
    rows: Any, written: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(make_record(1), tmp_path / "run")
    seen = list[Any]()

    def run_step(step: Any, *others: Any) -> int:
        file = next(word for word in step.command if word.startswith("--file=")).removeprefix("--file=")
        seen.extend(map(json.loads, Path(file).read_text().splitlines()))
        return 2

    monkeypatch.setattr("cpuft.api.check_request", lambda *given: None)
    monkeypatch.setattr("cpuft.api.run_step", run_step)
    with pytest.raises(CpuftError, match="the prediction failed"):
        Run(tmp_path / "run").predict(rows)
    assert seen == written


@pytest.mark.parametrize(
    "rows, found",
    [
        (
            [{"prediction": "=yes", "p_no": 0.25, "p_=yes": 0.75}, {"prediction": "no", "p_no": 0.9, "p_=yes": 0.1}],
            [
                {"label": "=yes", "probabilities": {"no": 0.25, "=yes": 0.75}},
                {"label": "no", "probabilities": {"no": 0.9, "=yes": 0.1}},
            ],
        ),
        (
            [{"label": 2.5, "prediction": 3.5}, {"label": 2.0, "prediction": 1.0}],
            [{"score": 3.5}, {"score": 1.0}],
        ),
        (
            [{"prediction": ["a", "b"], "p_a": 0.4, "p_b": 0.7}, {"prediction": [], "p_a": 0.1, "p_b": 0.2}],
            [
                {"labels": ["a", "b"], "probabilities": {"a": 0.4, "b": 0.7}},
                {"labels": [], "probabilities": {"a": 0.1, "b": 0.2}},
            ],
        ),
        (
            [
                {"token": "x", "prediction": "B", "p_O": 0.1, "p_B": 0.9},
                {"token": "y", "prediction": None, "p_O": None, "p_B": None},
                {"index": 1, "token": "z", "prediction": "O", "p_O": 0.8, "p_B": 0.2},
            ],
            [{"tags": ["B", ""]}, {"tags": ["O"]}],
        ),
    ],
)
def test_predictions_are_read_by_task(rows: list[dict[str, Any]], found: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    is_tags = "token" in rows[0]
    numbered = [{"index": 0 if is_tags else number, **row} for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered))
    assert read_predicted_rows(path, 2) == found


def test_plots_of_earlier_runs(tmp_path: Path) -> None:
    runs = []
    for ranks in (1, 2):
        folder = tmp_path / f"np-{ranks}"
        write_record(replace(make_record(ranks), steps=make_steps(8, [0.3] * ranks)), folder)
        runs.append(Run(folder))
    figure = runs[0].plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    figure.savefig(tmp_path / "plot.png")
    compared = ComparedRuns(tmp_path, runs)
    assert [axes.get_ylabel() for axes in compared.plot().axes] == ["times as fast as np 1", "loss"]
    assert repr(compared).count("\n") > 3
    assert repr(runs[0]) == f"<cpuft.Run {tmp_path}/np-1, accuracy 0.7600, f1 0.8400>"


@pytest.mark.proof
@needs_cores
def test_a_training_that_fails_is_an_error_and_one_that_ends_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nword,a\n")
    with pytest.raises(CpuftError, match="label"):
        launch(task="files", train_file="rows.csv", validation_file="rows.csv", run_dir="refused")
    assert not Path("refused").exists()
    run = launch(TrainConfig(**DEMO), np=2, run_dir="run", save_model=False)
    assert len(run.record.steps) == 2
    assert set(run.metrics) == {"accuracy", "f1"}
    assert not sys.stderr.isatty()
    assert "step 2/2" in (tmp_path / "run/logs/rank-0.err").read_text()


@needs_cores
@pytest.mark.proof
def test_a_comparison_returns_its_runs() -> None:
    compared = cpuft.compare(DEMO, np=(1, 2), save_model=False, run_dir="both")
    assert [run.record.header.world_size for run in compared.runs] == [1, 2]
    assert [row.np for row in compared.comparison.rows] == [1, 2]
    assert (compared.folder / "report.md").exists()


def read_cells() -> list[str]:
    """Return the code cells of the notebook in docs/."""
    cells = json.loads((ROOT / "docs/python.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_page_has_the_code_of_the_notebook() -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    assert [block.rstrip() for block in re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.M)] == read_cells()


@pytest.mark.proof
@needs_cores
def test_the_notebook_runs_on_two_ranks(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(ROOT / "docs/python.ipynb", as_version=4)
    client = NotebookClient(book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = ["".join(out.get("text", "") or str(out.get("data", "")) for out in cell.outputs) for cell in cells]
    # The bar is a widget, and other lines are text beside it.
    assert "application/vnd.jupyter.widget-view+json" in shown[0]
    assert "cpuft-progress" not in "".join(shown)
    assert "samples/s" not in shown[0]
    assert re.search(r"'accuracy': 0\.\d+", shown[0])
    assert shown[1].count("'label': ") == 2
    assert "image/png" in shown[2]
    assert re.search(r"\[\(0, [\d.]+\), \(1, [\d.]+\)\]", shown[3])
    assert list_children() == set()
