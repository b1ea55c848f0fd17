"""What a run's decoder answers: `python -m cpuft.train.generate --run=...`, started by `cpuft predict`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.config.fields import parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError, counted
from cpuft.train.data.chat import Message, find_end_of_turn, is_conversation, parse_messages, render, set_chat_template
from cpuft.train.data.sources import get_text
from cpuft.train.data.tables import (
    JSON_SUFFIXES,
    choose_column,
    find_column,
    get_suffix,
    list_json_lines,
    parse_json_cells,
    read_tables,
)
from cpuft.train.data.texts import find_document_marks
from cpuft.train.data.tokenizer import choose_pad_id, load_tokenizer
from cpuft.train.data.write_tables import Column, write_table
from cpuft.train.model import count_positions, load_model
from cpuft.train.predict import (
    FinishedRun,
    Table,
    check_predictions_file,
    choose_run_precision,
    give_ids,
    name_given,
    read_finished_run,
)
from cpuft.train.startup import resume_garbage_collection, run_as_process

_PROMPT_COLUMNS = ("prompt", "text", "question", "instruction")
"""Columns of prompts, where --text-columns names none."""


@dataclass(frozen=True)
class Prompt:
    """What a decoder is to answer or to continue."""

    where: str
    """Where it is: `prompts.csv, line 3`."""
    text: str
    """The text; of a conversation its messages as JSON."""
    messages: list[Message]
    """The messages of a conversation up to the last one that is not the assistant's; empty for a text to continue."""
    id: str = ""
    """The cell of --id-column."""


def generate(request: PredictConfig) -> None:
    """Answer all prompts, then write prompts and answers to --output, or predictions.csv of the run, and print its
    name. Raises CpuftError: the run, the file or the output cannot be used.
    """
    run = read_finished_run(request.run)
    path = Path(request.output or Path(request.run, "predictions.csv"))
    check_predictions_file(path, request)
    prompts = read_prompts(request, run.task.kind == "chat")
    tokenizer = load_tokenizer(str(run.model))
    if run.task.kind == "chat":
        set_chat_template(tokenizer, "", str(run.model))
    encoded = encode_prompts(prompts, tokenizer)
    answers = _compute_answers(request, run, tokenizer, prompts, encoded)
    write_table(path, *_tabulate_answers(prompts, answers, request.id_column, path.suffix == ".jsonl"))
    print(f"predictions: {path}")


def read_prompts(request: PredictConfig, is_chat: bool) -> list[Prompt]:
    """Read the prompts of --file: a column of any table (--text-columns, else a usual one), or, for a chat without
    --text-columns, the messages of JSON lines.

    A conversation that ends with an answer is read without it; for a chat, a text is the one message of a user. Raises
    CpuftError: no such column or several are named, or there is no prompt, or one is not valid.
    """
    if is_chat and not request.text_columns and (found := _read_conversations(request)):
        return found
    table = read_tables(request.file, "--file", request)
    column = choose_column(table, request.text_columns, usual=_PROMPT_COLUMNS)
    if request.id_column:
        find_column(table.columns, request.id_column, table.source)
    prompts = []
    for where, row in table.rows:
        text = get_text(row, column, where, may_be_blank=False)
        own = get_text(row, request.id_column, where) if request.id_column else ""
        prompts.append(Prompt(where, text, [{"role": "user", "content": text}] if is_chat else [], own))
    if not prompts:
        raise CpuftError(f"{request.file} has no rows: give a file with at least one prompt")
    return prompts


