"""Mistakes of a new user: each is answered with one whole message that names the mistake and the next step.

Every message here was read by itself and judged by three questions: does it say what happened, does it name the option,
the file and the line, or the host, and does it say what to do next?
"""
# ruff: noqa: E501 (a message stands on one line, as a terminal shows it)

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.train.data import prepare
from cpuft.train.imports import find_hub_problem

Files = dict[str, str | bytes]

COMMANDS: list[tuple[str, Files, str]] = [
    (
        "lanch",
        {},
        "No such command 'lanch'. (Did you mean one of: 'bench', 'launch'?) (see cpuft --help)",
    ),
    (
        "launch --tsk x",
        {},
        "No such option '--tsk'. Did you mean '--task'? (see cpuft launch --help)",
    ),
    (
        "launch --task mprc",
        {},
        "--task knows no 'mprc': did you mean mrpc? (see cpuft launch --help)",
    ),
    (
        "launch --np 0",
        {},
        "Invalid value for '--np': 0 is not in the range x>=1. (see cpuft launch --help)",
    ),
    (
        "launch --np two",
        {},
        "Invalid value for '--np': 'two' is not a valid whole number. (see cpuft launch --help)",
    ),
    (
        "launch --hostfile hosts",
        {},
        "hostfile hosts cannot be read ([Errno 2] No such file or directory: 'hosts'): name a file with one host a line",
    ),
    (
        "launch --hostfile hosts",
        {"hosts": "localhost\nb slot=4\n"},
        "hosts, line 2: 'slot=4' is not understood: write slots=N, user=NAME or port=N",
    ),
    (
        "launch --hostfile hosts",
        {"hosts": "localhost\nlocalhost\n"},
        "hosts, line 2: host localhost stands on line 1 already: remove one, and say slots=N for several ranks",
    ),
    (
        "launch --np 2 --hostfile hosts",
        {"hosts": "localhost\n127.0.0.9 port=9\n"},
        "host 127.0.0.9 cannot be used over ssh ([Errno 111] Connection refused: check its name, its port and that sshd runs there and lets this machine in)",
    ),
    (
        "launch --cluster lab",
        {},
        "there is no cluster 'lab': make one with cpuft provision",
    ),
    (
        "launch --run-dir .",
        {},
        "run directory DIR exists: name a new one with --run-dir, or remove it",
    ),
    (
        "launch --config options.yaml",
        {},
        "--config options.yaml cannot be read ([Errno 2] No such file or directory: 'options.yaml'): name a YAML file",
    ),
    (
        "launch --config options.yaml",
        {"options.yaml": "tsk: mrpc\n"},
        "--config options.yaml: no option 'tsk': did you mean task?",
    ),
    (
        "launch --config options.yaml",
        {"options.yaml": "max-steps: 3.5\n"},
        "Invalid value for '--max-steps': '3.5' is not a valid whole number. (see cpuft launch --help)",
    ),
    (
        "launch --train-file train.csv",
        {},
        "--train-file has no effect with --task demo: add --task files, or text for a corpus",
    ),
    (
        "launch --data-dir glue",
        {},
        "--data-dir has no effect with --task demo: name a GLUE task, such as --task mrpc",
    ),
    (
        "launch --learning-rate 2e-5x",
        {},
        "Invalid value for '--learning-rate': '2e-5x' is not a valid number. (see cpuft launch --help)",
    ),
    (
        "launch -- train.py",
        {},
        "there is no script train.py: name it as seen from DIR",
    ),
    (
        "launch train.py --lr 1e-4",
        {"train.py": ""},
        "put -- before train.py: the words after a script are its own options (see cpuft launch --help)",
    ),
    (
        "launch --task mrpc -- train.py",
        {"train.py": ""},
        "--task is for cpuft's own training: a script takes its options behind its name, after --",
    ),
    (
        "launch --lr 1e-4",
        {},
        "write --learning-rate for --lr (see cpuft launch --help)",
    ),
    (
        "launch --lr_scheduler_type cosine",
        {},
        "leave out --lr_scheduler_type (the rate rises linearly for --warmup-ratio of the updates, then falls linearly to 0) (see cpuft launch --help)",
    ),
    (
        "launch --push_to_hub",
        {},
        "leave out --push_to_hub (upload the folder RUN_DIR/model yourself when the run has ended) (see cpuft launch --help)",
    ),
    (
        "launch --load_best_model_at_end True",
        {},
        "leave out --load_best_model_at_end (a run evaluates once, at its end, and saves that model) (see cpuft launch --help)",
    ),
    (
        "launch --num_train_epochs 3",
        {},
        "write --epochs for --num_train_epochs (see cpuft launch --help)",
    ),
    (
        "launch --per_device_train_batch_size 16 --no_cuda",
        {},
        "write --batch-size for --per_device_train_batch_size; leave out --no_cuda (cpuft trains on CPUs only) (see cpuft launch --help)",
    ),
    (
        "launch --backend nccl",
        {},
        "--backend knows no 'nccl': did you mean ccl? (see cpuft launch --help)",
    ),
    (
        "launch --precision fp16",
        {},
        "--precision knows no 'fp16': did you mean bf16 or fp32? (see cpuft launch --help)",
    ),
    (
        "launch --resume runs/mrpc",
        {},
        "there is no file or folder DIR/runs/mrpc: name the directory of a run",
    ),
    (
        "compare --np 1,x",
        {},
        "--np '1,x' is no list of different rank numbers: write e.g. --np 1,2,4",
    ),
    (
        "report runs/mrpc",
        {},
        "there is no file or folder runs/mrpc: name the directory of a run",
    ),
    (
        "estimate runs/mrpc",
        {},
        "the link between the hosts is not known: give --bandwidth 10gbit, --link comm.jsonl or --instance NAME",
    ),
    (
        "estimate runs/mrpc --bandwidth fast",
        {},
        "--bandwidth 'fast' is no rate: write e.g. 1gbit or 100mbit",
    ),
    (
        "stacks runs/mrpc",
        {},
        "there is no active run in DIR/runs/mrpc: name the folder that an active run got with --run-dir",
    ),
    (
        "bench comm",
        {},
        "bench comm measures the links between ranks: start two or more, e.g. --np 2",
    ),
]
"""What follows `cpuft`, the files that are there, and the whole message. DIR stands for the working directory."""

