"""Where this machine's apt fetches Debian from, for debootstrap to fetch from there too."""

from __future__ import annotations

import email
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError

_OFF = ("no", "false", "without", "off", "disable")
"""What apt takes for a no (StringToBool of its strutl.cc)."""
_FETCHED = ("http://", "https://", "file:/")
"""Of the ways that apt knows, those that debootstrap knows too."""


@dataclass(frozen=True)
class Source:
    """A place of binary packages, and what is had from it."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]


def gather_sources(folder: Path = Path("/etc/apt")) -> dict[str, str]:
    """Texts of apt's lists of sources by path, in apt's own order (sources.list(5)); empty where there is no apt."""
    paths = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    found = [path for path in paths if path.suffix in (".list", ".sources") and path.is_file()]
    return {str(path): path.read_text(encoding="utf-8", errors="replace") for path in found}


def choose_mirror(texts: Mapping[str, str], suite: str) -> str:
    """The address of a mirror that has Debian's `suite`: one it is fetched from, else one of Debian's other suites.

    `texts` are from `gather_sources`.

    Raises CpuftError: there is none.
    """
    parsed = (_parse_stanzas(text) if path.endswith(".sources") else _parse_lines(text) for path, text in texts.items())
    sources = [source for found in parsed for source in found if "main" in source.components]
    exact = [uri for source in sources if suite in source.suites for uri in source.uris]
    debian = [uri for source in sources for uri in source.uris if uri.rstrip("/").endswith("/debian")]
    mirror = next((uri for uri in (*exact, *debian) if uri.startswith(_FETCHED)), "")
    if not mirror:
        raise CpuftError(
            f"apt on this machine has no mirror of Debian {suite}: add mirror: ADDRESS to the recipe's base"
        )
    return mirror


def _parse_lines(text: str) -> Iterator[Source]:
    """One-line style: deb [ option=value ... ] uri suite [component ...]."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?([^#]*)", line)
        words = match[1].split() if match else []
        if len(words) > 1:
            yield Source((words[0],), (words[1],), tuple(words[2:]))


def _parse_stanzas(text: str) -> Iterator[Source]:
    """Deb822 style: stanzas of fields as in mail, an empty line between."""
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    for stanza in "\n".join(lines).split("\n\n"):
        fields = email.message_from_string(stanza.lstrip("\n"))
        if "deb" in fields.get("Types", "").split() and fields.get("Enabled", "yes").lower() not in _OFF:
            yield Source(*(tuple(fields.get(name, "").split()) for name in ("URIs", "Suites", "Components")))
