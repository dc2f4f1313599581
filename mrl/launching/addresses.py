"""The address that other hosts reach this one by, and the interface that leads to another.

`python -m mrl.launching.addresses` prints the address of this host;
`python -m mrl.launching.addresses --interface-to HOST` the interface that reaches HOST.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Bridges and tunnels of containers and virtual machines: the same address on every host.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc", "tun")
_NAMED_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host."""

    interface: str
    ip: str


def local_addresses() -> tuple[Address, ...]:
    """List the addresses of the interfaces that are up."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return tuple(
        Address(name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )


def choose_address(
    addresses: Sequence[Address],
    given: Mapping[str, str],
    named: Sequence[str] = (),
    routed: str | None = None,
) -> Address:
    """Choose the address that ranks on other hosts meet at.

    The interfaces that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME allow (NCCL's grammar: prefixes,
    `=` exact, `^` excluded) come first; then what the host's own name means (`named`), then the
    source of its default route (`routed`); IPv4 before IPv6. Raises ValueError, listing what was
    found, where no address is left.
    """
    variable = next((name for name in _NAMED_BY if given.get(name)), None)
    rule = given[variable] if variable else None
    left = [
        address
        for address in addresses
        if not ipaddress.ip_address(address.ip).is_link_local
        and (
            _allows(rule, address.interface)
            if rule is not None
            else not ipaddress.ip_address(address.ip).is_loopback
            and not address.interface.startswith(_VIRTUAL)
        )
    ]
    if not left:
        why = f"{variable}={rule} allows none of them" if rule else "none reaches another host"
        found = ", ".join(f"{a.interface} {a.ip}" for a in addresses) or "no interface is up"
        raise ValueError(
            f"{why}: {found}. Set MASTER_ADDR to an address of this host that the others reach, "
            "or NCCL_SOCKET_IFNAME to its interface"
        )
    return min(left, key=lambda a: (":" in a.ip, a.ip not in named, a.ip != routed))


def _allows(rule: str, interface: str) -> bool:
    exclude, text = rule.startswith("^"), rule.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]
    hit = interface in names if exact else interface.startswith(tuple(names))
    return hit != exclude and not (exclude and interface == "lo")


def host_address(given: Mapping[str, str]) -> Address:
    """Choose the address of this host; raises ValueError as `choose_address` does."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:  # a host that does not know its own name
        infos = []
    names = [str(info[4][0]) for info in infos]
    # a documentation address (RFC 5737): nothing is sent, the kernel only picks the route
    return choose_address(local_addresses(), given, names, _source_to("192.0.2.1"))


def interface_to(host: str) -> Address:
    """Find the interface of this host that reaches another.

    Raises ValueError for a host that is not known or has no route to it.
    """
    source = _source_to(host)
    for address in local_addresses():
        if address.ip == source:
            return address
    if source is not None and ipaddress.ip_address(source).is_loopback:
        return Address("lo", source)  # all of 127.0.0.0/8 is this host
    raise ValueError(
        f"no route to {host!r}: set MASTER_ADDR to an address of node 0 that "
        f"{socket.gethostname()} reaches"
    )


def _source_to(host: str) -> str | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interface-to", metavar="HOST")
    host = parser.parse_args().interface_to
    try:
        print(interface_to(host).interface if host else host_address(os.environ).ip)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