def _read_conversations(request: PredictConfig) -> list[Prompt]:
    """Return the conversations of JSON lines; nothing if the first line is none."""
    prompts: list[Prompt] = []
    if get_suffix(Path(request.file)) not in JSON_SUFFIXES:
        return prompts
    for where, line in list_json_lines(request.file, "--file"):
        if not prompts and not is_conversation(line):
            return prompts
        messages = parse_messages(line, where)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise CpuftError(f"{where} has no message to answer: correct or remove that line")
        own = get_text(parse_json_cells(line, where), request.id_column, where) if request.id_column else ""
        prompts.append(Prompt(where, json.dumps(messages, ensure_ascii=False), messages, own))
    return prompts


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Return each prompt's token ids: of a conversation up to where the answer begins, by the chat template; of a text
    after the token that begins documents. Raises CpuftError: the template refuses one, or one has no token.
    """
    begin, _ = find_document_marks(tokenizer)  # texts to continue begin as documents did in the training
    found = []
    for prompt in prompts:
        text, first = prompt.text, begin
        if prompt.messages:
            options = {"tokenize": False, "add_generation_prompt": True}
            text = render(tokenizer, prompt.messages, prompt.where, "correct that line", **options)
            first = []
        ids = [*first, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        if not ids:
            raise CpuftError(f"{prompt.where}: the tokenizer makes no token of the prompt: correct or remove that line")
        found.append(ids)
    return found


def _compute_answers(
    request: PredictConfig, run: FinishedRun, tokenizer: Any, prompts: Sequence[Prompt], encoded: Sequence[list[int]]
) -> list[str]:
    # Imported here because it takes seconds, for which an error about bad input should not wait.
    import torch

    precision = choose_run_precision(run, request.precision)
    model = load_model(run.saved, "AutoModelForCausalLM", {}, attention="auto").eval()
    model.to(torch.bfloat16 if precision.name == "bf16" else torch.float32)
    positions = count_positions(model.config.get_text_config())
    for prompt, ids in zip(prompts, encoded, strict=True):
        if 0 < positions < len(ids) + request.max_new_tokens:
            raise CpuftError(
                f"{prompt.where}: the prompt has {len(ids)} tokens and the answer up to {request.max_new_tokens}, and "
                f"the model has {positions} positions: give a smaller --max-new-tokens, or a shorter prompt"
            )
    pad_id = choose_pad_id(run.saved, tokenizer)
    stops = find_stop_tokens(model, tokenizer, run.task.kind == "chat")
    resume_garbage_collection()
    start, size = time.perf_counter(), request.batch_size or run.train.eval_batch_size
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))
    answers, count = [""] * len(encoded), 0
    torch.manual_seed(run.train.seed)
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
        made = generate_batch(model, [encoded[number] for number in numbers], pad_id, stops, request)
        for number, ids in zip(numbers, made, strict=True):
            answers[number] = tokenizer.decode(ids, skip_special_tokens=True)
            count += len(ids)
    seconds = time.perf_counter() - start
    speed = f"{counted(len(answers), 'answer')}, {count:,} tokens, {count / seconds:.1f} tokens/s in {precision.name}"
    print(speed, file=sys.stderr, flush=True)
    return answers


def find_stop_tokens(model: Any, tokenizer: Any, is_chat: bool) -> list[int]:
    """Return the ids that end an answer, ascending: eos of model and tokenizer, and for a chat the end of a turn."""
    # A model that was no chat model before does not name the token that ends an answer in the chat template.
    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    if is_chat:
        stops.add(find_end_of_turn(tokenizer))
    return sorted(one for one in stops if one is not None)


def generate_batch(
    model: Any, prompts: Sequence[list[int]], pad_id: int, stops: list[int], request: PredictConfig
) -> list[list[int]]:
    """Return the token ids with which a model continues each prompt, at most --max-new-tokens, without the one of
    `stops` that ended them. They are the likeliest ones with --temperature 0, else drawn by torch's generator.
    """
    import torch

    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad_id)
    # Padded at the left, so that all answers begin at the same position.
    for row, prompt in zip(ids, prompts):
        row[length - len(prompt) :] = torch.tensor(prompt)
    mask = torch.arange(length) >= length - torch.tensor([[len(prompt)] for prompt in prompts])
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            max_new_tokens=request.max_new_tokens,
            pad_token_id=pad_id,
            eos_token_id=stops or None,
            **sampling,
        )
    rows = found[:, length:].tolist()
    ends = [next((place for place, one in enumerate(row) if one in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends)]


def _tabulate_answers(prompts: Sequence[Prompt], answers: Sequence[str], id_column: str, as_messages: bool) -> Table:
    """Return the table of prompts and answers; `as_messages` if conversations need not be texts."""
    as_messages = as_messages and bool(prompts[0].messages)
    asked = [prompt.messages if as_messages else prompt.text for prompt in prompts]
    own = [Column("messages" if as_messages else "prompt"), Column("answer")]
    given = give_ids(id_column, [prompt.id for prompt in prompts])
    columns = [*name_given(own, given), *own]
    return columns, zip(range(len(prompts)), *(cells for _, cells in given), asked, answers, strict=True)


if __name__ == "__main__":
    run_as_process(lambda: generate(parse_arguments(PredictConfig, sys.argv[1:])))
