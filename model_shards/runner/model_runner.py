"""One rank's part of a step: plan -> tensors -> model -> logits where needed -> sampled tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from shoal.kernels.page_format import PageFormat
from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan, TokenLogprobs
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.split import HeadSplit
from shoal.model_shards.runner.batch import ForwardBatch, build_batch
from shoal.model_shards.runner.captured import CapturedSteps, Computed
from shoal.model_shards.runner.decode_graphs import DecodeGraphs
from shoal.model_shards.runner.device_inputs import DeviceInputs, PlacedStep
from shoal.model_shards.runner.footprint import graph_sizes, max_logit_rows
from shoal.model_shards.runner.loading import load_stage
from shoal.model_shards.runner.sequences import PLACEHOLDER_TOKEN, LiveSequence, SequenceTable
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.runner.step_capture import StepCapture
from shoal.model_shards.runner.warm_up import warm_up_batches, warm_up_states
from shoal.model_shards.sampling.logprobs import prompt_logprobs
from shoal.model_shards.sampling.sampler import Sampler


class ModelRunner:
    """Runs step plans, in order. Keeps the tokens of live sequences itself: what it samples, it appends.

    Only the sampling rank (`MeshPosition.sampling_rank`) returns columns; the others an empty output. They learn the
    sampled ids when a later plan needs them, so that stages work on different steps at once.
    """

    def __init__(self, settings: RunnerSettings, context: ParallelContext) -> None:
        """Loads the model and allocates the KV pages; raises ConfigError (or ModelLoadError) if it cannot."""
        position = context.position
        self.settings = settings
        self.context = context
        self.device = rank_device(settings.device, position.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: kernels are launched on the current device
        self.model = load_stage(settings, context, self.device)
        self.config = self.model.config
        self.samples = position.samples
        self.table = SequenceTable(settings, samples=self.samples)
        heads = HeadSplit.of_rank(self.config.num_heads, self.config.num_kv_heads, position.tp_size, position.tp_rank)
        page = PageFormat(
            self.model.ops.layout, settings.block_size, heads.num_kv_heads, self.config.head_dim, settings.kv_dtype
        )
        self.pages = [page.allocate(settings.num_blocks, self.device) for _ in self.model.stage.layers]
        self._sampler = Sampler(tuple({*self.config.eos_token_ids, *settings.eos_token_ids}), self.model.ops)
        self._rows_per_piece = max_logit_rows(self.config.vocab_size, self.device.type)
        self._unreceived: deque[list[LiveSequence]] = deque()
        self._inputs: DeviceInputs | None = None
        self.captured: CapturedSteps
        if self.device.type == "cpu":
            self.captured = StepCapture(self.model, self.pages, settings)
        else:
            self._inputs = DeviceInputs(settings, self.config.vocab_size, self.device)
            sizes = graph_sizes(settings.max_num_seqs)
            self.captured = graphs = DecodeGraphs(self.model, self.pages, self._inputs, context, sizes)
            graphs.prepare()
            self._warm_up()  # afterwards, since a capture gives back the memory that the largest step takes

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Applies `removed`, `new`, `block_copies` and runs `chunks`. A sequence that fails is in `errors`; anything
        raised means that the step failed as a whole and that this runner must not be used again."""
        output = StepOutput(plan.step_id)
        for seq_id in plan.removed:
            self.table.remove(seq_id)
        for new in plan.new:
            self.table.add(new)
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        if not plan.chunks:
            return output
        sequences = [self.table.extend(chunk) for chunk in plan.chunks]
        self._receive_tokens(plan.chunks, sequences)
        batch = build_batch(plan.chunks, sequences, self.table, self.settings.block_size)
        computed = self._forward(batch)
        sampling = batch.sampling
        if self.context.position.is_last_stage:
            self._score_prompts(batch, computed.hidden, output)
            self._sample(computed, sampling, output)
        if sampling and not self.samples:
            self._unreceived.append(sampling)
        return output

    # --- the model ------------------------------------------------------------------------------------------------

    def _forward(self, batch: ForwardBatch) -> Computed:
        position = self.context.position
        received = None
        if not position.is_first_stage:
            shape = (batch.num_tokens, self.config.hidden_size)
            received = torch.empty(shape, dtype=self.model.ops.activation_dtype, device=self.device)
            self.context.receive_hidden(received)
        computed = self.captured.run(batch, received)
        if computed is None:
            step = self._place(batch)
            inputs = step.token_ids if received is None else received
            hidden = self.model.forward(inputs, self.pages, step.meta)
            computed = Computed(hidden, sample_rows=step.sample_rows)
            if not position.is_last_stage:
                self.context.send_hidden(hidden)
        elif not position.is_last_stage:
            self.context.send_hidden(computed.hidden.clone())  # the next step may overwrite it before it is sent
        return computed

    def _place(self, batch: ForwardBatch) -> PlacedStep:
        if self._inputs is not None:
            return self._inputs.place(batch)
        return PlacedStep(*batch.tensors(self.device), torch.from_numpy(batch.sample_rows))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        sources, targets = pairs.to(self.device, non_blocking=True).unbind(1)
        for pages in self.pages:
            pages.copy_blocks(sources, targets)

    def _logits(
        self, hidden: torch.Tensor, rows: torch.Tensor | None = None
    ) -> Iterator[tuple[slice, torch.Tensor | None]]:
        """(which of `rows`, or of all of `hidden`; their logits) in pieces of bounded size. The logits are None where
        this rank does not sample."""
        count = len(hidden if rows is None else rows)
        for start in range(0, count, self._rows_per_piece):
            piece = slice(start, min(start + self._rows_per_piece, count))
            if rows is None:
                yield piece, self.model.logits(hidden[piece])
            else:
                yield piece, self.model.logits(hidden, rows[piece])

    def _sampled_logits(self, computed: Computed, count: int) -> Iterable[tuple[slice, torch.Tensor | None]]:
        """Of the `count` rows that sample, in the plan's order."""
        if computed.logits is not None:  # of every row, and every row samples: batch and plan have one order
            assert count == len(computed.logits)
            return [(slice(count), computed.logits)]
        whole = count == len(computed.hidden)
        assert whole or computed.sample_rows is not None, "only some rows sample"
        return self._logits(computed.hidden, None if whole else computed.sample_rows)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Runs what steps may run. On all ranks at once: they meet in it."""
        for batch in warm_up_batches(self.settings):
            computed = self._forward(batch)
            if not self.context.position.is_last_stage:
                continue
            for _, logits in self._sampled_logits(computed, len(batch.sample_rows)):
                if logits is not None:
                    states = warm_up_states()
                    self._sampler.sample(logits[:1].repeat(len(states), 1), states)

    # --- what comes of it -----------------------------------------------------------------------------------------

    def _sample(self, computed: Computed, sequences: list[LiveSequence], output: StepOutput) -> None:
        """`sequences`: those that sample, in the plan's order, which is the order of the output's columns."""
        if not sequences:
            return
        drawn: list[int] = []
        for piece, logits in self._sampled_logits(computed, len(sequences)):
            if logits is not None:
                drawn += self._draw(sequences[piece], logits, output)
        if self.samples:
            self.context.send_tokens(drawn)

    def _draw(self, sequences: list[LiveSequence], logits: torch.Tensor, output: StepOutput) -> list[int]:
        """One token a sequence, appended to it and to the columns; a placeholder for one that failed."""
        states = [sequence.sampler_state for sequence in sequences if sequence.sampler_state is not None]
        assert len(states) == len(sequences)
        result = self._sampler.sample(logits, states)
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

    def _score_prompts(self, batch: ForwardBatch, hidden: torch.Tensor, output: StepOutput) -> None:
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
            for piece, logits in self._logits(hidden[first : first + len(targets)]):
                if logits is None or sequence.failure is not None:
                    continue  # the stage's other ranks are in the middle of the same pieces
                try:
                    scores += prompt_logprobs(logits, targets[piece], k)
                except ValueError as error:  # NaN in this sequence's rows; the others go on
                    sequence.failure = output.errors[sequence.seq_id] = str(error)
            if scores and sequence.failure is None:
                output.prompt_logprobs[sequence.seq_id] = scores

    def _receive_tokens(self, chunks: list[ScheduledChunk], sequences: list[LiveSequence]) -> None:
        """Waits for tokens sampled elsewhere until those that this plan feeds to the model are known."""
        while self._unreceived:
            known = all(c.start + c.num_tokens <= s.num_tokens for c, s in zip(chunks, sequences, strict=True))
            if known and len(self._unreceived) < self.context.token_backlog:
                return
            waiting = self._unreceived.popleft()
            for sequence, token_id in zip(waiting, self.context.receive_tokens(len(waiting)), strict=True):
                self.table.append_token(sequence, token_id)


def rank_device(device: str, rank: int) -> torch.device:
    """The device of a rank: "cuda" alone is that rank's own GPU."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
