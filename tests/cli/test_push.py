"""`cpuft push` against a hub that is an HTTP server of the test."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from cpuft.cli.push import _list_upload
from cpuft.train.embedding_form import EmbeddingForm, write_form
from tests.conftest import run_cpuft
from tests.records import make_record
from tests.report.test_comparison import write_record

TOKEN = "hf_a_secret_of_the_test"


@dataclass
class Hub:
    """What the server has, and what it was sent."""

    address: str
    repositories: dict[str, bool] = field(default_factory=dict)
    """Whether a repository is private, by its name."""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    refuses: bool = False


class Handler(BaseHTTPRequestHandler):
    """The requests of huggingface_hub that create a repository and commit files to it."""

    hub: Hub

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def note(self) -> bytes:
        if self.path != "/api/agent-harnesses":  # the client asks this for its user agent
            self.hub.requests.append(f"{self.command} {self.path.partition('?')[0]}")
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        self.note()
        name = self.path.partition("?")[0].removeprefix("/api/models/").removesuffix("/revision/main")
        if name not in self.hub.repositories:
            return self.answer(404, {"error": "not found"})
        return self.answer(200, {"id": name, "private": self.hub.repositories[name], "siblings": []})

    def do_POST(self) -> None:
        body = self.note()
        if self.hub.refuses:
            return self.answer(401, {"error": "Invalid username or password."})
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            is_new = name not in self.hub.repositories
            if is_new:
                self.hub.repositories[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return self.answer(200 if is_new else 409, {"url": f"{self.hub.address}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]
            return self.answer(200, {"files": modes})
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        url = f"{self.hub.address}/{name}/commit/{'0' * 40}"
        return self.answer(200, {"commitUrl": url, "commitOid": "0" * 40, "success": True})

    def log_message(self, format: str, *values: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Handler.hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has logged in to this hub."""
    return {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}


MODEL = {
    "README.md": "---\ntags: [cpuft]\n---\n# A model\n",
    "config.json": "{}\n",
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "vocab.txt": "a\nb\n",
}
DATA = {"train.csv": "text,label\n", "demo-0123.npz": "x", "predictions.csv": "index\n", "record.jsonl": "{}\n"}
"""What somebody put into the folder of the model, or a program left there."""


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_record(make_record(1), folder)
    (folder / "model").mkdir()
    for name, text in (MODEL | DATA).items():
        (folder / "model" / name).write_text(text)
    (folder / "model/special_tokens_map.json").symlink_to(folder / "record.jsonl")
    (folder / "model/logs").mkdir()
    return folder


LEFT = "not uploaded: demo-0123.npz, logs, predictions.csv, record.jsonl, special_tokens_map.json, train.csv"


def test_only_the_model_is_uploaded_and_it_is_private(hub: Hub, settings: dict[str, str]) -> None:
    done = run_cpuft("push", "run", "team/model", settings=settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"uploaded: {hub.address}/team/model\n"
    assert hub.files == {name: text.encode() for name, text in MODEL.items()}
    assert hub.repositories == {"team/model": True}
    lines = done.stderr.splitlines()
    assert lines[0] == "5 files of run/model for team/model (private):"
    assert [line.split()[0] for line in lines[1:6]] == sorted(MODEL)
    assert lines[6] == LEFT
    assert hub.tokens <= {f"Bearer {TOKEN}", ""}
    assert TOKEN not in done.stdout + done.stderr


def test_an_embedding_model_is_uploaded_with_the_files_that_say_how_it_embeds(
    run: Path, hub: Hub, settings: dict[str, str]
) -> None:
    model = run / "model"
    write_form(model, EmbeddingForm("cls", normalize=True, prompts={"query": "q: "}), 128)
    (model / "1_Pooling/train.csv").write_text("text,label\n")
    done = run_cpuft("push", "run", "team/model", settings=settings)
    assert done.returncode == 0, done.stderr
    form = (
        "1_Pooling/config.json",
        "2_Normalize/config.json",
        "config_sentence_transformers.json",
        "modules.json",
        "sentence_bert_config.json",
    )
    assert hub.files == {name: (model / name).read_bytes() for name in (*MODEL, *form)}
    assert done.stderr.splitlines()[11] == LEFT.replace(": ", ": 1_Pooling/train.csv, ")


def test_no_file_is_uploaded_from_a_linked_folder(run: Path, hub: Hub, settings: dict[str, str]) -> None:
    (run / "elsewhere").mkdir()
    (run / "elsewhere/config.json").write_text("{}")
    (run / "model/1_Pooling").symlink_to(run / "elsewhere")
    done = run_cpuft("push", "run", "team/model", settings=settings)
    assert (done.returncode, sorted(hub.files)) == (0, sorted(MODEL)), done.stderr


def test_files_of_windows_have_the_names_of_the_hub(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1_Pooling", "elsewhere"):
        (run / "model" / name).mkdir()
        (run / "model" / name / "config.json").write_text("{}")
    (run / "model/2_Normalize").symlink_to(run / "model/elsewhere")
    monkeypatch.setattr(Path, "relative_to", lambda path, folder: PureWindowsPath(os.path.relpath(path, folder)))
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)  # as of a junction
    files, others = _list_upload(run / "model")
    assert [name for name in files if "Pool" in name or "Norm" in name] == ["1_Pooling/config.json"]
    assert {"2_Normalize", "elsewhere"} <= {*others}


def test_it_is_public_only_if_that_is_asked_for(hub: Hub, settings: dict[str, str]) -> None:
    hub.repositories["team/model"] = False
    done = run_cpuft("push", "run", "team/model", settings=settings)
    wanted = "team/model is public on the hub: add --public to upload the model for everybody, or give another name"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"cpuft: error: {wanted}")
    assert hub.files == {}
    done = run_cpuft("push", "run", "team/model", "--public", settings=settings)
    assert (done.returncode, len(hub.files)) == (0, 5), done.stderr
    done = run_cpuft("push", "run", "other", "--public", settings=settings)
    assert (done.returncode, hub.repositories["me/other"]) == (0, False), done.stderr


