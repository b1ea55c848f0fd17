import pytest

from cpuft.errors import CpuftError
from cpuft.provision.local.facts import choose_network, parse_networks, parse_rate, parse_routes

ADDRESSES = """[{"ifname": "lo", "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
 {"ifname": "down0", "addr_info": []},
 {"ifname": "cpuft-local", "addr_info": [{"family": "inet", "local": "10.77.0.254", "prefixlen": 24}]}]"""
ROUTES = '[{"dst": "default", "gateway": "192.0.2.1"}, {"dst": "10.77.0.0/16"}, {"type": "local", "dst": "10.79.0.9"}]'
SHAPED = '[{"kind": "tbf", "handle": "8002:", "root": true, "options": {"rate": 125000000, "burst": 262125}}]'


def test_networks_of_interfaces() -> None:
    assert parse_networks(ADDRESSES) == {"lo": "127.0.0.0/8", "cpuft-local": "10.77.0.0/24"}


def test_a_network_that_nothing_uses() -> None:
    assert choose_network(parse_routes(ROUTES)) == "10.78.0.0/24"
    assert choose_network(["10.77.0.0/16", "10.78.0.128/25"]) == "10.79.0.0/24"


def test_no_network_left() -> None:
    with pytest.raises(CpuftError, match=r"cpuft provision down$"):
        choose_network(["10.0.0.0/8"])


@pytest.mark.parametrize("text, bits", [(SHAPED, 10**9), ("[]", 0), ("", 0), ('[{"kind": "noqueue"}]', 0)])
def test_rate_of_a_link(text: str, bits: int) -> None:
    assert parse_rate(text) == bits