TRAINING: list[tuple[str, Files, str]] = [
    (
        "--task=demo --model=runs/x",
        {"runs/x/model/config.json": "{}"},
        "folder runs/x is the directory of a run, which holds its model: did you mean runs/x/model?",
    ),
    (
        "--task=demo --model=./nowhere",
        {},
        "there is no folder ./nowhere: name a folder with a model, a hub name, or minilm",
    ),
    (
        "--task=demo --model=bert-base-cased",
        {},
        "model bert-base-cased is neither a folder here nor in the cache of models, and the Hugging Face hub does not answer within 3 s: check the network and the proxy settings, name a folder with --model, or use --model minilm, which needs no hub",
    ),
    (
        "--task=mrpc",
        {},
        "the data of --task mrpc is not in the cache of data sets, and the Hugging Face hub does not answer within 3 s: check the network and the proxy settings, name a folder with a GLUE download with --data-dir, or use --task demo",
    ),
    (
        "--task=mrpc --data-dir=glue",
        {},
        "there is no folder glue: name the one that holds MRPC/train.tsv with --data-dir",
    ),
    (
        "--task=files --train-file=trian.csv --validation-file=validation.csv",
        {"train.csv": "text,label\ngood,1\nbad,0\n", "validation.csv": "text,label\ngood,1\nbad,0\n"},
        "there is no file trian.csv: check --train-file",
    ),
    (
        "--task=files --train-file=train.csv",
        {"train.csv": "text,label\ngood,1\nbad,0\n"},
        "--task files needs --validation-file: name a CSV, TSV or JSON lines file",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": ""},
        "train.csv is empty: give a file with rows",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,target\na,1\n"},
        "train.csv has no column 'label': choose one of target, text",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "review,label\na,1\nb,0\n"},
        "train.csv has no column sentence1 or text: name one or two of review with --text-columns",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na, b,1\nc,0\n"},
        "train.csv, line 2 has 3 columns, its header 2: mend that line (a text with a comma stands in quotation marks)",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na,1\nb,1\n"},
        "all rows of train.csv have the label '1': give rows of two labels or more",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na,1\nb,\n"},
        "train.csv, line 3 has no 'label': mend or remove that line",
    ),
    (
        "--task=files --train-file=train.jsonl --validation-file=train.jsonl",
        {"train.jsonl": '{"text": "a"}\n{"text": "b", "label": "1"}\n'},
        "train.jsonl, line 1 has no 'label': mend or remove that line",
    ),
    (
        "--task=files --train-file=train.parquet --validation-file=train.parquet",
        {"train.parquet": b"PAR1\x15\x04\x15\xfePAR1"},
        "train.parquet is a Parquet file, which cpuft does not read: convert it first: python -c \"import pandas; pandas.read_parquet('train.parquet').to_json('train.jsonl', orient='records', lines=True)\"",
    ),
    (
        "--task=files --train-file=train.xlsx --validation-file=train.xlsx",
        {"train.xlsx": b"PK\x03\x04\x14\x00\xff"},
        "train.xlsx is a spreadsheet, which cpuft does not read: convert it first: save it as CSV in UTF-8 with commas between the columns",
    ),
    (
        "--task=files --train-file=reviews --validation-file=reviews",
        {"reviews/data-00000-of-00001.arrow": b"ARROW1", "reviews/dataset_info.json": "{}", "reviews/state.json": "{}"},
        "reviews is a folder of the package datasets, which cpuft does not read: convert each of its splits first: python -c \"import datasets; datasets.load_from_disk('reviews').to_json('train.jsonl')\"",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text;label\na;1\nb;0\n"},
        "train.csv has semicolons between its columns, and cpuft reads commas: convert it with python -c \"import pandas; pandas.read_csv('train.csv', sep=';', dtype=str).to_csv('train-commas.csv', index=False)\"",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": b"text,label\ncaf\xe9,1\nb,0\n"},
        "train.csv, line 2 is no UTF-8 text (byte 0xe9): if it comes from Windows or Excel, convert it with iconv -f WINDOWS-1252 -t UTF-8 train.csv > train-utf8.csv, else mend that line",
    ),
    (
        "--task=files --train-file=train.json --validation-file=train.json",
        {"train.json": '[\n{"text": "a", "label": "1"},\n{"text": "b", "label": "0"}\n]\n'},
        "train.json is a JSON array, and cpuft reads JSON lines, one object a line: convert it with python -c \"import json; [print(json.dumps(row)) for row in json.load(open('train.json'))]\" > train-lines.jsonl",
    ),
]
"""The same for options that only the preparation of a training can find fault with."""


@pytest.fixture(autouse=True)
def _without_a_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing listens where the Hugging Face hub would be."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    find_hub_problem.cache_clear()
    yield
    find_hub_problem.cache_clear()


def check(call: Callable[[], object], files: Files, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as ended:
        call()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.splitlines()[-1].replace(str(Path.cwd()), "DIR") == f"cpuft: error: {message}"


@pytest.mark.parametrize(("words", "files", "message"), COMMANDS, ids=[words for words, *_ in COMMANDS])
def test_a_command_with_a_mistake(words: str, files: Files, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(lambda: main(words.split()), files, message, capsys)


@pytest.mark.parametrize(("words", "files", "message"), TRAINING, ids=[words for words, *_ in TRAINING])
def test_a_training_with_a_mistake(
    words: str,
    files: Files,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare", "out.npz", *words.split()])
    check(prepare.main, files, message, capsys)


def test_there_are_as_many_mistakes_as_were_tried() -> None:
    assert len(COMMANDS) + len(TRAINING) >= 45
