"""What the last stage makes of hidden states: the tokens drawn in a step, and the scores of prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.model_shards.engine.plan import StepOutput, TokenLogprobs
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.captured import Computed
from shoal.model_shards.runner.sequences import PLACEHOLDER_TOKEN, LiveSequence, SequenceTable
from shoal.model_shards.runner.warm_up import warm_up_states
from shoal.model_shards.sampling.logprobs import prompt_logprobs
from shoal.model_shards.sampling.sampler import Sampler
from shoal.model_shards.sampling.sharded_sampler import ShardedSampler


class OutputMaker:
    """Fills a step's output. On every rank of the last stage, since logits are computed by all of them; only the
    sampling rank (`MeshPosition.samples`) gets columns."""

    def __init__(
        self, model: Decoder, sampler: Sampler, table: SequenceTable, context: ParallelContext, rows_per_piece: int
    ) -> None:
        """`rows_per_piece`: rows whose logits are held at once."""
        self.model, self.sampler, self.table, self.context = model, sampler, table, context
        self.rows_per_piece = rows_per_piece
        self._sharded: ShardedSampler | None = None
        """With tensor parallelism: whole rows of logits come together only where a draw needs them."""
        if context.size("tensor") > 1:
            self._sharded = ShardedSampler(sampler, context, model.config.vocab_size)

    def sample(self, computed: Computed, sequences: list[LiveSequence], output: StepOutput) -> None:
        """`sequences`: those that sample, in the plan's order, which is the order of the output's columns."""
        if not sequences:
            return
        drawn: list[int] = []
        for piece, logits in self._sampled_logits(computed, len(sequences)):
            drawn += self._draw(sequences[piece], logits, output)
        if self.context.position.samples:
            self.context.send_tokens(drawn)

    def _draw(self, sequences: list[LiveSequence], logits: torch.Tensor, output: StepOutput) -> list[int]:
        """One token a sequence, appended to it and to the columns; a placeholder for one that failed. Elsewhere than on
        the sampling rank none."""
        states = [sequence.sampler_state for sequence in sequences if sequence.sampler_state is not None]
        samples, result = self.context.position.samples, None
        if self._sharded is not None:
            params = [sequence.sampling for sequence in sequences]
            result = self._sharded.sample(logits, params, states if samples else None)
        elif samples:
            result = self.sampler.sample(logits, states)
        if result is None:
            return []
        drawn = []
        for row, sequence in enumerate(sequences):
            sequence.failure = sequence.failure or result.errors.get(row)
            if sequence.failure is not None:
                output.errors[sequence.seq_id] = sequence.failure
                drawn.append(PLACEHOLDER_TOKEN)
            else:
                output.seq_ids.append(sequence.seq_id)
                output.generations.append(sequence.generation)
                output.token_ids.append(result.token_ids[row])
                output.logprobs.append(result.logprobs[row])
                drawn.append(result.token_ids[row])
                states[row].append(drawn[-1])
            self.table.append_token(sequence, drawn[-1])
        return drawn

    def score_prompts(self, batch: ForwardBatch, hidden: torch.Tensor, output: StepOutput) -> None:
        """Logprobs of the prompt tokens that follow each row of a chunk whose request asked for them."""
        for i, (chunk, sequence) in enumerate(zip(batch.chunks, batch.sequences, strict=True)):
            k = sequence.sampling.prompt_logprobs
            if k is None:
                continue
            # The row of position p scores the token at p + 1:  start+1 .. start+num_tokens, clipped to the prompt.
            stop = min(chunk.start + chunk.num_tokens + 1, sequence.num_prompt_tokens)
            targets = self.table.tokens[sequence.row, chunk.start + 1 : stop].tolist()
            first = int(batch.query_start[i])
            scores: list[TokenLogprobs] = []
            rows = hidden[first : first + len(targets)]
            for piece in self._pieces(len(rows)):
                logits = self.model.logits(rows[piece])
                if logits is None or sequence.failure is not None:
                    continue  # the stage's other ranks are in the middle of the same pieces
                try:
                    scores += prompt_logprobs(logits, targets[piece], k)
                except ValueError as error:  # NaN in this sequence's rows; the others go on
                    sequence.failure = output.errors[sequence.seq_id] = str(error)
            if scores and sequence.failure is None:
                output.prompt_logprobs[sequence.seq_id] = scores

    def warm_up(self, computed: Computed, count: int) -> None:
        """Every way of drawing a token, from what the model computed for `count` rows that sample."""
        for _, logits in self._sampled_logits(computed, count):
            states = warm_up_states()
            if self._sharded is None:
                self.sampler.sample(logits[:1].repeat(len(states), 1), states)
            else:
                ways = [states[row % len(states)] for row in range(len(logits))]
                params = [state.params for state in ways]
                self._sharded.sample(logits, params, ways if self.context.position.samples else None)

    # --- logits ---------------------------------------------------------------------------------------------------

    def _pieces(self, count: int) -> list[slice]:
        starts = range(0, count, self.rows_per_piece)
        return [slice(start, min(start + self.rows_per_piece, count)) for start in starts]

    def _sampled_logits(self, computed: Computed, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Of the `count` rows that sample, in the plan's order and in pieces: (which of them, their logits). With
        tensor parallelism this rank's shard of each."""
        if computed.logits is not None:  # of every row, and every row samples: batch and plan have one order
            assert count == len(computed.logits)
            yield slice(count), computed.logits
            return
        rows = None if count == len(computed.hidden) else computed.sample_rows
        assert count == len(computed.hidden) or rows is not None, "only some rows sample"
        compute = self.model.logits if self._sharded is None else self.model.shard_logits
        for piece in self._pieces(count):
            hidden = computed.hidden[piece] if rows is None else computed.hidden
            logits = compute(hidden, None if rows is None else rows[piece])
            assert logits is not None, "without tensor parallelism every rank has whole logits"
            yield piece, logits