def test_a_dry_run_asks_nobody(hub: Hub, settings: dict[str, str]) -> None:
    done = run_cpuft("push", "run", "team/model", "--dry-run", settings=settings)
    assert (done.returncode, done.stdout, hub.requests) == (0, "", [])
    assert done.stderr.splitlines()[-1] == LEFT


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"HF_TOKEN": ""}, "no token for the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN to"),
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"),
    ],
)
def test_without_a_token_or_offline(changes: dict[str, str], message: str, hub: Hub, settings: dict[str, str]) -> None:
    done = run_cpuft("push", "run", "team/model", settings=settings | changes)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert hub.requests == []


def test_a_hub_that_refuses_or_is_not_there(hub: Hub, settings: dict[str, str]) -> None:
    hub.refuses = True
    done = run_cpuft("push", "run", "team/model", settings=settings)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith(f"cpuft: error: the upload of 'team/model' to {hub.address} failed (")
    assert "log in with `hf auth login`" in last
    assert TOKEN not in last
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
        address = f"http://me:pass-word@{nobody}"
        done = run_cpuft("push", "run", "team/model", settings=settings | {"HF_ENDPOINT": address})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"cpuft: error: the upload of 'team/model' to http://***@{nobody} failed ("
    )
    assert "pass-word" not in done.stderr
    assert "the network and the proxy settings" in done.stderr


@pytest.mark.parametrize("name", ["a b", "a/b/c", "../x", "--x"])
def test_no_name_of_a_repository(name: str, hub: Hub, settings: dict[str, str]) -> None:
    done = run_cpuft("push", "run", "--", name, settings=settings)
    assert done.returncode == 2
    assert "check the name (OWNER/NAME)" in done.stderr
    assert hub.requests == []


def test_adapters_for_a_local_model_stay_here(run: Path, hub: Hub, settings: dict[str, str]) -> None:
    adapters = run / "model/adapter_config.json"
    adapters.write_text(json.dumps({"base_model_name_or_path": "/home/me/bert"}))
    done = run_cpuft("push", "run", "team/model", settings=settings)
    assert (done.returncode, hub.requests) == (2, [])
    assert "for a base model in the folder /home/me/bert, which nobody else can load: train with" in done.stderr
    adapters.write_text(json.dumps({"base_model_name_or_path": "bert-base-uncased"}))
    assert run_cpuft("push", "run", "team/model", settings=settings).returncode == 0
    assert "adapter_config.json" in hub.files


def test_a_model_without_weights_is_refused(run: Path, settings: dict[str, str]) -> None:
    (run / "model/model.safetensors").unlink()
    done = run_cpuft("push", "run", "team/model", settings=settings)
    assert (done.returncode, "run/model holds no weights (*.safetensors)" in done.stderr) == (2, True)
