"""Conversations of the user's own, as a tokenizer's chat template renders them, with a mask of the assistant's tokens.

The loss is computed on the assistant's tokens only. Some templates mark them ({% generation %}). Otherwise an answer is
what the template adds when it renders the messages up to the answer, instead of those before it.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, describe_error
from cpuft.serialization import load, parse_json
from cpuft.train.data.archive import EMPTY, Tokens
from cpuft.train.data.tables import choose_smallest, hash_content, list_json_lines, read_text

ROLES = ("system", "user", "assistant", "tool")
_ASSISTANT = "assistant"
_SPEAKERS = {
    "human": "user",
    "gpt": _ASSISTANT,
    "chatgpt": _ASSISTANT,
    "model": _ASSISTANT,
    "bot": _ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by the names that ShareGPT and its descendants have for them in `from`."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_CONVERSATIONS_AT_ONCE = 256

Message = dict[str, Any]
Conversation = tuple[str, list[Message]]
"""Where a conversation is (`chat.jsonl, line 3`), and its messages."""


@dataclass(frozen=True)
class Chats:
    """The conversations of a split, in files that `scan_chats` has read once."""

    paths: str
    """Paths and patterns, separated by commas."""
    option: str
    checksums: NDArray[np.uint64]
    """Of all conversations in the files."""
    chosen: NDArray[np.bool_]
    """Which of them belong to the split."""

    @property
    def checksum(self) -> str:
        """Checksum of all conversations in the files, 64 hexadecimal digits."""
        return hashlib.sha256(self.checksums.tobytes()).hexdigest()

    def list_conversations(self) -> Iterator[Conversation]:
        """Read the files again; yield the conversations of the split. Raises as `scan_chats` does."""
        for where, line in compress(list_json_lines(self.paths, self.option), self.chosen):
            yield where, parse_conversation(line, where)

    def split(self, share: float) -> tuple[Chats, Chats]:
        """Return training and validation split, the latter of about `share` (0 to 1). CpuftError: all are equal."""
        is_kept = choose_smallest(self.checksums, share, self.paths, "conversation")
        return replace(self, chosen=~is_kept), replace(self, chosen=is_kept)


def scan_chats(paths: str, option: str) -> Chats:
    """Read conversations in JSON lines. CpuftError: a file is unreadable, a line no conversation, or there are none."""
    lines = list_json_lines(paths, option)
    checksums = [hash_content(parse_conversation(line, where)) for where, line in lines]
    if not checksums:
        raise CpuftError(f"{paths} holds no conversations: give JSON lines of the form {_FORM} with {option}")
    return Chats(paths, option, np.asarray(checksums, np.uint64), np.ones(len(checksums), bool))


def read_chats(config: TrainConfig) -> tuple[Chats, Chats]:
    """Return the conversations for training and validation; without --validation-file, --train-file is split. Raises
    CpuftError: it is not given or has only equal ones; or a file is unreadable, empty, or has a line that is none.
    """
    if not config.train_file:
        raise CpuftError("--task chat needs --train-file: name JSON lines files of conversations")
    chats = scan_chats(config.train_file, "--train-file")
    if not config.validation_file:
        return chats.split(config.validation_split)
    return chats, scan_chats(config.validation_file, "--validation-file")


def parse_conversation(line: str, where: str) -> list[Message]:
    """Return the messages of a line as `parse_messages`. CpuftError also: none is the assistant's, or the first is."""
    messages = parse_messages(line, where)
    if all(message["role"] != _ASSISTANT for message in messages):
        raise CpuftError(f"{where} has no message with the role assistant: add one, or remove that line")
    if messages[0]["role"] == _ASSISTANT:
        raise CpuftError(f"{where} begins with an answer: put what it answers before it, or remove that line")
    return messages


