"""Command lines of every verb with every option, and the files and variables they find, as cases to be run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from hypothesis import strategies as st

from cpuft.cli import cli
from cpuft.provision.options import HostsConfig, LocalConfig
from cpuft.record import Line, format_line
from tests.fuzz import values
from tests.fuzz.sandbox import FOLDERS, ROOT
from tests.records import make_record

Verb = tuple[str, ...]
FIRST: dict[Verb, list[list[str]]] = {
    ("launch",): [["--dry-run"]],
    ("compare",): [["--dry-run"]],
    ("bench", "comm"): [["--dry-run", "--np=2"]],
    ("bench", "scaling"): [["--dry-run"]],
    ("data", "show"): [["--dry-run"]],
    ("export",): [["--dry-run"]],
    ("predict",): [["--dry-run"]],
    ("push",): [["--dry-run"]],
    ("quickstart",): [["--dry-run"]],
    ("provision", "aws"): [["--dry-run", "--region=us-east-1"], ["--policy"]],
    ("provision", "hosts"): [["--dry-run", "--accept-host-keys", "--hosts=127.0.0.1"]],
    ("provision", "image"): [["--dry-run", "--output=out", "--wheels=wheels"]],
    ("submit", "batch"): [["--dry-run", "--image=i", "--queue=q", "--secret=s", "--role=r"]],
    ("submit", "dstack"): [["--dry-run", "--image=i"]],
    ("submit", "kubernetes"): [["--dry-run", "--image=i"]],
    ("submit", "skypilot"): [["--dry-run", "--image=i"]],
    ("submit", "slurm"): [["--dry-run"]],
    ("submit", "trainjob"): [["--dry-run", "--image=i"]],
    ("sweep",): [["--dry-run"]],
    ("provision", "local"): [
        ["--dry-run"],
        *(["--name=one", word, "2"] for word in ("kill", "pause", "resume", "cut", "join")),
    ],
}
"""One of these lists comes before all other words, where no option can take it for its value: nothing is started."""

_RECIPE = (Path(__file__).parents[2] / "ami" / "recipe.yaml").read_text(encoding="utf-8")
_BIN = os.path.dirname(sys.executable)

# What makes an option of this name lead further than to its first check. Files are those of `FILES`.
GOOD = {
    "hostfile": ["hf", str(ROOT / "work/hf"), "hostfiles/one", "hostfiles/two"],
    "cluster": ["one", "two"],
    "config": ["c.yaml"],
    "run_dir": ["runs/x", "50%rate", "a b", "run"],
    "mpirun": [f"{_BIN}/mpirun", "mpirun", "train.py"],
    "iface": ["lo"],
    "ssh_config": [str(ROOT / "state/two/ssh_config")],
    "name": ["one", "two", "lab", "../../v"],
    "node": ["1", "one-1", "10.77.0.1"],
    "net": ["1gbit", "2.5mbit"],
    "shm": ["64m"],
    "image": ["img"],
    "hosts": ["127.0.0.1", "localhost, 127.0.0.9"],
    "wheels": ["wheels", "img"],
    "prefix": ["/opt/x"],
    "output": ["out2"],
    "pins": ["pins"],
    "recipe_path": ["r.yaml"],
    "path": ["r.yaml"],
    "run": ["run", "."],
    "runs": ["run", "runs", "."],
    "numbers": ["1", "1,2"],
    "np": ["1", "2", "3"],
    "script": ["train.py", "true", "run"],
    "text_columns": ["text", "a,b"],
    "train_file": ["rows.csv", "rows.csv,train.py", "."],
    "from_config": ["bert-base", "c.yaml"],
    "tokenizer": ["minilm", "run"],
    "file": ["rows.csv"],
    "format": ["onnx", "openvino"],
    "split": ["validation", "test"],
    "validation_file": ["rows.csv"],
    "data_dir": ["glue"],
    "sizes": ["1024,8"],
    "backends": ["gloo,auto"],
    "dtypes": ["float32"],
    "operations": ["broadcast"],
    "job": ["slurm:1", "kubernetes:a/b", "trainjob:a/b", "batch:us-east-1/c"],
    "array": ["0-3"],
    "learning_rate": ["1e-5", "1e-5,1e-4"],
    "seed": ["1", "1..3"],
    "action": ["status", "run"],
    "conditions": ["c.yaml"],
    "search": ["optuna", "random"],
    "trials": ["2"],
    "storage": ["sqlite:///trials.db", "sqlite:///none/trials.db", "nothing"],
    "only_hosts": ["localhost", "127.0.0.1"],
    "options": ["--np=2", "--epochs=1", "--run-dir=runs/x"],
    "extra": ["--mem=0", "'--qos=high' --mem=0"],
}

_STAMP = {"format": 1, "recipe": "0", "environment": "1", "python": "/opt/cpuft/env/bin/python", "contents": "2"}
_YAML = ["np: 2\n", "task: mrpc\n", "run-dir: runs/y\n", "save_model: no\n", "hostfile: hf\n", "seed: 7\nnp: [1]\n"]
_HOSTS = [
    "localhost\n",
    "127.0.0.1 slots=4\n",
    "localhost slots=3\n127.0.0.9 user=u\n",
    "127.0.0.1\n127.0.0.1 port=22\n",
]
HOSTFILES = values.damaged([*_HOSTS, "root@127.0.0.2:2 # x\n", "fe80::1 slots=2 max_slots=2\n"])


def _entry(name: str, kind: str, config: type, **wanted: str) -> dict[str, Any]:
    options = {one.name: str(one.default) for one in dataclasses.fields(config)} | {"name": name} | wanted
    paths = {"hostfile": f"{ROOT}/work/hostfiles/{name}", "ssh_config": f"{ROOT}/state/{name}/ssh_config"}
    rest = {"python": sys.executable, "settings": {"PYTHONPATH": "x"}, "ssh_config_there": ""}
    return {"name": name, "kind": kind, "options": options} | paths | rest


def _record() -> list[str]:
    whole = make_record(2)
    assert whole.footer is not None
    lines: list[Line] = [whole.header, *whole.steps, *whole.evaluations, whole.footer]
    return [format_line(line) for line in lines]


_ONE, _TWO = _entry("one", "local", LocalConfig), _entry("two", "hosts", HostsConfig, hosts="127.0.0.1")
RECORDS = values.damaged(["\n".join(_record()) + "\n"]) | st.tuples(
    *(st.just(line) | values.damaged_json(json.loads(line)) for line in _record())
).map(lambda kept: "\n".join(kept) + "\n")
ENTRIES = values.damaged_json(_ONE)
RECIPES = values.damaged([_RECIPE, _RECIPE[:700]])
STAMPS = values.damaged_json(_STAMP)
SSH_CONFIGS = values.damaged(["Host 127.0.0.1\n  Port 22\n  User u\n", "Host two\n  ProxyJump a:22\nMatch all\n"])
CONFIGS = st.lists(st.sampled_from(_YAML), max_size=3).map("".join).flatmap(lambda text: values.damaged([text]))

FILES: dict[str, tuple[str, st.SearchStrategy[str]]] = {
    "work/hf": (_HOSTS[0], HOSTFILES),
    "home/.ssh/config": ("", SSH_CONFIGS),
    "work/hostfiles/one": ("# made by cpuft provision\nlocalhost\n", HOSTFILES),
    "work/hostfiles/two": ("# made by cpuft provision\n127.0.0.1\n", HOSTFILES),
    "work/c.yaml": ("{}\n", CONFIGS),
    "work/r.yaml": (_RECIPE, RECIPES),
    "work/ami/recipe.yaml": (_RECIPE, RECIPES),
    "work/run/record.jsonl": ("\n".join(_record()) + "\n", RECORDS),
    "work/run/model/config.json": ("{}\n", values.TEXTS),
    "work/run/model/model.safetensors": ("x", values.TEXTS),
    "work/run/model/adapter_config.json": ('{"base_model_name_or_path": "b"}', values.TEXTS),
    "work/runs/np-2/record.jsonl": ("\n".join(_record()) + "\n", RECORDS),
    "work/img/etc/cpuft-image.json": (json.dumps(_STAMP), STAMPS),
    "work/img/usr/sbin/sshd": ("", values.TEXTS),
    "work/wheels/a-1-py3-none-any.whl": ("x", values.TEXTS),
    "work/pins": ("a==1\n", values.damaged(["a==1\nb==2 # c\n"])),
    "work/train.py": ("print(1)\n", values.TEXTS),
    "work/rows.csv": ("text,label\na,0\nb,1\n", values.TEXTS),
    "state/one/cluster.json": (json.dumps(_ONE), ENTRIES),
    "state/two/cluster.json": (json.dumps(_TWO), values.damaged_json(_TWO)),
    "state/two/known_hosts": ("127.0.0.1 ssh-ed25519 AAAA\n", values.damaged(["[127.0.0.1]:22 ssh-ed25519 AAAA\n"])),
    "state/two/ssh_config": ("Host *\n", SSH_CONFIGS),
}
"""Files below `ROOT`: a good text of each, and texts with something wrong in them."""

_VARIABLES = [
    "OMP_NUM_THREADS",
    "HF_X",
    "CCL_X",
    "OMP_X;id #",
    "KMP_AFFINITY",
    "CPUFT_EXPORTED",
    "CPUFT_CORES",
    "PMI_RANK",
]
_VARIABLES += [
    "ONEDNN_MAX_CPU_ISA",
    "LD_PRELOAD_X",
    "COLUMNS",
    "LANG",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
    "FI_PROVIDER",
]


@dataclass(frozen=True)
class Case:
    """A command line, files that it finds below `ROOT` instead of good ones, and variables beyond the usual ones."""

    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    fixed: int = 0
    """So many words at its begin keep it from starting anything."""


def list_verbs(command: click.Command = cli, path: Verb = ()) -> Iterator[tuple[Verb, click.Command]]:
    """Every verb of the command line."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from list_verbs(found, (*path, name))
    else:
        yield path, command


