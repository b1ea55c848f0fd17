"""The launch that a job does, as shell lines that start it, or go on with its run; and how templates are filled."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.record import FILE_NAME
from cpuft.schedulers.options import JobConfig

HERE = Path(__file__).parent
_RESUME = (HERE / "resume.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Work:
    """`cpuft launch`: its words up to `--` and those of a script from there on; and what its own parser read there."""

    options: tuple[str, ...]
    script: tuple[str, ...] = ()
    np: int = 1
    ppn: int = 0
    run_dir: str = ""
    resume: str = ""

    def spread(self, nodes: int) -> tuple[int, int]:
        """Hosts, of which `nodes` were asked for (0: no wish), and ranks of the fullest. Raises CpuftError: no way."""
        hosts = nodes or (math.ceil(self.np / self.ppn) if self.ppn else self.np)
        if hosts > self.np or (self.ppn and hosts * self.ppn < self.np):
            raise CpuftError(f"--nodes {hosts} does not go with --np {self.np} and --ppn {self.ppn}: leave it out")
        return hosts, math.ceil(self.np / hosts)

    def format(self, name: str, again: str, *first: str) -> str:
        """Lines of a POSIX shell: `launch`, a function that becomes the launch, and "$@", what is to be said to it.

        The run is called `name`, where its words name none. `again`: what a shell expands to nothing when the job
        starts for the first time. `first`: options of the launch; those among its words win.
        """
        words, script = shlex.join(("launch", *first, *self.options)), shlex.join(self.script)
        line = f'launch() {{ exec "$cpuft" {words} "$@" {script}; }}\n'
        if self.resume:
            return f"{line}run={shlex.quote(self.resume)} proof=.\nset --\n"
        run, proof = shlex.quote(self.run_dir or f"runs/{name}"), "logs" if self.script else FILE_NAME
        return f"{line}run={run}$task proof={proof} again={again}\n{_RESUME}"


def fill(template: str, config: JobConfig, more: dict[str, Any]) -> str:
    """A YAML template of this folder: its texts `$name` become options or `more`; where that is None, they go.

    Raises CpuftError: there is no image.
    """
    import yaml

    if not config.image:
        raise CpuftError("which container image? give --image NAME: one that has cpuft and sshd")
    values = vars(config) | more

    def put(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: made for key, value in part.items() if (made := put(value)) is not None}
        if isinstance(part, list):
            return [put(one) for one in part]
        return values[part[1:]] if str(part).startswith("$") else part

    def show(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(str, show)
    job = put(yaml.safe_load((HERE / template).read_text(encoding="utf-8")))
    return str(yaml.dump(job, Dumper=dumper, sort_keys=False, width=120))
