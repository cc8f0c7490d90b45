"""The mesh of ranks: how many there are along each axis, and where one of them stands.

Ranks are numbered with the tensor-parallel axis fastest, so that the ranks that talk most are neighbours:

    rank = ((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks along each axis."""

    tp_size: int = 1
    """Share each layer's matrices."""
    pp_size: int = 1
    """Share the layers out (stages)."""
    dp_size: int = 1
    """Share the sequences out: each part has its own KV cache; only experts are common."""
    cp_size: int = 1
    """Share the tokens of each sequence out."""
    expert_parallel: bool = False
    """Whether the ranks of a stage share whole experts out, rather than a slice of each."""
    num_redundant_experts: int = 0
    """Slots of each layer beyond one for each expert, with `expert_parallel`: busy experts have several."""

    @property
    def stage_size(self) -> int:
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def world_size(self) -> int:
        return self.pp_size * self.stage_size

    @property
    def ep_size(self) -> int:
        return self.stage_size if self.expert_parallel else 1

    def position(self, rank: int) -> MeshPosition:
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tp_rank = divmod(rank, self.tp_size)
        rest, cp_rank = divmod(rest, self.cp_size)
        pp_rank, dp_rank = divmod(rest, self.dp_size)
        return MeshPosition(self, tp_rank, pp_rank, dp_rank, cp_rank)

    def positions(self) -> list[MeshPosition]:
        return [self.position(rank) for rank in range(self.world_size)]


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The place of one rank."""

    shape: MeshShape = MeshShape()
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    cp_rank: int = 0

    @property
    def rank(self) -> int:
        shape = self.shape
        return (
            (self.pp_rank * shape.dp_size + self.dp_rank) * shape.cp_size + self.cp_rank
        ) * shape.tp_size + self.tp_rank

    @property
    def tp_size(self) -> int:
        return self.shape.tp_size

    @property
    def pp_size(self) -> int:
        return self.shape.pp_size

    @property
    def dp_size(self) -> int:
        return self.shape.dp_size

    @property
    def cp_size(self) -> int:
        return self.shape.cp_size

    @property
    def ep_size(self) -> int:
        return self.shape.ep_size

    @property
    def ep_rank(self) -> int:
        """Among the ranks of its stage; 0 when experts are not shared out."""
        return self.rank % self.ep_size

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def sampling_rank(self) -> int:
        """The one rank that draws the tokens of this one's sequences: the first of the last stage in its data-parallel
        part."""
        return MeshPosition(self.shape, pp_rank=self.pp_size - 1, dp_rank=self.dp_rank).rank

    @property
    def samples(self) -> bool:
        return self.rank == self.sampling_rank

    @property
    def reads_outputs(self) -> bool:
        """Whether this rank takes part in what is made of the last stage's hidden states: those of all context-parallel
        ranks come together on the first of them."""
        return self.is_last_stage and self.cp_rank == 0

    def __str__(self) -> str:
        axes = [("tensor", self.tp_rank, self.tp_size), ("stage", self.pp_rank, self.pp_size)]
        axes += [("data", self.dp_rank, self.dp_size)] if self.dp_size > 1 else []
        axes += [("context", self.cp_rank, self.cp_size)] if self.cp_size > 1 else []
        return f"rank {self.rank} ({', '.join(f'{name} {index}/{size}' for name, index, size in axes)})"
