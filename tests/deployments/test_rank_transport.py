"""Plans and results between an executor and its ranks, and who is let in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from shoal.deployments.network import address_towards, interface_of, interface_towards
from shoal.deployments.rank_transport import GroupEndpoint, RankEndpoint
from shoal.model_shards.executor.channel import pack

PARTS = [0, 0, 1, 1]
"""The data-parallel part of each rank."""


@pytest.fixture
def keys() -> list[tuple[bytes, bytes]]:
    return [zmq.curve_keypair() for _ in PARTS]


@pytest.fixture
def group(keys: list[tuple[bytes, bytes]]) -> Iterator[GroupEndpoint]:
    endpoint = GroupEndpoint("127.0.0.1", [public for public, _ in keys])
    yield endpoint
    endpoint.close()


@pytest.fixture
def ranks(group: GroupEndpoint, keys: list[tuple[bytes, bytes]]) -> Iterator[list[RankEndpoint]]:
    made = [RankEndpoint(group.address, rank, PARTS[rank], keys[rank]) for rank in range(len(PARTS))]
    yield made
    for each in made:
        each.close()


def collect(group: GroupEndpoint, count: int, timeout_s: float = 10.0) -> list[tuple[int, list[object]]]:
    deadline, found = time.monotonic() + timeout_s, []
    while len(found) < count and time.monotonic() < deadline:
        found += list(group.receive(0.1))
    return found


def test_every_rank_gets_its_parts_messages_in_order_and_its_answers_name_it(
    group: GroupEndpoint, ranks: list[RankEndpoint]
) -> None:
    assert sorted(collect(group, 4)) == [(rank, ["subscribed"]) for rank in range(4)]
    assert group.complete
    for step in range(50):
        group.publish([pack("plan", part, step) for part in range(2)])
    for rank, each in enumerate(ranks):
        assert [each.receive() for _ in range(50)] == [["plan", PARTS[rank], step] for step in range(50)]
        each.send("result", {1: b"x" * 300_000})
    assert sorted(collect(group, 4), key=lambda found: found[0]) == [
        (rank, ["result", {1: b"x" * 300_000}]) for rank in range(4)
    ]


def test_nothing_is_published_while_a_rank_would_miss_it(group: GroupEndpoint, keys: list[tuple[bytes, bytes]]) -> None:
    first = RankEndpoint(group.address, 0, 0, keys[0])
    assert collect(group, 1) == [(0, ["subscribed"])]
    with pytest.raises(AssertionError):
        group.publish([b"", b""])
    first.close()


def test_a_stranger_is_not_let_in(group: GroupEndpoint) -> None:
    stranger = RankEndpoint(group.address, 0, 0, zmq.curve_keypair())
    stranger.send("result", "forged")
    assert collect(group, 1, timeout_s=1.0) == []
    stranger.close()
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = plain.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    push.connect(group.address.results)
    push.send(pack(0, "result", "forged"))
    assert collect(group, 1, timeout_s=0.5) == []
    push.close()
    plain.term()


def test_receiving_can_be_woken_from_another_thread_also_late(group: GroupEndpoint) -> None:
    threading.Timer(0.1, group.wake).start()
    began = time.monotonic()
    assert list(group.receive(30.0)) == []
    assert time.monotonic() - began < 10
    group.close()
    group.wake()


def test_the_interface_is_the_one_on_the_route() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("192.0.2.1", ["192.0.2.1", "192.0.2.1"]) == loopback, "all are on this machine"
