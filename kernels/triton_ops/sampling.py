"""Launches of the sampling kernels: the cut of the vocabulary, the workspace, and the three launches in order."""

from __future__ import annotations

import torch

from shoal.kernels.draws import WORDS
from shoal.kernels.triton_ops import sampling_kernels as kernels
from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

MAX_TILE = 64
"""Columns of one program: with 32 lines 2,048 logits, 8 a thread."""
MAX_LANES = 2048
TILE_WARPS, DRAW_WARPS = 8, 16


def sample_launches(logits: torch.Tensor, draws: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    """What `Ops.sample` runs, in order. Writes `out` int64 [2, rows]. Shapes depend on the logits' shape alone."""
    rows, vocab = logits.shape
    require_dense(logits, first_axis=1)
    require_dense(draws, first_axis=0)
    assert draws.shape == (rows, WORDS), draws.shape
    assert draws.dtype == torch.int64, draws.dtype
    # The cut of `model_shards.sampling.vocab_rows.Columns`: a row without filters draws the host's token.
    columns = cdiv(vocab, min(kernels.LINES.value, vocab))
    tile = min(MAX_TILE, next_power_of_2(columns))
    tiles = cdiv(columns, tile)
    lanes = min(MAX_LANES, next_power_of_2(vocab))
    bins = kernels.ABOVE_MIN_P.value + 1
    words = tiles + max(bins, columns)
    work = torch.empty((rows, words), dtype=torch.int64, device=logits.device)
    lists = torch.empty((rows, kernels.DEPTH.value * lanes), dtype=torch.int32, device=logits.device)
    args = {
        "logits_ptr": logits,
        "draws_ptr": draws,
        "work_ptr": work,
        "logits_stride": logits.stride(0),
        "work_stride": words,
    }
    shape = {"VOCAB": vocab, "COLUMNS": columns, "TILES": tiles, "ID_BITS": max(1, (vocab - 1).bit_length())}
    slots = {"TILE_SLOTS": next_power_of_2(tiles)}
    cleared = {"CLEARED": next_power_of_2(cdiv(bins, tiles))}
    grid = (rows, tiles, 1)
    return [
        Launch(kernels.row_maxima_kernel, grid, args, {**shape, "TILE": tile, **cleared}, TILE_WARPS),
        Launch(kernels.row_masses_kernel, grid, args, {**shape, "TILE": tile, **slots}, TILE_WARPS),
        Launch(
            kernels.draw_tokens_kernel,
            (rows, 1, 1),
            {"out_ptr": out, **args, "list_ptr": lists},
            {**shape, **slots, "LANES": lanes},
            DRAW_WARPS,
        ),
    ]
