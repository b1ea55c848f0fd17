"""Answers of decoders: in batches as alone, up to the end of a turn, and what is written."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import CpuftError
from cpuft.hardware import Cpu
from cpuft.record import RecordedRank, Writer
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.data.chat import find_end_of_turn
from cpuft.train.generate import encode_prompts, find_stop_tokens, generate, generate_batch, read_prompts
from cpuft.train.predict import read_finished_run
from cpuft.train.reporter import make_header
from tests.train.decoder_ranks import make_setup
from tests.train.decoders import CHATML, FAMILIES, MARKED, THINKING, make_decoder, save_tokenizer
from tests.train.test_decoders import make_chat_config, make_text_config

pytestmark = pytest.mark.usefixtures("own_cache")
REQUEST = PredictConfig(max_new_tokens=6)
PROMPTS = [list(range(4, 4 + length)) for length in (9, 1, 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_same_answer_in_any_batch(family: str) -> None:
    model = make_decoder(family).eval()
    together = generate_batch(model, PROMPTS, 3, [], REQUEST)
    assert together == [generate_batch(model, [prompt], 3, [], REQUEST)[0] for prompt in PROMPTS]
    assert [len(answer) for answer in together] == [6, 6, 6]
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]])
        for token in together[0]:
            assert int(model(input_ids=ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_answers_end_before_a_stop_token() -> None:
    model = make_decoder("llama").eval()
    whole = generate_batch(model, PROMPTS, 3, [], REQUEST)
    stop = whole[0][3]
    cut = generate_batch(model, PROMPTS, 3, [stop], REQUEST)
    assert cut == [one[: one.index(stop)] if stop in one else one for one in whole]


def test_a_temperature_draws_other_tokens_from_the_seed() -> None:
    model, request = make_decoder("llama").eval(), replace(REQUEST, temperature=2.0)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate_batch(model, PROMPTS, 3, [], request))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING])
def test_a_turn_ends_where_the_template_ends_it(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, template)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), make_decoder("llama")
    assert find_end_of_turn(tokenizer) == 2
    assert (find_stop_tokens(model, tokenizer, True), find_stop_tokens(model, tokenizer, False)) == ([0, 2], [0])
    model.generation_config.eos_token_id = [5, 6]
    assert find_stop_tokens(model, tokenizer, False) == [0, 5, 6]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert find_end_of_turn(tokenizer) is None


def save_run(folder: Path, config: TrainConfig) -> str:
    """A run that has trained nothing yet; its folder."""
    setup = make_setup(config)
    header = make_header(setup, WorkerConfig(), [RecordedRank(0, "here", [0])], "gloo", Cpu("x", ()), "")
    with Writer(str(folder)) as writer:
        writer.write(header)
    save_model(setup.model, config.model, str(folder), finish=setup.objective.finish_folder)
    return str(folder)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("lora", [0, 4])
def test_answers_to_a_column_of_prompts_are_written_beside_them(lora: int, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    config = make_chat_config(tmp_path, template="", chat_template="chat.jinja", lora_rank=lora)
    run = save_run(tmp_path / "run", config)
    (tmp_path / "chat.jinja").unlink()  # the template is beside the model
    (tmp_path / "p.csv").write_text("n,prompt\n1,Who barks?\n2,=1+1\n")
    request = PredictConfig(run=run, file="p.csv", max_new_tokens=4, id_column="n")
    generate(request)
    assert capsys.readouterr().out == f"predictions: {run}/predictions.csv\n"
    with Path(run, "predictions.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert [row[:3] for row in rows] == [["index", "n", "prompt"], ["0", "1", "Who barks?"], ["1", "2", "'=1+1"]]
    assert rows[0][3] == "answer"
    with pytest.raises(CpuftError, match="exists: give another --output, or"):
        generate(request)
    generate(replace(request, overwrite=True))
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Who barks?", "=1+1")]
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps(chat | {"n": f"id{n}"}) + "\n" for n, chat in enumerate(chats))
    )
    request = replace(request, file="p.jsonl", output="out.jsonl")
    generate(request)
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    wanted = [row[3].removeprefix("'") for row in rows[1:]]
    assert found == [{"index": n, "n": f"id{n}", **chats[n], "answer": wanted[n]} for n in range(2)]
    with pytest.raises(CpuftError, match=r"out\.jsonl exists: give another --output, or"):
        generate(request)
    generate(replace(request, overwrite=True))


@pytest.mark.usefixtures("alone", "plain")
def test_texts_are_continued_as_documents_begin(tmp_path: Path) -> None:
    config = make_text_config(tmp_path)
    run = save_run(tmp_path / "run", config)
    assert (read_finished_run(run).task.kind, read_finished_run(run).train.causal) == ("causal", True)
    (tmp_path / "p.jsonl").write_text('{"text": "Who barks?"}\n')
    generate(PredictConfig(run=run, file="p.jsonl", output="out.jsonl", max_new_tokens=4))
    assert json.loads(Path("out.jsonl").read_text())["prompt"] == "Who barks?"
    with pytest.raises(CpuftError, match=r"p\.jsonl, line 1: the prompt has \d+ tokens and the answer up to 300"):
        generate(PredictConfig(run=run, file="p.jsonl", output="o.csv", max_new_tokens=300))
    assert not Path("o.csv").exists()


def test_special_tokens_begin_texts_and_templates_begin_conversations(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain = tokenizer("a")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A <|endoftext|>", None, [("<|im_start|>", 1), ("<|endoftext|>", 0)]
    )
    Path("p.csv").write_text("text\na\n")
    request = PredictConfig(file="p.csv")
    assert encode_prompts(read_prompts(request, False), tokenizer) == [[1, *plain]]
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    assert encode_prompts(read_prompts(request, True), tokenizer) == [asked]


def test_conversations_are_read_up_to_the_last_question() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [chat, [*chat, {"role": "assistant", "content": "d"}]]
    Path("p.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert [prompt.messages for prompt in read_prompts(PredictConfig(file="p.jsonl"), True)] == [chat, chat]
    Path("p.jsonl").write_text('{"instruction": "a", "input": "b", "prompt": "c"}\n')
    assert read_prompts(PredictConfig(file="p.jsonl"), True)[0].messages == [{"role": "user", "content": "a\n\nb"}]
    Path("p.jsonl").write_text('{"instruction": "a", "prompt": "c"}\n')
    assert read_prompts(PredictConfig(file="p.jsonl"), True)[0].text == "c"


@pytest.mark.parametrize(
    "content, columns, message",
    [
        (
            "a,b\n1,2\n",
            "",
            "p.csv has no column 'prompt' (it has a, b): name the one of the texts with --text-columns",
        ),
        ("a,b\n1,2\n", "c", "p.csv has no column 'c': choose one of a, b"),
        ("a,b\n1,2\n", "a,b", "--text-columns 'a,b': name one column, as each text is taken by itself"),
        ("text,b\n ,2\n", "", "p.csv, line 2 has no text in the column 'text': correct or remove that row"),
        ("text\n", "", "p.csv has no rows: give a file with at least one prompt"),
    ],
)
def test_files_without_prompts_are_refused(content: str, columns: str, message: str) -> None:
    Path("p.csv").write_text(content)
    with pytest.raises(CpuftError) as error:
        read_prompts(PredictConfig(file="p.csv", text_columns=columns), True)
    assert str(error.value).startswith(message)


def test_a_conversation_without_a_question_is_refused() -> None:
    Path("p.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    with pytest.raises(CpuftError, match=r"p\.jsonl, line 1 has no message to answer"):
        read_prompts(PredictConfig(file="p.jsonl"), True)
