"""Which of this machine's addresses and network interfaces lead to a peer."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address, `netdevice(7)`."""
_ANY_PORT = 9
"""A UDP socket is connected to it, by which nothing is sent: the kernel only looks up the route."""


def address_towards(peer: str) -> str:
    """This machine's address on the route to a peer's. Raises OSError when there is none."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an address; None when none has."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None


def interface_towards(own: str, peers: Iterable[str]) -> str | None:
    """The interface on the route to the first peer on another machine than `own`; loopback when all are here."""
    elsewhere = next((peer for peer in peers if peer != own), None)
    return interface_of("127.0.0.1" if elsewhere is None else address_towards(elsewhere))


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(socket.inet_ntoa(reply[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found  # no IPv6
    for line in lines:
        digits, *_, name = line.split()
        if name == interface:
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found
