"""Who measures with whom, and what is made of the answers; a real measurement over loopback."""

import threading
from typing import Any

import pytest

from cpuft.doctor.link import measure
from cpuft.doctor.links import format_links, plan_pairs, read_links


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_all_meet_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = plan_pairs(count)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))


def test_a_table_of_links() -> None:
    here = [{"peer": "10.0.0.2", "latency_us": 41.4, "bits_per_second": 9.4e8}]
    there = [{"peer": "10.0.0.1", "bits_per_second": 5e8}]
    links = read_links(["a", "b"], {"10.0.0.1": "a", "10.0.0.2": "b"}, [here, there])
    assert format_links(links).splitlines()[1:] == [
        "from \\ to  a                   b",
        "a          -                   41 us 0.50 Gbit/s",
        "b          41 us 0.94 Gbit/s  -".replace("0.94 Gbit/s  -", "0.94 Gbit/s   -"),
    ]


def test_a_link_that_failed_says_why() -> None:
    links = read_links(["a", "b"], {"1": "a", "2": "b"}, [[{"peer": "2", "error": "timed out"}], []])
    assert "timed out" in format_links(links)


def test_two_ends_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, list[dict[str, Any]]] = {}
    order = {"port": 23917, "seconds": 0.05}

    def serve() -> None:
        answers["serve"] = measure(order | {"peers": [["127.0.0.1", False]]})

    def call() -> None:
        # The second of one machine: it listens elsewhere, and calls the first one's port.
        import socket

        from cpuft.doctor import link

        with socket.create_connection(("127.0.0.1", 23917), timeout=5) as line:
            answers["call"] = [link._ask(line, order)]

    server = threading.Thread(target=serve)
    server.start()
    while not answers.get("call"):
        try:
            call()
        except ConnectionRefusedError:
            continue
    server.join(10)
    (served,), (called,) = answers["serve"], answers["call"]
    assert served["bits_per_second"] > 1e8
    assert called["bits_per_second"] > 1e8
    assert 0 < called["latency_us"] < 1e5
