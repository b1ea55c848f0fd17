"""What a rank imports before its first step, and modules that wait until they are used."""

from __future__ import annotations

import importlib
import json
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
from cpuft.train.model import find_model
from cpuft.train.startup import defer, find_hub_problem

_MODULES = {
    "__init__.py": "from late.parts import add\nfrom late import other\nNAME = 'late'\n",
    "parts.py": "def add(a, b=0):\n    return a + b\n",
    "other.py": "",
}
_TELL = """
import gc, sys
from cpuft.train import __main__, imports
settle = imports.settle

def tell():
    looks = [gc.isenabled(), settle(), gc.isenabled(), gc.get_freeze_count() > 100_000]
    print("at the first step:", looks, *sys.modules, flush=True)

imports.settle = tell
__main__.main()
"""


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, which is not imported."""
    (tmp_path / "late").mkdir()
    for name, text in _MODULES.items():
        (tmp_path / "late" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("late", "late.parts", "late.other"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that what is there in the end is taken away
        del sys.modules[name]


def test_before_its_first_step_a_rank_imports_nothing_of_other_models_and_looks_for_no_garbage(tmp_path: Path) -> None:
    words = ["--task=demo", "--max-steps=1", "--max-train-samples=32", "--save-model=false", "--progress=lines"]
    command = [sys.executable, "-c", _TELL, *words, f"--run-dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("step 1/1")) == (0, 1), done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("at the first step: "))
    assert told.startswith("at the first step: [False, None, True, True]")
    loaded = set(told.split())
    unwanted = {"scipy.optimize._optimize", "scipy.stats", "sklearn", "pandas", "boto3.session", "peft", "datasets"}
    assert not loaded & (unwanted | {"transformers.trainer", "torch._inductor.compile_fx"})
    assert {"torch", "transformers.models.bert.modeling_bert", "scipy.optimize"} <= loaded


_NAMES = """
import json, sys
from cpuft.train import imports
looked = []
if sys.argv[1:] == ["hurry"]:
    imports.hurry()
sys.addaudithook(lambda name, words: name == "os.scandir" and looked.append(str(words[0])))
import transformers
from transformers.models.bert import BertConfig
offered = [[kept.__name__, sorted(dir(kept)), sorted(kept._class_to_module.items())]
           for kept in (transformers, transformers.models, transformers.models.bert)]
print(json.dumps([offered, sum(path.endswith("transformers/models") for path in looked)]))
"""


def test_transformers_reads_its_models_files_once_and_offers_the_same() -> None:
    command = [sys.executable, "-c", _NAMES]
    answers = [subprocess.check_output([*command, *words], timeout=120) for words in ([], ["hurry"])]
    (offered, reads), (same, once) = (json.loads(answer) for answer in answers)
    assert same == offered
    assert (reads, once) == (2, 1)


@pytest.mark.usefixtures("late")
def test_a_deferred_function_imports_its_module_when_it_is_called() -> None:
    defer("late", ("add",))
    from late import add  # type: ignore[import-not-found]

    assert "late.parts" not in sys.modules
    assert add(1, b=2) == 3
    assert sys.modules["late.parts"].add is sys.modules["late"].add
    assert add(2) == 2


@pytest.mark.usefixtures("late")
def test_a_deferred_module_is_the_real_one_once_anything_else_is_asked_of_it() -> None:
    defer("late", ("add",))
    module = importlib.import_module("late")
    assert "late.parts" not in sys.modules
    assert module.NAME == "late"
    assert module is sys.modules["late"]
    assert type(module) is type(sys)
    assert (module.add, module.parts) == (sys.modules["late.parts"].add, sys.modules["late.parts"])
    with pytest.raises(AttributeError, match="late"):
        _ = module.missing


@pytest.mark.usefixtures("late")
def test_modules_of_a_deferred_package_can_be_imported_before_it() -> None:
    defer("late", ("add",))
    parts = importlib.import_module("late.parts")
    assert sys.modules["late"].NAME == "late"
    assert (sys.modules["late"].add, sys.modules["late"].parts) == (parts.add, parts)


@pytest.mark.usefixtures("late")
def test_a_module_of_a_package_is_deferred_in_it() -> None:
    defer("late.other")
    package = importlib.import_module("late")
    assert package.other is sys.modules["late.other"]
    assert type(package.other) is not type(sys)
    assert not hasattr(package.other, "missing")
    assert type(package.other) is type(sys)


def test_what_is_imported_or_not_installed_is_left_alone() -> None:
    before = sys.modules["json"]
    for name in ("json", "no_such_package", "no_such_package.part", "json.no_such_module"):
        defer(name)
    assert sys.modules["json"] is before
    assert not {"no_such_package", "no_such_package.part", "json.no_such_module"} & sys.modules.keys()


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    find_hub_problem.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
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


def test_the_folder_of_a_run_is_answered_with_that_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "x" / "model").mkdir(parents=True)
    (tmp_path / "x" / "model" / "config.json").write_text("{}")
    with pytest.raises(CpuftError) as error:
        find_model(f"{tmp_path}/x")
    folder = f"{tmp_path}/x"
    assert str(error.value) == (
        f"folder {folder} is the directory of a run, which holds its model: did you mean {folder}/model?"
    )
