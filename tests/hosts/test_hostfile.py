"""Hostfiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host, format_hostfile, parse_hostfile, read_hostfile

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9](\.[a-z]{2,5})?", fullmatch=True)
HOSTS = st.builds(
    Host,
    NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str),
    st.integers(0, 999),
    st.just("") | st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True),
    st.integers(0, 65535),
) | st.builds(Host, NAMES, max_slots=st.integers(0, 999))


@given(st.lists(HOSTS, min_size=1, unique_by=lambda host: host.name))
def test_what_is_written_reads_back(hosts: list[Host]) -> None:
    assert parse_hostfile(format_hostfile(tuple(hosts))) == tuple(hosts)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node1\nnode2\n", (Host("node1"), Host("node2"))),
        ("# head\n\n  node1   # the master\r\n10.0.0.2\n", (Host("node1"), Host("10.0.0.2"))),
        ("node1:4", (Host("node1", 4),)),
        ("node1 slots=4 max_slots=4", (Host("node1", 4),)),
        ("ubuntu@node1:2 port=2222", (Host("node1", 2, "ubuntu", 2222),)),
        ("node1 user=ubuntu", (Host("node1", 0, "ubuntu"),)),
        ("fe80::1", (Host("fe80::1"),)),
        ("2001:db8::2 slots=2", (Host("2001:db8::2", 2),)),
        ("node1 slots=2 max_slots=8\nnode2 max-slots=8 slots=2", (Host("node1", 2), Host("node2", 2))),
        ("node1 max_slots=8", (Host("node1", max_slots=8),)),
        ("node1\nnode1\nnode2\nnode1\n", (Host("node1", 3), Host("node2", 1))),  # PBS, LSF
        ("node1 slots=2\nnode2\nnode1:3", (Host("node1", 5), Host("node2"))),
        ("n1.x 4 all.q@n1.x UNDEFINED\nn2.x 2 a.q <NULL>\nn1.x 1 b.q 0,0", (Host("n1.x", 5), Host("n2.x", 2))),  # SGE
        ("me@n[09-10,3].x:2", (Host("n09.x", 2, "me"), Host("n10.x", 2, "me"), Host("n3.x", 2, "me"))),
        ("r[1-2]n[1-2]", (Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2"))),
        ("node1 # U+2028 is no line end:\u2028none\x85none\x0cnone\nnode2", (Host("node1"), Host("node2"))),
        ("a" * 63 + ".b-_c", (Host("a" * 63 + ".b-_c"),)),
    ],
)
def test_forms(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hostfile(text) == hosts


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "hf names no host: write one name or address on each line, the head host first"),
        ("# only a comment\n", "hf names no host: write one name or address on each line, the head host first"),
        (
            "a\nb\na slots=2\n",
            "hf, line 3: host a is on line 1 already: remove this line; for several ranks on one host, write for "
            "example a slots=2",
        ),
        ("a:0", "hf, line 1: slots is '0': give a whole number from 1 to 9999"),
        ("a:10000", "hf, line 1: slots is '10000': give a whole number from 1 to 9999"),
        ("a slots=" + "9" * 5000, f"hf, line 1: slots is '{'9' * 60}': give a whole number from 1 to 9999"),
        ("a max_slots=" + "9" * 5000, f"hf, line 1: max_slots is '{'9' * 60}': give a whole number from 1 to 9999"),
        ("a port=" + "9" * 5000, f"hf, line 1: port is '{'9' * 60}': give a whole number from 1 to 65535"),
        ("a:٣", "hf, line 1: slots is '٣': give a whole number from 1 to 9999"),
        ("a:x", "hf, line 1: slots is 'x': give a whole number from 1 to 9999"),
        ("a slots=-1", "hf, line 1: slots is '-1': give a whole number from 1 to 9999"),
        ("a port=http", "hf, line 1: port is 'http': give a whole number from 1 to 65535"),
        ("127.0.0.1 port=99999", "hf, line 1: port is '99999': give a whole number from 1 to 65535"),
        (
            "a user=x\x1b[2J",
            "hf, line 1: user 'x\\x1b[2J' contains a control character or begins with a dash: write the login name",
        ),
        (
            "-oProxyCommand=x@a",
            "hf, line 1: user '-oProxyCommand=x' contains a control character or begins with a dash: "
            "write the login name",
        ),
        ("a 4", "hf, line 1: '4' is not understood: write slots=N, user=NAME or port=N"),
        ("a slot=4", "hf, line 1: 'slot=4' is not understood: write slots=N, user=NAME or port=N"),
        ("-oX", "hf, line 1: '-oX' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        ("$HOME", "hf, line 1: '$HOME' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        ("a..b", "hf, line 1: 'a..b' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        ("a" * 64, f"hf, line 1: '{'a' * 64}' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        (
            "a.b" * 90,
            f"hf, line 1: '{'a.b' * 90}' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1",
        ),
        ("n[2-1]", "hf, line 1: 'n[2-1]' has a range of no or too many hosts: write e.g. node[01-04]"),
        ("n[1-99999]", "hf, line 1: 'n[1-99999]' has a range of no or too many hosts: write e.g. node[01-04]"),
        ("n[1-]", "hf, line 1: 'n[1-]' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        ("n1:2,n2:2", "hf, line 1: 'n1:2,n2:2' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
        ("n1 2 n2 4", "hf, line 1: '2' is not understood: write slots=N, user=NAME or port=N"),
        (
            "[fe80::1]:4",
            "hf, line 1: '[fe80::1]:4' is an IPv6 address, and ranks connect over IPv4: write the IPv4 address, or a "
            "name that has one",
        ),
        (
            "a slots=1\nx@a slots=1",
            "hf, line 2: host a is on line 1 already: remove this line; for several ranks on one host, write for "
            "example a slots=2",
        ),
        ("a,b", "hf, line 1: 'a,b' is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_hostfile(text, "hf")
    assert str(error.value) == message


def test_a_file_of_windows_reads(tmp_path: Path) -> None:
    (tmp_path / "hf").write_bytes("\ufeffnode1 slots=2\r\nnode2\r\n".encode())
    assert read_hostfile(str(tmp_path / "hf")) == (Host("node1", 2), Host("node2"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"there is no file .*, which --hostfile names"):
        read_hostfile(str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["localhost", "example"])
def test_shipped_hostfiles_read(name: str) -> None:
    assert read_hostfile(str(Path(__file__).parents[2] / "hostfiles" / name))
