"""Data-parallel parts: who gets a request, steps that all take together, and sums that add up."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from types import ModuleType
from typing import Any

import pytest

from shoal.model_shards.engine.parts import SchedulerParts
from shoal.model_shards.engine.plan import PartedPlan, StepOutput, StepPlan
from shoal.model_shards.engine.request import FinishReason
from shoal.model_shards.executor.wire import merge_outputs


class Group:
    """Parts, and fake ranks for each."""

    def __init__(self, kit: ModuleType, num_parts: int, **options: Any) -> None:
        ids = count()
        self.scheduler = SchedulerParts([kit.make_scheduler(seq_ids=ids, **options) for _ in range(num_parts)])
        self.ranks = [kit.ranks_for(part) for part in self.scheduler.parts]

    def execute(self, plan: StepPlan) -> StepOutput:
        """As a `RankedExecutor` does: each part its own plan, one output for all."""
        assert isinstance(plan, PartedPlan)
        outputs = []
        for dp_rank, ranks in enumerate(self.ranks):
            mine = plan.of_part(dp_rank)
            assert mine.step_id == plan.step_id
            if mine.chunks:
                ranks.steps = plan.step_id
                outputs.append(ranks.execute(mine))
            else:
                assert mine == StepPlan(plan.step_id), "a part without work is told nothing"
                outputs.append(StepOutput(plan.step_id))
        return merge_outputs(outputs)

    def run(self) -> dict[tuple[str, int], list[int]]:
        outputs: dict[tuple[str, int], list[int]] = {}
        while self.scheduler.has_work():
            plan = self.scheduler.schedule()
            assert plan is not None
            for update in self.scheduler.commit(self.execute(plan)):
                key = (update.sequence.request.request_id, update.sequence.index)
                outputs.setdefault(key, []).extend(update.token_ids)
        return outputs

    def part_of(self, seq_id: int) -> int:
        return next(i for i, part in enumerate(self.scheduler.parts) if seq_id in part)


def test_requests_go_in_turn_to_the_part_with_the_least_work(kit: ModuleType) -> None:
    group = Group(kit, 3)
    chosen = [group.part_of(group.scheduler.add(kit.make_request(str(i), [i] * 10))[0].seq_id) for i in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]
    (long,) = group.scheduler.add(kit.make_request("long", range(300)))
    assert group.part_of(long.seq_id) == 0
    later = [group.part_of(group.scheduler.add(kit.make_request(f"b{i}", [i + 7] * 10))[0].seq_id) for i in range(6)]
    assert later == [1, 2, 1, 2, 1, 2]


def test_a_prefix_that_a_part_has_or_is_computing_is_no_work_there(kit: ModuleType) -> None:
    group = Group(kit, 2, block_size=4)
    prefix = list(range(30)) * 10
    (first,) = group.scheduler.add(kit.make_request("first", prefix, max_tokens=1))
    assert group.part_of(first.seq_id) == 0
    group.scheduler.schedule()  # it begins; the rest of it is in the making
    (second,) = group.scheduler.add(kit.make_request("second", [*prefix, 1]))
    assert group.part_of(second.seq_id) == 0
    for difference in ({"salt": "another tenant"}, {"max_tokens": 0, "prompt_logprobs": 1}):
        (other,) = group.scheduler.add(kit.make_request("other", prefix, **difference))
        assert group.part_of(other.seq_id) == 1
        group.scheduler.abort("other")


def test_a_prefix_is_worth_so_many_sequences_and_no_more(kit: ModuleType) -> None:
    """A prompt that all share is computed once by each part, when enough requests have come for it."""
    group = Group(kit, 2, block_size=4, num_blocks=1000, max_num_seqs=64)
    prefix = [i % 50 for i in range(256)]
    group.scheduler.add(kit.make_request("first", prefix, max_tokens=1))
    group.run()
    chosen = []
    for i in range(16):
        (sequence,) = group.scheduler.add(kit.make_request(str(i), [*prefix, i], ignore_eos=True, max_tokens=100))
        chosen.append(group.part_of(sequence.seq_id))
        plan = group.scheduler.schedule()
        assert plan is not None
        group.scheduler.commit(group.execute(plan))
    assert chosen[:6] == [0, 0, 0, 0, 0, 1]
    assert chosen[6:] == [1, 1, 1, 1, 0, 1, 0, 1, 0, 1]
    assert [part.counters.cached_prompt_tokens for part in group.scheduler.parts] == [8 * 256, 7 * 256]


def test_samples_of_a_request_stay_together_and_share_its_prompt(kit: ModuleType) -> None:
    group = Group(kit, 2)
    request = kit.make_request("a", range(10), n=4, max_tokens=5, ignore_eos=True)
    family = group.scheduler.add(request)
    assert len({group.part_of(sequence.seq_id) for sequence in family}) == 1
    outputs = group.run()
    assert outputs == {("a", index): kit.unbatched(request, index, 5) for index in range(4)}
    assert group.scheduler.counters.prompt_tokens == 10


def test_a_part_without_work_takes_part_with_an_empty_plan(kit: ModuleType) -> None:
    group = Group(kit, 3)
    assert group.scheduler.schedule() is None
    group.scheduler.add(kit.make_request("a", [1, 2, 3], max_tokens=1))
    plan = group.scheduler.schedule()
    assert isinstance(plan, PartedPlan)
    assert [len(plan.of_part(i).chunks) for i in range(3)] == [1, 0, 0]
    assert (plan.num_tokens, len(plan.new)) == (3, 1)
    assert group.scheduler.schedule() is None
    group.scheduler.commit(group.execute(plan))
    assert not group.scheduler.has_work()


def test_what_is_counted_adds_up(kit: ModuleType) -> None:
    group = Group(kit, 2, num_blocks=20)
    for i in range(5):
        group.scheduler.add(kit.make_request(str(i), [i] * 9, max_tokens=3, ignore_eos=True))
    assert (group.scheduler.num_running, group.scheduler.num_waiting) == (0, 5)
    plan = group.scheduler.schedule()
    assert plan is not None
    assert (group.scheduler.num_running, group.scheduler.num_waiting) == (5, 0)
    ledger = group.scheduler.kv_ledger
    assert (ledger.referenced, ledger.total) == (5 * 3, 40)
    assert ledger.usage == 15 / 40
    group.scheduler.commit(group.execute(plan))
    group.run()
    counters, parts = group.scheduler.counters, group.scheduler.parts
    assert (counters.prompt_tokens, counters.output_tokens, counters.steps) == (45, 15, 3)
    assert sum(part.counters.output_tokens for part in parts) == 15
    assert all(part.counters.output_tokens > 0 for part in parts)
    assert group.scheduler.kv_ledger.referenced == 0


@pytest.mark.parametrize(
    ("num_parts", "depth", "options"),
    [
        (2, 2, {}),
        (3, 2, {"num_blocks": 14, "max_model_len": 48}),
        (2, 3, {"micro_batches": 2, "num_blocks": 14, "max_model_len": 48}),
        (4, 2, {"policy": "priority", "max_num_seqs": 2}),
        (2, 2, {"target_s": 0.03}),
    ],
)
def test_random_traffic_gives_every_request_what_it_gets_alone(
    kit: ModuleType, num_parts: int, depth: int, options: dict[str, Any]
) -> None:
    rng = random.Random(f"{num_parts}{depth}{options}")
    group = Group(kit, num_parts, **options)
    scheduler = group.scheduler
    requests: dict[str, Any] = {}
    outputs: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], FinishReason] = {}
    in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
    shared = [rng.randrange(kit.VOCAB) for _ in range(24)]
    idle_parts = steps = 0
    while len(requests) < 60 or scheduler.has_work() or in_flight:
        if len(requests) < 60 and rng.random() < 0.35:
            name, prompt = f"r{len(requests)}", [*shared[: rng.randrange(24)], rng.randrange(kit.VOCAB)]
            requests[name] = kit.make_request(
                name, prompt, priority=rng.randrange(3), arrival=float(steps), seed=rng.randrange(5),
                max_tokens=rng.choice([1, 2, 6, 12]), n=rng.choice([1, 1, 3]),
            )  # fmt: skip
            outputs |= {(name, s.index): [] for s in scheduler.add(requests[name])}
        if requests and rng.random() < 0.05:
            name = rng.choice(list(requests))
            reasons |= {(name, sequence.index): FinishReason.ABORT for sequence in scheduler.abort(name)}
        plan = scheduler.schedule()
        if plan is not None:
            idle_parts += any(not plan.of_part(i).chunks for i in range(num_parts))
            in_flight.append((plan, group.execute(plan)))
        if in_flight and (plan is None or len(in_flight) == depth):
            for update in scheduler.commit(in_flight.popleft()[1], rng.random()):
                key = (update.sequence.request.request_id, update.sequence.index)
                outputs[key] += update.token_ids
                if update.finish_reason is not None:
                    reasons[key] = update.finish_reason
        steps += 1
        assert steps < 10_000, "livelock"
    assert set(reasons) == set(outputs)
    for (name, index), tokens in outputs.items():
        alone = kit.unbatched(requests[name], index, requests[name].sampling.max_tokens)
        assert tokens == (alone[: len(tokens)] if reasons[name, index] is FinishReason.ABORT else alone)
    for part in scheduler.parts:
        part.kv.check_integrity()
        assert part.kv.num_free_blocks == part.kv.num_total_blocks, "blocks leaked"
    assert idle_parts > 0


def test_a_request_that_waits_for_others_to_end_goes_to_a_part_that_has_room(kit: ModuleType) -> None:
    group = Group(kit, 2, max_num_seqs=2)
    requests = [kit.make_request(str(i), [i] * 5, max_tokens=12, ignore_eos=True, n=1 + (i == 3)) for i in range(5)]
    ids = [sequence.seq_id for request in requests for sequence in group.scheduler.parts[0].add(request)]
    outputs: dict[tuple[str, int], list[int]] = {}
    where = []
    while group.scheduler.has_work():
        plan = group.scheduler.schedule()
        assert plan is not None
        where.append(
            [group.part_of(seq_id) if any(seq_id in p for p in group.scheduler.parts) else -1 for seq_id in ids]
        )
        for update in group.scheduler.commit(group.execute(plan)):
            key = (update.sequence.request.request_id, update.sequence.index)
            outputs.setdefault(key, []).extend(update.token_ids)
    assert where[0] == [0, 0, 1, 0, 0, 0]  # one a step, and the first in the queue
    assert where[1] == [0, 0, 1, 1, 1, 0]  # with all its samples, of which one waits
    assert where[2] == where[1], "who has a queue of its own takes nobody in"
    assert outputs == {(r.request_id, i): kit.unbatched(r, i, 12) for r in requests for i in range(r.sampling.n)}
    assert all(part.kv.num_free_blocks == part.kv.num_total_blocks for part in group.scheduler.parts)


def test_a_request_that_only_waits_for_its_turn_stays_with_its_prefix(kit: ModuleType) -> None:
    group = Group(kit, 2, max_num_batched_tokens=8)
    group.scheduler.add(kit.make_request("long", range(40), max_tokens=1))
    (follower,) = group.scheduler.parts[0].add(kit.make_request("follower", [*range(40), 1], max_tokens=1))
    (later,) = group.scheduler.parts[0].add(kit.make_request("later", [7] * 9, max_tokens=1))
    group.scheduler.schedule()
    assert [group.part_of(sequence.seq_id) for sequence in (follower, later)] == [0, 0]
