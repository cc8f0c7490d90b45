"""The scheduler's rules, one at a time."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import ConfigError, ContextLengthError, InvalidRequestError
from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.engine.policy import make_policy
from shoal.model_shards.engine.request import FinishReason
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import IllegalTransitionError, Sequence, SequenceStatus, SequenceUpdate


def chunks(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of a plan."""
    assert plan is not None
    return [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def step(scheduler: Scheduler, ranks: Any) -> list[SequenceUpdate]:
    plan = scheduler.schedule()
    return [] if plan is None else scheduler.commit(ranks.execute(plan))


def run_all(scheduler: Scheduler, ranks: Any) -> dict[tuple[str, int], list[int]]:
    outputs: dict[tuple[str, int], list[int]] = {}
    while scheduler.has_work():
        for update in step(scheduler, ranks):
            key = (update.sequence.request.request_id, update.sequence.index)
            outputs.setdefault(key, []).extend(update.token_ids)
    return outputs


def test_decodes_go_first_then_the_shortest_rest_of_a_prompt(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", [1, 2, 3], ignore_eos=True))
    assert chunks(scheduler.schedule()) == [(0, 0, 3)]
    scheduler.add(kit.make_request("b", range(25)))
    assert chunks(scheduler.schedule()) == [(0, 3, 1), (1, 0, 9)]
    scheduler.add(kit.make_request("c", [4, 5]))
    assert chunks(scheduler.schedule()) == [(0, 4, 1), (2, 0, 2), (1, 9, 7)]
    assert chunks(scheduler.schedule()) == [(0, 5, 1), (2, 2, 1), (1, 16, 8)]
    assert ranks.steps == 0  # all of it without one result


def test_every_fourth_step_belongs_to_the_first_by_the_policy(kit: ModuleType) -> None:
    """Short prompts that keep coming take three quarters of the steps from a long one, and no more."""
    scheduler = kit.make_scheduler(max_num_batched_tokens=10, max_num_seqs=8)
    ranks = kit.ranks_for(scheduler)
    (long,) = scheduler.add(kit.make_request("long", range(40), max_tokens=1))
    progress = []
    for index in range(9):
        scheduler.add(kit.make_request(f"short {index}", [index] * 10, max_tokens=1))
        step(scheduler, ranks)
        progress.append(long.num_computed_tokens)
    assert progress == [10, 10, 10, 10, 20, 20, 20, 20, 30]


def test_a_short_prompt_overtakes_long_ones_that_wait_but_leaves_the_first_its_seat_and_blocks(kit: ModuleType) -> None:
    def overtakes(**options: int) -> bool:
        scheduler = kit.make_scheduler(max_num_batched_tokens=10, max_partial_prefills=1, block_size=4, **options)
        for name, token in (("running", 1), ("waiting", 2)):
            scheduler.add(kit.make_request(name, [token] * 33, max_tokens=1))
        scheduler.schedule()
        (short,) = scheduler.add(kit.make_request("short", [7, 8], max_tokens=1))
        scheduler.schedule()
        return bool(short.status is SequenceStatus.RUNNING)

    assert overtakes(max_num_seqs=3, num_blocks=20)
    assert not overtakes(max_num_seqs=2, num_blocks=20)
    assert not overtakes(max_num_seqs=3, num_blocks=19)  # 9 run, 9 wait, 1 to grow by


def test_the_end_by_length_is_foreseen(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler()
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", [1, 2, 3], max_tokens=2, ignore_eos=True))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None
    updates = [update for plan in plans for update in scheduler.commit(ranks.execute(plan))]
    assert [update.finish_reason for update in updates] == [None, FinishReason.LENGTH]


def test_late_results_of_a_finished_sequence_are_dropped(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler()
    ranks = kit.ranks_for(scheduler)
    seed = next(seed for seed in range(1000) if kit.next_token([1], seed, 0) == kit.EOS)
    scheduler.add(kit.make_request("a", [1], seed=seed))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.commit(ranks.execute(first))[0].finish_reason is FinishReason.STOP
    assert scheduler.kv.ledger.usage == 0
    assert scheduler.commit(ranks.execute(second)) == []
    assert scheduler.counters.dropped_results == 1


def test_a_prefix_hit_computes_only_the_rest(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", range(10), max_tokens=1))
    run_all(scheduler, ranks)
    (sequence,) = scheduler.add(kit.make_request("b", range(12), max_tokens=1))
    assert chunks(scheduler.schedule()) == [(1, 8, 4)]
    assert sequence.num_cached_tokens == 8
    scheduler.abort("b")
    scheduler.add(kit.make_request("c", range(12), max_tokens=1, salt="another tenant"))
    assert chunks(scheduler.schedule()) == [(2, 0, 12)]


def test_a_prompt_in_the_cache_to_its_end_still_computes_its_last_block(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", range(8), max_tokens=1))
    run_all(scheduler, ranks)
    scheduler.add(kit.make_request("b", range(8), max_tokens=1))
    assert chunks(scheduler.schedule()) == [(1, 4, 4)]


def test_n_samples_share_one_prefill(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=4)
    ranks = kit.ranks_for(scheduler)
    request = kit.make_request("a", range(10), n=3, max_tokens=6, ignore_eos=True)
    scheduler.add(request)
    first = scheduler.schedule()
    assert chunks(first) == [(0, 0, 10)]
    second = scheduler.schedule()
    assert chunks(second) == [(0, 10, 1), (1, 9, 1), (2, 9, 1)]
    assert second is not None
    assert len(second.block_copies) == 2
    assert scheduler.kv.num_total_blocks - scheduler.kv.num_free_blocks == 2 + 3  # two shared, three tails
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for update in scheduler.commit(ranks.execute(first)) + scheduler.commit(ranks.execute(second)):
        outputs[update.sequence.index] += update.token_ids
    for (_, index), tokens in run_all(scheduler, ranks).items():
        outputs[index] += tokens
    assert outputs == {index: kit.unbatched(request, index, 6) for index in range(3)}


def test_preemption_takes_the_latest_and_loses_no_token(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    ranks = kit.ranks_for(scheduler)
    requests = [kit.make_request(str(i), range(i, i + 10), max_tokens=12, ignore_eos=True) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    outputs = run_all(scheduler, ranks)
    assert scheduler.counters.preemptions > 0
    assert outputs == {(r.request_id, 0): kit.unbatched(r, 0, 12) for r in requests}
    assert ranks.live.keys() <= {0, 1}
    scheduler.kv.check_integrity()
    assert scheduler.kv.ledger.usage == 0


def test_o17_a_starved_pool_gives_what_each_gets_alone(kit: ModuleType) -> None:
    def generate(requests: list[Any]) -> tuple[dict[tuple[str, int], list[int]], Scheduler]:
        scheduler = kit.make_scheduler(num_blocks=24, block_size=16, max_model_len=128)
        for request in requests:
            scheduler.add(request)
        return run_all(scheduler, kit.ranks_for(scheduler)), scheduler

    requests = [
        kit.make_request(str(i), [(7 * i + j) % kit.VOCAB for j in range(40)], max_tokens=80, ignore_eos=True)
        for i in range(6)
    ]
    together, scheduler = generate(requests)
    assert scheduler.counters.preemptions > 0
    assert scheduler.kv.num_free_blocks == 24
    for request in requests:
        assert generate([request])[0] == {(request.request_id, 0): together[request.request_id, 0]}
        assert len(together[request.request_id, 0]) == 80


def test_a_better_priority_does_not_wait_behind_a_full_batch(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(policy="priority", max_num_seqs=2)
    for name, priority in (("a", 5), ("b", 3)):
        scheduler.add(kit.make_request(name, [1, 2], priority=priority))
    scheduler.schedule()
    scheduler.add(kit.make_request("urgent", [3, 4], priority=0))
    scheduler.add(kit.make_request("equal", [3, 4], priority=3))
    assert chunks(scheduler.schedule()) == [(1, 2, 1), (2, 0, 2)]
    assert chunks(scheduler.schedule()) == [(2, 2, 1), (1, 3, 1)]
    assert scheduler.counters.preemptions == 1


def test_at_most_so_many_prompts_are_in_the_middle(kit: ModuleType) -> None:
    """A prompt that fits in a piece does not count."""
    scheduler = kit.make_scheduler(prefill_chunk_size=4, max_partial_prefills=2)
    for index in range(4):
        scheduler.add(kit.make_request(str(index), [index] * 10, max_tokens=1))
    assert chunks(scheduler.schedule()) == [(0, 0, 4), (1, 0, 4)]
    scheduler.add(kit.make_request("short", [1, 2], max_tokens=1))
    assert chunks(scheduler.schedule()) == [(4, 0, 2), (0, 4, 4), (1, 4, 4)]
    assert chunks(scheduler.schedule()) == [(0, 8, 2), (1, 8, 2), (2, 0, 4), (3, 0, 4)]


def test_scoring_a_prompt_samples_nothing(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(prefill_chunk_size=3)
    ranks = kit.ranks_for(scheduler)
    (sequence,) = scheduler.add(kit.make_request("a", range(8), max_tokens=0, prompt_logprobs=0))
    updates = []
    while scheduler.has_work():
        updates += step(scheduler, ranks)
    assert [update.finish_reason for update in updates] == [FinishReason.LENGTH]
    assert sequence.num_output_tokens == 0
    assert [entry and entry.token_id for entry in sequence.prompt_logprobs] == [None, 1, 2, 3, 4, 5, 6, 7]


def test_o16_prompt_logprobs_are_whole_with_a_warm_cache_and_after_preemption(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(block_size=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("warm", range(20), max_tokens=1))
    run_all(scheduler, ranks)
    (sequence,) = scheduler.add(kit.make_request("scored", range(21), prompt_logprobs=0))
    plan = scheduler.schedule()
    assert chunks(plan) == [(1, 0, 21)]
    scheduler._roster.preempt(sequence)
    scheduler.commit(ranks.execute(plan))
    assert sequence.prompt_logprobs == [None]
    run_all(scheduler, ranks)
    assert [entry and entry.token_id for entry in sequence.prompt_logprobs] == [None, *range(1, 21)]


def test_one_failed_sequence_does_not_touch_the_others(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler()
    ranks = kit.ranks_for(scheduler)
    requests = [kit.make_request(str(i), [i], max_tokens=5, ignore_eos=True) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    ranks.fail[1] = 2
    errors, outputs = {}, {}
    while scheduler.has_work():
        for update in step(scheduler, ranks):
            outputs.setdefault(update.sequence.seq_id, []).extend(update.token_ids)
            if update.error:
                errors[update.sequence.seq_id] = update.error
    assert errors == {1: "it was told to fail"}
    assert [len(outputs[i]) for i in range(3)] == [5, 2, 5]
    assert scheduler.kv.ledger.usage == 0


def test_what_a_failed_sequence_computed_is_given_to_nobody(kit: ModuleType) -> None:
    """A NaN in a cached prefix would otherwise fail everybody who begins alike, for ever."""
    scheduler = kit.make_scheduler(block_size=4, max_num_batched_tokens=8)
    ranks = kit.ranks_for(scheduler)
    (failing,) = scheduler.add(kit.make_request("a", range(20)))
    ranks.fail[failing.seq_id] = 0  # its last chunk, when two have been committed
    run_all(scheduler, ranks)
    (again,) = scheduler.add(kit.make_request("b", range(20)))
    run_all(scheduler, ranks)
    assert again.num_cached_tokens == 0
    assert again.num_output_tokens > 0


@pytest.mark.parametrize("steps", range(6))
def test_abort_frees_everything_at_once_at_every_stage(kit: ModuleType, steps: int) -> None:
    scheduler = kit.make_scheduler(prefill_chunk_size=4)
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("a", range(12), n=3, ignore_eos=True))
    for _ in range(steps):
        step(scheduler, ranks)
    assert len(scheduler.abort("a")) == 3
    assert scheduler.kv.ledger.usage == 0
    assert not scheduler.has_work()
    assert scheduler.abort("a") == []
    assert scheduler.schedule() is None


def test_a_request_that_can_never_run_is_refused_with_the_numbers(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(
        ContextLengthError, match=r"100 tokens, but 101 .*\(100 in the prompt, 1 to generate\)"
    ) as caught:
        scheduler.add(kit.make_request("a", [1] * 100, max_tokens=1))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(ContextLengthError, match="5 in the prompt, 96 to generate") as caught:
        scheduler.add(kit.make_request("a", [1] * 5, max_tokens=96))
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError, match=r"17 tokens, but the pool holds 16 \(4 blocks of 4\)"):
        scheduler.add(kit.make_request("a", [1] * 10, max_tokens=8))
    with pytest.raises(InvalidRequestError, match="empty"):
        scheduler.add(kit.make_request("a", []))
    assert not scheduler.has_work()


def test_without_max_tokens_a_sequence_may_fill_what_there_is(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler(num_blocks=4, block_size=4, max_model_len=100)
    scheduler.add(kit.make_request("a", [1] * 10, max_tokens=None, ignore_eos=True))
    assert len(run_all(scheduler, kit.ranks_for(scheduler))["a", 0]) == 7  # 16 slots, and a last token that needs none


def test_stop_token_ids_end_it_but_not_before_min_tokens(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler()
    request = kit.make_request("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    tokens = kit.unbatched(request, 0, 30)
    stopping = kit.make_request("b", [1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=(tokens[4],))
    late = kit.make_request("c", [1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=(tokens[0],), min_tokens=1)
    scheduler.add(stopping)
    scheduler.add(late)
    outputs = run_all(scheduler, kit.ranks_for(scheduler))
    assert outputs["b", 0] == tokens[: tokens.index(tokens[4]) + 1]
    assert len(outputs["c", 0]) > 1


def test_a_deferred_token_is_planned_again(kit: ModuleType) -> None:
    scheduler = kit.make_scheduler()
    ranks = kit.ranks_for(scheduler)
    scheduler.add(kit.make_request("slow", range(3), max_tokens=2, ignore_eos=True))
    plan = scheduler.schedule()
    output = ranks.execute(plan)
    scheduler.commit(type(output)(output.step_id, deferred=[0]))
    assert chunks(scheduler.schedule()) == [(0, 0, 3)]


def test_illegal_transitions_raise(kit: ModuleType) -> None:
    (sequence,) = Sequence.family(kit.make_request("a", [1]), count(), 1)
    with pytest.raises(IllegalTransitionError, match="WAITING -> PREEMPTED"):
        sequence.transition(SequenceStatus.PREEMPTED)
    sequence.transition(SequenceStatus.FINISHED)
    for status in SequenceStatus:
        with pytest.raises(IllegalTransitionError):
            sequence.transition(status)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fcfs, priority"):
        make_policy("lottery")


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_a_prompt_counts_once_and_what_its_samples_share_is_no_cache_hit(kit: ModuleType, max_num_seqs: int) -> None:
    """With one seat the further samples start after the first has ended, and find its prompt in the cache."""
    scheduler = kit.make_scheduler(block_size=4, max_num_seqs=max_num_seqs)
    family = scheduler.add(kit.make_request("a", range(10), n=3, max_tokens=6, ignore_eos=True))
    run_all(scheduler, kit.ranks_for(scheduler))
    assert [sequence.num_cached_tokens for sequence in family] == [0, 0, 0]
    assert (scheduler.counters.prompt_tokens, scheduler.counters.cached_prompt_tokens) == (10, 0)