def parse_messages(line: str, where: str) -> list[Message]:
    """Return the messages of a line of JSON, dicts with a `role` (system, user, assistant or tool) and a text as
    `content`. CpuftError, which begins with `where`: another role, or another form than OpenAI, ShareGPT, Alpaca,
    Dolly, or prompt and completion.
    """
    try:
        messages = load(list[dict[str, Any]], _list_messages(load(dict[str, Any], parse_json(line))), "messages")
        for message in messages:
            load(str, message.get("role"), "a role")
            message["content"] = load(str, _join_parts(message), "a content")
    except ValueError as error:
        raise CpuftError(f"{where} is no conversation ({error}): write {_FORM}") from None
    for message in messages:
        if message["role"] not in ROLES:
            raise CpuftError(f"{where} has the unknown role {message['role']!r:.60}: write one of {', '.join(ROLES)}")
    return messages


def is_conversation(line: str) -> bool:
    """Return whether a line is JSON with the key messages or conversations, or instruction beside input or context."""
    try:
        names = load(dict[str, Any], parse_json(line)).keys()
    except ValueError:
        return False
    return not names.isdisjoint(("messages", "conversations")) or (
        "instruction" in names and not names.isdisjoint(("input", "context"))
    )


def _list_messages(row: dict[str, Any]) -> Any:
    """Return the messages of a row of any form, with roles and contents that are not checked yet."""
    if "messages" in row:
        messages = load(list[dict[str, Any]], row["messages"], "messages")
        if not isinstance(row.get("system"), str) or any(message.get("role") == "system" for message in messages):
            return messages
    elif "conversations" in row:  # ShareGPT
        messages = load(list[dict[str, Any]], row["conversations"], "conversations")
        for turn in messages:
            if "from" in turn:
                name = str(turn.pop("from")).lower()
                turn["role"], turn["content"] = _SPEAKERS.get(name, name), turn.pop("value", None)
    elif "instruction" in row:  # Alpaca, with the history of LLaMA-Factory, and Dolly
        texts = [load(str, row.get(name) or "", name) for name in ("instruction", "input", "context")]
        history = load(list[list[str]], row.get("history") or [], "history")
        turns = [_as_messages(role, text) for turn in history for role, text in zip(("user", _ASSISTANT), turn)]
        messages = [*chain.from_iterable(turns), *_as_messages("user", "\n\n".join(filter(None, texts)))]
        answers = [row[name] for name in ("output", "response") if name in row]
        messages += _as_messages(_ASSISTANT, answers[0]) if answers else []
    elif "prompt" in row and "completion" in row:
        messages = [*_as_messages("user", row["prompt"]), *_as_messages(_ASSISTANT, row["completion"])]
    else:
        return None
    return [*(_as_messages("system", row["system"]) if row.get("system") else []), *messages]


def _as_messages(role: str, content: Any) -> list[Any]:
    """Return a text as a message of this role, and a list as the messages that it is."""
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def _join_parts(message: dict[str, Any]) -> Any:
    """Return the content of a message: its parts as one text, and a missing one beside calls of tools as empty."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        for part in content:
            if part.get("type", "text") != "text":
                raise ValueError(f"a content has a part of the type {part['type']!r:.60}, and only text can be learned")
        return "\n".join(load(str, part.get("text"), "the text of a part") for part in content)
    return content


def set_chat_template(tokenizer: Any, path: str, name: str) -> None:
    """Give a tokenizer the chat template in the file `path`, unless that is "". CpuftError: the file cannot be
    read or is no jinja template, or the tokenizer has no template then.
    """
    if path:
        tokenizer.chat_template = read_chat_template(path)
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        template = ""
    if not template:
        raise CpuftError(
            f"the tokenizer of {name} has no chat template: give one with --chat-template, or another model"
        )


def read_chat_template(path: str) -> str:
    """Return the text of the file of --chat-template. Raises CpuftError: it cannot be read, or is no jinja template."""
    import jinja2  # torch needs it anyway

    text = read_text(Path(path), "--chat-template")
    try:
        # What transformers adds to the language would be an unknown tag here.
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
        )
    except (jinja2.TemplateError, RecursionError) as error:
        raise CpuftError(f"{path} is no jinja template ({error}): correct it") from None
    return text


def find_end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the first special token behind an answer in the chat template; None if none is found."""
    asked = [{"role": "user", "content": "a"}]
    try:
        before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template([*asked, {"role": _ASSISTANT, "content": "b"}], tokenize=False)
    except Exception:  # templates raise errors of their own, and of jinja
        return None
    answer = tokenizer(after.removeprefix(before), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids}
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((int(one) for one in answer if one in special), None) if after.startswith(before) else None


