"""Steps of nobody's tokens, which a GPU runs at start-up: kernels are compiled, libraries choose, and memory is taken
as the largest step takes it, before a request comes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.model_shards.engine.plan import ScheduledChunk
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.state import SamplerState


def warm_up_batches(settings: RunnerSettings) -> Iterator[ForwardBatch]:
    """The largest step, with a decode of few keys; then a small one with a decode of as many as there can be."""
    longest, budget = settings.max_model_len, settings.max_num_batched_tokens - 1
    prompts = [min(longest, budget - start) for start in range(0, budget, longest)]
    largest = [(1, 1), *[(length, length) for length in prompts]][: settings.max_num_seqs]
    yield _batch(largest, settings)
    yield _batch([(longest, 1), (min(longest, 32), min(longest, 16))][: settings.max_num_seqs], settings)


def warm_up_states() -> list[SamplerState]:
    """A row for each way of drawing a token."""
    ways = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, repetition_penalty=1.1, logprobs=1),
    )
    return [SamplerState(params, seed=0, sample_index=0, token_ids=[0], num_prompt_tokens=1) for params in ways]


def _batch(sequences: list[tuple[int, int]], settings: RunnerSettings) -> ForwardBatch:
    """`sequences` are (tokens after the step, tokens of the step). All read the null block and store nothing."""
    lengths = np.array([length for length, _ in sequences])
    queries = np.array([count for _, count in sequences])
    tokens = int(queries.sum())
    query_start = np.concatenate([[0], np.cumsum(queries)])
    return ForwardBatch(
        chunks=[
            ScheduledChunk(i, length - count, count, [], samples=True) for i, (length, count) in enumerate(sequences)
        ],
        sequences=[],
        query_start=query_start,
        seq_lens=lengths,
        block_tables=np.zeros((len(sequences), -(-int(lengths.max()) // settings.tokens_per_block)), dtype=np.int32),
        token_ids=np.zeros(tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(length - count, length) for length, count in sequences]),
        slots=np.full(tokens, -1),
        sampling=[],
        sample_rows=query_start[1:] - 1,
    )
