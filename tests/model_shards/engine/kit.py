"""Helpers of the engine's tests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.pacing import StepPacer
from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepOutput, StepPlan, TokenLogprobs
from shoal.model_shards.engine.policy import make_policy
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.engine.scheduler import Scheduler, SchedulerSettings
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.sampling.params import SamplingParams

VOCAB = 50
EOS = 7


def next_token(tokens: Sequence[int], seed: int, sample_index: int) -> int:
    """The fake model: any change of any earlier token changes what comes next."""
    text = f"{list(tokens)}|{seed}|{sample_index}"
    return hashlib.sha256(text.encode()).digest()[0] % VOCAB


def unbatched(request: Request, index: int, limit: int) -> list[int]:
    """What the fake model gives for one sequence by itself."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < limit:
        output.append(next_token(tokens + output, request.seed, index))
        if output[-1] == EOS and not request.sampling.ignore_eos and len(output) > request.sampling.min_tokens:
            break
    return output


@dataclass(slots=True)
class _Live:
    new: NewSequence
    tokens: list[int]
    blocks: list[int]
    computed: int


@dataclass
class FakeRanks:
    """Runs plans on pages that hold token ids where real ones hold keys and values, so that a wrong block, a stale
    one or one written by somebody else changes the tokens. Asserts every rule of a plan."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    live: dict[int, _Live] = field(default_factory=dict)
    steps: int = 0
    fail: dict[int, int] = field(default_factory=dict)
    """seq_id -> output position at which it fails."""

    def execute(self, plan: StepPlan) -> StepOutput:
        assert plan.step_id == self.steps
        self.steps += 1
        for seq_id in plan.removed:
            del self.live[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.live
            blocks = list(new.block_ids)
            start = next(c.start for c in plan.chunks if c.seq_id == new.seq_id)
            self.live[new.seq_id] = _Live(new, list(new.token_ids), blocks, start)
        for source, target in plan.block_copies:
            for slot in range(self.block_size):
                self.pages[target, slot] = self.pages.get((source, slot), -1)
        assert len(self.live) <= self.max_num_seqs
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            self._store(chunk)
        output = StepOutput(plan.step_id)
        for chunk in plan.chunks:
            self._sample(chunk, output)
        return output

    def _store(self, chunk: ScheduledChunk) -> None:
        seq = self.live[chunk.seq_id]
        seq.blocks += chunk.new_block_ids
        assert chunk.start == seq.computed, "a token computed twice, or one left out"
        assert chunk.num_tokens > 0
        end = chunk.start + chunk.num_tokens
        assert end <= len(seq.tokens), "a token that is not known by now"
        assert end <= len(seq.blocks) * self.block_size
        for position in range(chunk.start, end):
            block, slot = seq.blocks[position // self.block_size], position % self.block_size
            assert block != 0, "the null block is never written"
            self.pages[block, slot] = seq.tokens[position]
        seq.computed = end

    def _sample(self, chunk: ScheduledChunk, output: StepOutput) -> None:
        seq = self.live[chunk.seq_id]
        end = chunk.start + chunk.num_tokens
        stop = min(end + 1, seq.new.num_prompt_tokens)
        if seq.new.sampling.prompt_logprobs is not None:
            output.prompt_logprobs[chunk.seq_id] = [
                TokenLogprobs(token, -float(position), 1, [])
                for position, token in enumerate(seq.tokens[chunk.start + 1 : stop], chunk.start + 1)
            ]
        if not chunk.samples:
            return
        assert end == len(seq.tokens)
        seen = [self.pages[seq.blocks[p // self.block_size], p % self.block_size] for p in range(end)]
        token = next_token(seen, seq.new.seed, seq.new.sample_index)
        if self.fail.get(chunk.seq_id, -1) == end - seq.new.num_prompt_tokens:
            output.errors[chunk.seq_id] = "it was told to fail"
            seq.tokens.append(0)
            self.fail[chunk.seq_id] += 1  # whatever was planned before the failure was known fails as well
            return
        seq.tokens.append(token)
        output.seq_ids.append(chunk.seq_id)
        output.generations.append(seq.new.generation)
        output.token_ids.append(token)
        output.logprobs.append(None if seq.new.sampling.logprobs is None else TokenLogprobs(token, -0.5, 1, []))


def make_scheduler(
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    policy: str = "fcfs",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    prefix_caching: bool = True,
    target_s: float | None = None,
    seq_ids: Iterator[int] | None = None,
    **settings: Any,
) -> Scheduler:
    """`num_blocks` are the usable ones."""
    return Scheduler(
        SchedulerSettings(max_num_seqs, max_num_batched_tokens, max_model_len, frozenset({EOS}), **settings),
        KVCacheManager(num_blocks + 1, block_size, enable_prefix_caching=prefix_caching, namespace=b"test"),
        make_policy(policy),
        None if target_s is None else StepPacer(target_s),
        seq_ids=seq_ids,
    )


def ranks_for(scheduler: Scheduler) -> FakeRanks:
    settings = scheduler.settings
    return FakeRanks(scheduler.kv.block_size, settings.max_num_seqs, settings.max_num_batched_tokens)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    arrival: float = 0.0,
    seed: int = 0,
    salt: str = "",
    **sampling: Any,
) -> Request:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Request(name, list(prompt), params, seed, priority, arrival, salt)


class FakeExecutor(Executor):
    """Fake ranks behind the executor's interface. Steps run when submitted; with `hold`, their futures complete only
    when `release` is called."""

    def __init__(self, ranks: FakeRanks, *, hold: bool = False) -> None:
        self.vocab_size = VOCAB
        self.ranks = ranks
        self.closed = False
        self.break_at: int | None = None
        """Step id at which the whole step fails."""
        self._gate = threading.Semaphore(0) if hold else None
        self._pool = ThreadPoolExecutor(1)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        return self._pool.submit(self._step, plan)

    def release(self, steps: int = 1) -> None:
        if self._gate is not None:
            self._gate.release(steps)

    def close(self) -> None:
        self.closed = True
        self.release(1000)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _step(self, plan: StepPlan) -> StepOutput:
        if self._gate is not None:
            self._gate.acquire()
        if self.break_at == plan.step_id:
            raise RuntimeError("the ranks fell over")
        return self.ranks.execute(plan)


class ByteTokenizer:
    """Token 0..255 is that byte; then specials, and tokens of several bytes."""

    special_token_ids = frozenset({256, 257})
    bos_token_id = None
    eos_token_ids = (256,)
    chat_template = "chatml"

    def __init__(self, *words: bytes) -> None:
        self._bytes = [*(bytes([b]) for b in range(256)), b"<|eos|>", b"<|im_start|>", *words]
        self.vocab_size = len(self._bytes)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode(errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        data = text.encode()
        while data:
            special = next((i for i in (256, 257) if data.startswith(self._bytes[i])), None)
            ids.append(data[0] if special is None else special)
            data = data[len(self._bytes[ids[-1]]) :]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(self._bytes[i] for i in kept).decode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], **_: Any) -> str:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|eos|>\n" for m in messages]
        return "<|im_start|>system\nbe brief<|eos|>\n" + "".join(turns) + "<|im_start|>assistant\n"

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **kwargs))


class Collector:
    """A sink that remembers everything, and can be waited for."""

    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []
        self.calls = 0
        self._condition = threading.Condition()

    def deliver(self, deltas: list[RequestDelta]) -> None:
        with self._condition:
            self.calls += 1
            self.deltas += deltas
            self._condition.notify_all()

    def of(self, request_id: str, index: int = 0) -> list[RequestDelta]:
        return [d for d in self.deltas if d.request_id == request_id and d.index == index]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(d.text for d in self.of(request_id, index))

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for d in self.of(request_id, index) for t in d.token_ids]

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        deltas = self.of(request_id, index)
        assert all(d.finish_reason is None for d in deltas[:-1]), "deltas after the last one"
        return deltas[-1].finish_reason if deltas else None

    def wait(self, request_id: str, n: int = 1, timeout: float = 20.0) -> None:
        """Until all n sequences of the request have ended."""
        self.wait_until(lambda: all(self.reason(request_id, index) for index in range(n)), timeout)

    def wait_until(self, condition: Any, timeout: float = 20.0) -> None:
        with self._condition:
            assert self._condition.wait_for(condition, timeout), "it did not happen in time"
