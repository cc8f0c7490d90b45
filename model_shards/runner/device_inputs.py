"""What a step is told, on an accelerator: one packed copy a step, which nobody waits for.

    | token ids | positions | slots | rows that sample | query starts | lengths | block tables |

The arrays lie one behind the other in page-locked memory of the host and, at the same distances, on the device. The
tables come last: what lies before them is at the same place whatever the longest sequence is, so that a captured step
of some size finds it there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.settings import RunnerSettings

ALIGNMENT = 64
"""Bytes. Kernels are compiled for what is known of their pointers: the arrays of every step are aligned alike."""

_NUM_BUFFERS = 2
"""The host writes one while the device may still read the other."""

_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step's inputs on the device; valid until the next step is placed."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    meta: AttentionMetadata
    sample_rows: torch.Tensor
    """[chunks that sample] int64, as in `ForwardBatch.sample_rows`."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One array: bytes [start, stop) of the packed memory."""

    start: int
    stop: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    def array(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
        return memory[self.start : self.stop].view(self.dtype).reshape(self.shape)

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.start : self.stop].view(_DTYPES[self.dtype]).view(self.shape)


@lru_cache(maxsize=1024)
def _layout(tokens: int, sequences: int, width: int) -> dict[str, _Field]:
    """Name -> place, for a step of this size whose tables have rows of `width` blocks."""
    shapes = {
        "token_ids": (np.int64, (tokens,)),
        "positions": (np.int64, (tokens,)),
        "slots": (np.int64, (tokens,)),
        "sample_rows": (np.int64, (sequences,)),
        "query_start": (np.int32, (sequences + 1,)),
        "seq_lens": (np.int32, (sequences,)),
        "block_tables": (np.int32, (sequences, width)),
    }
    fields, stop = {}, 0
    for name, (kind, shape) in shapes.items():
        start, dtype = -(-stop // ALIGNMENT) * ALIGNMENT, np.dtype(kind)
        stop = start + math.prod(shape) * dtype.itemsize
        fields[name] = _Field(start, stop, dtype, shape)
    return fields


def packed_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks_per_sequence: int) -> int:
    """Of the largest step."""
    return _layout(max_num_tokens, max_num_seqs, max_blocks_per_sequence)["block_tables"].stop


class DeviceInputs:
    """The buffers of one rank."""

    def __init__(self, settings: RunnerSettings, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._max_model_len = vocab_size, settings.max_model_len
        rows, width = settings.max_num_seqs, settings.max_blocks_per_sequence
        assert rows <= settings.max_num_batched_tokens, "every sequence may have a token of a step"
        size = packed_bytes(settings.max_num_batched_tokens, rows, width)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [_HostBuffer(size, pinned=device.type == "cuda") for _ in range(_NUM_BUFFERS)]
        # Programs know one distance between the rows of the tables: that of the longest sequence there may be.
        self._tables = torch.zeros((rows, width), dtype=torch.int32, device=device)

    def place(self, batch: ForwardBatch) -> PlacedStep:
        """The step as it is. Raises IndexError for token ids that no embedding has: a device would not notice."""
        fields = self._send(batch, batch.num_tokens, len(batch.chunks))
        lengths = np.diff(batch.query_start)
        step = self._view(fields, fields["block_tables"].tensor(self._memory))
        step.meta.max_query_len = int(lengths.max())
        step.meta.max_seq_len = int(batch.seq_lens.max())
        step.meta.num_decodes = int((lengths == 1).sum())
        return PlacedStep(step.token_ids, step.meta, step.sample_rows[: len(batch.sample_rows)])

    def place_decodes(self, batch: ForwardBatch, size: int) -> None:
        """A step of one token a sequence, filled up to `size` sequences with such as have no token, for
        `decodes_of_size(size)` to see. Raises like `place`."""
        table = self._send(batch, size, size)["block_tables"]
        # A block table is read up to its sequence's length; what an earlier step left beyond does not matter.
        self._tables[:size, : table.shape[1]] = table.tensor(self._memory)

    def decodes_of_size(self, size: int) -> PlacedStep:
        """The same tensors at every call: a program made for them reads what `place_decodes` put there last."""
        return self._view(_layout(size, size, 0), self._tables[:size])

    def clear(self, size: int) -> None:
        """`decodes_of_size(size)` becomes a step of no token at all."""
        self._memory.zero_()
        self.decodes_of_size(size).meta.slot_mapping.fill_(-1)

    def _view(self, fields: dict[str, _Field], block_tables: torch.Tensor) -> PlacedStep:
        """With metadata of decodes of any length."""
        memory = self._memory
        meta = AttentionMetadata(
            query_start=fields["query_start"].tensor(memory),
            seq_lens=fields["seq_lens"].tensor(memory),
            block_tables=block_tables,
            slot_mapping=fields["slots"].tensor(memory),
            positions=fields["positions"].tensor(memory),
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_decodes=len(block_tables),
        )
        return PlacedStep(fields["token_ids"].tensor(memory), meta, fields["sample_rows"].tensor(memory))

    def _send(self, batch: ForwardBatch, tokens: int, sequences: int) -> dict[str, _Field]:
        """Fills up to so many tokens and sequences; what is filled up belongs to no sequence and is stored nowhere."""
        if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self._vocab_size:
            raise IndexError(f"a token id of the step is not in [0, {self._vocab_size})")
        self._hosts.append(host := self._hosts.pop(0))
        host.wait()
        fields = _layout(tokens, sequences, batch.block_tables.shape[1])
        for name, values, rest in (
            ("token_ids", batch.token_ids, 0),
            ("positions", batch.positions, 0),
            ("slots", batch.slots, -1),
            ("sample_rows", batch.sample_rows, 0),
            ("query_start", batch.query_start, batch.num_tokens),
            ("seq_lens", batch.seq_lens, 0),
            ("block_tables", batch.block_tables, 0),
        ):
            array = fields[name].array(host.array)
            array[: len(values)] = values
            array[len(values) :] = rest
        stop = fields["block_tables"].stop
        self._memory[:stop].copy_(host.memory[:stop], non_blocking=True)
        host.sent()
        return fields


class _HostBuffer:
    """Memory that the device reads by itself, and the moment from which it no longer does."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.array: npt.NDArray[np.uint8] = self.memory.numpy()
        self._read = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has read what was sent from here; it almost always has."""
        if self._read is not None:
            self._read.synchronize()

    def sent(self) -> None:
        if self._read is not None:
            self._read.record()
