"""From bytes to blocks: how large the KV pool can be, what fits in it, and the ledger that says so.

A pure function of numbers; measuring memory is the caller's business. All sizes are of one rank, the heaviest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.configs.errors import ConfigError
from shoal.configs.units import format_bytes
from shoal.kvcache.spec import KVCacheSpec, bytes_per_token


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What must fit, and where. Give `total_bytes` (the rest after weights and activations becomes the pool), or
    `kv_bytes` (the pool itself), or both (then the sum is checked)."""

    specs: tuple[KVCacheSpec, ...]
    block_size: int
    """Tokens of a block on one rank."""
    max_model_len: int
    max_num_seqs: int
    weights_bytes: int
    activation_bytes: int
    total_bytes: int | None = None
    kv_bytes: int | None = None
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence, and so of each block."""

    @property
    def tokens_per_block(self) -> int:
        return self.block_size * self.context_parallel_size

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The pool that was planned. `num_blocks` counts the null block; everything else counts what sequences can use."""

    num_blocks: int
    block_size: int
    """Tokens a block, on all ranks that share them."""
    bytes_per_token: int
    """On the rank that holds the token."""
    num_tokens: int
    """Slots for tokens over all sequences."""
    full_sequences: int
    """Sequences of max_model_len that fit at once, without sharing."""
    ledger: tuple[tuple[str, int, str], ...]
    """(what, bytes, how it is counted)"""
    context_parallel_size: int = 1
    """Ranks that share the tokens of a block."""

    @property
    def bytes_per_block(self) -> int:
        return self.block_size // self.context_parallel_size * self.bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """What the pages take, the null block included."""
        return self.num_blocks * self.bytes_per_block

    def render(self) -> str:
        """The ledger as lines of plain text."""
        rows = [(what, format_bytes(size), note) for what, size, note in self.ledger]
        left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{what:<{left}}  {size:>{middle}}  {note}".rstrip() for what, size, note in rows)


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """The largest pool that the request allows. Raises ConfigError, with the arithmetic and what to change, when the
    weights and activations do not fit, or when not even one sequence of max_model_len does."""
    assert request.total_bytes is not None or request.kv_bytes is not None, "give total_bytes or kv_bytes"
    per_block = sum(spec.bytes_per_block(request.block_size) for spec in request.specs)
    available = _available(request)
    num_blocks = available // per_block
    usable = max(0, num_blocks - 1)
    blocks_per_sequence = -(-request.max_model_len // request.tokens_per_block)
    if usable < blocks_per_sequence:
        raise _too_long(request, available, usable, per_block)
    plan = MemoryPlan(
        num_blocks=num_blocks,
        block_size=request.tokens_per_block,
        bytes_per_token=bytes_per_token(request.specs),
        num_tokens=usable * request.tokens_per_block,
        full_sequences=usable // blocks_per_sequence,
        ledger=(),
        context_parallel_size=request.context_parallel_size,
    )
    return replace(plan, ledger=_ledger(plan, request))


def _available(request: MemoryRequest) -> int:
    """Bytes for the pool."""
    total, fixed, pool = request.total_bytes, request.fixed_bytes, request.kv_bytes
    if total is None:
        assert pool is not None
        return pool
    if fixed >= total:
        raise ConfigError(
            f"{_fixed_sum(request)} = {format_bytes(fixed)} leave nothing of the memory budget of "
            f"{format_bytes(total)} for the KV cache ({format_bytes(fixed - total)} too much). Raise the budget, "
            "use a smaller model or dtype, lower max_num_batched_tokens, or split the model over more ranks.",
            param="memory_budget",
        )
    if pool is not None and fixed + pool > total:
        raise ConfigError(
            f"{_fixed_sum(request)} + KV cache {format_bytes(pool)} = {format_bytes(fixed + pool)}, which is "
            f"{format_bytes(fixed + pool - total)} more than the memory budget of {format_bytes(total)}. "
            f"Lower the KV cache to {format_bytes(total - fixed)} or raise the budget.",
            param="kv_cache_memory",
        )
    return total - fixed if pool is None else pool


def _fixed_sum(request: MemoryRequest) -> str:
    return f"Weights {format_bytes(request.weights_bytes)} + activations {format_bytes(request.activation_bytes)}"


def _too_long(request: MemoryRequest, available: int, usable: int, per_block: int) -> ConfigError:
    blocks = -(-request.max_model_len // request.tokens_per_block)
    needed = (blocks + 1) * per_block
    longest = usable * request.tokens_per_block
    advice = f"Set max_model_len to {longest} or less, or give" if longest else "Give"
    ranks = f" on each of {request.context_parallel_size} ranks" if request.context_parallel_size > 1 else ""
    return ConfigError(
        f"One sequence of max_model_len={request.max_model_len} tokens takes {blocks} blocks of {request.block_size} "
        f"tokens{ranks} x {bytes_per_token(request.specs)} bytes; with the null block that is {format_bytes(needed)}, "
        f"and {format_bytes(available)} are left for the KV cache (room for {longest} tokens). "
        f"{advice} the KV cache {format_bytes(needed - available)} more.",
        param="max_model_len",
    )


def _ledger(plan: MemoryPlan, request: MemoryRequest) -> tuple[tuple[str, int, str], ...]:
    tokens = f"{plan.num_tokens:,} tokens = {plan.num_blocks - 1:,} blocks of {plan.block_size}"
    rows: list[tuple[str, int, str]] = [
        ("weights", request.weights_bytes, ""),
        ("activations", request.activation_bytes, "largest step, upper estimate"),
        ("KV cache", plan.kv_bytes, f"{tokens} + 1 null block, {_token_bytes(plan)}"),
    ]
    if len(request.specs) > 1:
        rows += [_group_row(spec, plan) for spec in request.specs]
    rows.append(("sum", request.fixed_bytes + plan.kv_bytes, _capacity(plan, request)))
    if request.total_bytes is not None:
        spare = request.total_bytes - request.fixed_bytes - plan.kv_bytes
        rows.append(("budget", request.total_bytes, f"{format_bytes(spare)} unused"))
    return tuple(rows)


def _token_bytes(plan: MemoryPlan) -> str:
    size, ranks = plan.bytes_per_token, plan.context_parallel_size
    if ranks == 1:
        return f"{size:,} bytes a token"
    return f"{size:,} bytes a token on one of {ranks} ranks, on average {size / ranks:,.0f} on each"


def _group_row(spec: KVCacheSpec, plan: MemoryPlan) -> tuple[str, int, str]:
    size = plan.num_blocks * spec.bytes_per_block(plan.block_size // plan.context_parallel_size)
    if spec.window is None:
        return f"  {spec.num_layers} layers", size, "full attention"
    note = f"window of {spec.window:,}; all tokens are kept: one block table serves all layers"
    return f"  {spec.num_layers} layers", size, note


def _capacity(plan: MemoryPlan, request: MemoryRequest) -> str:
    average = plan.num_tokens // request.max_num_seqs
    return (
        f"{plan.full_sequences:,} sequences of {request.max_model_len:,} tokens, "
        f"or {request.max_num_seqs:,} of {min(average, request.max_model_len):,}"
    )
