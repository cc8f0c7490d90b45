# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sampling on the device: temperature, top-k, top-p, min-p, the draw by inverse CDF, without a sort and without sync.

A token's weight exp((logit - largest) / temperature) is rounded to a whole number of 2**-40 parts of the largest: its
mass. Sums of integers are exact in any order, so programs add them up as they come (atomics included) and a row's token
still depends on nothing but the row. A mass of 0 can neither be kept nor drawn; at a vocabulary of 2**18 all that is
lost so is under 2**-23 of the row.

Filters keep a prefix of the total order (larger logit first, the lower id first among equals). Where a prefix ends is
one question, asked up to three times: which is its shortest that holds `goal`?

    top_k   goal = k tokens
    top_p   goal = top_p * (mass of what top_k left)
    draw    goal = u * (mass of what is left) + 1: the last token of that prefix is the one drawn

A histogram over distance from the largest logit leads to one bin; its few tokens are collected, then bisected over
codes that are in the total order. Rows without filters are drawn as the host draws them: a strided column of the
vocabulary by its mass, then a token inside the column. Three launches:

    row_maxima      (rows, tiles)   the largest code of each tile
    row_masses      (rows, tiles)   histograms of filtered rows, column masses of the others
    draw_tokens     (rows)          the answers; greedy rows are answered by their largest code
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal.kernels import draws

SEED, SAMPLE_INDEX, POSITION = tl.constexpr(draws.SEED), tl.constexpr(draws.SAMPLE_INDEX), tl.constexpr(draws.POSITION)
TOP_K, TEMPERATURE = tl.constexpr(draws.TOP_K), tl.constexpr(draws.TEMPERATURE)
TOP_P, MIN_P = tl.constexpr(draws.TOP_P), tl.constexpr(draws.MIN_P)
WORDS, FAILED_FLAG = tl.constexpr(draws.WORDS), tl.constexpr(draws.FAILED_FLAG)
FAR = tl.constexpr(1 << 62)
"""Beyond every code."""
BINS = tl.constexpr(2048)
BIN_WIDTH_INVERSE = tl.constexpr(64.0)
"""Bins of 1/64 nat: the last begins where masses are 0."""
MASS_ONE = tl.constexpr(float(2**40))
DEPTH = tl.constexpr(8)
"""Tokens of one bin that a lane collects; beyond that the bisection walks over the row itself."""
LINES = tl.constexpr(32)
"""Most lines of the matrix that the vocabulary is seen as (`vocab_rows.Columns`): column j holds j, j + COLUMNS, ..."""

# A row's workspace, int64: | tile codes | mass of each bin | tokens in each bin | mass above min_p |
#                           | tile codes | mass of each column ...                                  |
ABOVE_MIN_P = tl.constexpr(2 * 2048)
"""Offset from the first bin."""


@triton.jit
def _word(draws_ptr, row, column: tl.constexpr):
    return tl.load(draws_ptr + row * WORDS + column)


@triton.jit
def _real(draws_ptr, row, column: tl.constexpr):
    return _word(draws_ptr, row, column).to(tl.float64, bitcast=True)


@triton.jit
def _top_k(draws_ptr, row, VOCAB: tl.constexpr):
    """0 where it keeps everything."""
    top_k = _word(draws_ptr, row, TOP_K)
    return tl.where(top_k < VOCAB, top_k, 0)


@triton.jit
def _shape_of_draw(draws_ptr, row, VOCAB: tl.constexpr):
    """(greedy, filtered, 1 / temperature, least log-weight that min_p keeps) in fp32."""
    temperature = _real(draws_ptr, row, TEMPERATURE).to(tl.float32)
    min_p = _real(draws_ptr, row, MIN_P).to(tl.float32)
    greedy = temperature == 0.0
    filtered = (_top_k(draws_ptr, row, VOCAB) > 0) | (_real(draws_ptr, row, TOP_P) < 1.0) | (min_p > 0.0)
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    # Below 2**-41 there is nothing to keep off: such masses are 0.
    return greedy, filtered & (greedy == 0), inverse, tl.log(tl.maximum(min_p, 1e-20))


