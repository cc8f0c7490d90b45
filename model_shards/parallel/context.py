"""Where this process stands in the mesh of ranks, and how it talks to the others.

Ranks are numbered stage by stage: rank = pp_rank * tp_size + tp_rank. Every wait on another rank has a deadline; past
it, or when the peer is gone, `EngineDeadError` names the operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.configs.errors import EngineDeadError

_Send = tuple[Any, torch.Tensor]
"""A send under way: torch's handle, and the tensor, which must live until the peer has it."""

_TOKEN_BACKLOG = 8
"""Steps whose sampled ids may be under way beyond one for each stage."""


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The place of one rank. `tp_size` ranks share each layer, `pp_size` stages share the layers out."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, pp_size: int) -> MeshPosition:
        assert 0 <= rank < tp_size * pp_size, (rank, tp_size, pp_size)
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def sampling_rank(self) -> int:
        """The one rank that has whole logits and draws tokens: the first of the last stage."""
        return (self.pp_size - 1) * self.tp_size

    def __str__(self) -> str:
        return f"rank {self.rank} (tensor {self.tp_rank}/{self.tp_size}, stage {self.pp_rank}/{self.pp_size})"


class ParallelContext:
    """The process groups of one rank. `ParallelContext.single()` is the world of one, in which nothing is sent."""

    def __init__(self, position: MeshPosition, groups: _Groups | None = None) -> None:
        assert (groups is None) == (position.world_size == 1)
        self.position = position
        self._groups = groups
        self._hidden_sends: deque[_Send] = deque()
        self._token_sends: deque[_Send] = deque()

    @classmethod
    def single(cls) -> ParallelContext:
        return cls(MeshPosition())

    @classmethod
    def connect(
        cls, position: MeshPosition, rendezvous: str, device: torch.device, timeout_s: float
    ) -> ParallelContext:
        """Joins the other ranks; blocks until all are there. `rendezvous` is a torch init method, such as
        `file:///path` or `tcp://host:port`. Tensors travel over NCCL on CUDA and gloo on CPU; token ids over gloo."""
        if position.world_size == 1:
            return cls.single()
        with _collective(f"{position}: joining the other ranks"):
            return cls(position, _Groups.create(position, rendezvous, device, timedelta(seconds=timeout_s)))

    @property
    def queues_sums(self) -> bool:
        """Whether sums over the tensor-parallel ranks are queued on the device (NCCL), and so can be part of a captured
        step; gloo's wait in the host."""
        if self.position.tp_size == 1:
            return True
        return self._groups is not None and dist.get_backend(self._groups.tensor) == "nccl"

    # --- within a stage -------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the tensor-parallel ranks, in place; the same bits on each."""
        if self.position.tp_size > 1:
            self._wait("all-reduce", lambda groups: dist.all_reduce(x, group=groups.tensor))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensor-parallel ranks' equally shaped parts, concatenated along `dim`, on every rank."""
        if self.position.tp_size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.position.tp_size)]
        self._wait("all-gather", lambda groups: dist.all_gather(parts, x.contiguous(), group=groups.tensor))
        return torch.cat(parts, dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """Like `all_gather`, but only the first tensor-parallel rank of the stage gets it; the others get None."""
        position = self.position
        if position.tp_size == 1:
            return x
        first = position.pp_rank * position.tp_size
        parts = [torch.empty_like(x) for _ in range(position.tp_size)] if position.tp_rank == 0 else None
        self._wait("gather", lambda groups: dist.gather(x.contiguous(), parts, dst=first, group=groups.tensor))
        return None if parts is None else torch.cat(parts, dim)

    # --- between stages -------------------------------------------------------------------------------------------

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the same tensor-parallel rank of the next stage. Returns at once; `hidden` must not be written again."""
        target = self.position.rank + self.position.tp_size
        self._send(self._hidden_sends, hidden.contiguous(), target, limit=2)

    def receive_hidden(self, out: torch.Tensor) -> torch.Tensor:
        """From the previous stage, into `out`, whose shape and dtype both sides derive from the plan."""
        source = self.position.rank - self.position.tp_size
        self._wait("receiving hidden states", lambda groups: dist.recv(out, src=source, group=groups.pipeline))
        return out

    # --- sampled tokens -------------------------------------------------------------------------------------------

    @property
    def token_backlog(self) -> int:
        """How many steps' tokens a rank may leave unreceived; one more and it must receive the oldest first."""
        return self.position.pp_size + _TOKEN_BACKLOG

    def send_tokens(self, token_ids: list[int]) -> None:
        """From the sampling rank to every other rank. Returns at once: a stage reads them when it needs them, so that
        no cycle of waits can form with the hidden states that travel the other way."""
        position = self.position
        if position.world_size == 1:
            return
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        peers = position.world_size - 1
        for target in range(position.world_size):
            if target != position.rank:
                self._send(self._token_sends, tokens, target, limit=(self.token_backlog + 1) * peers)

    def receive_tokens(self, count: int) -> list[int]:
        """The next step's sampled ids, in the order of the steps."""
        tokens = torch.empty(count, dtype=torch.int64)
        source = self.position.sampling_rank
        self._wait("receiving sampled tokens", lambda groups: dist.recv(tokens, src=source, group=groups.control))
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
        with _collective(f"{self.position}: sending to rank {target}"):
            under_way.append((dist.isend(tensor, dst=target, group=group), tensor))
            while len(under_way) > limit:
                under_way.popleft()[0].wait()

    def _wait(self, what: str, operation: Callable[[_Groups], object]) -> None:
        assert self._groups is not None, what
        with _collective(f"{self.position}: {what}"):
            operation(self._groups)


@dataclass(frozen=True, slots=True)
class _Groups:
    """torch process groups: layers' sums, hidden states along a column of stages, token ids among all."""

    tensor: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    control: dist.ProcessGroup | None

    @classmethod
    def create(cls, position: MeshPosition, rendezvous: str, device: torch.device, timeout: timedelta) -> _Groups:
        assert not dist.is_initialized(), "a process is one rank of one group"
        tp, pp, world = position.tp_size, position.pp_size, position.world_size
        dist.init_process_group("gloo", init_method=rendezvous, rank=position.rank, world_size=world, timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        stages = [[stage * tp + i for i in range(tp)] for stage in range(pp)]
        columns = [[stage * tp + i for stage in range(pp)] for i in range(tp)]
        # Every rank takes part in making every group, in the same order.
        tensor = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in stages]
        pipeline = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in columns]
        return cls(tensor[position.pp_rank], pipeline[position.tp_rank], dist.group.WORLD)


@contextmanager
def _collective(what: str) -> Iterator[None]:
    """Says in words that a peer failed; torch's own message stays behind it."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors (timeout, closed connection) derive from it
        raise EngineDeadError(f"{what} failed; another rank is gone or hangs ({error}).") from error
