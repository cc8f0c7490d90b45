"""Where an HTTP server listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from shoal.configs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


def bind(address: Address) -> socket.socket:
    """A socket bound to it, not listening yet. Raises ConfigError, with the reason, when that cannot be done."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address.host, address.port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        message = (
            f"Cannot listen on {address.host} port {address.port}: {reason}. Choose another with --port or --host."
        )
        raise ConfigError(message, param="port") from None
    return bound