@dataclass
class Encoded:
    """The tokens of conversations, each cut to one length at the end of an answer."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    masks: list[NDArray[np.int8]] = field(default_factory=list)
    """1 for the assistant's tokens, else 0; never 1 for the first token, before which there is nothing."""
    conversations: int = 0
    divided: int = 0
    """Number of conversations of which each answer is an example of its own."""
    cut: int = 0
    """Number of conversations whose last messages do not fit."""
    left_out: int = 0
    """Number of conversations whose first answer does not fit."""


def encode_chats(conversations: Iterable[Conversation], tokenizer: Any, max_length: int) -> Encoded:
    """Tokenise conversations as the chat template renders them, cut at the last answer that fits into `max_length`.

    If no answer fits, the conversation is left out. Where a template renders earlier answers in another way than the
    last one (Qwen3's drops their thoughts), each answer is an example of its own. Raises CpuftError: the tokenizer is
    not a fast one, or the template refuses a conversation or does not tell what the assistant says.
    """
    if not tokenizer.is_fast:
        raise CpuftError("--task chat needs a fast tokenizer, which this model has not: give another --tokenizer")
    found, remaining = Encoded(), iter(conversations)
    is_marked = bool(_MARKS.search(tokenizer.get_chat_template()))
    while batch := list(islice(remaining, _CONVERSATIONS_AT_ONCE)):
        encode = _encode_marked if is_marked else _encode_rendered
        for examples in encode([(where, _drop_end(messages)) for where, messages in batch], tokenizer):
            parts = [_cut(ids, mask, max_length) for ids, mask in examples]
            kept = list(filter(None, parts))
            found.conversations += 1
            found.divided += len(examples) > 1
            found.left_out += not kept
            # Of examples with an answer each, the longer ones may not fit.
            is_cut = any(part is None or len(part[0]) < len(ids) for part, (ids, _) in zip(parts, examples))
            found.cut += bool(kept) and is_cut
            found.ids += [ids for ids, _ in kept]
            found.masks += [mask for _, mask in kept]
    return found


_Example = tuple[NDArray[np.int32], NDArray[np.int8]]


def _drop_end(messages: list[Message]) -> list[Message]:
    last = max(number for number, message in enumerate(messages) if message["role"] == _ASSISTANT)
    return messages[: last + 1]


