"""Tokens from logits whose vocabulary lies in shards on the tensor-parallel ranks, without bringing whole rows together
where a few candidates of each shard tell the token. It is the token that the whole row would give.

What of a row travels depends on its parameters alone, which every rank knows:

    greedy                       each shard's first token
    top_k (with top_p, min_p)    each shard's first k tokens: the k of the row are among them
    top_p or min_p without       on a CPU each shard's first 64 tokens and its mass, to every rank: all then find the
                                 same rows whose cut these settle (`nucleus.py`); the others travel whole. On a GPU,
                                 where finding out would make the host wait, all travel whole
    no filter; edits; logprobs   all of it: a draw takes columns that run through every shard, and edits and logprobs
                                 look at any token

Candidates become a row of the sampler's own, in the order of their ids, and are drawn from like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.embedding import VocabShard
from shoal.model_shards.sampling.device_rows import to_device
from shoal.model_shards.sampling.nucleus import UNSETTLED, nucleus_sizes, shard_mass
from shoal.model_shards.sampling.order_keys import key_ids, key_values, top_keys
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SampleResult
from shoal.model_shards.sampling.state import SamplerState
from shoal.model_shards.sampling.vocab_rows import IdArray

NUCLEUS_CANDIDATES = 64
"""Of each shard, where top_p or min_p alone cut. Text of a confident model keeps fewer at the usual 0.9."""


@dataclass(slots=True)
class _Group:
    """Rows that travel as `count` candidates of each shard."""

    count: int
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Candidates:
    """Of some rows, from all shards."""

    rows: list[int]
    keys: torch.Tensor
    """int64 [len(rows), shards, count]."""


class ShardedSampler:
    """One on each rank of a tensor-parallel group; all of them call `sample` with the same rows."""

    def __init__(self, sampler: Sampler, context: ParallelContext, vocab_size: int) -> None:
        """`sampler` draws, on the rank that has the states."""
        self._sampler, self._context = sampler, context
        self._vocab_size = vocab_size
        self._num_shards = context.size("tensor")
        self._shard = VocabShard.of_rank(vocab_size, self._num_shards, context.index("tensor"))

    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], states: Sequence[SamplerState] | None
    ) -> SampleResult | None:
        """logits [len(params), shard.padded] of this rank's shard, -inf beyond the vocabulary -> what `Sampler.sample`
        makes of the whole rows. `states`: on the first rank of the group, where it samples; elsewhere None, and None
        comes back."""
        groups, whole = self._sort(params, nucleus=logits.device.type == "cpu")
        found, sizes = self._exchange(logits, groups, params)
        unsettled = [row for row, size in sizes.items() if size == UNSETTLED]
        whole = sorted(whole + unsettled)
        rows = self._gather_whole(logits, whole) if whole else None
        if states is None:
            return None
        for candidates in found:
            kept = [i for i, row in enumerate(candidates.rows) if sizes.get(row) != UNSETTLED]
            if len(kept) < len(candidates.rows):
                candidates.rows = [candidates.rows[i] for i in kept]
                candidates.keys = candidates.keys[kept]
        limited = [
            state.limited_to(sizes[row]) if sizes.get(row, UNSETTLED) != UNSETTLED else state
            for row, state in enumerate(states)
        ]
        if rows is None:
            return self._draw_from_candidates(found, limited)
        return self._sampler.sample(self._spread(found, whole, rows, len(params)), limited)

    # --- what travels ---------------------------------------------------------------------------------------------

    def _sort(self, params: Sequence[SamplingParams], *, nucleus: bool) -> tuple[list[_Group], list[int]]:
        """(groups, rows that travel whole). The last group is that of rows whose cut is to be found."""
        greedy, top_k, cut = groups = [_Group(1), _Group(0), _Group(NUCLEUS_CANDIDATES)]
        whole = []
        most = self._shard.padded // 2  # a candidate is twice as long as a logit: beyond, a row sends less
        for row, p in enumerate(params):
            limit = p.top_k if p.top_k < self._vocab_size else 0
            if p.may_edit or p.logprobs is not None:
                whole.append(row)
            elif p.greedy:
                greedy.rows.append(row)
            elif 0 < limit <= most:
                top_k.rows.append(row)
                top_k.count = max(top_k.count, limit)
            elif nucleus and limit == 0 and (p.top_p < 1.0 or p.min_p > 0.0) and cut.count <= most:
                cut.rows.append(row)
            else:
                whole.append(row)
        return groups, whole

    def _exchange(
        self, logits: torch.Tensor, groups: list[_Group], params: Sequence[SamplingParams]
    ) -> tuple[list[_Candidates], dict[int, int]]:
        """(candidates of each group that has rows, on the first rank; how many each cut row keeps, on every rank)."""
        filled = [group for group in groups if group.rows]
        if not filled:
            return [], {}
        parts = [self._top(logits, group) for group in filled]
        cut = groups[-1].rows
        if cut:
            temperatures = torch.tensor([params[row].temperature for row in cut], dtype=torch.float32)
            mass = shard_mass(_select(logits, cut).float(), temperatures)
            parts.append(mass.view(torch.int64))
        message = torch.cat([part.flatten() for part in parts])[None]
        received = self._context.all_gather(message, dim=0) if cut else self._context.gather(message, dim=0)
        if received is None:
            return [], {}
        columns = torch.split_with_sizes(received, [part.numel() for part in parts], dim=1)
        found = [
            _Candidates(group.rows, column.view(self._num_shards, len(group.rows), group.count).transpose(0, 1))
            for group, column in zip(filled, columns, strict=False)
        ]
        if not cut:
            return found, {}
        masses = columns[-1].contiguous().view(torch.float64).T.numpy()
        keys = found[-1].keys.contiguous().numpy()
        error = self._sampler.sum_error(self._vocab_size)
        sizes = nucleus_sizes(keys, masses, [params[row] for row in cut], error)
        return found, dict(zip(cut, sizes.tolist(), strict=True))

    def _top(self, logits: torch.Tensor, group: _Group) -> torch.Tensor:
        return top_keys(_select(logits, group.rows).float(), self._shard.start, group.count)

    def _gather_whole(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor | None:
        """[len(rows), vocabulary and padding], on the first rank."""
        return self._context.gather(_select(logits, rows))

    # --- on the rank that draws -----------------------------------------------------------------------------------

    def _draw_from_candidates(self, found: list[_Candidates], states: Sequence[SamplerState]) -> SampleResult:
        """Draws from rows of candidates alone: a place of the row is then a candidate's id."""
        # One more than the most that a filter may keep: a top_k of the width and more would be none.
        width = 1 + max(candidates.keys[0].numel() for candidates in found)
        device = found[0].keys.device
        logits = torch.full((len(states), width), -torch.inf, device=device)
        ids = torch.zeros((len(states), width), dtype=torch.int64, device=device)
        for candidates in found:
            in_order, values = _by_id(candidates.keys)
            if len(found) == 1:
                logits[:, : in_order.shape[1]], ids[:, : in_order.shape[1]] = values, in_order
            else:
                rows = _index(candidates.rows, device)
                logits[rows, : in_order.shape[1]], ids[rows, : in_order.shape[1]] = values, in_order
        known = _start_copy(ids)  # before the draw, which waits for all that is queued before it
        result = self._sampler.sample(logits, states)
        places: IdArray = np.maximum(result.token_ids, 0)
        chosen = known.numpy()[np.arange(len(states)), places].tolist()
        drawn = zip(result.token_ids, chosen, strict=True)
        result.token_ids = [place if place < 0 else token_id for place, token_id in drawn]
        return result

    def _spread(self, found: list[_Candidates], whole: list[int], rows: torch.Tensor, count: int) -> torch.Tensor:
        """Whole rows, and candidates at the places of their ids in rows that are -inf elsewhere: one matrix is one
        draw, for which the host waits once."""
        if len(whole) == count:
            return rows[:, : self._vocab_size].float().contiguous()
        logits = torch.full((count, rows.shape[1]), -torch.inf, device=rows.device)
        logits[_index(whole, rows.device)] = rows.float()
        for candidates in found:
            in_order, values = _by_id(candidates.keys)
            logits[_index(candidates.rows, rows.device)[:, None], in_order] = values
        return logits[:, : self._vocab_size].contiguous()


def _by_id(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """keys [n, shards, count] -> (ids ascending [n, shards * count], their logits)."""
    flat = keys.flatten(1)
    if keys.shape[2] == 1:  # shards are in the order of their ids
        return key_ids(flat), key_values(flat)
    ids, order = key_ids(flat).sort(dim=1)
    return ids, key_values(flat.gather(1, order))


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[_index(rows, logits.device)]


def _index(rows: list[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)


def _start_copy(values: torch.Tensor) -> torch.Tensor:
    """To the host; complete when the host has waited for anything queued later."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
