"""Every function that reads a text or a file, with texts for it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from cpuft import argv, hardware, plans, serialization
from cpuft.cli.options import read_config
from cpuft.cli.stacks import format_dumps
from cpuft.comm.backend_choice import read_choice
from cpuft.config.bench import BenchConfig, list_bench_cases
from cpuft.config.fields import format_arguments, option_names, parse_arguments, parse_numbers
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.hosts import registry, ssh_config, topology
from cpuft.hosts.hostfile import Host, parse_hostfile, read_hostfile
from cpuft.hosts.mpi_implementations import parse_version
from cpuft.launch.rank_variables import user_variables
from cpuft.launch.resume import parse_host_copy, read_resumed_run
from cpuft.launch.run_state import format_state, parse_state
from cpuft.launch.stack_dumps import parse_rank_dump, parse_stack
from cpuft.network_speed import parse_bit_rate
from cpuft.provision import image
from cpuft.provision.aws.lease import parse_lease, parse_limit, parse_timer
from cpuft.provision.aws.plan import parse_ssh_from
from cpuft.provision.servers import parse_survey
from cpuft.provision.wheels import parse_pins
from cpuft.rank.process import FAILED_MARK, STEPS_MARK, parse_failure, parse_missing_ranks, parse_steps
from cpuft.rank.progress import ProgressEvent, format_evaluation, format_event, parse_evaluation, parse_event
from cpuft.rank.world import parse_world
from cpuft.record import (
    Line,
    MeasuredHeader,
    Measurement,
    Record,
    format_line,
    parse_lines,
    parse_measurements,
    parse_record,
    read_record,
)
from cpuft.schedulers import parse_job
from cpuft.schedulers.job_node import parse_node, parse_registration
from cpuft.sweep.queue import format_status
from cpuft.sweep.results import format_sweep
from cpuft.sweep.search_space import parse_values, read_conditions
from cpuft.sweep.study import DONE, Attempt, SweepSettings, make_sweep, open_sweep, read_sweep
from cpuft.tasks import TASKS
from cpuft.trackers import parse_trackers
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.chat import (
    parse_conversation,
    parse_messages,
    read_chat_template,
    scan_chats,
)
from cpuft.train.data.embedding_pairs import read_pairs
from cpuft.train.data.labels import parse_label
from cpuft.train.data.recipe import parse_dimensions
from cpuft.train.data.relevance import read_documents_to_predict, read_relevance
from cpuft.train.data.retrieval import read_beir
from cpuft.train.data.sources import parse_glue_tsv, read_data, read_file_to_predict
from cpuft.train.data.tables import parse_hub_name, read_table
from cpuft.train.data.texts import scan_texts, split_texts
from cpuft.train.embedding_form import read_form, read_settings
from cpuft.train.generate import read_prompts
from cpuft.train.model import read_stored_tensors
from cpuft.train.predict import read_finished_run
from tests.conftest import make_facts
from tests.fuzz import values
from tests.fuzz.verbs import CONFIGS, ENTRIES, HOSTFILES, RECIPES, RECORDS, SSH_CONFIGS, STAMPS
from tests.launch.test_stack_dumps import DUMP, found
from tests.records import make_record, make_state
from tests.schedulers.test_job_node import CHILD
from tests.train.decoders import CHATML, MARKED

Texts = st.SearchStrategy[str]
_GLUE = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe.\tShe.\n0\t7\t8\ta\tb\n"
_LSCPU = "# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n2,0,1,1\n"
_SURVEY = (
    "os Debian\nkernel 6.1\npython 3.11.2\nfree_kb 100\nwheel a.whl 00\nsum_hosts 11\nauthorized ssh-ed25519 A b\n"
)
_CSV = [
    'text,label\n"a, ""b""\nc",spam\nd,ham\n',
    "sentence1,sentence2,label\r\na,b,0.5\r\nc,d,1\r\n",
    "text,label\na,0\n",
    "text,label\na,x|y\nb,\n",
]
_JSON_ROWS = [
    '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n',
    '{"sentence1": "a", "sentence2": "b", "label": 0.5}\n',
    '{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": []}\n',
    '{"tokens": ["a", "b"], "tags": ["B-X", "O"]}\n{"tokens": ["c"], "tags": ["O"]}\n',
]
_RELEVANCE = ["query,document,label\na,x,1\na,y,0\nb,y,0.5\n", "query,passage\na,x\na,y\n"]
_JSON_RELEVANCE = [
    '{"anchor": "a", "positive": "x", "negative_1": "y", "negative_2": ""}\n{"anchor": "b", "positive": "y"}\n',
    '{"query": "a", "positive": ["x"], "negative": ["y", "z"]}\n',
    '{"query": "a", "document": "x", "label": true}\n{"query": "a", "document": "y", "label": 0}\n',
]
_BEIR = {
    "corpus.jsonl": '{"_id": "d1", "title": "a", "text": "b"}\n{"_id": "d2", "text": "c"}\n',
    "queries.jsonl": '{"_id": "q1", "text": "a"}\n{"_id": "q2", "text": "b"}\n',
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\nq2\td1\t0\n",
}
"""Files of a folder in BEIR's form."""


