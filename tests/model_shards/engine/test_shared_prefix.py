"""A prefix that several waiting requests have in common is computed once, by the first of them."""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from shoal.kvcache import prefix
from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus

BLOCK = 4
PREFIX = list(range(40))


def step(scheduler: Scheduler, ranks: Any) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(ranks.execute(plan))
    return plan


def finish(scheduler: Scheduler, ranks: Any) -> Counter[int]:
    """Runs until nothing is left; returns how many tokens were computed of each sequence."""
    computed: Counter[int] = Counter()
    while scheduler.has_work():
        for chunk in step(scheduler, ranks).chunks:
            computed[chunk.seq_id] += chunk.num_tokens
    scheduler.kv.check_integrity()
    assert scheduler.kv.ledger.usage == 0
    return computed


def running(*sequences: Sequence) -> list[bool]:
    return [sequence.status is SequenceStatus.RUNNING for sequence in sequences]


def test_eight_that_arrive_together_compute_their_common_prefix_once(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=16)
    ranks = kit.ranks_for(scheduler)
    family = [scheduler.add(kit.make_request(str(i), [*PREFIX, i, i], max_tokens=1))[0] for i in range(8)]
    computed = finish(scheduler, ranks)
    assert [sequence.num_cached_tokens for sequence in family] == [0] + [40] * 7
    assert (scheduler.counters.prompt_tokens, scheduler.counters.cached_prompt_tokens) == (8 * 42, 7 * 40)
    assert [computed[sequence.seq_id] for sequence in family] == [42] + [2] * 7
    assert scheduler.counters.followers == 7


def test_others_run_meanwhile(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=16)
    ranks = kit.ranks_for(scheduler)
    (leader,) = scheduler.add(kit.make_request("leader", PREFIX))
    (follower,) = scheduler.add(kit.make_request("follower", [*PREFIX, 1]))
    (other,) = scheduler.add(kit.make_request("other", [5, 6, 7]))
    step(scheduler, ranks)
    step(scheduler, ranks)
    assert running(leader, follower, other) == [True, False, True]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_following) == (2, 1, 1)


def test_it_waits_for_what_it_shares_and_no_longer(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=10)
    ranks = kit.ranks_for(scheduler)
    (leader,) = scheduler.add(kit.make_request("leader", range(49)))
    (follower,) = scheduler.add(kit.make_request("follower", [*range(14), *[9] * 30]))
    step(scheduler, ranks)  # 10 of 12 shared tokens
    assert scheduler.num_following == 1
    step(scheduler, ranks)
    assert scheduler.num_following == 0
    assert leader.num_computed_tokens == 20
    finish(scheduler, ranks)
    assert follower.num_cached_tokens == 12


@pytest.mark.parametrize("end", ["abort", "finish", "fail", "preempt"])
def test_when_the_leader_goes_the_wait_ends_with_what_is_there(kit: ModuleType, end: str) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=10)
    ranks = kit.ranks_for(scheduler)
    (leader,) = scheduler.add(kit.make_request("leader", PREFIX))
    followers = [scheduler.add(kit.make_request(f"f{i}", [*PREFIX, i], max_tokens=2))[0] for i in range(2)]
    step(scheduler, ranks)
    assert scheduler.num_following == 2
    if end == "abort":
        scheduler.abort("leader")
    elif end == "finish":
        scheduler.finish(leader.seq_id)
    elif end == "fail":
        plan = scheduler.schedule()
        output = ranks.execute(plan)
        output.errors[leader.seq_id] = "it fails"
        scheduler.commit(output)
    else:
        scheduler._roster.preempt(leader)
    assert scheduler.num_following == 0
    step(scheduler, ranks)
    if end == "preempt":  # it comes first again, and leads again
        assert running(leader, *followers) == [True, False, False]
        assert scheduler.num_following == 2
    else:
        assert running(*followers) == [True, False]
        assert followers[0].num_cached_tokens == (0 if end == "fail" else 8)
        assert scheduler.num_following == 1
    finish(scheduler, ranks)


def test_a_follower_can_be_aborted(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=10)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("leader", PREFIX, max_tokens=1))
    scheduler.add(kit.make_request("follower", PREFIX))
    step(scheduler, ranks)
    assert len(scheduler.abort("follower")) == 1
    assert scheduler.num_following == scheduler.num_waiting == 0
    finish(scheduler, ranks)


