"""Words as they travel: commands and modules of ours, a user's through mpirun, Slurm's counts of hosts."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Sequence

WITHOUT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""First thing in what Python is given by `-c`: it would import from the working folder, where others may write."""

_RUN = f"{WITHOUT_FOLDER}; from cpuft.words import run_module; run_module()"
_MARK = "json:"
_PLAIN = re.compile(r"(--)?[A-Za-z0-9_./][A-Za-z0-9_./=,+@:-]*")


def own_module(python: str, module: str) -> tuple[str, ...]:
    """`python -m module`, but for the working folder, which -m puts in front; Python 3.10 has no -P against it."""
    return (python, "-c", _RUN, module)


def run_module() -> None:
    """What `own_module` starts: the module that the first word names, with the others as its own."""
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def pack_words(words: Sequence[str]) -> tuple[str, ...]:
    """A command that mpirun takes nothing of for itself, a `:` say; a leading `-m MODULE` is one of ours.

    Words that no mpirun could misread stay as they are, so that a person can read the plan.
    """
    own = 1 if words[:1] == ("-m",) else 0
    return (*words[:own], *(word if _is_plain(word) else _MARK + json.dumps(word) for word in words[own:]))


def _is_plain(word: str) -> bool:
    return bool(_PLAIN.fullmatch(word)) and not word.startswith(_MARK)


def unpack_words(words: Sequence[str]) -> list[str]:
    """The command that `pack_words` packed, as it is to be executed."""
    given = [json.loads(word.removeprefix(_MARK)) if word.startswith(_MARK) else word for word in words]
    return [*own_module(sys.executable, given[1]), *given[2:]] if words[:1] == ["-m"] else given


def parse_counts(text: str) -> tuple[int, ...]:
    """Slurm's count for each host: "2(x3),1" is 2, 2, 2, 1; nothing for a text that is none."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not found:
            return ()
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)
