"""What a rank imports before its first step, and how it finds out that the hub is absent."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.model import describe_load_failure, find_model
from cpuft.train.startup import find_hub_problem
from tests.train.tiny import save_tiny

_REPORT = """
import gc, sys
from cpuft.train import __main__, startup
resume = startup.resume_garbage_collection

def report():
    states = [gc.isenabled(), resume(), gc.isenabled(), gc.get_freeze_count() > 100_000]
    print("at the first step:", states, *sys.modules, flush=True)

startup.resume_garbage_collection = report
__main__.main()
"""


def test_before_its_first_step_a_rank_imports_nothing_of_other_models_and_collects_no_garbage(tmp_path: Path) -> None:
    words = ["--task=demo", "--max-steps=1", "--max-train-samples=32", "--max-length=16", "--save-model=false"]
    words += ["--progress=lines", f"--model={save_tiny(tmp_path / 'tiny')}"]
    command = [sys.executable, "-c", _REPORT, *words, f"--run-dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("step 1/1")) == (0, 1), done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("at the first step: "))
    assert told.startswith("at the first step: [False, None, True, True]")
    loaded = set(told.split())
    unwanted = {"scipy.stats", "sklearn", "pandas", "peft", "datasets"}
    assert not loaded & (unwanted | {"transformers.trainer", "torch._inductor.compile_fx"})
    assert {"torch", "transformers.models.bert.modeling_bert"} <= loaded


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    find_hub_problem.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    find_hub_problem.cache_clear()


@pytest.mark.usefixtures("_hub")
def test_a_hub_that_accepts_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert find_hub_problem() == ""
    find_hub_problem.cache_clear()
    assert find_hub_problem() == "the Hugging Face hub does not answer within 3 s"
    assert constants.HF_HUB_OFFLINE
    find_hub_problem.cache_clear()
    assert find_hub_problem() == "HF_HUB_OFFLINE forbids asking the Hugging Face hub"


@pytest.mark.usefixtures("_hub")
def test_a_name_server_that_does_not_answer_costs_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def wait(*_: object, **__: object) -> None:
        answered.wait(20)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", wait)
    start = time.monotonic()
    find_hub_problem()
    assert time.monotonic() - start < 5
    answered.set()
    with pytest.raises(CpuftError) as error:
        load_tokenizer("someone/some-encoder")
    assert str(error.value) == (
        "model someone/some-encoder is neither a folder here nor in the cache of models, and the Hugging Face hub does "
        "not answer within 3 s: check the network and the proxy settings, name a folder with --model, or use "
        "--model minilm, which needs no hub"
    )


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_that_the_user_has_forbidden(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with monkeypatch.context() as patch:
        patch.setenv(variable, "1")
        said = describe_load_failure("someone/some-encoder", OSError("x"))
    assert said == (
        f"model someone/some-encoder is neither a folder here nor in the cache of models, and {variable} forbids "
        f"asking the Hugging Face hub: unset {variable} to download it once, name a folder with --model, or use "
        f"--model minilm, which needs no hub"
    )


def test_the_folder_of_a_run_is_answered_with_that_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "x" / "model").mkdir(parents=True)
    (tmp_path / "x" / "model" / "config.json").write_text("{}")
    with pytest.raises(CpuftError) as error:
        find_model(f"{tmp_path}/x")
    folder = f"{tmp_path}/x"
    assert str(error.value) == (f"--model {folder} is the folder of a run, not of a model: give --model {folder}/model")
