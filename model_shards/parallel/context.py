"""How one rank talks to the others of its mesh.

Every wait on another rank has a deadline; past it, or when the peer is gone, `EngineDeadError` names the operation.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.configs.errors import EngineDeadError
from shoal.model_shards.parallel.groups import Groups
from shoal.model_shards.parallel.mesh import MeshPosition
from shoal.model_shards.parallel.ordered import ordered_all_reduce, ordered_reduce_scatter
from shoal.model_shards.parallel.rows import StepRows

Axis = Literal["tensor", "context", "expert"]

_Send = tuple[Any, torch.Tensor]
"""A send under way: torch's handle, and the tensor, which must live until the peer has it."""

Parcel = tuple[int, torch.Tensor]
"""(place of a rank along an axis, what goes to it or comes from it)."""

T = TypeVar("T")

_TOKEN_BACKLOG = 8
"""Steps whose sampled ids may be under way beyond one for each stage."""


class ParallelContext:
    """The process groups of one rank. `ParallelContext.single()` is the world of one, in which nothing is sent."""

    def __init__(self, position: MeshPosition, groups: Groups | None = None) -> None:
        assert (groups is None) == (position.world_size == 1)
        self.position = position
        self.traffic: Counter[str] = Counter()
        """Bytes that this rank has sent, by operation, as the usual ring algorithms send them."""
        self.rows = StepRows(0, 0)
        """How the rows of the present step lie on the tensor-parallel ranks."""
        self._groups = groups
        self._hidden_sends: deque[_Send] = deque()
        self._token_sends: deque[_Send] = deque()
        self._token_peers = [
            other.rank
            for other in position.shape.positions()
            if other.dp_rank == position.dp_rank and other.rank != position.rank
        ]

    @classmethod
    def single(cls) -> ParallelContext:
        return cls(MeshPosition())

    @classmethod
    def connect(
        cls, position: MeshPosition, rendezvous: str | Store, device: torch.device, timeout_s: float
    ) -> ParallelContext:
        """Joins the other ranks; blocks until all are there. `rendezvous` is a torch init method, such as
        `file:///path`, or a store that the ranks have in common. Tensors travel over NCCL on CUDA and gloo on CPU;
        token ids over gloo."""
        if position.world_size == 1:
            return cls.single()
        with _collective(f"{position}: joining the other ranks"):
            return cls(position, Groups.create(position, rendezvous, device, timedelta(seconds=timeout_s)))

    @property
    def queues_sums(self) -> bool:
        """Whether sums over the tensor-parallel ranks are queued on the device (NCCL), and so can be part of a captured
        step; gloo's wait in the host."""
        if self.position.tp_size == 1:
            return True
        return self._groups is not None and dist.get_backend(self._groups.tensor) == "nccl"

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        position = self.position
        return {"tensor": position.tp_size, "context": position.cp_size, "expert": position.ep_size}[axis]

    def index(self, axis: Axis) -> int:
        """This rank's place among them."""
        position = self.position
        return {"tensor": position.tp_rank, "context": position.cp_rank, "expert": position.ep_rank}[axis]

    # --- within a stage -------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, axis: Axis = "tensor") -> torch.Tensor:
        """Sum over the ranks along an axis, in place; the same bits on each, and on gloo whatever else is in x."""
        size = self.size(axis)
        if size > 1:

            def add(groups: Groups) -> None:
                group = _group(groups, axis)
                if size > 2 and _over_gloo(group):  # two can be added in either order
                    ordered_all_reduce(x, group)
                else:
                    dist.all_reduce(x, group=group)

            self._wait("all-reduce", add)
            self.traffic["all_reduce"] += 2 * (size - 1) * x.nbytes // size
        return x

    def reduce_scatter(self, x: torch.Tensor, axis: Axis = "tensor") -> torch.Tensor:
        """x [size * n, ...] on each rank -> the sum's rows index * n : (index + 1) * n, with the bits of `all_reduce`
        on gloo."""
        size = self.size(axis)
        if size == 1:
            return x
        assert len(x) % size == 0, (len(x), size)

        def add(groups: Groups) -> torch.Tensor:
            group = _group(groups, axis)
            if _over_gloo(group):  # whose own would send what an all-reduce sends
                return ordered_reduce_scatter(x, group)
            out = x.new_empty((len(x) // size, *x.shape[1:]))
            dist.reduce_scatter_single(out, x.contiguous(), group=group)
            return out

        out = self._wait("reduce-scatter", add)
        self.traffic["reduce_scatter"] += (size - 1) * out.nbytes
        return out

    def all_gather(self, x: torch.Tensor, dim: int = -1, axis: Axis = "tensor") -> torch.Tensor:
        """The ranks' equally shaped parts, concatenated along `dim`, on every rank."""
        size = self.size(axis)
        if size == 1:
            return x
        whole = x.new_empty((size * len(x), *x.shape[1:]))
        self._wait(
            "all-gather", lambda groups: dist.all_gather_single(whole, x.contiguous(), group=_group(groups, axis))
        )
        self.traffic["all_gather"] += (size - 1) * x.nbytes
        return whole if dim == 0 else torch.cat(whole.chunk(size), dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """Like `all_gather` over the tensor-parallel ranks, but only the first of them gets it; the others get None."""
        position = self.position
        if position.tp_size == 1:
            return x
        first = position.rank - position.tp_rank
        parts = [torch.empty_like(x) for _ in range(position.tp_size)] if position.tp_rank == 0 else None
        self._wait("gather", lambda groups: dist.gather(x.contiguous(), parts, dst=first, group=groups.tensor))
        self.traffic["gather"] += x.nbytes if position.tp_rank else 0
        return None if parts is None else torch.cat(parts, dim)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int], axis: Axis = "expert") -> torch.Tensor:
        """Rows to each rank along an axis and from each: x [sum(sent), ...], in the order of the ranks ->
        [sum(received), ...]. `received[i]` is what rank i puts into its own `sent` for this one. Any may be 0."""
        size, index = self.size(axis), self.index(axis)
        assert len(sent) == len(received) == size
        assert len(x) == sum(sent)
        if size == 1:
            return x
        out = x.new_empty((sum(received), *x.shape[1:]))
        self._wait(
            "all-to-all",
            lambda groups: dist.all_to_all_single(out, x.contiguous(), received, sent, group=_group(groups, axis)),
        )
        row_bytes = x[:1].nbytes if len(x) else 0
        self.traffic["all_to_all"] += (len(x) - sent[index]) * row_bytes
        return out

    def shift(self, x: torch.Tensor, axis: Axis = "context") -> torch.Tensor:
        """One turn of the ring: x goes to the next rank along an axis; what the previous one sent, of the same shape
        and dtype, comes back."""
        return self.start_shift(x, axis)()

    def start_shift(self, x: torch.Tensor, axis: Axis = "context") -> Callable[[], torch.Tensor]:
        """A `shift` that is under way while the caller goes on, who may read x but not write it: calling the result
        waits for what arrives."""
        size, index = self.size(axis), self.index(axis)
        if size == 1:
            return lambda: x
        what = "shifting around the ring"
        sent, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)

        def begin(groups: Groups) -> list[dist.Work]:
            group = _group(groups, axis)
            to, source = (dist.get_global_rank(group, (index + step) % size) for step in (1, -1))
            sends = dist.P2POp(dist.isend, sent, to, group)
            receives = dist.P2POp(dist.irecv, out, source, group)
            works: list[dist.Work] = dist.batch_isend_irecv([sends, receives])
            return works

        under_way = self._wait(what, begin)
        self.traffic["shift"] += x.nbytes

        def finish() -> torch.Tensor:
            with _collective(f"{self.position}: {what}"):
                for work in under_way:
                    work.wait()
            return out

        return finish

    def exchange(self, sends: list[Parcel], receives: list[Parcel], axis: Axis = "expert") -> None:
        """Contiguous tensors to some ranks along an axis and from some, into those of `receives`. Between any two ranks
        the one's sends are the other's receives, in the same order, of the same shapes and dtypes."""

        def pass_on(groups: Groups) -> None:
            group = _group(groups, axis)
            operations = [
                dist.P2POp(operation, tensor, dist.get_global_rank(group, index), group)
                for operation, parcels in ((dist.isend, sends), (dist.irecv, receives))
                for index, tensor in parcels
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        if sends or receives:
            self._wait("exchanging tensors", pass_on)
            self.traffic["exchange"] += sum(tensor.nbytes for _, tensor in sends)

    # --- the rows of a step ---------------------------------------------------------------------------------------

    def begin_step(self, num_rows: int, scatter_from: int) -> None:
        """Says how many rows the step has on the ranks of this tensor-parallel group; with `scatter_from` or more of
        them (0: never) they are scattered between the layers. The same on all of these ranks."""
        self.rows = StepRows.of_step(num_rows, self.position.tp_size, scatter_from)

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """How a layer ends whose result is a sum over the ranks: x [total, ...], this rank's summand (which may be
        overwritten) -> the sum's rows that this rank holds, all of them or its share."""
        if not self.rows.scattered:
            return self.all_reduce(x)
        padding = self.rows.held * self.position.tp_size - self.rows.total
        return self.reduce_scatter(torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x)

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """How a layer begins that needs all rows of the step: x [held, ...] -> [total, ...]. Rows that are whole
        already stay as they are."""
        if not self.rows.scattered or len(x) == self.rows.total:
            return x
        return self.all_gather(x, dim=0)[: self.rows.total]

    def pick_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Some rows of the step, on every rank: x [held, hidden], index int64 [n] -> [n, hidden]. By a sum to which
        one rank adds each row and the others zeros, or by way of all rows where that sends less."""
        if len(index) == 0:
            return x[:0]
        if not self.rows.scattered or 2 * len(index) >= self.rows.held * self.position.tp_size:
            return self.whole_rows(x)[index]
        local = index - self.position.tp_rank * self.rows.held
        elsewhere = (local < 0) | (local >= self.rows.held)
        picked = x[local.masked_fill(elsewhere, 0)].masked_fill_(elsewhere[:, None], 0)
        return self.all_reduce(picked)

    # --- between stages -------------------------------------------------------------------------------------------

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the rank in the same place of the next stage. Returns at once; `hidden` must not be written again."""
        target = self.position.rank + self.position.shape.stage_size
        self.traffic["send_hidden"] += hidden.nbytes
        self._send(self._hidden_sends, hidden.contiguous(), target, limit=2)

    def receive_hidden(self, out: torch.Tensor) -> torch.Tensor:
        """From the previous stage, into `out`, whose shape and dtype both sides derive from the plan."""
        source = self.position.rank - self.position.shape.stage_size
        self._wait("receiving hidden states", lambda groups: _receive(out, source, groups.pipeline))
        return out

    # --- the whole world ------------------------------------------------------------------------------------------

    def tell_all(self, message: Any) -> list[Any]:
        """What every rank says, in the order of the ranks: plain values, as JSON has them (no tuples)."""
        if self.position.world_size == 1:
            return [message]
        mine = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = self._control_gather(torch.tensor([len(mine)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        said = self._control_gather(padded)
        return [json.loads(data[: int(size)].numpy().tobytes()) for data, size in zip(said, sizes, strict=True)]

    def _control_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.position.world_size)]
        self._wait("hearing from the other ranks", lambda groups: dist.all_gather(parts, x, group=groups.control))
        return parts

    # --- sampled tokens -------------------------------------------------------------------------------------------

    @property
    def token_backlog(self) -> int:
        """How many steps' tokens a rank may leave unreceived; one more and it must receive the oldest first."""
        return self.position.pp_size + _TOKEN_BACKLOG

    def send_tokens(self, token_ids: list[int]) -> None:
        """From the sampling rank to every other that has the same sequences. Returns at once: a stage reads them when
        it needs them, so that no cycle of waits can form with the hidden states that travel the other way."""
        tokens, peers = torch.tensor(token_ids, dtype=torch.int64), self._token_peers
        for target in peers:
            self._send(self._token_sends, tokens, target, limit=(self.token_backlog + 1) * len(peers))

    def receive_tokens(self, count: int) -> list[int]:
        """The next step's sampled ids, in the order of the steps."""
        tokens = torch.empty(count, dtype=torch.int64)
        source = self.position.sampling_rank
        self._wait("receiving sampled tokens", lambda groups: _receive(tokens, source, groups.control))
        return tokens.tolist()

    def close(self) -> None:
        """Leaves the groups without waiting for anyone."""
        if self._groups is not None and dist.is_initialized():
            dist.destroy_process_group()
            self._groups = None

    # --------------------------------------------------------------------------------------------------------------

    def _send(self, under_way: deque[_Send], tensor: torch.Tensor, target: int, limit: int) -> None:
        assert self._groups is not None
        group = self._groups.control if under_way is self._token_sends else self._groups.pipeline
        assert group is not None
        with _collective(f"{self.position}: sending to rank {target}"):
            under_way.append((group.send([tensor], dist.get_group_rank(group, target), 0), tensor))
            while len(under_way) > limit:
                under_way.popleft()[0].wait()

    def _wait(self, what: str, operation: Callable[[Groups], T]) -> T:
        assert self._groups is not None, what
        with _collective(f"{self.position}: {what}"):
            return operation(self._groups)


def _receive(out: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """As `dist.recv`, whose checks cost as much as the transfer of a step's token ids, once a step on every rank."""
    assert group is not None
    group.recv([out], dist.get_group_rank(group, source), 0).wait()


def _group(groups: Groups, axis: Axis) -> dist.ProcessGroup:
    group = {"tensor": groups.tensor, "context": groups.context, "expert": groups.expert}[axis]
    assert group is not None, f"no ranks along the {axis} axis"
    return group


def _over_gloo(group: dist.ProcessGroup) -> bool:
    return bool(dist.get_backend(group) == "gloo")


@contextmanager
def _collective(what: str) -> Iterator[None]:
    """Says in words that a peer failed; torch's own message stays behind it."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors (timeout, closed connection) derive from it
        raise EngineDeadError(f"{what} failed; another rank is gone or hangs ({error}).") from error
