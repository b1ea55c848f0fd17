"""Where Debian comes from, by apt's own lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.image.sources import choose_mirror, gather_sources

STANZAS = """# Modernized from /etc/apt/sources.list
Types: deb
# the archive itself
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

types: deb deb-src
URIs:
 http://mirror.example/debian-security
Suites: bookworm-security
Components: main contrib
"""
LINES = """#deb cdrom:[Debian GNU/Linux 12.5.0 _Bookworm_ - Official amd64]/ bookworm main
deb cdrom:[Debian GNU/Linux 12.5.0 _Bookworm_ - Official amd64]/ bookworm main

deb-src http://source.example/debian/ bookworm main
deb [ arch=amd64 signed-by=/usr/share/keyrings/a.gpg ] https://lines.example/debian/ bookworm main contrib # ours
deb http://security.example/debian-security bookworm-security main
"""
OTHERS = """deb [arch=amd64] https://packages.example/linux/debian bookworm stable
deb https://cloud.example/apt cloud-sdk-bookworm main
deb mirror+file:/etc/apt/mirrors/debian.list bookworm main
"""


@pytest.mark.parametrize(
    "text, name, mirror",
    [
        (STANZAS, "debian.sources", "http://mirror.example/debian"),
        (LINES, "debian.list", "https://lines.example/debian/"),
        (STANZAS.replace("bookworm", "trixie"), "debian.sources", "http://mirror.example/debian"),
        ("deb file:/srv/debian bookworm main", "local.list", "file:/srv/debian"),
    ],
)
def test_the_mirror_of_a_suite(text: str, name: str, mirror: str) -> None:
    assert choose_mirror({f"/etc/apt/{name}": text}, "bookworm") == mirror


@pytest.mark.parametrize(
    "text, name",
    [
        ("Enabled: no\n" + STANZAS[STANZAS.index("Types") :], "debian.sources"),
        (STANZAS.replace("\nTypes: deb", "\nTypes: deb-src"), "debian.sources"),
        (STANZAS.replace("http://mirror", "mirror+http://mirror"), "debian.sources"),
        (OTHERS, "others.list"),
        ("deb", "short.list"),
        ("deb [", "short.list"),
        ("", "none.list"),
        ("no stanza\n\n\n\nURIs\n", "none.sources"),
    ],
)
def test_no_mirror_is_said(text: str, name: str) -> None:
    with pytest.raises(
        CpuftError, match=r"has no mirror of Debian bookworm: add mirror: ADDRESS to the recipe's base$"
    ):
        choose_mirror({f"/etc/apt/{name}": text}, "bookworm")


def test_the_suite_itself_wins_over_another_release_of_debian() -> None:
    texts = {"a.list": "deb http://older.example/debian bullseye main", "b.sources": STANZAS}
    assert choose_mirror(texts, "bookworm") == "http://mirror.example/debian"


def test_lists_are_found_as_apt_finds_them(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    for name in ("sources.list", "sources.list.d/b.sources", "sources.list.d/a.list", "sources.list.d/a.list.save"):
        (tmp_path / name).write_text(name)
    found = [str(Path(path).relative_to(tmp_path)) for path in gather_sources(tmp_path)]
    assert found == ["sources.list", "sources.list.d/a.list", "sources.list.d/b.sources"]
    assert gather_sources(tmp_path / "none") == {}
