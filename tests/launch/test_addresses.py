from __future__ import annotations

import pytest

from mrl.launching.addresses import Address, choose_address, interface_to, local_addresses

LO = Address("lo", "127.0.0.1")
DOCKER = Address("docker0", "172.17.0.1")
LINK = Address("eth1", "fe80::1")
FAST = Address("ib0", "10.1.0.5")
SLOW = Address("eth0", "192.168.3.5")
SIX = Address("eth0", "2001:db8::5")
ALL = (LO, DOCKER, LINK, SIX, SLOW, FAST)


def test_what_only_this_host_reaches_is_not_chosen() -> None:
    assert choose_address((LO, DOCKER, LINK, FAST), {}) == FAST


def test_the_hosts_name_wins_over_its_route_and_ipv4_over_ipv6() -> None:
    assert choose_address(ALL, {}, named=["127.0.1.1"], routed=SLOW.ip) == SLOW
    assert choose_address(ALL, {}, named=[FAST.ip], routed=SLOW.ip) == FAST
    assert choose_address(ALL, {}, named=[SIX.ip], routed=FAST.ip) == FAST
    assert choose_address((LO, SIX), {}) == SIX


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [("ib", FAST), ("=eth0", SLOW), ("^eth", DOCKER), ("^=eth0,docker0", FAST), ("lo", LO)],
)
def test_the_users_interface_rule_is_followed_as_nccl_reads_it(rule: str, chosen: Address) -> None:
    assert choose_address(ALL, {"NCCL_SOCKET_IFNAME": rule}) == chosen


def test_no_address_left_says_what_was_found_and_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"lo 127.0.0.1, docker0 172.17.0.1.*Set MASTER_ADDR"):
        choose_address((LO, DOCKER), {})
    with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME=ib1 allows none"):
        choose_address(ALL, {"NCCL_SOCKET_IFNAME": "ib1"})


def test_the_interface_to_a_host_is_one_of_this_host() -> None:
    assert interface_to("127.0.0.3").interface == "lo"
    for address in local_addresses():
        if "." in address.ip:
            assert interface_to(address.ip).ip == address.ip
    with pytest.raises(ValueError, match=r"no route to 'no-such-host\.invalid'"):
        interface_to("no-such-host.invalid")
