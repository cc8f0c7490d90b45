"""Messages between an executor and its rank processes: msgpack over a socket pair that only the two hold.

A socket pair needs no name or port that a third process could reach, and its end of file tells each side at once that
the other died. Messages are lists `[kind, ...]` of plain values; msgpack marks their ends itself.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgpack

_READ_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 256 << 20
"""Far above a plan that brings in a million-token prompt; a bound on what a broken peer can make us hold."""

SEND_TIMEOUT_S = 30.0
"""The peer's reader drains its socket whatever it computes, so a send that blocks means that the process hangs."""


class Channel:
    """One end. `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._lock = threading.Lock()
        self._unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES, strict_map_key=False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Raises OSError when the peer is gone or does not read."""
        self.send_packed(pack(*message))

    def send_packed(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived; call it when the socket is readable. EOFError: the peer is gone."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        self._socket.close()


def pack(*message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed
