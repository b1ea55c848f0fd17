"""Options of other launchers and trainers, and what to write in cpuft instead, from the table aliases.txt."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("run_glue", "torchrun", "accelerate", "deepspeed", "ipexrun", "mpirun", "fairseq", "earlier")
"""The other tools, as `Alias.theirs` names them; earlier is an earlier version of cpuft."""


@dataclass(frozen=True)
class Alias:
    """One line of the table: an option of cpuft, and what other tools call it."""

    ours: str
    """What to write in cpuft, perhaps with a value; empty if the option is to be left out."""
    theirs: str
    """The other tools with their names, as in `torchrun --log_dir; mpirun -n -np`."""
    why: str = ""
    """How cpuft's option differs, or why there is none."""

    def names(self, *tools: str) -> list[str]:
        """Return the names that `tools`, such as "torchrun", have for the option: ["--log_dir"]; [] if none has one."""
        parts = [part.split() for part in self.theirs.split("; ")]
        return [name for tool, *names in parts for name in names if tool in tools]


@functools.cache
def read_aliases() -> tuple[Alias, ...]:
    """Return the lines of aliases.txt in their order."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines if not line.startswith("#")]
    return tuple(Alias(ours.strip("-") and ours, *rest) for ours, *rest in parts)


def _dashed(name: str) -> str:
    """Return an option in a form in which dashes and underscores are the same."""
    return name[:2] + name[2:].replace("_", "-")


def suggest_options(arguments: Sequence[str], flags: Collection[str], script: bool = False) -> str:
    """Return what to write instead of the options of other tools: "write --np instead of --nproc_per_node", or "".

    `arguments` are those up to `--`, and `flags` those of the verb: an option of another tool is only answered if the
    verb has cpuft's option for it, or if it is to be left out. If the verb runs scripts (`script`), arguments from the
    first one that ends in .py on are the script's; if unknown flags are among them, the answer says to write `--`.
    """
    scripts = [number for number, text in enumerate(arguments) if text.endswith(".py") and text[0] != "-"]
    place = scripts[0] if script and scripts else len(arguments)
    replaced, left_out = list[str](), list[str]()
    for name in dict.fromkeys(text.partition("=")[0] for text in arguments[:place]):
        known = (alias for alias in read_aliases() if _dashed(name) in map(_dashed, alias.names(*TOOLS)))
        alias = next(known, None) if name not in flags else None
        if alias and alias.ours.partition(" ")[0] in {*flags, ""}:
            why = f" ({alias.why})" if alias.why else ""
            if alias.ours:
                replaced.append(f"{alias.ours} instead of {name}{why}")
            else:
                left_out.append(f"{name}{why}")
    parts = [f"write {', '.join(replaced)}"] * bool(replaced)
    parts += [f"leave out what cpuft does not have: {', '.join(left_out)}"] * bool(left_out)
    if any(text.startswith("--") and text.partition("=")[0] not in flags for text in arguments[place:]):
        parts.append(
            f"the script {arguments[place]} needs -- before it, and its own options after it: write for example "
            f"cpuft launch -- {arguments[place]} --name value"
        )
    return "; ".join(parts)