@pytest.mark.parametrize(
    "difference", [{"salt": "another tenant"}, {"prompt_logprobs": 0}, {"prompt": [*range(3), 9, *PREFIX]}]
)
def test_who_shares_nothing_does_not_wait(kit: ModuleType, difference: dict[str, Any]) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=64)
    scheduler.add(kit.make_request("leader", PREFIX[:16]))
    (other,) = scheduler.add(kit.make_request("other", **{"prompt": PREFIX[:20], **difference}))
    scheduler.schedule()
    assert running(other) == [True]


def test_without_prefix_caching_nobody_waits(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(prefix_caching=False)
    family = [scheduler.add(kit.make_request(str(i), PREFIX[:20]))[0] for i in range(3)]
    scheduler.schedule()
    assert running(*family) == [True] * 3


def test_nobody_waits_for_a_sequence_whose_place_it_may_take(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(policy="priority", block_size=BLOCK, max_num_batched_tokens=10)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("worse", PREFIX, priority=1))
    step(scheduler, ranks)
    better, equal = (
        scheduler.add(kit.make_request(name, PREFIX, priority=priority))[0]
        for name, priority in (("better", 0), ("equal", 1))
    )
    step(scheduler, ranks)
    assert running(better, equal) == [True, False]


def test_followers_keep_their_seats_against_those_who_come_later(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=10, max_num_seqs=3)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("leader", PREFIX, ignore_eos=True))
    followers = [scheduler.add(kit.make_request(f"f{i}", PREFIX, ignore_eos=True))[0] for i in range(2)]
    (later,) = scheduler.add(kit.make_request("later", [1, 2]))
    while not all(running(*followers)):
        assert not any(running(later))
        step(scheduler, ranks)


def test_a_waiting_prompt_is_hashed_once(kit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    real = prefix.block_hash

    def counting(*arguments: Any) -> bytes:
        nonlocal hashed
        hashed += 1
        return real(*arguments)

    monkeypatch.setattr(prefix, "block_hash", counting)
    scheduler = kit.make_scheduler(block_size=BLOCK, max_num_batched_tokens=4, max_num_seqs=4)
    ranks = kit.ranks_for(scheduler)
    for index in range(4):
        scheduler.add(kit.make_request(str(index), [*PREFIX, *[index] * 8], max_tokens=1))
    finish(scheduler, ranks)
    assert hashed == 4 * 12  # 12 full blocks each, however often they were looked for


@pytest.mark.parametrize("seed", range(20))
def test_with_room_enough_no_block_is_ever_computed_twice(kit: ModuleType, seed: int) -> None:
    """Any tree of prompts, arriving at any time: each distinct full block is computed once, but for a prompt's last one
    (whose logits are needed)."""
    rng = random.Random(seed)
    options = {"prefill_chunk_size": rng.choice([None, 6]), "target_s": rng.choice([None, 0.01])}
    scheduler = kit.make_scheduler(
        num_blocks=2000, block_size=BLOCK, max_num_seqs=16, max_num_batched_tokens=rng.choice([16, 40]), **options
    )
    ranks = kit.ranks_for(scheduler)
    prompts: dict[int, list[int]] = {}
    computed: Counter[tuple[int, ...]] = Counter()
    while scheduler.has_work() or len(prompts) < 40:
        for _ in range(rng.choice([0, 1, 4]) if len(prompts) < 40 else 0):
            stem = rng.choice(list(prompts.values()))[: rng.randrange(40)] if prompts else []
            prompt = stem + [rng.randrange(kit.VOCAB) for _ in range(rng.randrange(1, 30))]
            (sequence,) = scheduler.add(kit.make_request(str(len(prompts)), prompt, max_tokens=1))
            prompts[sequence.seq_id] = prompt
        if (plan := scheduler.schedule()) is None:
            continue
        for chunk in plan.chunks:
            prompt, end = prompts[chunk.seq_id], chunk.start + chunk.num_tokens
            last_needed = (len(prompt) - 1) // BLOCK * BLOCK
            for edge in range(BLOCK, last_needed + 1, BLOCK):
                if chunk.start < edge <= end:
                    computed[tuple(prompt[:edge])] += 1
        scheduler.commit(ranks.execute(plan), 0.001 * plan.num_tokens)
    assert max(computed.values()) == 1
    assert scheduler.counters.followers > 0
    scheduler.kv.check_integrity()
