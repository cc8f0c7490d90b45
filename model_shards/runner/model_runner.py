"""One rank's part of a step: plan -> tensors -> model -> logits where needed -> sampled tokens."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.models.moe import parallel_experts
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.rebalance import ExpertRebalancer
from shoal.model_shards.parallel.split import HeadSplit
from shoal.model_shards.runner.batch import ForwardBatch, build_batch
from shoal.model_shards.runner.captured import CapturedSteps, Computed
from shoal.model_shards.runner.decode_graphs import DecodeGraphs
from shoal.model_shards.runner.device_inputs import DeviceInputs, PlacedStep
from shoal.model_shards.runner.footprint import graph_sizes, max_logit_rows, page_format
from shoal.model_shards.runner.loading import load_stage
from shoal.model_shards.runner.outputs import OutputMaker
from shoal.model_shards.runner.sequences import LiveSequence, SequenceTable
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.runner.step_capture import StepCapture
from shoal.model_shards.runner.step_clock import StepClock
from shoal.model_shards.runner.striped_batch import StripedBatch, striping
from shoal.model_shards.runner.warm_up import warm_up_batches
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
        self.clock = StepClock()
        self.device = rank_device(settings.device, position.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: kernels are launched on the current device
        self.model = load_stage(settings, context, self.device)
        self.config = self.model.config
        self.samples = position.samples
        self.table = SequenceTable(settings, samples=self.samples)
        heads = HeadSplit.of_rank(self.config.num_heads, self.config.num_kv_heads, position.tp_size, position.tp_rank)
        layout = self.model.ops.layout
        page = page_format(self.config, layout, settings.block_size, settings.kv_dtype, position.tp_size)
        self.pages = [page.allocate(settings.num_blocks, self.device) for _ in self.model.stage.layers]
        self._stripe = striping(position, page, heads.num_heads, self.model.ops.activation_dtype)
        """A step -> this rank's part of it; None: this rank computes all rows."""
        ends = tuple({*self.config.eos_token_ids, *settings.eos_token_ids})
        sampler = Sampler(ends, self.model.ops)
        rows = max_logit_rows(self.config.vocab_size, self.device.type)
        self.outputs = OutputMaker(self.model, sampler, self.table, context, rows)
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
        self._experts = parallel_experts(layer.mlp for layer in self.model.layers)
        """Those that all ranks of the stage have in common."""
        self.rebalancer = self._make_rebalancer()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Applies `removed`, `new`, `block_copies` and runs `chunks`. A sequence that fails is in `errors`; anything
        raised means that the step failed as a whole and that this runner must not be used again."""
        with self.clock.step():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepOutput:
        output = StepOutput(plan.step_id)
        for seq_id in plan.removed:
            self.table.remove(seq_id)
        for new in plan.new:
            self.table.add(new)
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        if not plan.chunks:
            self._join()
            return output
        sequences = [self.table.extend(chunk) for chunk in plan.chunks]
        self._receive_tokens(plan.chunks, sequences)
        batch = build_batch(plan.chunks, sequences, self.table, self.settings.tokens_per_block)
        computed = self._forward(batch)
        sampling = batch.sampling
        if self.context.position.reads_outputs:
            self.outputs.score_prompts(batch, computed.hidden, output)
            self.outputs.sample(computed, sampling, output)
        if sampling and not self.samples:
            self._unreceived.append(sampling)
        if self.rebalancer is not None:
            self.rebalancer.after_step()
        return output

    def _join(self) -> None:
        """A step in which this part has no token: other parts' rows still come to its experts."""
        if self.context.position.dp_size == 1:
            return
        self.context.begin_step(0, self.settings.sequence_parallel_min_tokens)
        rows = torch.empty(0, self.config.hidden_size, dtype=self.model.ops.activation_dtype, device=self.device)
        expert_ids = torch.empty(0, 1, dtype=torch.int64, device=self.device)
        for experts in self._experts:
            experts(rows, expert_ids, expert_ids.float())
        if self.rebalancer is not None:
            self.rebalancer.after_step()

    def _make_rebalancer(self) -> ExpertRebalancer | None:
        if self.config.moe is None or not self._experts or not self.settings.expert_rebalance_interval:
            return None
        return ExpertRebalancer(
            self._experts, self.context, self.settings.expert_rebalance_interval, self.config.moe.num_groups
        )

    # --- the model ------------------------------------------------------------------------------------------------

    def _forward(self, batch: ForwardBatch) -> Computed:
        position = self.context.position
        striped = None if self._stripe is None else self._stripe(batch)
        rows = batch if striped is None else striped
        self.context.begin_step(rows.num_tokens, self.settings.sequence_parallel_min_tokens)
        received = None
        if not position.is_first_stage:
            shape = (self.context.rows.held, self.config.hidden_size)
            received = torch.empty(shape, dtype=self.model.ops.activation_dtype, device=self.device)
            with self.clock.waiting():
                self.context.receive_hidden(received)
        computed = self.captured.run(batch, received)
        if computed is None:
            step = self._place(rows)
            inputs = step.token_ids if received is None else received
            hidden = self.model.forward(inputs, self.pages, step.meta)
            computed = Computed(hidden, sample_rows=step.sample_rows)
            if not position.is_last_stage:
                self.context.send_hidden(hidden)
            elif striped is not None:
                computed = self._bring_for_head(striped, computed)
            elif self.context.rows.scattered:
                computed = self._gather_for_head(batch, computed)
        elif not position.is_last_stage:
            self.context.send_hidden(computed.hidden.clone())  # the next step may overwrite it before it is sent
        return computed

    def _gather_for_head(self, batch: ForwardBatch, computed: Computed) -> Computed:
        """The rows whose logits are asked for, on every rank: those that sample, or all where a prompt is scored."""
        assert computed.sample_rows is not None
        if any(sequence.sampling.prompt_logprobs is not None for sequence in batch.sequences):
            return Computed(self.context.whole_rows(computed.hidden), sample_rows=computed.sample_rows)
        return Computed(self.context.pick_rows(computed.hidden, computed.sample_rows))

    def _bring_for_head(self, striped: StripedBatch, computed: Computed) -> Computed:
        """The same rows of all context-parallel ranks, on the first of them."""
        batch = striped.batch
        if any(sequence.sampling.prompt_logprobs is not None for sequence in batch.sequences):
            every_row = np.arange(batch.num_tokens)
            hidden = striped.bring_rows(self.context, computed.hidden, every_row)
            return Computed(hidden, sample_rows=computed.sample_rows)
        return Computed(striped.bring_rows(self.context, computed.hidden, batch.sample_rows))

    def _place(self, batch: ForwardBatch | StripedBatch) -> PlacedStep:
        if isinstance(batch, StripedBatch):
            ids = batch.batch.token_ids
            if not 0 <= ids.min() <= ids.max() < self.config.vocab_size:  # a device would not notice
                raise IndexError(f"a token id of the step is not in [0, {self.config.vocab_size})")
            sample_rows = torch.from_numpy(batch.batch.sample_rows).to(self.device)
            return PlacedStep(*batch.tensors(self.device), sample_rows)
        if self._inputs is not None:
            return self._inputs.place(batch)
        return PlacedStep(*batch.tensors(self.device), torch.from_numpy(batch.sample_rows))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        sources, targets = pairs.to(self.device, non_blocking=True).unbind(1)
        for pages in self.pages:
            pages.copy_blocks(sources, targets)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Runs what steps may run. On all ranks at once: they meet in it."""
        for batch in warm_up_batches(self.settings):
            computed = self._forward(batch)
            if self.context.position.reads_outputs:
                self.outputs.warm_up(computed, len(batch.sample_rows))

    # --- tokens from elsewhere ------------------------------------------------------------------------------------

    def _receive_tokens(self, chunks: list[ScheduledChunk], sequences: list[LiveSequence]) -> None:
        """Waits for tokens sampled elsewhere until those that this plan feeds to the model are known."""
        while self._unreceived:
            known = all(c.start + c.num_tokens <= s.num_tokens for c, s in zip(chunks, sequences, strict=True))
            if known and len(self._unreceived) < self.context.token_backlog:
                return
            waiting = self._unreceived.popleft()
            with self.clock.waiting():
                token_ids = self.context.receive_tokens(len(waiting))
            for sequence, token_id in zip(waiting, token_ids, strict=True):
                self.table.append_token(sequence, token_id)


def rank_device(device: str, rank: int) -> torch.device:
    """The device of a rank: "cuda" alone is that rank's own GPU."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
