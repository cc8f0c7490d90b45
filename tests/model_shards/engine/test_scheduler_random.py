"""Random traffic under a simulated clock: whatever comes, every request gets what it would get alone, and the ledger
of blocks is exact."""

from __future__ import annotations

import random
from collections import deque
from types import ModuleType
from typing import Any

import pytest

from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import SequenceUpdate

SCENARIOS = [
    pytest.param({}, id="ample"),
    pytest.param({"num_blocks": 14, "max_model_len": 48}, id="starved"),
    pytest.param({"num_blocks": 14, "max_model_len": 48, "policy": "priority"}, id="starved-priority"),
    pytest.param({"policy": "priority", "max_num_seqs": 3}, id="priority-few-seats"),
    pytest.param({"max_num_batched_tokens": 8}, id="small-budget"),
    pytest.param({"prefill_chunk_size": 1, "max_partial_prefills": 2}, id="chunks-of-1"),
    pytest.param({"prefill_chunk_size": 7, "max_partial_prefills": 1, "num_blocks": 20}, id="chunks-of-7"),
    pytest.param({"prefix_caching": False, "num_blocks": 30}, id="no-prefix-cache"),
    pytest.param({"max_num_seqs": 1, "max_num_batched_tokens": 1}, id="one-token-a-step"),
    pytest.param({"block_size": 1, "num_blocks": 60, "max_model_len": 60}, id="blocks-of-1"),
    pytest.param({"target_s": 0.03}, id="bounded-steps"),
    pytest.param({"target_s": 0.001, "max_partial_prefills": 1, "policy": "priority"}, id="hopeless-target-priority"),
    pytest.param({"target_s": 0.03, "num_blocks": 14, "max_model_len": 48}, id="bounded-steps-starved"),
]