@triton.jit
def _key(value):
    """int32 in the order of the values: NaN above all, 0.0 and -0.0 equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def _code(value, token, ID_BITS: tl.constexpr):
    """int64 in the total order, larger first."""
    last: tl.constexpr = (1 << ID_BITS) - 1
    return (_key(value).to(tl.int64) << ID_BITS) + (last - token)


@triton.jit
def _token_of(code, ID_BITS: tl.constexpr):
    last: tl.constexpr = (1 << ID_BITS) - 1
    return last - (code & last)


@triton.jit
def _largest(work_ptr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr, ID_BITS: tl.constexpr):
    """(code, value, whether the row has a distribution)."""
    tile = tl.arange(0, TILE_SLOTS)
    code = tl.max(tl.load(work_ptr + tile, mask=tile < TILES, other=-FAR), 0)
    key = (code >> ID_BITS).to(tl.int32)
    value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return code, value, tl.abs(value) < float("inf")


@triton.jit
def _log_weight(value, largest, inverse):
    """0 for the largest. Never increases where the value does not: neither do the bins."""
    return (value - largest) * inverse


@triton.jit
def _mass(log_weight):
    return (tl.exp(log_weight) * MASS_ONE + 0.5).to(tl.int64)


@triton.jit
def _bin(log_weight):
    return tl.minimum(-log_weight * BIN_WIDTH_INVERSE, BINS - 1.0).to(tl.int32)


@triton.jit
def _tile(row_ptr, tile, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """(columns [TILE], tokens, their values [LINES, TILE], -inf beyond the vocabulary, which of them are inside)."""
    column = tile * TILE + tl.arange(0, TILE)
    token = tl.arange(0, LINES)[:, None] * COLUMNS + column[None, :]
    inside = (column < COLUMNS)[None, :] & (token < VOCAB)
    value = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    return column, token, value, inside


@triton.jit
def row_maxima_kernel(
    logits_ptr, draws_ptr, work_ptr, logits_stride, work_stride,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ID_BITS: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles). Clears its share, CLEARED words, of a filtered row's histograms on the way."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    work_ptr += row * work_stride
    _, token, value, inside = _tile(logits_ptr + row * logits_stride, tile, VOCAB, COLUMNS, TILE)
    code = tl.where(inside, _code(value, token, ID_BITS), -FAR)
    tl.store(work_ptr + tile, tl.max(tl.max(code, 1), 0))
    _, filtered, _, _ = _shape_of_draw(draws_ptr, row, VOCAB)
    if filtered:
        word = tile * CLEARED + tl.arange(0, CLEARED)
        tl.store(work_ptr + TILES + word, tl.zeros([CLEARED], dtype=tl.int64), mask=word <= ABOVE_MIN_P)


@triton.jit
def row_masses_kernel(
    logits_ptr, draws_ptr, work_ptr, logits_stride, work_stride,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr,
    ID_BITS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles). Each token adds to its bin (narrow, so that few meet in one), or each column is summed."""
    row = tl.program_id(0).to(tl.int64)
    work_ptr += row * work_stride
    greedy, filtered, inverse, least = _shape_of_draw(draws_ptr, row, VOCAB)
    _, largest, sound = _largest(work_ptr, TILES, TILE_SLOTS, ID_BITS)
    if greedy | (sound == 0):
        return
    column, _, value, _ = _tile(logits_ptr + row * logits_stride, tl.program_id(1), VOCAB, COLUMNS, TILE)
    log_weight = _log_weight(value, largest, inverse)
    mass = _mass(log_weight)
    bins_ptr = work_ptr + TILES
    if filtered:
        bin = _bin(log_weight)
        weighs = mass > 0
        tl.atomic_add(bins_ptr + bin, mass, mask=weighs, sem="relaxed")
        if _top_k(draws_ptr, row, VOCAB) > 0:
            tl.atomic_add(bins_ptr + BINS + bin, tl.full(mass.shape, 1, dtype=tl.int64), mask=weighs, sem="relaxed")
        kept = tl.sum(tl.sum(tl.where(log_weight >= least, mass, 0), 1), 0)
        tl.atomic_add(bins_ptr + ABOVE_MIN_P, kept, sem="relaxed")
    else:
        tl.store(bins_ptr + column, tl.sum(mass, 0), mask=column < COLUMNS)


