"""Tokens beside Ray: one ZMQ message a step from a shard group to each gateway that waits for something.

A message is msgpack: a list of `RequestDelta.to_wire()`, shortened where a delta is nothing but more text; or, about
once a second, a map that holds an `EngineStatus`, by which a gateway knows that the group lives, also while no call can
reach it (Serve sends none to a replica that it is stopping, and the streams there go on for a while).

Every connection is CURVE: the gateway is the server and makes its key pair when it starts; its public key travels to
the shard group in the `attach` call, and the shard group's public key comes back as that call's answer. So a connection
proves on both sides that Ray's (authenticated) control plane introduced it, and no secret leaves the process that made
it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from shoal.configs.app import WiringConfig
from shoal.configs.errors import ConfigError
from shoal.deployments.stages import EngineStatus, ReplyAddress
from shoal.deployments.streams import StreamHub
from shoal.model_shards.engine.request import RequestDelta

MAX_MESSAGE_BYTES = 256 << 20
MAX_QUEUED_STEPS = 10_000
"""Messages that wait for a gateway which does not take them; beyond, its requests are given up."""

logger = logging.getLogger("shoal.data_plane")


_PLAIN_FIELDS = 6
_LINGER_MS = 1000
_MESSAGES_AT_ONCE = 64


def encode(deltas: list[RequestDelta]) -> bytes:
    return bytes(msgpack.packb([_to_wire(delta) for delta in deltas]))


def encode_status(status: EngineStatus) -> bytes:
    return bytes(msgpack.packb({"status": status.to_wire()}))


def decode(message: bytes) -> list[RequestDelta] | EngineStatus:
    """Raises ValueError for what `encode` and `encode_status` did not write."""
    try:
        content = msgpack.unpackb(message)
        if isinstance(content, dict):
            return EngineStatus.from_wire(content["status"])
        return [_from_wire(wire) for wire in content]
    except (TypeError, ValueError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not a message of deltas: {error}") from error


def _to_wire(delta: RequestDelta) -> Sequence[Any]:
    if (
        delta.logprobs
        or delta.finish_reason is not None
        or delta.prompt_logprobs is not None
        or delta.error is not None
    ):
        return delta.to_wire()
    counts = (delta.num_output_tokens, delta.num_cached_tokens)
    return (delta.request_id, delta.index, delta.text, delta.token_ids, *counts)


def _from_wire(wire: list[Any]) -> RequestDelta:
    if len(wire) != _PLAIN_FIELDS:
        return RequestDelta.from_wire(wire)
    request_id, index, text, token_ids, outputs, cached = wire
    return RequestDelta(request_id, index, text, token_ids, [], None, None, None, outputs, cached)


class DeltaReceiver:
    """The gateway's end: binds a port, gives what arrives to the hub."""

    def __init__(self, hub: StreamHub, wiring: WiringConfig) -> None:
        """Raises ConfigError for an address that the configuration does not allow, or that cannot be bound."""
        host = wiring.data_plane_host
        if not (ipaddress.ip_address(host).is_loopback or wiring.allow_remote):
            message = f"The data plane would listen on {host}; set wiring.allow_remote to true if that is meant."
            raise ConfigError(message, param="wiring.data_plane_host")
        self._hub = hub
        self.on_status: Callable[[EngineStatus], None] = lambda _status: None
        """Told of each sign of life."""
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = None
        """Of the socket, while it is watched."""
        self._allowed_keys: set[bytes] = set()
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        public, secret = zmq.curve_keypair()
        # A plain socket, read when its descriptor says so: pyzmq's own socket for asyncio makes a future and three
        # passes of the loop of each message. (The authenticator needs the asyncio context.)
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=self._context)
        self._socket = plain.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_STEPS)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        shown = f"[{host}]" if ":" in host else host
        try:
            port = self._socket.bind_to_random_port(f"tcp://{shown}")
        except zmq.ZMQError as error:
            self.close()
            message = f"The data plane cannot listen on {host}: {error}."
            raise ConfigError(message, param="wiring.data_plane_host") from None
        self.address = ReplyAddress(endpoint=f"tcp://{shown}:{port}", server_key=public)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take)
        self._loop.call_soon(self._take)

    def allow(self, client_key: bytes) -> None:
        """Lets the shard group with this public key (Z85) send."""
        self._allowed_keys.add(client_key)

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq's authenticator asks of a new connection."""
        return key in self._allowed_keys

    def _take(self) -> None:
        """Takes what is there. The descriptor tells of a change and not of a state, so all of it must be taken; a
        sender that is always faster still leaves room for others on the loop."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self._socket.closed:
                return
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                content = decode(message)
            except ValueError:
                logger.exception("a data plane message was dropped")
                continue
            if isinstance(content, EngineStatus):
                self.on_status(content)
            else:
                self._hub.dispatch(content)
        self._loop.call_soon(self._take)

    def close(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        self._authenticator.stop()
        self._socket.close()
        self._context.term()


class ZmqSink:
    """The shard group's end: a DeltaSink that sends to one gateway."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], reply: ReplyAddress, keys: tuple[bytes, bytes]) -> None:
        """`keys` are this side's public and secret key, Z85."""
        # ZMQ sockets must not be used by two threads at once; the engine may deliver from more than one.
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_STEPS)
        self._socket.setsockopt(zmq.IPV6, int("[" in reply.endpoint))
        self._socket.curve_serverkey = reply.server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.connect(reply.endpoint)

    def deliver(self, deltas: list[RequestDelta]) -> None:
        """Never blocks. Raises zmq.Again when the gateway has taken nothing for MAX_QUEUED_STEPS steps."""
        self._send(encode(deltas))

    def tell(self, status: EngineStatus) -> None:
        """As `deliver`."""
        self._send(encode_status(status))

    def _send(self, message: bytes) -> None:
        with self._lock:
            self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """What was delivered is still sent, if it is taken soon."""
        with self._lock:
            self._socket.close(linger=_LINGER_MS)