def _encode_marked(batch: Sequence[Conversation], tokenizer: Any) -> Iterator[list[_Example]]:
    for where, messages in batch:
        found = render(tokenizer, messages, where, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.asarray(found["assistant_masks"], np.int8)
        if not mask.any():
            raise CpuftError(f"{where}: the chat template marks nothing that the assistant says: correct it")
        yield [(np.asarray(found["input_ids"], np.int32), mask)]


def _encode_rendered(batch: Sequence[Conversation], tokenizer: Any) -> Iterator[list[_Example]]:
    rendered = [_find_answers(tokenizer, messages, where) for where, messages in batch]
    texts = [text for parts in rendered for text, _ in parts]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    tokens = iter(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
    for parts in rendered:
        examples = []
        for _, spans in parts:
            ids, offsets = next(tokens)
            starts, mask = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 0], np.zeros(len(ids), np.int8)
            for begin, end in spans:
                mask[(begin <= starts) & (starts < end)] = 1
            examples.append((np.asarray(ids, np.int32), mask))
        yield examples


def _find_answers(tokenizer: Any, messages: list[Message], where: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return a text, or one per answer if earlier ones are rendered in another way, with the places of answers."""
    parts: list[tuple[str, list[tuple[int, int]]]] = []
    for number, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        before = render(tokenizer, messages[:number], where, tokenize=False, add_generation_prompt=True)
        after = render(tokenizer, messages[: number + 1], where, tokenize=False)
        if not after.startswith(before):
            raise CpuftError(
                f"{where}: the chat template does not render an answer behind what it renders to ask for it, so that "
                f"cpuft cannot tell what the assistant says: mark that with {{% generation %}} in a copy of the "
                f"template, and give it with --chat-template"
            )
        span = (len(before), len(after))
        if parts and before.startswith(parts[-1][0]):
            parts[-1] = (after, [*parts[-1][1], span])
        else:
            parts.append((after, [span]))
    return parts


def render(
    tokenizer: Any,
    messages: list[Message],
    where: str,
    advice: str = "correct that line, or give another template with --chat-template",
    **options: Any,
) -> Any:
    """Return what the tokenizer's `apply_chat_template` returns with `options`. Raises CpuftError, which begins with
    `where` and ends with `advice`: the template refuses the messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # templates raise errors of their own, and of jinja
        raise CpuftError(
            f"{where}: the chat template refuses the conversation ({describe_error(error)}): {advice}"
        ) from None


def _cut(ids: NDArray[np.int32], mask: NDArray[np.int8], max_length: int) -> _Example | None:
    """Return an example cut at the end of its last answer that fits; None if none does."""
    mask[:1] = 0
    if len(ids) > max_length:
        ends = np.flatnonzero(np.diff(np.append(mask, 0)) == -1) + 1
        fitting = ends[ends <= max_length]
        length = int(fitting[-1]) if len(fitting) else 0
        ids, mask = ids[:length], mask[:length]
    return (ids, mask) if mask.any() else None


def join_examples(found: Encoded, max_length: int, packs: bool) -> Tokens:
    """Return conversations as examples; with `packs`, several in one of up to `max_length`. CpuftError: none fits."""
    if not found.ids:
        raise CpuftError(f"no first answer of a conversation fits into --max-length {max_length}: give a larger one")
    lengths = [len(ids) for ids in found.ids]
    groups = pack_lengths(lengths, max_length) if packs else [[number] for number in range(len(lengths))]
    order = list(chain.from_iterable(groups))
    starts = np.cumsum([0, *(lengths[number] for number in order)], dtype=np.int64)
    types = EMPTY
    if packs:
        types = np.zeros(sum(lengths), np.int8)
        types[starts[:-1]] = 1
    return Tokens(
        np.concatenate([found.ids[number] for number in order]),
        types,
        starts[np.cumsum([0, *map(len, groups)])],
        np.concatenate([found.masks[number] for number in order]),
    )


def pack_lengths(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the indices of `lengths`, none above `room`, in groups whose lengths add up to `room` at most (best fit,
    longest first); each group and the list are in ascending order.
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room that is left, number of the group), in ascending order
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        place = bisect.bisect_left(free, (lengths[number], -1))
        left, group = free.pop(place) if place < len(free) else (room, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(number)
        bisect.insort(free, (left - lengths[number], group))
    return sorted(sorted(group) for group in groups)


def describe_chats(found: Encoded, tokens: Tokens, max_length: int) -> str:
    """Return clauses, with `; ` between them, on conversations: `1,200 conversations, 12 cut at --max-length 512`."""
    parts = [f"{found.conversations:,} conversation{'s' * (found.conversations != 1)}"]
    if found.cut:
        parts.append(f"{found.cut:,} cut at --max-length {max_length}")
    if found.left_out:
        parts.append(f"{found.left_out:,} left out because their first answer does not fit")
    clauses = [", ".join(parts)]
    if found.divided:
        clauses.append(f"each answer of {found.divided:,} of them is an example of its own")
    if len(tokens.types):
        clauses.append(f"packed into {len(tokens):,} example{'s' * (len(tokens) != 1)}")
    return "; ".join(clauses)
