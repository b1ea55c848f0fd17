"""Looks at the ranks of a run, wherever they are, and keeps what was seen in logs/rank-N.stack."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.cluster import FROM_STDIN, Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, attempt
from cpuft.launch.stacks.sights import Sight, fill_gaps, format_sight, parse_sight
from cpuft.launch.stacks.verdict import Verdict, judge
from cpuft.rank import looking
from cpuft.serialization import load, parse_json

LOOK_SECONDS = 3.0
"""How long a host's ranks may take to write their stacks; they need some milliseconds."""
_ANSWER_SECONDS = 15.0
_WRITE = "import json, sys; [open(path, 'w').write(text) for path, text in json.load(sys.stdin).items()]"


@dataclass(frozen=True)
class Place:
    """Where a run goes on."""

    work: str
    """Its folder, as its ranks know it."""
    hosts: tuple[Host, ...]
    """Of each rank."""
    access: Access


def gather_sights(place: Place) -> tuple[tuple[Sight, ...], dict[str, str]]:
    """All ranks, and which hosts do not answer, each with the reason. All hosts are asked at once."""
    source = Path(looking.__file__).read_text(encoding="utf-8")
    words = place.access.any_python("-c", FROM_STDIN, place.work, str(LOOK_SECONDS))

    def ask(host: Host) -> list[Sight]:
        answer = place.access.transport.run(host, words, source, _ANSWER_SECONDS)
        try:
            return [parse_sight(found, host.name) for found in load(list[Any], parse_json(answer.output))]
        except ValueError:
            said = (answer.errors.strip().splitlines() or ["it said nothing"])[-1]
            raise CpuftError(f"host {host.name} could not tell what its ranks do ({said}): log in and look") from None

    hosts = list(dict.fromkeys(place.hosts))
    answers = dict(zip((host.name for host in hosts), attempt(ask, hosts)))
    silent = {name: str(answer) for name, answer in answers.items() if isinstance(answer, CpuftError)}
    seen = [sight for answer in answers.values() if not isinstance(answer, CpuftError) for sight in answer]
    return fill_gaps(seen, tuple(host.name for host in place.hosts), silent), silent


def write_sights(place: Place, sights: tuple[Sight, ...]) -> None:
    """Keep what was seen, a file for each rank, in the run's logs, which are on the master.

    Raises CpuftError: the master does not take them.
    """
    files = {f"{place.work}/logs/rank-{sight.rank}.stack": format_sight(sight) for sight in sights}
    master = place.hosts[0]
    if place.access.transport.is_here(master):
        for path, text in files.items():
            write_text(Path(path), text)
        return
    answer = place.access.transport.run(
        master, place.access.any_python("-c", _WRITE), json.dumps(files), _ANSWER_SECONDS
    )
    if answer.exit_code:
        said = (answer.errors.strip().splitlines() or ["it said nothing"])[-1]
        raise CpuftError(f"host {master.name} could not keep the stacks ({said}): look at its disk")


def look_at_hang(
    run_dir: str, hosts: tuple[str, ...], transport: Transport, say: Callable[[str], None]
) -> tuple[Verdict, set[str]]:
    """Ranks have waited in vain: look at all, before any is ended. Whom they wait for; hosts that do not answer.

    `hosts` names that of each rank, as mpirun knows it from here.
    """
    place = Place(run_dir, tuple(map(Host, hosts)), Access(transport, sys.executable))
    sights, silent = gather_sights(place)
    write_sights(place, sights)
    say(f"stacks of all ranks: {run_dir}/logs/rank-N.stack")
    return judge(sights, 0.0), set(silent)
