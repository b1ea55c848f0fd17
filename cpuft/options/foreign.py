"""Options of other launchers and trainers, and what to write here instead: foreign.txt, for answers and for README."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import near_names

_NO_GPU = "works on GPUs only, and cpuft trains on CPUs"
_NO_FP16 = (
    "is not supported: choose bf16, which is fast on CPUs with AMX or AVX512_BF16, or fp32, which runs on every CPU"
)
_VALUES = {"nccl": _NO_GPU, "rccl": _NO_GPU, "fp16": _NO_FP16, "float16": _NO_FP16, "half": _NO_FP16}
"""What to say of names that other trainers take and cpuft does not."""

TOOLS = ("run_glue", "torchrun", "accelerate", "deepspeed", "ipexrun", "mpirun", "fairseq")


@dataclass(frozen=True)
class Row:
    """What others call one thing."""

    ours: str
    """What to write here; empty: leave it out."""
    theirs: str
    """Each tool with its names for it; dashes and underscores are one in them."""
    why: str = ""
    """How ours differs, or why it is left out."""

    def names(self, *tools: str) -> list[str]:
        """What these tools call it."""
        parts = [part.split() for part in self.theirs.split("; ")]
        return [name for tool, *names in parts for name in names if tool in tools]


@functools.cache
def read_table() -> tuple[Row, ...]:
    """The rows of foreign.txt, beside this file."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines if not line.startswith("#")]
    return tuple(Row(ours.strip("-") and ours, *rest) for ours, *rest in parts)


def find_row(name: str) -> Row | None:
    """The row that has this option of theirs."""
    return next((row for row in read_table() if _plain(name) in map(_plain, row.names(*TOOLS))), None)


def _plain(name: str) -> str:
    return name[:2] + name[2:].replace("_", "-")


def translate(words: Sequence[str], flags: Collection[str], script: bool = False) -> str:
    """What to write instead of the options of others among `words`; empty where there are none.

    Parameters
    ----------
    words: the command line up to `--`.
    flags: the verb's own options; what others than these would answer is no business of the verb.
    script: whether it runs scripts, whose options stand behind `--`.
    """
    place = next((i for i, word in enumerate(words) if script and word.endswith(".py") and word[0] != "-"), len(words))
    written: list[str] = []
    left: list[tuple[str, str]] = []
    for word in dict.fromkeys(word.partition("=")[0] for word in words[:place]):
        row = find_row(word) if word not in flags else None
        if row and row.ours.partition(" ")[0] in {*flags, ""}:
            why = f" ({row.why})" if row.why else ""
            if row.ours:
                written.append(f"{row.ours} instead of {word}{why}")
            else:
                left.append((word, row.why))
    parts = [f"write {', '.join(written)}"] * bool(written)
    if len(left) == 1:
        parts.append("cpuft does not have the option {}, so leave it out: {}".format(*left[0]))
    elif left:
        listed = ", ".join(f"{word} ({why})" for word, why in left)
        parts.append(f"cpuft does not have these options, so leave them out: {listed}")
    if any(word.startswith("--") and word.partition("=")[0] not in flags for word in words[place:]):
        parts.append(f"put -- before {words[place]}: the words after a script are its own options")
    return "; ".join(parts)


def describe_unknown_value(option: str, value: str, choices: Collection[str]) -> str:
    """Return the message for a value that is none of an option's `choices`, with the values to choose from."""
    known = _VALUES.get(value.lower(), "")
    if known == _NO_GPU:
        return f"{option} {value} {known}: choose one of {', '.join(choices)}"
    if known and {"bf16", "fp32"} <= set(choices):
        return f"{option} {value} {known}"
    return f"{value!r} is not a value of {option}: {near_names(value, choices)}"
