"""Who is measured: the Hugging Face Trainer in four configurations, and a bare loop with `accelerate`.

Each lives in a process of its own, loads once and then waits for its turns, so that none's allocator or threads
touch another's, and peak memory is its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpuft.errors import CpuftError
from cpuft.rank.process import end_with_parent
from cpuft.tasks import TASKS
from cpuft.train.data.archive import Tokens
from cpuft.train.data.sources import parse_glue_tsv
from cpuft.train.fast.acceleration import accelerate, has_bf16_products, patch_model
from cpuft.train.fast.adamw import clip_gradients
from cpuft.train.precision import autocast

MAX_LENGTH = 128
"""Most tokens of an example of MRPC."""
_SENTENCE_TOKENS = 25
"""About the number of tokens of a sentence of MRPC."""
Row = dict[str, Any]


def read_rows(path: Path, tokenizer: Any, count: int = 0, length: int = MAX_LENGTH) -> list[Row]:
    """The first `count` rows (0: all) of MRPC in GLUE's layout: `input_ids`, `token_type_ids`, `label` of each.

    With a `length` above 128, each text is followed by as many of the next texts as a random number of tokens up to
    that holds, so that all lengths are equally frequent.

    Raises CpuftError: there is no such file, or a line that is not MRPC's.
    """
    if not path.is_file():
        raise CpuftError(f"{path} is not there: give --data the folder that holds MRPC's train.tsv and dev.tsv")
    rows = parse_glue_tsv(path.read_text(encoding="utf-8-sig"), TASKS["mrpc"], str(path)).first(count)
    first, second = ([texts[at] for texts in rows.texts] for at in (0, 1))
    if length > MAX_LENGTH:
        sizes = np.random.default_rng(0).integers(1, length // (2 * _SENTENCE_TOKENS) + 1, len(first))
        first, second = (
            [" ".join(texts[at : at + size]) for at, size in enumerate(sizes.tolist())] for texts in (first, second)
        )
    encoded = tokenizer(first, second, truncation=True, max_length=length)
    return [
        {"input_ids": ids, "token_type_ids": types, "label": int(label)}
        for ids, types, label in zip(encoded["input_ids"], encoded["token_type_ids"], rows.labels, strict=True)
    ]


def make_tokens(rows: list[Row]) -> Tokens:
    """Return the same examples in the form that objectives of cpuft take."""
    lengths = [len(row["input_ids"]) for row in rows]
    return Tokens(
        np.concatenate([np.asarray(row["input_ids"], np.int32) for row in rows]),
        np.concatenate([np.asarray(row["token_type_ids"], np.int8) for row in rows]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.asarray([row["label"] for row in rows], np.float32),
    )


def collate(rows: list[Row], length: int = 0) -> dict[str, Tensor]:
    """Return a batch padded to `length` or to its longest example:

    input ids, token types (if the model has any), attention mask and labels.
    """
    longest = length or max(len(row["input_ids"]) for row in rows)

    def pad(lists: list[list[int]]) -> Tensor:
        return torch.from_numpy(np.array([one + [0] * (longest - len(one)) for one in lists]))

    names: list[str] = [name for name in ("input_ids", "token_type_ids") if name in rows[0]]
    inputs = {name: pad([row[name] for row in rows]) for name in names}
    mask = pad([[1] * len(row["input_ids"]) for row in rows])
    return {**inputs, "attention_mask": mask, "labels": torch.tensor([row["label"] for row in rows])}


def length_grouped(rows: list[Row], seed: int, batch: int) -> list[list[Row]]:
    """Return batches of examples of similar length, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    order.sort(key=lambda row: len(row["input_ids"]))
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


# The first row whose names fit an operator, or one that it runs inside of, names its kind.


LEARNING_RATE = 1e-4
"""Learning rate at the start of a turn; it falls to 0 during the turn, as the Trainer does it."""
# A padded row costs the same as any other, so the slowest contestant may see fewer.
PADDED_SHARE = 4


