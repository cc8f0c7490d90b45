"""The field's baseline: transformers' `generate` over batches of padded prompts, one batch after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from shoal.deployments.bench.records import RequestRecord
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import resolve_model

PAD = 0
"""Masked, so any token will do."""

Job = tuple[list[int], int]
"""(prompt, how many tokens are wanted)."""


class StaticBatching:
    """SmolLM2 in float32, as transformers computes it. A batch ends when its longest answer does: until then nobody new
    begins, and whoever is finished is computed along."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        checkpoint = open_checkpoint(resolve_model(model))
        found = checkpoint.config
        config = LlamaConfig(
            vocab_size=found.vocab_size,
            hidden_size=found.hidden_size,
            intermediate_size=found.intermediate_size,
            num_hidden_layers=found.num_layers,
            num_attention_heads=found.num_heads,
            num_key_value_heads=found.num_kv_heads,
            max_position_embeddings=found.max_position,
            rms_norm_eps=found.rms_eps,
            rope_theta=found.rope_theta,
            tie_word_embeddings=True,
            eos_token_id=None,  # answers have the length that was asked for
        )
        self._model = LlamaForCausalLM(config).eval()
        weights = {name: checkpoint.read(name, torch.float32) for name in checkpoint.names()}
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unexpected, unexpected
        self._model.tie_weights()

    def run(self, jobs: Sequence[Job], slots: int) -> list[RequestRecord]:
        """All jobs are due now. A token counts as delivered when it is computed, as if it were streamed."""
        due, records = time.perf_counter(), []
        for begin in range(0, len(jobs), slots):
            records += self._batch(jobs[begin : begin + slots], due)
        return records

    def _batch(self, jobs: Sequence[Job], due: float) -> list[RequestRecord]:
        sent, longest = time.perf_counter(), max(len(prompt) for prompt, _ in jobs)
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt, _ in jobs])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in jobs])
        clock = _Clock()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(wanted for _, wanted in jobs),
                do_sample=False,
                pad_token_id=PAD,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return [_record(prompt, wanted, clock.times, due, sent) for prompt, wanted in jobs]


class _Clock(StoppingCriteria):
    """Sees every step of `generate`, and never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _record(prompt: list[int], wanted: int, times: list[float], due: float, sent: float) -> RequestRecord:
    record = RequestRecord(wanted, due, sent=sent, end=times[wanted - 1], token_times=times[:wanted])
    record.input_tokens, record.output_tokens = len(prompt), wanted
    return record
