"""Who waits for whom when seats or blocks are short."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

from shoal.model_shards.engine.policy import FirstComeFirstServed, PriorityOrder, WaitingQueue
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus


def steps_until_running(scheduler: Scheduler, ranks: Any, sequence: Sequence) -> int:
    steps = 0
    while sequence.status is SequenceStatus.WAITING:
        scheduler.commit(ranks.execute(scheduler.schedule()))
        steps += 1
    return steps


def test_further_samples_take_no_seat_from_a_better_request(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(policy="priority", max_num_seqs=2)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("low", [1, 2, 3, 4, 5], priority=1, n=20, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        scheduler.commit(ranks.execute(scheduler.schedule()))
    (high,) = scheduler.add(kit.make_request("high", [9, 9, 9], priority=0))
    assert steps_until_running(scheduler, ranks, high) == 1
    assert scheduler.counters.preemptions == 1


def test_a_request_short_of_blocks_runs_once_its_prompt_is_cached(kit: ModuleType) -> None:
    """Two equal prompts in a pool that holds one and a little more: the second waits for the first one's prefill, not
    for its end."""
    scheduler = kit.make_scheduler(num_blocks=14, block_size=4)
    ranks = kit.ranks_for(scheduler)
    prompt = range(40)
    scheduler.add(kit.make_request("a", prompt, max_tokens=9, ignore_eos=True))
    (second,) = scheduler.add(kit.make_request("b", prompt, max_tokens=3, ignore_eos=True))
    assert steps_until_running(scheduler, ranks, second) == 2
    assert second.num_cached_tokens == 36


def test_a_request_short_of_blocks_is_not_tried_again_in_every_step(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(num_blocks=14, block_size=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", range(40), max_tokens=9, ignore_eos=True))
    (second,) = scheduler.add(kit.make_request("b", range(10, 50), max_tokens=3, ignore_eos=True))
    assert steps_until_running(scheduler, ranks, second) == 10
    assert scheduler.kv.stats.queried == 40 * 4  # a; b at first, after a's prefill, and when a has ended


def test_who_leaves_the_queue_without_ever_coming_first_is_forgotten(kit: ModuleType) -> None:
    queue = WaitingQueue(PriorityOrder())
    first, *rest = (
        Sequence.family(kit.make_request(str(i), [1], priority=min(i, 1)), count(i), 8)[0] for i in range(1000)
    )
    for sequence in (first, *rest):
        queue.push(sequence)
    for sequence in rest:
        queue.remove(sequence)
    assert len(queue) == 1
    assert len(queue._by_key) < 100
    assert len(queue._by_length) < 100
    assert queue.peek() is queue.shortest() is first


def test_a_sequence_that_comes_back_is_queued_once(kit: ModuleType) -> None:
    queue = WaitingQueue(FirstComeFirstServed())
    long, short = (Sequence.family(kit.make_request(str(i), [1] * (3 - i)), count(i), 8)[0] for i in range(2))
    for sequence in (long, short):
        queue.push(sequence)
    queue.remove(long)
    queue.push(long)
    assert queue.peek() is long
    assert queue.shortest() is short
    queue.remove(long)
    assert queue.peek() is short
    queue.remove(short)
    assert queue.peek() is queue.shortest() is None
