"""Step outputs and messages survive the way between processes."""

from __future__ import annotations

import socket

import msgpack
import pytest

from shoal.model_shards.engine.plan import StepOutput, TokenLogprobs
from shoal.model_shards.executor.channel import Channel
from shoal.model_shards.executor.wire import output_from_wire, output_to_wire

ENTRY = TokenLogprobs(5, -0.25, 1, [(5, -0.25), (7, -2.0)])


def test_a_step_output_is_the_same_on_the_other_side() -> None:
    output = StepOutput(3, [1, 2], [0, 4], [5, 6], [ENTRY, None], {2: [ENTRY]}, {9: "NaN"})
    assert output_from_wire(msgpack.unpackb(msgpack.packb(output_to_wire(output)))) == output


def test_messages_come_whole_however_the_bytes_arrive() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = Channel(left), Channel(right)
        data = msgpack.packb(["plan", {5: "x" * 100}]) + msgpack.packb(["stop"])
        left.sendall(data[:40])
        assert receiver.receive() == []
        left.sendall(data[40:])
        assert receiver.receive() == [["plan", {5: "x" * 100}], ["stop"]]
        sender.close()
        with pytest.raises(EOFError):
            receiver.receive()
