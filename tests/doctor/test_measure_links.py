"""Which hosts measure when, the table of the results, and a real measurement over loopback."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cpuft.cli import main
from cpuft.doctor import probe
from cpuft.doctor.measure_links import format_links, plan_pairs, read_links
from cpuft.doctor.probe import measure_links
from cpuft.errors import CpuftError


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_each_pair_is_measured_once_and_no_host_twice_in_a_round(count: int) -> None:
    rounds = plan_pairs(count)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))


def test_a_table_of_links_has_latency_and_rate() -> None:
    here = [{"peer": "10.0.0.2", "latency_us": 41.4, "bits_per_second": 9.4e8}]
    there = [{"peer": "10.0.0.1", "bits_per_second": 5e8}]
    links = read_links(["a", "b"], {"10.0.0.1": "a", "10.0.0.2": "b"}, [here, there])
    assert [line.split() for line in format_links(links).splitlines()][-2:] == [
        ["a", "-", *["41", "us", "0.50", "Gbit/s"]],
        ["b", *["41", "us", "0.94", "Gbit/s"], "-"],
    ]


def test_the_table_shows_why_a_link_failed() -> None:
    links = read_links(["a", "b"], {"1": "a", "2": "b"}, [[{"peer": "2", "error": "timed out"}], []])
    assert "timed out" in format_links(links)


def test_a_link_is_measured_over_loopback() -> None:
    order: dict[str, Any] = {"port": 23917, "seconds": 0.05}
    served: list[dict[str, Any]] = []
    server = threading.Thread(target=lambda: served.extend(measure_links(order | {"peers": [["127.0.0.1", False]]})))
    server.start()
    # Two hosts of one address cannot both listen there: this end only calls.
    with probe._connect("127.0.0.1", order["port"], time.monotonic() + 5) as connection:
        called = probe._measure_as_client(connection, order["seconds"])
    server.join(10)
    assert served[0]["bits_per_second"] > 1e8
    assert called["bits_per_second"] > 1e8
    assert 0 < called["latency_us"] < 1e5


def test_a_peer_that_does_not_connect_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LINK_TIMEOUT_SECONDS", 0.1)
    (answer,) = measure_links({"port": 23918, "seconds": 0.05, "peers": [["127.0.0.1", False]]})
    assert answer == {"peer": "127.0.0.1", "error": "timed out"}


def test_links_that_cannot_be_measured_hide_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of one host cannot both listen on the port."""

    def fail(*_: object) -> None:
        raise CpuftError("Address already in use")

    monkeypatch.setattr("cpuft.doctor.measure_links.measure_links", fail)
    (tmp_path / "hosts").write_text("localhost\n127.0.0.1\n")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--hostfile", str(tmp_path / "hosts"), "--bandwidth"])
    said = capsys.readouterr()
    assert "CPUFT-011 error on 127.0.0.1" in said.out
    assert said.err == "cpuft: error: Address already in use\n"
    assert ended.value.code == 2