class Traffic:
    """Drives a scheduler with `depth` steps in flight, and checks every plan and every result."""

    def __init__(self, kit: ModuleType, rng: random.Random, depth: int, options: dict[str, Any]) -> None:
        self.kit, self.rng, self.depth = kit, rng, depth
        self.scheduler: Scheduler = kit.make_scheduler(**options)
        self.ranks = kit.ranks_for(self.scheduler)
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.limits: dict[int, int] = {}
        self.updates: list[SequenceUpdate] = []
        """Committed and not yet seen by the output side, as in the engine."""
        self.stop_after: dict[int, int] = {}
        """seq_id -> tokens after which the output side finds a stop string, while later steps are under way."""
        self.prompts = [[rng.randrange(kit.VOCAB) for _ in range(40)] for _ in range(3)]
        self.micro_batches = self.scheduler.settings.micro_batches
        self.drew: dict[int, int] = {}
        """seq_id -> the step that drew its last token."""
        self.longest_wait = 0
        """Steps between two tokens of a sequence, at most."""

    def arrive(self, now: int) -> None:
        rng = self.rng
        longest = min(self.scheduler.settings.max_model_len - 1, 40)
        shared = rng.choice(self.prompts)[: rng.randrange(longest)]
        prompt = (shared + [rng.randrange(self.kit.VOCAB) for _ in range(rng.randrange(8))])[:longest] or [3]
        max_tokens: int | None = rng.choice([0, 1, 2, 5, 12, None])
        if max_tokens is not None:
            max_tokens = min(max_tokens, self.scheduler.settings.max_model_len - len(prompt))
        request = self.kit.make_request(
            f"r{len(self.requests)}",
            prompt,
            priority=rng.randrange(3),
            arrival=float(now),
            seed=rng.randrange(5),
            salt=rng.choice(["", "", "tenant"]),
            max_tokens=max_tokens,
            n=rng.choice([1, 1, 1, 2, 4]),
            ignore_eos=max_tokens is not None and rng.random() < 0.3,
            prompt_logprobs=0 if max_tokens == 0 else rng.choice([None, None, None, 0]),
        )
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.outputs[request.request_id, index] = []
        for sequence in self.scheduler.add(request):
            self.limits[sequence.seq_id] = sequence.limit
            if rng.random() < 0.15:
                self.stop_after[sequence.seq_id] = rng.randrange(1, 6)
            if rng.random() < 0.05:
                self.ranks.fail[sequence.seq_id] = rng.randrange(6)

    def abort_one(self) -> None:
        name = self.rng.choice(list(self.requests))
        for sequence in self.scheduler.abort(name):
            self.reasons[name, sequence.index] = FinishReason.ABORT

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_turns(plan)
            self.in_flight.append((plan, self.ranks.execute(plan)))
        self.deliver()
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            committed, output = self.in_flight.popleft()
            self.updates = self.scheduler.commit(output, self.duration(committed))
        else:
            assert plan is not None or not self.scheduler.has_work(), "sequences wait and nothing can run"
        self.scheduler.kv.check_integrity()

    def duration(self, plan: StepPlan) -> float | None:
        """Of a step: noisy, sometimes a stall, sometimes not known."""
        stall = self.rng.choice([1, 1, 1, 1, 1, 1, 1, 20])
        seconds = stall * (0.005 + 0.001 * plan.num_tokens) * self.rng.uniform(0.8, 1.2)
        return None if self.rng.random() < 0.1 else seconds

    def deliver(self) -> None:
        updates, self.updates = self.updates, []
        for update in updates:
            sequence = update.sequence
            key = (sequence.request.request_id, sequence.index)
            if self.reasons.get(key) is FinishReason.ABORT:
                continue
            assert key not in self.reasons, "a result after the end"
            self.outputs[key] += update.token_ids
            if update.finish_reason is not None:
                self.reasons[key] = update.finish_reason
            elif len(self.outputs[key]) >= self.stop_after.get(sequence.seq_id, 1000):
                self.reasons[key] = FinishReason.CONTENT_FILTER  # stands for a stop string
                self.scheduler.finish(sequence.seq_id)

    def check_turns(self, plan: StepPlan) -> None:
        """Nobody is in two micro-batches: what it drew within the last ones is committed when it goes on. And nobody
        who decodes waits for long, unless it ended, was preempted, or needs no more."""
        on_their_way = {c.seq_id for earlier, _ in self.in_flight for c in earlier.chunks if c.samples}
        for seq_id in [*plan.removed, *(new.seq_id for new in plan.new)]:
            self.drew.pop(seq_id, None)
        drawing = {chunk.seq_id for chunk in plan.chunks if chunk.samples}
        for seq_id, step_id in self.drew.items():
            live = self.ranks.live[seq_id]
            waited = plan.step_id - step_id
            if seq_id in drawing and seq_id in on_their_way:
                assert waited >= self.micro_batches, "a sequence is in two micro-batches"
            if len(live.tokens) - live.new.num_prompt_tokens < self.limits[seq_id]:
                self.longest_wait = max(self.longest_wait, waited + (seq_id not in drawing))
        self.drew.update(dict.fromkeys(drawing, plan.step_id))

    def check_results(self) -> None:
        assert set(self.reasons) == set(self.outputs), "a request was lost"
        for (name, index), output in self.outputs.items():
            request, reason = self.requests[name], self.reasons[name, index]
            limit = self.scheduler.limit_of(request)
            alone = self.kit.unbatched(request, index, limit)
            if reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.CONTENT_FILTER):
                assert output == alone[: len(output)]
                continue
            assert output == alone, f"{name}[{index}] differs from its unbatched run"
            stopped = output[-1:] == [self.kit.EOS] and not request.sampling.ignore_eos
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        kv = self.scheduler.kv
        kv.check_integrity()
        assert kv.num_free_blocks == kv.num_total_blocks, "blocks leaked"
        assert not self.scheduler.has_work()


@pytest.mark.parametrize("options", SCENARIOS)
@pytest.mark.parametrize(("depth", "micro_batches"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 4)])
def test_random_traffic_gives_every_request_what_it_gets_alone(
    kit: ModuleType, options: dict[str, Any], depth: int, micro_batches: int
) -> None:
    preemptions = followers = 0
    for seed in range(3 if micro_batches == 1 else 2):
        rng = random.Random(f"{seed}{depth}{options}")
        traffic = Traffic(kit, rng, depth, {**options, "micro_batches": micro_batches})
        for now in range(60):
            for _ in range(rng.choice([0, 0, 1, 3])):
                traffic.arrive(now)
            if traffic.requests and rng.random() < 0.1:
                traffic.abort_one()
            traffic.step()
        steps = 0
        while traffic.scheduler.has_work() or traffic.in_flight or traffic.updates:
            traffic.step()
            steps += 1
            assert steps < 100_000, "livelock"
        traffic.check_results()
        assert traffic.longest_wait <= (1 if micro_batches == 1 else 2 * micro_batches), "a decode was left waiting"
        preemptions += traffic.scheduler.counters.preemptions
        followers += traffic.scheduler.counters.followers
    if "num_blocks" in options and options["num_blocks"] == 14:
        assert preemptions > 0
    alone = options.get("max_num_seqs") == 1
    if micro_batches == 1 or not options.get("prefix_caching", True) or alone:
        assert (followers > 0) == (options.get("prefix_caching", True) and not alone)