@dataclass(frozen=True)
class Parser:
    """A function of one text, and the texts it is given."""

    call: Callable[[str], object]
    texts: Texts
    refusals: tuple[type[Exception], ...] = ()
    """What it may raise beside CpuftError, by its docstring."""


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[str], object]:
    """A function of a file's text, for one that reads a file called `name`."""

    def call(text: str) -> object:
        path = Path(name).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(values.as_bytes(text))
        return read(path)

    return call


def _read_files(path: Path) -> object:
    """The text as training rows, and as validation rows of good ones and of itself."""
    good = path.with_name("good.csv")
    good.write_text("text,label\na,0\nb,1\n")
    for train, validation in ((path, path), (good, path)):
        read_data(TrainConfig(task="files", train_file=str(train), validation_file=str(validation)))
    return None


def _read_asked(path: Path) -> object:
    """The text as rows for models of every kind."""
    for kind in ("class", "score", "labels", "tags"):
        task = replace(TASKS["files"], kind=kind, labels=("0", "1") if kind != "score" else ())
        with suppress(CpuftError):
            read_file_to_predict(task, PredictConfig(file=str(path)), TrainConfig())
    return read_file_to_predict(TASKS["mrpc"], PredictConfig(file=str(path)), TrainConfig())


def _read_relevance(path: Path) -> object:
    """The text as rows for rerankers, for training and validation, and to predict."""
    config = TrainConfig(task="rerank", train_file=str(path), validation_file=str(path))
    with suppress(CpuftError):
        read_relevance(TASKS["rerank"], config)
    with suppress(CpuftError):
        read_relevance(TASKS["rerank"], replace(config, validation_file=""))
    return read_documents_to_predict(TASKS["rerank"], PredictConfig(file=str(path)), config)


def _read_pairs(path: Path) -> object:
    """The text as pairs for embedding models, for training and validation."""
    for task in ("pairs", "scored-pairs"):
        for validation in (str(path), ""):
            config = TrainConfig(task=task, train_file=str(path), validation_file=validation)
            with suppress(CpuftError):
                read_pairs(TASKS[task], config)
    return read_pairs(TASKS["pairs"], TrainConfig(task="pairs", train_file=str(path)))


