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
from cpuft.train.startup import find_hub_problem

Files = dict[str, str | bytes]

COMMANDS: list[tuple[str, Files, str]] = [
    (
        "lanch",
        {},
        "there is no command cpuft lanch: did you mean launch? (see cpuft --help)",
    ),
    (
        "provision local kill 2 --nodes 2 --dry-run",
        {},
        "--nodes is for making a cluster, and kill changes one that is there: leave it out",
    ),
    (
        "provision image --output root --type m7i.large --dry-run",
        {},
        "--type is for AMIs: leave it out with --output",
    ),
    (
        "push runs/none me/model",
        {},
        "there is no folder runs/none: give the folder of an earlier run",
    ),
    (
        "provision image --list --recipe a.yaml",
        {},
        "--recipe is for a new image: leave it out",
    ),
    (
        "launch --tsk x",
        {},
        "there is no option --tsk: did you mean --task? (see cpuft launch --help)",
    ),
    (
        "launch --task mprc",
        {},
        "'mprc' is not a value of --task: did you mean mrpc? (see cpuft launch --help)",
    ),
    (
        "launch --np 0",
        {},
        "--np '0' is not valid: give a whole number of 1 or more (see cpuft launch --help)",
    ),
    (
        "launch --np two",
        {},
        "--np 'two' is not valid: give a whole number of 1 or more (see cpuft launch --help)",
    ),
    (
        "launch --hostfile hosts",
        {},
        "there is no file hosts, which --hostfile names: give a file with one host on each line",
    ),
    (
        "launch --hostfile hosts",
        {"hosts": "localhost\nb slot=4\n"},
        "hosts, line 2: 'slot=4' is not understood: write slots=N, user=NAME or port=N",
    ),
    (
        "launch --np 2 --hostfile hosts",
        {"hosts": "localhost\n127.0.0.9 port=9\n"},
        "host 127.0.0.9 cannot be used over ssh (Connection refused on port 9: check its name and its port, and that sshd runs there and accepts connections from this machine)",
    ),
    (
        "launch --cluster lab",
        {},
        "there is no cluster named 'lab' (no cluster exists yet): make one with cpuft provision, or name machines of your own in a file with --hostfile",
    ),
    (
        "launch --run-dir .",
        {},
        "the folder DIR exists already, and a run needs a new folder: give --run-dir the name of a folder that does not exist yet, or leave --run-dir out, and cpuft makes a new folder in runs",
    ),
    (
        "launch --config options.yaml",
        {},
        "there is no file options.yaml, which --config names: give a YAML file",
    ),
    (
        "launch --config options.yaml",
        {"options.yaml": "tsk: mrpc\n"},
        "--config options.yaml: there is no option 'tsk': did you mean task?",
    ),
    (
        "launch --config options.yaml",
        {"options.yaml": "max-steps: 3.5\n"},
        "--config options.yaml: max-steps '3.5' is not valid: give a whole number of 0 or more (see cpuft launch --help)",
    ),
    (
        "launch --config options.yaml",
        {"options.yaml": "precision: fp16\n"},
        "--config options.yaml: 'fp16' is not a value of precision: did you mean bf16? (see cpuft launch --help)",
    ),
    (
        "launch --do_train --no_cuda",
        {},
        "leave out what cpuft does not have: --do_train (a run always trains, then evaluates), --no_cuda (cpuft trains on CPUs only) (see cpuft launch --help)",
    ),
    (
        "compare --np 2,1,2",
        {},
        "--np 2,1,2: the number 2 is there twice: give numbers with commas between them, for example 1,2,4",
    ),
    (
        "launch --train-file train.csv",
        {},
        "--train-file has no effect with --task demo: leave it out, or give --task files or text or chat or pairs or scored-pairs or rerank",
    ),
    (
        "launch --data-dir glue",
        {},
        "--data-dir has no effect with --task demo: leave it out, or give --task cola or sst2 or mrpc or stsb or qqp or mnli or qnli or rte or wnli",
    ),
    (
        "launch --learning-rate 2e-5x",
        {},
        "--learning-rate '2e-5x' is not valid: give a number of 0 or more (see cpuft launch --help)",
    ),
    (
        "launch -- train.py",
        {},
        "there is no script train.py in the folder DIR: give the path of the script",
    ),
    (
        "launch train.py --lr 1e-4",
        {"train.py": ""},
        "the script train.py needs -- before it, and its own options after it: write for example cpuft launch -- train.py --name value (see cpuft launch --help)",
    ),
    (
        "launch --task mrpc -- train.py",
        {"train.py": ""},
        "--task is for cpuft's own training, not for a script: leave it out, and write the options of the script behind the script, as in cpuft launch -- train.py --name value",
    ),
    (
        "launch --lr 1e-4",
        {},
        "write --learning-rate instead of --lr (see cpuft launch --help)",
    ),
    (
        "launch --lr_scheduler_type cosine",
        {},
        "write --lr-schedule instead of --lr_scheduler_type (with dashes: constant-with-warmup) (see cpuft launch --help)",
    ),
    (
        "launch --push_to_hub",
        {},
        "leave out what cpuft does not have: --push_to_hub (when the run has ended, upload its model yourself; it is in the folder of the run, for example in runs/mrpc-np2/model) (see cpuft launch --help)",
    ),
    (
        "launch --load_best_model_at_end True",
        {},
        "write --save-best instead of --load_best_model_at_end (see cpuft launch --help)",
    ),
    (
        "launch --num_train_epochs 3",
        {},
        "write --epochs instead of --num_train_epochs (see cpuft launch --help)",
    ),
    (
        "launch --per_device_train_batch_size 16 --no_cuda",
        {},
        "write --batch-size instead of --per_device_train_batch_size; leave out what cpuft does not have: --no_cuda (cpuft trains on CPUs only) (see cpuft launch --help)",
    ),
    (
        "launch --backend nccl",
        {},
        "'nccl' is not a value of --backend: did you mean ccl? (see cpuft launch --help)",
    ),
    (
        "launch --precision fp16",
        {},
        "'fp16' is not a value of --precision: did you mean bf16? (see cpuft launch --help)",
    ),
    (
        "launch --resume runs/mrpc",
        {},
        "there is no folder DIR/runs/mrpc: give the folder of an earlier run, for example runs/mrpc-np2",
    ),
    (
        "compare --np 1,x",
        {},
        "--np 1,x: 'x' is not a whole number from 1 to 1000000: give numbers with commas between them, for example 1,2,4",
    ),
    (
        "report runs/mrpc",
        {},
        "there is no folder runs/mrpc: give the folder of an earlier run, for example runs/mrpc-np2",
    ),
    (
        "estimate runs/mrpc",
        {},
        "the speed of the network between the hosts is not known: give --bandwidth, such as 10gbit, --link with comm.jsonl of cpuft bench comm, or --instance, such as c7i.8xlarge",
    ),
    (
        "estimate runs/mrpc --bandwidth fast",
        {},
        "--bandwidth 'fast' is not a bit rate: write for example 1gbit or 100mbit",
    ),
    (
        "stacks runs/mrpc",
        {},
        "there is no folder DIR/runs/mrpc: give the folder of a run that is running now, for example runs/mrpc-np2",
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
        "--model runs/x is the folder of a run, not of a model: give --model runs/x/model",
    ),
    (
        "--task=demo --model=./nowhere",
        {},
        "there is no folder ./nowhere: give --model the folder or the hub name of a model",
    ),
    (
        "--task=demo --model=bert-base-cased",
        {},
        "model bert-base-cased is neither a folder here nor in the cache of models, and the Hugging Face hub does not answer within 3 s: check the network and the proxy settings, name a folder with --model, or use --model minilm, which needs no hub",
    ),
    (
        "--task=mrpc",
        {},
        "the data of --task mrpc is not in the cache of data sets, and the Hugging Face hub does not answer within 3 s: check the network and the proxy settings, or give --data-dir a folder that contains MRPC/train.tsv, from a GLUE download, or use --task demo",
    ),
    (
        "--task=mrpc --data-dir=glue",
        {},
        "--data-dir glue does not exist: give the folder that contains MRPC/train.tsv",
    ),
    (
        "--task=files --train-file=trian.csv --validation-file=validation.csv",
        {"train.csv": "text,label\ngood,1\nbad,0\n", "validation.csv": "text,label\ngood,1\nbad,0\n"},
        "there is no file trian.csv: check --train-file",
    ),
    (
        "--task=files --train-file=train.csv",
        {"train.csv": "text,label\ngood,1\ngood,1\n"},
        "train.csv has 1 different row, too few to take some for validation: give more rows, or other rows with --validation-file",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": ""},
        "train.csv is empty: give a file with rows",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,target\na,1\n"},
        "train.csv has no column 'label' (its columns are 'text', 'target'): give the name of the column of the labels with --label-column",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "review,label\na,1\nb,0\n"},
        "no column of train.csv is named text, sentence or sentence1 (it has review): name the column of the texts, or two columns for pairs, with --text-columns",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na, b,1\nc,0\n"},
        "train.csv, line 2 has 3 columns, but the header has 2: put a text that contains a comma in quotation marks",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na,1\nb,1\n"},
        "all rows of train.csv have the label '1': give rows with at least two different labels",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": "text,label\na,1\nb,\n"},
        "train.csv, line 3 has no 'label': correct or remove that line, or leave out rows with --skip-unlabelled",
    ),
    (
        "--task=files --train-file=train.jsonl --validation-file=train.jsonl",
        {"train.jsonl": '{"text": "a"}\n{"text": "b", "label": "1"}\n'},
        "train.jsonl, line 1 has no 'label': correct or remove that line, or leave out rows with --skip-unlabelled",
    ),
    (
        "--task=files --train-file=train.parquet --validation-file=train.parquet",
        {"train.parquet": b"PAR1\x15\x04\x15\xfePAR1"},
        "train.parquet is cut off or damaged (Parquet file size is 12 bytes, smaller than the size reported by footer's (4262790165bytes)): copy or download it again",
    ),
    (
        "--task=files --train-file=train.xlsx --validation-file=train.xlsx",
        {"train.xlsx": b"PK\x03\x04\x14\x00\xff"},
        "train.xlsx is a spreadsheet, which cpuft does not read: save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead",
    ),
    (
        "--task=files --train-file=reviews --validation-file=reviews",
        {"reviews/data-00000-of-00001.arrow": b"ARROW1", "reviews/dataset_info.json": "{}", "reviews/state.json": "{}"},
        "reviews is cut off or damaged (KeyError: '_data_files'): copy or download it again",
    ),
    (
        "--task=files --train-file=reviews --validation-file=reviews",
        {"reviews/dataset_dict.json": '{"splits": ["train", "validation"]}'},
        "reviews is a folder: give a file of rows, or all files in it, for example --train-file 'reviews/*.csv'",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": 'text,label\n"Yes, he said,1\nno,0\n'},
        "train.csv, line 2: a quotation mark opens a cell there and does not close it at the end of a cell (unexpected end of data): write a quotation mark within a quoted cell twice, or give --quoting none if quotation marks are a part of the texts",
    ),
    (
        "--task=files --train-file=train.csv --validation-file=train.csv",
        {"train.csv": b"text,label\ncaf\xe9,1\nb,0\n"},
        "train.csv, line 2 is not UTF-8 text (byte 0xe9): correct that line; or, if the file comes from Windows or Excel, give --encoding windows-1252",
    ),
    (
        "--task=files --train-file=train.json --validation-file=train.json",
        {"train.json": '[\n{"text": "a", "label": "1"},\n{"text": "b", "label": "0"}\n]\n'},
        "train.json is a JSON array, and cpuft reads JSON lines, one object a line: convert it with this command, then give train-lines.jsonl instead: python -c \"import json; [print(json.dumps(row)) for row in json.load(open('train.json'))]\" > train-lines.jsonl",
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
