"""Plans to the ranks of a group and results back, beside Ray: ZMQ over TCP, encrypted and authenticated (CURVE).

The executor binds two ports: one on which it publishes (XPUB), so that a step's plan is packed once and handed to ZMQ
once for each data-parallel part; and one on which every rank puts what it has to say (PULL). The ranks connect. Each
side makes its own key pair for this group alone; the public keys are introduced over Ray, and a rank whose key was not
is refused. Messages are msgpack.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
from zmq.auth.thread import ThreadAuthenticator

from shoal.model_shards.executor.channel import MAX_MESSAGE_BYTES, pack

_LINGER_MS = 1000
"""How long a rank that ends waits for its last words to be taken."""

_PART, _RANK = b"p", b"r"
"""Topics: plans of a data-parallel part; one that a rank has to itself, on which nothing is ever sent: that it has
arrived tells the executor that this rank's subscription has."""


def part_topic(dp_rank: int) -> bytes:
    return _PART + dp_rank.to_bytes(4, "big")


def _rank_topic(rank: int) -> bytes:
    return _RANK + rank.to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """What a rank needs to connect."""

    plans: str
    results: str
    server_key: bytes


class GroupEndpoint:
    """The executor's end. `receive` is for one thread; `publish` for any, one at a time, once all have subscribed."""

    def __init__(self, host: str, rank_keys: Sequence[bytes]) -> None:
        """Binds at `host`, an address of this machine; lets in who holds one of the keys (public, Z85)."""
        self._allowed = frozenset(rank_keys)
        self._missing = {_rank_topic(rank): rank for rank in range(len(rank_keys))}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        keys = zmq.curve_keypair()
        self._plans = self._bound(zmq.XPUB, keys)
        self._results = self._bound(zmq.PULL, keys)
        self._bell, self._bell_rope = socket.socketpair()
        shown = f"[{host}]" if ":" in host else host
        ports = [each.bind_to_random_port(f"tcp://{shown}") for each in (self._plans, self._results)]
        plans, results = (f"tcp://{shown}:{port}" for port in ports)
        self.address = GroupAddress(plans, results, keys[0])
        self._poller = zmq.Poller()
        for each in (self._plans, self._results, self._bell):
            self._poller.register(each, zmq.POLLIN)

    def _bound(self, kind: int, keys: tuple[bytes, bytes]) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # Nothing may be dropped; the steps under way are few, so that little can wait.
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.IPV6, 1)
        made.curve_server = True
        made.curve_publickey, made.curve_secretkey = keys
        return made

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq's authenticator asks of a new connection."""
        return key in self._allowed

    @property
    def complete(self) -> bool:
        """Whether every rank gets what is published from now on."""
        return not self._missing

    def publish(self, messages: Sequence[bytes]) -> None:
        """One message for the ranks of each data-parallel part. Does not wait for them."""
        assert self.complete, "a rank that has not subscribed would miss it"
        for part, message in enumerate(messages):
            self._plans.send_multipart((part_topic(part), message))

    def receive(self, timeout_s: float) -> Iterator[tuple[int, list[Any]]]:
        """(rank, message) of all that has arrived; waits for something, at most so long. Until all ranks have
        subscribed, the message of one that does is ["subscribed"]."""
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1e3)))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
        if self._plans in ready:
            yield from self._subscribed()
        if self._results in ready:
            while (message := _next(self._results)) is not None:
                rank, *body = msgpack.unpackb(message[0], strict_map_key=False)
                yield rank, body

    def _subscribed(self) -> Iterator[tuple[int, list[Any]]]:
        while self._missing and (message := _next(self._plans)) is not None:
            rank = self._missing.pop(message[0][1:], None)
            if rank is not None:
                yield rank, ["subscribed"]
        if self.complete:
            self._poller.unregister(self._plans)  # from here on it belongs to whoever publishes

    def wake(self) -> None:
        """Makes `receive` return. From any thread, also after `close`."""
        with suppress(OSError):
            self._bell_rope.send(b"!")

    def close(self) -> None:
        self._authenticator.stop()
        for each in (self._plans, self._results, self._bell, self._bell_rope):
            each.close()
        self._context.term()


def _next(source: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class RankEndpoint:
    """A rank's end (`RankLink` of the rank's main loop)."""

    def __init__(self, address: GroupAddress, rank: int, dp_rank: int, keys: tuple[bytes, bytes]) -> None:
        """`keys` are this rank's public and secret key, Z85."""
        self._rank = rank
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results = self._connected(zmq.PUSH, address.results, address, keys)
        self._plans = self._connected(zmq.SUB, address.plans, address, keys)
        self._plans.subscribe(part_topic(dp_rank))
        self._plans.subscribe(_rank_topic(rank))  # after the other: they arrive in order

    def _connected(
        self, kind: int, endpoint: str, address: GroupAddress, keys: tuple[bytes, bytes]
    ) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.IPV6, 1)
        made.curve_serverkey = address.server_key
        made.curve_publickey, made.curve_secretkey = keys
        made.connect(endpoint)
        return made

    def send(self, *message: Any) -> None:
        data = pack(self._rank, *message)
        with self._lock:
            self._results.send(data)

    def receive(self) -> list[Any]:
        message: list[Any] = msgpack.unpackb(self._plans.recv_multipart()[1], strict_map_key=False)
        return message

    def close(self) -> None:
        """Waits a moment for what was sent last to arrive."""
        with self._lock:
            self._results.close()
            self._plans.close()
        self._context.term()