def draw_case(verb: Verb, command: click.Command) -> st.SearchStrategy[Case]:
    """Cases of one verb: a few of its options, up to two files with something wrong in them."""
    options = [_draw_option(one) for one in command.params if isinstance(one, click.Option)]
    return st.builds(
        lambda start, options, end, files, environ: Case(
            (*verb, *start, *(word for option in options for word in option), *end),
            dict(files),
            environ,
            len(verb) + len(start),
        ),
        st.sampled_from(FIRST.get(verb, [[]])),
        st.lists(st.one_of(options), max_size=4) if options else st.just([]),
        _draw_end(verb, command),
        st.lists(st.sampled_from(sorted(FILES)).flatmap(_draw_file), max_size=2),
        st.dictionaries(st.sampled_from(_VARIABLES), values.WORDS, max_size=1),
    )


def _draw_file(name: str) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(st.just(name), FILES[name][1])


def _draw_option(option: click.Option) -> st.SearchStrategy[list[str]]:
    """An option with a good value, or, once in three times, an awkward one."""
    flags = st.sampled_from([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags.map(lambda flag: [flag])
    good = GOOD.get(str(option.name), ["x"])
    if isinstance(option.type, click.Choice):
        good = list(option.type.choices)
    elif not isinstance(option.type, click.types.StringParamType):
        good = ["0", "1", "2", "3", "8", "0.5"]
    texts = st.sampled_from(good)
    return st.builds(lambda flag, text: [f"{flag}={text}"], flags, texts | texts | values.WORDS)


def _draw_end(verb: Verb, command: click.Command) -> st.SearchStrategy[list[str]]:
    """A verb's arguments, mostly good ones; for launch, a script in one case of three."""
    if verb == ("launch",):
        script = st.lists(st.sampled_from(GOOD["script"]) | values.WORDS, min_size=1, max_size=3)
        return st.just([]) | st.just([]) | script.map(lambda words: ["--", *words])
    if verb[0] == "submit" and verb[1] not in ("status", "cancel"):
        words = st.lists(st.sampled_from(["--np=2", "--task=mrpc", "--seed=7", "--"]) | values.WORDS, max_size=4)
        sweeps = words.map(lambda drawn: ["--nodes=2", "--", "sweep", *drawn])
        return words.map(lambda drawn: ["--", "launch", *drawn]) | sweeps
    names = [str(one.name) for one in command.params if isinstance(one, click.Argument)]
    good = [GOOD[name] for name in names if name not in ("fault", "node")]
    ends = st.tuples(*map(st.sampled_from, good)).map(list)
    awkward = st.lists(values.WORDS, max_size=1 + len(good))
    return ends | ends | ends | awkward


JUNK = st.lists(values.WORDS, max_size=3).map(lambda words: Case(tuple(words)))
"""Command lines without a verb, or nearly."""


def base_environ() -> dict[str, str]:
    """What is set for every case: folders of its own, and no package index to be asked."""
    own = {name: str(ROOT / folder) for name, folder in FOLDERS.items()}
    return own | {"PATH": f"{_BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "PIP_NO_INDEX": "1", "LANG": "C.UTF-8"}
