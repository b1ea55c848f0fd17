"""Conversations: which tokens the assistant says, what is cut, and how they are packed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.train.data.chat import (
    Encoded,
    Message,
    describe_chats,
    encode_chats,
    join_examples,
    pack_lengths,
    parse_conversation,
    read_chat_template,
    scan_chats,
    set_chat_template,
)
from tests.train.decoders import CHATML, MARKED, THINKING, make_conversation, save_tokenizer, write_conversations

TEMPLATES = {"rendered": CHATML, "marked": MARKED, "thinking": THINKING}
USER, SYSTEM = {"role": "user", "content": "Who barks?"}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Dogs bark."}


def load_tokenizer(folder: Path, template: str = CHATML) -> Any:
    from transformers import AutoTokenizer

    save_tokenizer(folder, template)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES[request.param])


def encode(tokenizer: Any, *chats: list[Message], max_length: int = 10**6) -> Encoded:
    return encode_chats([(f"a.jsonl, line {n}", chat) for n, chat in enumerate(chats, 1)], tokenizer, max_length)


def said(tokenizer: Any, found: Encoded) -> list[str]:
    """What the assistant says in each example."""
    return [tokenizer.decode(ids[mask == 1]) for ids, mask in zip(found.ids, found.masks, strict=True)]


def test_the_tokens_are_the_templates_and_the_assistants_are_marked(tokenizer: Any) -> None:
    chat = [SYSTEM, USER, ANSWER]
    found = encode(tokenizer, chat)
    (ids,), (mask,) = found.ids, found.masks
    assert ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
    prompt = tokenizer.apply_chat_template(chat[:2], add_generation_prompt=True)["input_ids"]
    assert int(mask.argmax()) == len(prompt)
    thoughts = "<think>\n\n</think>\n\n" * (tokenizer.chat_template == THINKING)
    end = "" if tokenizer.chat_template == MARKED else "\n"
    assert said(tokenizer, found) == [f"{thoughts}Dogs bark.<|im_end|>{end}"]


def test_every_answer_of_a_conversation_is_learned_once(tokenizer: Any) -> None:
    chats = [make_conversation(random.Random(seed), seed + 1, system=True) for seed in range(4)]
    found = encode(tokenizer, *chats)
    is_divided = tokenizer.chat_template == THINKING
    assert len(found.ids) == (10 if is_divided else 4)
    assert (found.conversations, found.divided, found.cut, found.left_out) == (4, 3 * is_divided, 0, 0)
    answers = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    texts = "".join(said(tokenizer, found)).replace("<think>\n\n</think>\n\n", "").replace("\n", "")
    assert texts.split("<|im_end|>")[:-1] == answers


def test_answers_of_their_own_follow_what_the_model_sees_before_them(tmp_path: Path) -> None:
    tokenizer, chat = load_tokenizer(tmp_path, THINKING), make_conversation(random.Random(0), 3)
    found = encode(tokenizer, chat)
    for number, (ids, mask) in enumerate(zip(found.ids, found.masks, strict=True)):
        asked = tokenizer.apply_chat_template(chat[: 2 * number + 1], add_generation_prompt=True)["input_ids"]
        assert ids[: int(mask.argmax())].tolist() == asked
    assert "each answer of 1 of them is an example of its own" in describe_chats(
        found, join_examples(found, 512, False), 512
    )


def test_what_follows_the_last_answer_is_dropped(tokenizer: Any) -> None:
    longer = encode(tokenizer, [USER, ANSWER, USER, USER])
    assert longer.ids[0].tolist() == encode(tokenizer, [USER, ANSWER]).ids[0].tolist()


@pytest.mark.parametrize("tokenizer", ["rendered", "marked"], indirect=True)
def test_long_conversations_are_cut_behind_an_answer(tokenizer: Any) -> None:
    chat = [USER, ANSWER] * 4
    whole = encode(tokenizer, chat)
    (ids,), (mask,) = whole.ids, whole.masks
    ends = (np.flatnonzero(np.diff(np.append(mask, 0)) == -1) + 1).tolist()
    assert len(ends) == 4
    for length in range(len(ids) + 2):
        found = encode(tokenizer, chat, max_length=length)
        fitting = [end for end in ends if end <= length]
        wanted = len(ids) if length >= len(ids) else fitting[-1] if fitting else 0
        assert [part.tolist() for part in found.ids] == ([ids[:wanted].tolist()] if wanted else [])
        assert (found.cut, found.left_out) == (int(0 < wanted < len(ids)), int(not wanted))


def test_what_became_of_conversations_is_told_in_a_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    length = len(encode(tokenizer, [USER, ANSWER]).ids[0])
    long = [{"role": "user", "content": "a" * 99}, ANSWER]
    found = encode(tokenizer, [USER, ANSWER] * 2, long, [USER, ANSWER], max_length=length)
    tokens = join_examples(found, length, False)
    told = f"3 conversations, 1 cut at --max-length {length}, 1 left out because their first answer does not fit"
    assert describe_chats(found, tokens, length) == told
    assert describe_chats(found, join_examples(found, 2 * length, True), length) == f"{told}; packed into 1 example"
    with pytest.raises(CpuftError, match="no first answer of a conversation fits into --max-length 8: give"):
        join_examples(encode(tokenizer, long, max_length=8), 8, False)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 50))
def test_packing_loses_nothing_and_fills_well(lengths: list[int], room: int) -> None:
    groups = pack_lengths(lengths, room)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in group) <= room for group in groups)
    # Best fit decreasing needs at most 11/9 of the fewest groups and one more; no two groups fit into one anyway.
    sums = sorted(sum(lengths[number] for number in group) for group in groups)
    assert len(sums) < 2 or sums[0] + sums[1] > room


def test_packed_examples_hold_whole_conversations(tokenizer: Any) -> None:
    generator = random.Random(1)
    found = encode(tokenizer, *(make_conversation(generator, generator.randint(1, 3)) for _ in range(30)))
    tokens = join_examples(found, 200, True)
    begins = np.flatnonzero(tokens.types)
    parts = np.split(tokens.ids, begins[1:])
    assert sorted(part.tolist() for part in parts) == sorted(ids.tolist() for ids in found.ids)
    assert set(tokens.offsets[:-1].tolist()) <= set(begins.tolist())
    assert int(tokens.lengths.max()) <= 200
    assert len(tokens) < len(found.ids)
    assert int(tokens.labels.sum()) == sum(int(mask.sum()) for mask in found.masks)


@pytest.mark.parametrize(
    "line, message",
    [
        ("[1]", "a.jsonl, line 1 is no conversation (it is [1], and must be an object): write {"),
        ('{"text": "a"}', "a.jsonl, line 1 is no conversation (messages is None, and must be a list): write"),
        ('{"messages": []}', "a.jsonl, line 1 has no message with the role assistant: add one"),
        ('{"messages": ["a"]}', "a.jsonl, line 1 is no conversation (messages[0] is 'a', and must be"),
        (
            '{"messages": [{"role": "user"}]}',
            "a.jsonl, line 1 is no conversation (a content is None, and must be a text",
        ),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "a.jsonl, line 1 is no conversation (a content is ['a'], and must be a text): write",
        ),
        (
            json.dumps({"messages": [{"role": "human", "content": "a"}, ANSWER]}),
            "a.jsonl, line 1 has the unknown role 'human': write one of system, user, assistant, tool",
        ),
        (
            json.dumps({"messages": [SYSTEM, USER]}),
            "a.jsonl, line 1 has no message with the role assistant: add",
        ),
        (json.dumps({"messages": [ANSWER, USER]}), "a.jsonl, line 1 begins with an answer: put what it answers before"),
    ],
)
def test_what_is_no_conversation_is_named(line: str, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_conversation(line, "a.jsonl, line 1")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "row, messages",
    [
        (
            {"conversations": [{"from": "human", "value": "Who barks?"}, {"from": "gpt", "value": "Dogs bark."}]},
            [USER, ANSWER],
        ),
        ({"conversations": [USER, ANSWER], "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, USER, ANSWER], "id": 1},
            [SYSTEM, USER, ANSWER],
        ),
        ({"instruction": "Who barks?", "input": "", "output": "Dogs bark."}, [USER, ANSWER]),
        ({"instruction": "Who barks?", "output": "Dogs bark.", "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
        (
            {"instruction": "Translate.", "input": "Hund", "output": "Dogs bark."},
            [{"role": "user", "content": "Translate.\n\nHund"}, ANSWER],
        ),
        ({"prompt": "Who barks?", "completion": "Dogs bark."}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}, ANSWER]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, ANSWER],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who"}, {"text": "barks?"}]}, ANSWER]},
            [{"role": "user", "content": "Who\nbarks?"}, ANSWER],
        ),
        ({"messages": [USER, ANSWER], "prompt": "Who?", "completion": "x"}, [USER, ANSWER]),
        ({"system": "Be brief.", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": "Be long.", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        (
            {"conversations": [{"from": "Human", "value": "Who barks?"}, {"from": "Assistant", "value": "Dogs bark."}]},
            [USER, ANSWER],
        ),
        (
            {"instruction": "Who barks?", "output": "Dogs bark.", "history": [["Who barks?", "Dogs bark."]]},
            [USER, ANSWER, USER, ANSWER],
        ),
        (
            {"instruction": "Translate.", "context": "Hund", "response": "Dogs bark.", "category": "qa"},
            [{"role": "user", "content": "Translate.\n\nHund"}, ANSWER],
        ),
    ],
)
def test_conversations_of_other_forms_are_read(row: dict[str, Any], messages: list[Message]) -> None:
    assert parse_conversation(json.dumps(row), "a.jsonl, line 1") == messages


@pytest.mark.parametrize(
    "row, message",
    [
        ({"conversations": [{"from": "narrator", "value": "a"}, ANSWER]}, "has the unknown role 'narr"),
        ({"conversations": [{"from": "human"}]}, "is no conversation (a content is None, and must be a text)"),
        ({"instruction": "a", "input": 3, "output": "b"}, "is no conversation (input is 3, and must be a text)"),
        ({"instruction": "a", "output": None}, "is no conversation (a content is None, and must be a text)"),
        ({"instruction": "a"}, "has no message with the role assistant"),
        ({"prompt": "a"}, "is no conversation (messages is None, and must be a list)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER]},
            "is no conversation (a content has a part of the type 'image_url', and only text can be learned)",
        ),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "is no conversation (a content is None, and"),
    ],
)
def test_what_is_wrong_in_other_forms_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_conversation(json.dumps(row), "a.jsonl, line 1")
    assert str(error.value).startswith(f"a.jsonl, line 1 {message}")


def test_other_kinds_of_files_are_answered_with_the_command_that_converts(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"messages": [USER, ANSWER]}] * 2)
    rows.to_parquet(tmp_path / "x.parquet")
    rows.save_to_disk(tmp_path / "x")
    for name in ("x.parquet", "x"):
        with pytest.raises(CpuftError, match="is no file of JSON lines, which are needed here: convert it") as error:
            scan_chats(str(tmp_path / name), "--train-file")
        command = str(error.value).partition(" instead: ")[2].replace("python", sys.executable, 1)
        subprocess.run(["sh", "-c", command], check=True, timeout=60)
        assert len(scan_chats(str(tmp_path / "x-lines.jsonl"), "--train-file").checksums) == 2
    with pytest.raises(CpuftError, match=r"load_dataset\(\*\*{'path': 'a/b', 'split': 'test'}\).to_json\('a-b-lines"):
        scan_chats("hub:a/b:test", "--train-file")


def test_files_of_conversations(tmp_path: Path) -> None:
    for name, content, message in (
        ("none.jsonl", None, "there is no file"),
        ("empty.jsonl", "\n", "holds no conversations: give JSON lines of the form"),
        ("array.jsonl", "[\n]", "is a JSON array, and cpuft reads JSON lines"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(CpuftError, match=message):
            scan_chats(str(tmp_path / name), "--train-file")


def test_validation_takes_a_share_of_the_conversations_and_keeps_equal_ones_together(tmp_path: Path) -> None:
    path = Path(write_conversations(tmp_path / "a.jsonl", 200))
    chats = scan_chats(str(path), "-")
    trained, kept = ([json.dumps(m) for _, m in part.list_conversations()] for part in chats.split(0.25))
    assert len(kept) + len(trained) == 200
    assert set(kept) & set(trained) == set()
    assert len(set(kept)) == round(0.25 * len({*kept, *trained}))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)))
    again = scan_chats(str(path), "-")
    assert again.checksum != chats.checksum
    assert sorted(json.dumps(m) for _, m in again.split(0.25)[1].list_conversations()) == sorted(kept)
    path.write_text("\n".join([lines[0]] * 3))
    with pytest.raises(CpuftError, match="has 1 different conversation, too few to take some for validation"):
        scan_chats(str(path), "-").split(0.5)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('no tools here') }}", "refuses the conversation (no tools here): correct that line, or"),
        (
            "{{ messages | length }} asked" + CHATML,
            "does not render an answer behind what it renders to ask for it, so",
        ),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}x", "marks nothing that the assistant says"),
    ],
)
def test_templates_of_which_nothing_can_be_learned_are_refused(template: str, message: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, template)
    with pytest.raises(CpuftError) as error:
        encode(tokenizer, [USER, ANSWER])
    assert str(error.value).startswith("a.jsonl, line 1: the chat template ")
    assert message in str(error.value)


def test_a_template_comes_from_the_tokenizer_or_a_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "")
    with pytest.raises(CpuftError, match="the tokenizer of tiny has no chat template: give one with --chat-template"):
        set_chat_template(tokenizer, "", "tiny")
    path = tmp_path / "chat.jinja"
    path.write_text(MARKED)
    set_chat_template(tokenizer, str(path), "tiny")
    assert tokenizer.chat_template == MARKED
    path.write_text("{% for %}")
    with pytest.raises(CpuftError, match=r"chat\.jinja is no jinja template"):
        read_chat_template(str(path))
    with pytest.raises(CpuftError, match="there is no file nothing: check --chat-template"):
        read_chat_template("nothing")