_FORM = {
    "modules.json": [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_cls_token": True, "include_prompt": True},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "similarity_fn_name": "dot", "truncate_dim": 4},
    "sentence_bert_config.json": {"max_seq_length": 77},
}
"""Files of sentence-transformers beside a model."""


def _read_form(name: str) -> Callable[[str], object]:
    """A function of a file's text, for the file `name` of _FORM, whose other files are good."""

    def call(text: str) -> object:
        folder = Path("form").absolute()
        for file, good in _FORM.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(values.as_bytes(text if file == name else json.dumps(good)))
        return read_form(str(folder))

    return call


def _read_trained(path: Path) -> object:
    """The text as the configuration of a run's model."""
    path.parents[1].joinpath("record.jsonl").write_text(format_line(make_record(2).header) + "\n")
    return read_finished_run(str(path.parents[1]))


def _read_texts(path: Path) -> object:
    return list(split_texts(scan_texts(str(path), "", "--train-file"), 0.1, None))


def _read_prompts(path: Path) -> object:
    return [read_prompts(PredictConfig(file=str(path)), is_chat) for is_chat in (True, False)]


def _read_chats(path: Path) -> object:
    chats = scan_chats(str(path), "--train-file")
    return list(chats.split(0.5)[1].list_conversations())


def _log_in(path: Path) -> object:
    return [ssh_config.read_login(Host(name), str(path)) for name in ("127.0.0.1", "two")]


def _read_archive(text: str) -> object:
    Path("data.npz").write_bytes(text.encode("latin-1", "ignore"))
    return read_prepared("data.npz")


def _read_rows(path: Path) -> object:
    return list(read_table(path).rows)


def _read_beir(name: str) -> Callable[[str], object]:
    """A function of a file's text, for the file `name` of a folder in BEIR's form whose other files are good."""

    def call(text: str) -> object:
        folder = Path("beir").absolute()
        for file, good in _BEIR.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(values.as_bytes(text if file == name else good))
        return read_beir(str(folder), "--validation-file")

    return call


def _read_bytes_as_rows(name: str) -> Callable[[str], object]:
    """A function of a file's bytes, a character for each byte, that reads them as rows."""

    def call(text: str) -> object:
        Path(name).write_bytes(text.encode("latin-1", "ignore"))
        return _read_rows(Path(name))

    return call


def _make_files_of_rows() -> list[str]:
    """A Parquet file, an Arrow file, an Arrow stream and a compressed CSV file, a character for each byte."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["a", "b"], "label": [0, 1], "words": [["x"], ["y", "z"]]})
    as_parquet, as_file, as_stream = io.BytesIO(), io.BytesIO(), io.BytesIO()
    parquet.write_table(table, as_parquet)
    with pyarrow.ipc.new_file(as_file, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream(as_stream, table.schema) as writer:
        writer.write_table(table)
    files = [as_parquet.getvalue(), as_file.getvalue(), as_stream.getvalue(), gzip.compress(_CSV[0].encode())]
    return [file.decode("latin-1") for file in files]


def _make_archive() -> str:
    """A small archive of prepared rows, a character for each byte."""
    task = {"kind": "class", "labels": ["0", "1"], "metrics": ["accuracy"]}
    meta = {**task, "checksum": "0", "pad_id": 0, "mask_id": 0, "words": 9, "tokenizer": "", "validation": [""]}
    meta |= {"texts": ["text"], "label": "label", "cut": 0, "unknown": 0.0, "rows": "0", "slice_values": {"": ["x"]}}
    tokens = {"ids": [5, 6], "types": [0, 0], "offsets": [0, 2], "labels": [1]}
    types = {"ids": np.int32, "types": np.int8, "offsets": np.int64, "labels": np.float32}
    arrays = {
        f"{split}.{name}": np.asarray(value, types[name])
        for split in ("train", "validation")
        for name, value in tokens.items()
    }
    arrays |= {
        "validation.texts": np.frombuffer(b'[["a", "b"]]', np.uint8),
        "validation.slice_numbers": np.zeros(1, np.int32),
    }
    file = io.BytesIO()
    np.savez(file, meta=np.asarray(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
    return file.getvalue().decode("latin-1")


_HEADER = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def _add_length(header: str) -> str:
    """A safetensors file with this header and 24 bytes of numbers, a character for each byte."""
    length = len(values.as_bytes(header)).to_bytes(8, "little").decode("latin-1")
    return length + header + "\0" * 24


def _write_report(text: str) -> object:
    from cpuft.report.comparison import compare
    from cpuft.report.comparison_tables import format_markdown, format_text

    record: Record = parse_record(text)
    compared = compare([record])
    return format_text(compared), format_markdown(compared)


def _place(text: str) -> object:
    found = topology.parse_facts(text, "h")
    return topology.plan_placement(found.cores, 2, 1) if len(found.cores) < 100 else None


_PAIRS = [
    "anchor,positive\na,b\nc,d\n",
    "question,answer,negative_1\na,b,c\nd,e,f\n",
    "text1,text2,score\na,b,0.5\nc,d,1\n",
]
_ROWS = values.damaged([*_CSV, *_JSON_ROWS, _GLUE]) | values.lines(
    values.TEXTS, st.sampled_from([",", "\t", '"']), values.TEXTS
)
_WORDS = st.lists(values.WORDS | st.sampled_from(format_arguments(TrainConfig())), max_size=5).map("\n".join)
_CPUINFO = "processor\t: 0\ncpu family\t: 6\nmodel\t: 1\nmodel name\t: X\nflags\t\t: avx2 amx_bf16\n"
_FACTS = vars(make_facts()) | {"allowed_cpus": [0, 1], "cpuinfo": _CPUINFO, "machine": "x86_64"}
_FACTS = {name: value for name, value in _FACTS.items() if name not in ("cpu_model", "cpu_flags")}
_PLAN = dataclasses.asdict(
    plans.RunPlan(prepare=((plans.Step("w", ("a", "b"), (plans.Setting("n", "v", "r"),)),),), notes=("n",))
)

_MODEL = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "no", "1": "yes"},
    "problem_type": "single_label_classification",
}

_CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}

_ARCHIVES = values.damaged([_make_archive()])
_FILES_OF_ROWS = values.damaged(_make_files_of_rows())

_MEASUREMENT: list[Line] = [
    MeasuredHeader("bench comm", {"torch": "2"}),
    Measurement("gloo", "all_reduce", "float32", 8, 2, (0.1,), (0.5,)),
]
_MEASURED = st.tuples(*(values.damaged_json(json.loads(format_line(line))) for line in _MEASUREMENT)).map("\n".join)

_EVENTS = values.damaged([format_event(ProgressEvent(3, 60, 0.53, 64.2, 12.5, "accuracy 0.8603", True))])
_FAILURES = values.damaged([f"{FAILED_MARK} rank 0 on a exit code 2\n", f"{FAILED_MARK} rank 0 on a exit code 1 2 3\n"])
_STEPS = values.damaged([f"{STEPS_MARK} rank 1 on a ended after 5\n", f"{STEPS_MARK} rank 0 on a failed after 6\n"])
_COPY = {"steps": 3, "header": format_line(make_record(2).header), "states": [format_state(make_state("a"))]}
_KEPT = values.damaged_json(_COPY)

_STATES = values.damaged([format_state(make_state("a", "b"))])

_REPORTS = values.damaged_json(json.loads(str(found()["report"]))).map(lambda text: values.dump(found(report=text)))
"""Of a rank whose own words are damaged, in what its host says of it."""


def _make_journals() -> list[str]:
    """The files of a grid and of a search that have begun."""
    found = []
    for runs in ([{"seed": "1"}], []):
        spaces = [] if runs else [{"lora_rank": "4,8"}]
        settings = SweepSettings(["--task=demo"], 2 - len(runs), search="grid" if runs else "tpe", spaces=spaces)
        sweep = make_sweep("s", settings, True, runs)
        (run,) = sweep.runs or sweep.choose_next().runs
        start = Attempt("a", "run-1", 1.0)
        sweep.note(run, start)
        sweep.note_evaluation(run.configuration, 10, 0.5)
        sweep.note(run, replace(start, status=DONE, seconds=1.0, metrics={"accuracy": 0.5}))
        sweep.conclude(run.configuration)
        found.append("".join(sweep.backend.lines))
    return found


def _damage_journal(text: str) -> st.SearchStrategy[str]:
    """A journal with damage anywhere in its text, or in the values of some of its lines."""
    return values.damaged([text]) | st.tuples(
        *(st.just(line) | values.damaged_json(json.loads(line)) for line in text.splitlines())
    ).map(lambda kept: "\n".join(kept) + "\n")


JOURNALS = st.one_of(*map(_damage_journal, _make_journals()))


def _show_sweep(path: Path) -> None:
    sweep = read_sweep(str(path.parent))
    format_sweep(sweep)
    format_status(sweep, 0, 0.0)
    with open_sweep(str(path.parent)) as opened:
        if opened.settings.search != "grid" and len(opened.configurations) < opened.settings.trials:
            opened.choose_next()


PARSERS: dict[str, Parser] = {
    "parse_hostfile": Parser(parse_hostfile, HOSTFILES | values.lines(values.TEXTS, values.TEXTS)),
    "read_hostfile": Parser(_from_file("hf", lambda path: read_hostfile(str(path))), HOSTFILES),
    "parse_record": Parser(_write_report, RECORDS),
    "parse_state": Parser(partial(parse_state, place="it"), _STATES),
    "read_resumed_run": Parser(_from_file("record.jsonl", lambda path: read_resumed_run(str(path.parent))), RECORDS),
    "read_record": Parser(_from_file("r.jsonl", lambda path: read_record(str(path))), RECORDS),
    "parse_measurements": Parser(partial(parse_measurements, path="x"), _MEASURED),
    "parse_lines": Parser(partial(parse_lines, path="x"), _MEASURED),
    "load of a plan": Parser(
        lambda text: serialization.load(plans.RunPlan, serialization.parse_json(text)),
        values.damaged_json(_PLAN),
        (ValueError,),
    ),
    "parse_json": Parser(serialization.parse_json, values.damaged_json(_PLAN) | values.TEXTS, (ValueError,)),
    "parse_yaml": Parser(serialization.parse_yaml, RECIPES | values.TEXTS, (ValueError,)),
    "load": Parser(
        lambda text: serialization.load(Record, serialization.parse_json(text)),
        values.ANYTHING.map(values.dump),
        (ValueError,),
    ),
    "read_config": Parser(
        _from_file("c.yaml", lambda path: read_config(str(path), option_names(TrainConfig))), CONFIGS
    ),
    "parse_arguments": Parser(lambda text: parse_arguments(TrainConfig, text.split("\n")), _WORDS),
    "parse_job": Parser(parse_job, values.damaged(["slurm:12", "kubernetes:a-b/c-d", "batch:us-east-1/0a-1b"])),
    "parse_registration": Parser(parse_registration, values.damaged(["10.0.0.9 10.0.0.7 2 4711 yes"])),
    "parse_node": Parser(
        lambda text: parse_node(CHILD | dict([text.split("=", 1)])),
        st.tuples(st.sampled_from(sorted(CHILD)), values.damaged(["0", "2", "10.0.0.7", "7f#2", "b" * 32])).map(
            "=".join
        ),
    ),
    "read_stored_tensors": Parser(
        _from_file("m.safetensors", read_stored_tensors),
        values.damaged_json(_HEADER).map(_add_length) | values.damaged([_add_length(json.dumps(_HEADER))]),
    ),
    "read_pairs": Parser(_from_file("p.csv", _read_pairs), values.damaged(_PAIRS)),
    **{f"read_form of {name}": Parser(_read_form(name), values.damaged_json(good)) for name, good in _FORM.items()},
    "parse_dimensions": Parser(parse_dimensions, values.damaged(["384,256,128", "64"])),
    "parse_numbers": Parser(lambda text: parse_numbers(text, "--np", 1024), values.damaged(["1,2,4", "8"])),
    "parse_evaluation": Parser(parse_evaluation, values.damaged([format_evaluation(40, {"accuracy": 0.5, "f1": 0.6})])),
    "read_sweep": Parser(_from_file("s/sweep.jsonl", _show_sweep), JOURNALS),
    "parse_values": Parser(
        lambda text: [parse_values(name, text) for name in ("seed", "learning_rate", "task", "train_file")],
        values.damaged(["1..5", "1e-5,3e-5", "1e-5..1e-3", "mrpc,rte"]),
    ),
    "read_conditions": Parser(
        _from_file("c.yaml", lambda path: read_conditions(str(path))),
        values.damaged(["- seed: 1..3\n  lora-rank: [4, 8]\n- learning-rate: 1e-5\n"]) | CONFIGS,
    ),
    "list_bench_cases": Parser(
        lambda text: list_bench_cases(BenchConfig(sizes=text, backends=text[:9])), values.damaged(["8,16"])
    ),
    "parse_lease": Parser(parse_lease, values.damaged(["90m", "4h", "2d"])),
    "parse_limit": Parser(partial(parse_limit, lease=3600), values.damaged(["90m", "4h", "2d"])),
    "parse_timer": Parser(
        lambda text: parse_timer(text).find_fault(10**9),
        values.damaged(["until 9\nusec 9000000\nmode poweroff\nenabled yes\n"]),
    ),
    "parse_ssh_from": Parser(parse_ssh_from, values.damaged(["203.0.113.7", "10.0.0.0/24", "::1"])),
    "parse_hub_name": Parser(
        partial(parse_hub_name, option="--train-file", split="train"), values.damaged(["hub:a/b/c:train[:1%]@main"])
    ),
    "parse_trackers": Parser(parse_trackers, values.damaged(["tensorboard,mlflow", "wandb", "trackio"])),
    "parse_bit_rate": Parser(parse_bit_rate, values.damaged(["1gbit", "2.5mbit", "7bit"])),
    "parse_world": Parser(
        lambda text: (
            parse_world({"PMI_RANK": text, "PMI_SIZE": "2"}) and parse_world({"RANK": "0", "WORLD_SIZE": text})
        ),
        values.damaged(["0", "1"]),
    ),
    "user_variables": Parser(lambda text: user_variables({"CPUFT_EXPORTED": text}), values.damaged_json({"A": "1"})),
    "parse_facts": Parser(_place, values.damaged_json(_FACTS)),
    "parse_cpuinfo": Parser(partial(hardware.parse_cpuinfo, machine="x"), values.damaged([_CPUINFO])),
    "parse_jumps": Parser(partial(ssh_config.parse_jumps, where="h"), values.damaged(["u@a:22,b", "none"])),
    "read_login": Parser(_from_file("config", _log_in), SSH_CONFIGS),
    "parse_pins": Parser(
        partial(parse_pins, path="pins"), values.damaged(["a==1\nb==2 # c\n", "a==1 \\\n --hash=sha256:00\n"])
    ),
    "read_prepared": Parser(_read_archive, _ARCHIVES),
    "parse_slurm_counts": Parser(argv.parse_slurm_counts, values.damaged(["2(x3),1"])),
    "parse_lscpu": Parser(lambda text: topology.parse_lscpu(text, (0, 1)), values.damaged([_LSCPU])),
    "parse_version": Parser(
        partial(parse_version, "/m"), values.damaged(["Intel(R) MPI Library", "mpirun (Open MPI) 4"])
    ),
    "parse_survey": Parser(lambda text: parse_survey(text, "h"), values.damaged([_SURVEY])),
    "parse_host_copy": Parser(
        lambda text: read_resumed_run("run", host_copies=[parse_host_copy(text, Host("a"))]), _KEPT
    ),
    "parse_event": Parser(parse_event, _EVENTS),
    "parse_failure": Parser(parse_failure, _FAILURES),
    "parse_missing_ranks": Parser(parse_missing_ranks, _FAILURES),
    "parse_steps": Parser(parse_steps, _STEPS),
    "parse_stack": Parser(parse_stack, values.damaged([DUMP]) | values.TEXTS),
    "parse_rank_dump": Parser(
        lambda text: format_dumps((parse_rank_dump(serialization.parse_json(text), "h"),)),
        values.damaged_json(found()) | _REPORTS,
        (ValueError,),
    ),
    "read_entry": Parser(
        _from_file("state/one/cluster.json", lambda path: registry.read_entry(path.parents[1], "one")),
        ENTRIES,
    ),
    "read_recipe": Parser(
        _from_file("r.yaml", lambda path: image.format_install(image.read_recipe(str(path)))), RECIPES
    ),
    "read_stamp": Parser(
        _from_file("etc/cpuft-image.json", lambda path: image.read_stamp(path.parents[1])),
        STAMPS,
    ),
    "read_choice": Parser(
        _from_file("backend-k.json", lambda path: read_choice(path.parent, "k")),
        values.damaged_json({"backend": "mpi", "reason": "r"}),
    ),
    "parse_glue_tsv": Parser(partial(parse_glue_tsv, task=TASKS["mrpc"], source="x"), values.damaged([_GLUE])),
    "parse_label": Parser(partial(parse_label, task=TASKS["stsb"], where="x"), values.damaged(["0.5", "1"])),
    "read_table": Parser(_from_file("rows.csv", _read_rows), _ROWS),
    "read_table of JSON": Parser(_from_file("rows.jsonl", _read_rows), _ROWS),
    "read_columnar": Parser(_read_bytes_as_rows("rows.parquet"), _FILES_OF_ROWS),
    "read_columnar of Arrow": Parser(_read_bytes_as_rows("rows.arrow"), _FILES_OF_ROWS),
    "read_table of gzip": Parser(_read_bytes_as_rows("rows.csv.gz"), _FILES_OF_ROWS),
    "read_finished_run": Parser(_from_file("trained/model/config.json", _read_trained), values.damaged_json(_MODEL)),
    "read_file_to_predict": Parser(_from_file("rows.csv", _read_asked), _ROWS),
    "read_file_to_predict of JSON": Parser(_from_file("rows.jsonl", _read_asked), _ROWS),
    "scan_texts": Parser(_from_file("texts.txt", _read_texts), _ROWS),
    "scan_texts of JSON": Parser(_from_file("texts.jsonl", _read_texts), _ROWS),
    "parse_conversation": Parser(partial(parse_conversation, where="x"), values.damaged_json(_CHAT)),
    "scan_chats": Parser(_from_file("chats.jsonl", _read_chats), values.damaged([json.dumps(_CHAT) * 2]) | _ROWS),
    "parse_messages": Parser(partial(parse_messages, where="x"), values.damaged_json(_CHAT)),
    "read_prompts": Parser(_from_file("prompts.jsonl", _read_prompts), values.damaged([json.dumps(_CHAT)]) | _ROWS),
    "read_chat_template": Parser(
        _from_file("chat.jinja", lambda path: read_chat_template(str(path))), values.damaged([MARKED, CHATML])
    ),
    "read_beir of a corpus": Parser(_read_beir("corpus.jsonl"), values.damaged([_BEIR["corpus.jsonl"]])),
    "read_beir of queries": Parser(_read_beir("queries.jsonl"), values.damaged([_BEIR["queries.jsonl"]])),
    "read_beir of judgements": Parser(_read_beir("qrels/test.tsv"), values.damaged([_BEIR["qrels/test.tsv"]])),
    "read_relevance": Parser(_from_file("rows.csv", _read_relevance), values.damaged(_RELEVANCE)),
    "read_relevance of JSON": Parser(_from_file("rows.jsonl", _read_relevance), values.damaged(_JSON_RELEVANCE)),
    "read_documents_to_predict": Parser(_from_file("rows.csv", _read_relevance), values.damaged(_RELEVANCE)),
    "read_settings": Parser(
        _from_file("m/config_sentence_transformers.json", lambda path: read_settings(str(path.parent))),
        values.damaged_json({"activation_fn": "torch.nn.modules.activation.Sigmoid"}),
    ),
    "read_data": Parser(_from_file("rows.csv", _read_files), _ROWS),
    "read_data of JSON": Parser(_from_file("rows.jsonl", _read_files), _ROWS),
    "read_data of tabs": Parser(_from_file("rows.tsv", _read_files), _ROWS),
}