# Those of MiniLM's tokenizer.
_SPECIAL = {
    "vocab_size": 30522,
    "pad_token_id": 0,
    "bos_token_id": 101,
    "eos_token_id": 102,
    "cls_token_id": 101,
    "sep_token_id": 102,
}
UNTRAINED: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert"},
    "deberta-v3-base": {
        "model_type": "deberta-v2",
        # MiniLM's vocabulary: with its own, of 128,100 tokens, two thirds of the memory would be embeddings.
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "albert-base": {
        "model_type": "albert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "modernbert-base": {"model_type": "modernbert", **_SPECIAL, "classifier_pooling": "mean"},
    "eurobert-210m": {"model_type": "eurobert", **_SPECIAL, "num_key_value_heads": 12, "mask_token_id": 103},
    "qwen3-0.6b": {
        "model_type": "qwen3",
        **_SPECIAL,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Models with random weights, by their name: the arguments of transformers' AutoConfig.for_model."""


@dataclass(frozen=True)
class Workload:
    """What is trained: MiniLM from `model`, or that of `UNTRAINED` with the name `kind`; `rows` examples per turn."""

    data: Path
    model: str
    kind: str
    rows: int
    threads: int
    length: int = MAX_LENGTH
    """Most tokens of an example."""
    batch: int = 32
    """Examples of an update."""
    pool: int = 0
    """Rows of which batches of similar length are made; a turn trains some of them (0: all rows of a turn)."""
    evaluated: int = 0
    """Rows of the development set that the accuracy is computed on (0: all)."""

    def read_rows(self, split: str, count: int = 0) -> list[Row]:
        """Return the first `count` rows (0: all) of a split (train or dev), see `read_rows`."""
        from transformers import AutoTokenizer

        rows = read_rows(self.data / f"{split}.tsv", AutoTokenizer.from_pretrained(self.model), count, self.length)
        has_types = self.kind not in UNTRAINED or UNTRAINED[self.kind]["model_type"] in ("bert", "albert", "deberta-v2")
        return rows if has_types else [{n: value for n, value in row.items() if n != "token_type_ids"} for row in rows]


Turn = Callable[[], tuple[int, float]]
"""Trains once on the contestant's examples, and returns their number and the seconds."""


def thin_out(rows: list[Row], count: int, batch: int) -> list[Row]:
    """Return about `count` rows whose batches of similar length are as those of all `rows`.

    They are batches of the rows sorted by length, evenly spaced. Few rows drawn at random would have batches of
    different lengths, which favours whoever computes no padding.
    """
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    batches = [ordered[start : start + batch] for start in range(0, len(ordered) - batch + 1, batch)]
    kept = max(1, count // batch)
    return [row for number in range(kept) for row in batches[(2 * number + 1) * len(batches) // (2 * kept)]]


def load(workload: Workload) -> tuple[Any, list[Row]]:
    """Return the model in fp32 and the examples."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    rows = workload.read_rows("train", max(workload.rows, workload.pool))
    if len(rows) > workload.rows:
        rows = thin_out(rows, workload.rows, workload.batch)
    if workload.kind in UNTRAINED:
        config = AutoConfig.for_model(**UNTRAINED[workload.kind])
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), rows
    load_model = AutoModelForSequenceClassification.from_pretrained
    return load_model(workload.model, num_labels=2, dtype=torch.float32), rows


def make_step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[list[Row]], None]:
    """Return a function that makes one update: forward, backward, clip to norm 1, optimizer step."""

    parameters = list(model.parameters())

    def step(rows: list[Row]) -> None:
        model(**collate(rows)).loss.backward()
        clip_gradients(optimizer, parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerated(model: Any, precision: str = "auto") -> tuple[Any, torch.optim.Optimizer]:
    """Return the model and its AdamW on the fast path."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    return accelerate(model, optimizer, precision=precision)


def _bare_loop(workload: Workload, *, compiled: bool = False, own: str = "auto") -> tuple[Any, Turn]:
    model, rows = load(workload)
    optimizer = _compiled(model) if compiled else accelerated(model, own)[1]
    step = make_step(model, optimizer)
    precision = "bf16" if compiled and has_bf16_products() else "fp32"  # of autocast: the fast path needs none

    def turn() -> tuple[int, float]:
        start = time.perf_counter()
        model.train()
        batches = length_grouped(rows, 0, workload.batch)
        for number, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (1 - number / len(batches))
            with autocast(precision):
                step(batch)
        return len(rows), time.perf_counter() - start

    return model, turn


def _compiled(model: Any) -> torch.optim.Optimizer:
    """Return what torch.compile trains: the model's own layers compiled, bf16 by autocast, and torch's fused AdamW."""
    model.compile(dynamic=True)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


_TRAINING: dict[str, Any] = {
    "use_cpu": True,
    "num_train_epochs": 1,
    "learning_rate": LEARNING_RATE,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
    "remove_unused_columns": False,
}


def _trainer(workload: Workload, *, bf16: bool, dynamic: bool, fast: bool) -> tuple[Any, Turn]:
    from datasets import Dataset
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Start the time at the first step, because the Trainer prepares once per training and not once per turn."""

        start = 0.0

        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            self.start = self.start or time.perf_counter()

    model, rows = load(workload)
    optimizer = accelerated(model)[1] if fast else None
    rows = rows if dynamic else rows[: max(workload.batch, len(rows) // PADDED_SHARE)]

    def turn() -> tuple[int, float]:
        with tempfile.TemporaryDirectory() as folder:
            sampling = "group_by_length" if dynamic else "random"
            faster = {"bf16": bf16, "train_sampling_strategy": sampling}
            size = {"per_device_train_batch_size": workload.batch}
            arguments = TrainingArguments(output_dir=folder, **faster, **size, **_TRAINING)
            collator = collate if dynamic else partial(collate, length=workload.length)  # as in the well-known recipe
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_list(rows),
                data_collator=collator,
                optimizers=(optimizer, None),
            )
            trainer.remove_callback(PrinterCallback)
            clock = Clock()
            trainer.add_callback(clock)
            trainer.train()
            return len(rows), time.perf_counter() - clock.start

    return model, turn


def _predictor(workload: Workload) -> tuple[Any, Turn]:
    """Predict as `cpuft predict` does with tokenised examples."""
    from cpuft.train.evaluate import compute_outputs
    from cpuft.train.objective.labels import Classification

    model, rows = load(workload)
    patch_model(model)
    tokens, precision = make_tokens(rows), "bf16" if has_bf16_products() else "fp32"
    objective = Classification(("0", "1"), (), 0)

    def turn() -> tuple[int, float]:
        start = time.perf_counter()
        model.eval()
        compute_outputs(model, objective, tokens, workload.batch, 1, precision)
        return len(rows), time.perf_counter() - start

    return model, turn


def _trainer_predictor(workload: Workload) -> tuple[Any, Turn]:
    """Predict with the Trainer in its fastest form: bf16 weights, examples sorted by length, dynamic padding."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    model, rows = load(workload)
    faster = {"per_device_eval_batch_size": workload.batch, "bf16_full_eval": has_bf16_products()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **_TRAINING, **faster)
        trainer = Trainer(model=model, args=arguments, data_collator=collate)
    dataset = Dataset.from_list(sorted(rows, key=lambda row: len(row["input_ids"])))

    def turn() -> tuple[int, float]:
        start = time.perf_counter()
        trainer.predict(dataset)
        return len(rows), time.perf_counter() - start

    return model, turn


CONTESTANTS: dict[str, Callable[[Workload], tuple[Any, Turn]]] = {
    "cpuft": _bare_loop,
    "cpuft-int8": lambda workload: _bare_loop(workload, own="int8"),
    "compiled": lambda workload: _bare_loop(workload, compiled=True),
    "trainer-accelerated": lambda workload: _trainer(workload, bf16=False, dynamic=True, fast=True),
    "trainer-bf16-dynamic": lambda workload: _trainer(workload, bf16=True, dynamic=True, fast=False),
    "trainer-fp32-dynamic": lambda workload: _trainer(workload, bf16=False, dynamic=True, fast=False),
    "trainer-fp32-padded": lambda workload: _trainer(workload, bf16=False, dynamic=False, fast=False),
    "predict": _predictor,
    "trainer-predict": _trainer_predictor,
}


def usual(bf16: bool) -> tuple[str, ...]:
    """Whom to measure where nobody is named: the Trainer in what is fastest here, and in the well-known recipe.

    Compiling takes minutes, and predicting is another matter: only for who asks.
    """
    fastest = "trainer-bf16-dynamic" if bf16 else "trainer-fp32-dynamic"
    return ("cpuft", "trainer-accelerated", fastest, "trainer-fp32-padded")


class Contestant:
    """One contestant in its own process. `turn` lets it train once on its examples."""

    def __init__(self, name: str, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, workload, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._name = name
        self._receive()

    def turn(self) -> tuple[float, int]:
        """Train once on the examples; return samples per second and the peak memory so far in MB."""
        self._pipe.send("turn")
        rows, seconds, megabytes = self._receive()
        return rows / seconds, megabytes

    def finish(self) -> float:
        """End the process, and return the accuracy on MRPC's development set after all turns."""
        self._pipe.send("evaluate")
        accuracy = float(self._receive())
        self._pipe.close()
        self._process.join()
        return accuracy

    def _receive(self) -> Any:
        """Receive what the process sends. Raises CpuftError: it has ended."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = f"exit code {self._process.exitcode}; -9 is probably a lack of memory"
            raise CpuftError(f"the process of {self._name} has ended ({code}): see its lines above") from None


def _serve(name: str, workload: Workload, pipe: Connection) -> None:
    end_with_parent()  # a benchmark that is killed must not go on in the background
    torch.set_num_threads(workload.threads)
    model, turn = CONTESTANTS[name](workload)
    pipe.send("ready")
    while pipe.recv() == "turn":
        rows, seconds = turn()
        pipe.send((rows, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10))
    pipe.send(_accuracy(model, workload))


@torch.no_grad()
def _accuracy(model: Any, workload: Workload) -> float:
    rows, size = workload.read_rows("dev", workload.evaluated), workload.batch
    model.eval()
    right = 0
    for start in range(0, len(rows), size):
        batch = collate(rows[start : start + size])
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(rows)
