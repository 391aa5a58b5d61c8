"""Addresses and ports of this machine."""

import ipaddress
import socket

from twinkle.errors import InvalidInputError

__all__ = ["find_free_port", "find_node_ip", "is_valid_ipv6_address"]


def find_node_ip() -> str | None:
    """Return the address under which other machines reach this one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a reserved address: UDP connect only looks up the route, nothing is sent
        except OSError:
            return None
        return str(probe.getsockname()[0])


def find_free_port(address: str = "", start_port: int | None = None, retry: int = 100) -> int:
    """Return a free port: any, or the first free one of the ``retry`` ports from ``start_port`` on."""
    if start_port is None:
        return _bound_port(address, 0)
    for port in range(start_port, start_port + retry):
        try:
            return _bound_port(address, port)
        except OSError:
            continue
    raise InvalidInputError("start_port", start_port, f"a port with a free one among the {retry} ports from it on")


def is_valid_ipv6_address(address: str) -> bool:
    """Return whether a text is an IPv6 address, such as ``::1``; names, IPv4 addresses and ports are not."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def _bound_port(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        return int(probe.getsockname()[1])