@triton.jit
def _uniform_bits(draws_ptr, row):
    """The two uniforms of a row's draw, in 2**-53 parts of 1 (int64)."""
    word: tl.constexpr = 0xFFFFFFFF
    seed = _word(draws_ptr, row, SEED).to(tl.uint64, bitcast=True)
    index = _word(draws_ptr, row, SAMPLE_INDEX).to(tl.uint64)
    position = _word(draws_ptr, row, POSITION).to(tl.uint64)
    k0, k1 = seed & word, seed >> 32
    c0, c1, c2 = position & word, position >> 32, index
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c2 = (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 & word, product0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return ((c0 << 32) | c1) >> 11, ((c2 << 32) | c3) >> 11


@triton.jit
def _goal_of_draw(bits, total):
    """The least running mass that exceeds uniform * total."""
    point = bits.to(tl.float64) * (2.0**-53) * total.to(tl.float64)
    return tl.minimum(point.to(tl.int64) + 1, total)


@triton.jit
def _draw_from_columns(
    row_ptr, sums_ptr, bits0, bits1, largest, inverse,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The token of an unfiltered row."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([], dtype=tl.int64)
    for start in range(0, COLUMNS, LANES):
        total += tl.sum(tl.load(sums_ptr + start + lane, mask=start + lane < COLUMNS, other=0), 0)
    goal = _goal_of_draw(bits0, total)
    column = tl.zeros([], dtype=tl.int32)
    before = tl.zeros([], dtype=tl.int64)
    for start in range(0, COLUMNS, LANES):
        sums = tl.load(sums_ptr + start + lane, mask=start + lane < COLUMNS, other=0)
        short = (before + tl.cumsum(sums, 0) < goal) & (start + lane < COLUMNS)
        column += tl.sum(short.to(tl.int32), 0)
        before += tl.sum(sums, 0)
    token = column + COLUMNS * tl.arange(0, LINES)
    value = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    mass = _mass(_log_weight(value, largest, inverse))
    short = tl.cumsum(mass, 0) < _goal_of_draw(bits1, tl.sum(mass, 0))
    return column + COLUMNS * tl.sum(short.to(tl.int32), 0)


@triton.jit
def _candidates(
    row_ptr, list_ptr, step, filled, listed, chosen_bin, largest, inverse,
    VOCAB: tl.constexpr, LANES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """(tokens, codes, masses) of one token a lane: of the lanes' lists, or of the row. Mass 0: not of the bin."""
    token = step * LANES + tl.arange(0, LANES)
    if listed:
        token = tl.load(list_ptr + token, mask=filled > step, other=VOCAB)
    value = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    log_weight = _log_weight(value, largest, inverse)
    mass = tl.where(_bin(log_weight) == chosen_bin, _mass(log_weight), 0)
    return token, _code(value, token, ID_BITS), mass


@triton.jit
def _cut(
    row_ptr, bins_ptr, list_ptr, goal, counted, largest, inverse,
    VOCAB: tl.constexpr, LANES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """(code of the last token, mass) of the shortest prefix that holds `goal`: tokens where `counted`, else mass. The
    whole row holds it."""
    bin = tl.arange(0, BINS)
    masses = tl.load(bins_ptr + bin)
    measures = masses
    if counted:
        measures = tl.load(bins_ptr + BINS + bin)
    running = tl.cumsum(measures, 0)
    chosen = tl.sum((running < goal).to(tl.int32), 0)
    rest = goal - tl.max(tl.where(running < goal, running, 0), 0)

    # Every lane keeps the tokens it meets for itself: no order among lanes has to be found.
    low = tl.full([LANES], FAR, dtype=tl.int64)
    high = -low
    filled = tl.zeros([LANES], dtype=tl.int32)
    for step in tl.range(0, (VOCAB + LANES - 1) // LANES, num_stages=5):
        token, code, mass = _candidates(
            row_ptr, list_ptr, step, filled, False, chosen, largest, inverse, VOCAB, LANES, ID_BITS
        )
        found = mass > 0
        tl.store(list_ptr + filled * LANES + tl.arange(0, LANES), token, mask=found & (filled < DEPTH))
        filled += found.to(tl.int32)
        low = tl.where(found, tl.minimum(low, code), low)
        high = tl.where(found, tl.maximum(high, code), high)
    steps = tl.max(filled, 0)
    listed = steps <= DEPTH
    steps = tl.where(listed, steps, (VOCAB + LANES - 1) // LANES)
    tl.debug_barrier()

    # The answer is the code of a token between `first`, whose prefix holds the goal, and `last`.
    first = tl.min(low, 0)
    last = tl.max(high, 0)
    while first < last:
        middle = last - (last - first) // 2
        measure = tl.zeros([LANES], dtype=tl.int64)
        low = tl.full([LANES], FAR, dtype=tl.int64)
        high = -low
        for step in range(0, steps):
            _, code, mass = _candidates(
                row_ptr, list_ptr, step, filled, listed, chosen, largest, inverse, VOCAB, LANES, ID_BITS
            )
            above = (mass > 0) & (code >= middle)
            measure += tl.where(above, tl.where(counted, 1, mass), 0)
            low = tl.where(above, tl.minimum(low, code), low)
            high = tl.where((mass > 0) & (code < middle), tl.maximum(high, code), high)
        enough = tl.sum(measure, 0) >= rest
        first = tl.where(enough, tl.min(low, 0), first)
        last = tl.where(enough, last, tl.max(high, 0))
    held = tl.zeros([LANES], dtype=tl.int64)
    for step in range(0, steps):
        _, code, mass = _candidates(
            row_ptr, list_ptr, step, filled, listed, chosen, largest, inverse, VOCAB, LANES, ID_BITS
        )
        held += tl.where(code >= first, mass, 0)
    tl.debug_barrier()  # the next cut writes to the lists
    return first, tl.sum(held, 0) + tl.sum(tl.where(bin < chosen, masses, 0), 0)


@triton.jit
def draw_tokens_kernel(
    out_ptr,  # int64 [2, rows]: token ids (0 where there is none), then flags
    logits_ptr, draws_ptr, work_ptr, list_ptr, logits_stride, work_stride,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr,
    LANES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    work_ptr += row * work_stride
    greedy, filtered, inverse, _ = _shape_of_draw(draws_ptr, row, VOCAB)
    code, largest, sound = _largest(work_ptr, TILES, TILE_SLOTS, ID_BITS)
    flag_ptr = out_ptr + tl.num_programs(0) + row
    if sound == 0:
        tl.store(out_ptr + row, 0)
        tl.store(flag_ptr, FAILED_FLAG)
        return
    tl.store(flag_ptr, 0)
    if greedy:
        tl.store(out_ptr + row, _token_of(code, ID_BITS))
        return
    bits0, bits1 = _uniform_bits(draws_ptr, row)
    bins_ptr = work_ptr + TILES
    if filtered == 0:
        token = _draw_from_columns(row_ptr, bins_ptr, bits0, bits1, largest, inverse, VOCAB, COLUMNS, LANES)
        tl.store(out_ptr + row, token.to(tl.int64))
        return

    bin = tl.arange(0, BINS)
    kept = tl.sum(tl.load(bins_ptr + bin), 0)
    top_k = _top_k(draws_ptr, row, VOCAB)
    top_p = _real(draws_ptr, row, TOP_P)
    for stage in range(0, 3):
        # top_k, top_p, draw
        goal = top_k
        needed = top_k > 0
        if stage == 0:
            if needed:
                needed = top_k < tl.sum(tl.load(bins_ptr + BINS + bin), 0)
        elif stage == 1:
            point = top_p * kept.to(tl.float64)
            goal = point.to(tl.int64)
            goal = tl.maximum(goal + (goal.to(tl.float64) < point).to(tl.int64), 1)
            needed = top_p < 1.0
        else:
            kept = tl.minimum(kept, tl.load(bins_ptr + ABOVE_MIN_P))
            goal = _goal_of_draw(bits0, kept)
            needed = goal > 0
        if needed:
            code, kept = _cut(
                row_ptr, bins_ptr, list_ptr + row * DEPTH * LANES, goal, stage == 0, largest, inverse,
                VOCAB, LANES, ID_BITS,
            )  # fmt: skip
    tl.store(out_ptr + row, _token_of(code, ID_BITS))
