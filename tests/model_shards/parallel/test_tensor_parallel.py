"""Four ranks share models out: the tokens, logits, bytes sent and bytes read, with and without sequence parallelism."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.open import open_checkpoint

TinyCheckpoint = Callable[..., Path]

SCATTERED = {"sequence_parallel_min_tokens": 8}  # the prompts' step, but not the decodes of four sequences
ALWAYS_SCATTERED = {"sequence_parallel_min_tokens": 1}
GREEDY = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)
"""All rows of the prompts' step get logits."""
MIXED = [
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2),
]

BIASED = ("llama", {"tie_word_embeddings": True, "vocab_size": 321, "attention_bias": True, "mlp_bias": True})
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biased": BIASED,  # biases everywhere, a tied table that is padded, two KV heads for four ranks
    "gemma3": ("gemma3", {"vocab_size": 323}),
    "qwen2": ("qwen2", {"hidden_size": 128, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
DENSE = ("biased", "gemma3", "qwen2")


@dataclass
class Ranks:
    """What each rank told, and what one rank alone gives."""

    kit: ModuleType
    results: list[dict[str, Any]]
    jobs: dict[str, Any]
    alone: dict[str, Any]

    def sampled(self, name: str) -> Any:
        """By the sampling rank."""
        job = self.jobs[name]
        return self.results[job.tp * (job.pp - 1)][name]

    def expected(self, name: str) -> Any:
        """Of the same job on one rank."""
        job = self.jobs[name]
        key = f"{job.paths[0]} {job.sampling} {job.changes.get('weights')}"
        if key not in self.alone:
            changes = {"weights": job.changes.get("weights", "dense")}
            self.alone[key] = self.kit.run(replace(job, tp=1, pp=1, changes=changes), ParallelContext.single())
        return self.alone[key]


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tensor_ranks", Path(__file__).with_name("tensor_ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["tensor_ranks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tensor_ranks"])
    return sys.modules["tensor_ranks"]


@pytest.fixture(scope="module")
def ranks(kit: ModuleType, tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Everything that the tests look at, by one start of four processes."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = {name: tiny_checkpoint(family, **overrides) for name, (family, overrides) in MODELS.items()}
    jobs = []
    for name, path in paths.items():
        jobs.append(kit.Job(f"{name}", [path], 4, sampling=[SCORED]))
        jobs.append(kit.Job(f"{name} scattered", [path], 4, changes=SCATTERED, sampling=[SCORED]))
        if name in DENSE:
            jobs.append(kit.Job(f"{name} stages", [path], 2, 2, sampling=[SCORED]))
            jobs.append(kit.Job(f"{name} stages scattered", [path], 2, 2, changes=SCATTERED, sampling=[SCORED]))
    jobs.append(kit.Job("greedy", [paths["biased"]], 4))
    jobs.append(kit.Job("greedy scattered", [paths["biased"]], 4, changes=ALWAYS_SCATTERED))
    jobs.append(kit.Job("mixed", [paths["gemma3"]], 4, changes=SCATTERED, sampling=MIXED))
    jobs.append(kit.Job("mixed stages", [paths["gemma3"]], 2, 2, sampling=MIXED))
    jobs.append(kit.Job("int8", [paths["qwen2"]], 4, changes={"weights": "int8", **SCATTERED}))
    padded = attractive_padding(tiny_checkpoint("llama", vocab_size=321), tmp_path_factory.mktemp("padded"))
    # Steps of which no row travels whole: rows that do are cut at the vocabulary, and with them those beside them.
    jobs.append(kit.Job("padding", [padded], 4))
    jobs.append(kit.Job("padding drawn", [padded], 4, sampling=MIXED[:1]))
    other = tiny_checkpoint("llama", seed=1)
    jobs.append(kit.Job("other files", [tiny_checkpoint("llama")] * 3 + [other], 4))
    jobs.sort(key=lambda job: (job.tp, job.pp))
    (directory / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    command = [sys.executable, str(Path(__file__).with_name("tensor_ranks.py"))]
    processes = [subprocess.Popen([*command, str(rank), str(directory)]) for rank in range(4)]
    try:
        assert [process.wait(300) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(4)]
    return Ranks(kit, results, {job.name: job for job in jobs}, {})


def attractive_padding(source: Path, directory: Path) -> Path:
    """An untied model whose every logit is far below 0, which is what the rows that pad its head give."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 100.0
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = -50.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    "name", ["greedy", "greedy scattered", "mixed", "mixed stages", "int8", "padding", "padding drawn"]
)
def test_tokens_are_those_of_one_rank(ranks: Ranks, name: str) -> None:
    assert ranks.sampled(name).tokens == ranks.expected(name).tokens
    assert sum(bool(result[name].tokens) for result in ranks.results) == 1


@pytest.mark.parametrize("model", MODELS)
def test_scattered_rows_give_the_tokens_of_one_rank(ranks: Ranks, model: str) -> None:
    for way in ("", " scattered", *([" stages", " stages scattered"] if model in DENSE else [])):
        assert ranks.sampled(model + way).tokens == ranks.expected(model + way).tokens, way


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(ranks: Ranks, model: str) -> None:
    from transformers import AutoModelForCausalLM

    path = ranks.jobs[model].paths[0]
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.cat([oracle(torch.tensor([prompt])).logits[0] for prompt in ranks.kit.PROMPTS])
    for way in ("", " scattered", *([" stages scattered"] if model in DENSE else [])):
        error = (ranks.sampled(model + way).logits - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, way


@pytest.mark.parametrize("model", MODELS)
def test_scattered_rows_have_the_bits_of_whole_ones(ranks: Ranks, model: str) -> None:
    """Sums are in the order of the ranks either way."""
    whole = ranks.sampled(model)
    assert torch.equal(ranks.sampled(f"{model} scattered").logits, whole.logits)
    if model in DENSE:
        stages = ranks.sampled(f"{model} stages").logits
        assert torch.equal(ranks.sampled(f"{model} stages scattered").logits, stages)


@pytest.mark.parametrize("model", MODELS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(ranks: Ranks, model: str) -> None:
    """Sums over four ranks included."""
    start, count = (len(prompt) for prompt in ranks.kit.PROMPTS[:2])
    for way in ("", " scattered"):
        result = ranks.sampled(model + way)
        assert torch.equal(result.alone, result.logits[start : start + count])


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_send_as_much_either_way(ranks: Ranks, model: str) -> None:
    for told in ranks.results:
        whole, scattered = told[model].prefill, told[f"{model} scattered"].prefill
        assert scattered["reduce_scatter"] + scattered["all_gather"] == whole["all_reduce"] > 0


@pytest.mark.parametrize("model", DENSE)
@pytest.mark.parametrize("stages", ["", " stages"])
def test_scattering_sends_what_the_sums_send(ranks: Ranks, model: str, stages: str) -> None:
    """A sum over the ranks is a reduce-scatter and an all-gather; between stages only shares travel."""
    for told in ranks.results:
        whole, scattered = told[f"{model}{stages}"].prefill, told[f"{model}{stages} scattered"].prefill
        assert whole["all_reduce"] > 0
        assert whole["reduce_scatter"] == whole["all_gather"] == scattered["all_reduce"] == 0
        if not stages:  # a stage that begins or ends with shares has one half of a sum more than of the other
            assert scattered["reduce_scatter"] + scattered["all_gather"] == whole["all_reduce"]
        assert scattered["send_hidden"] * 2 == whole["send_hidden"]
    for stage in [ranks.results] if not stages else [ranks.results[:2], ranks.results[2:]]:
        assert len({str(sorted(told[f"{model}{stages} scattered"].decode.items())) for told in stage[1:]}) == 1
    totals = [
        sum(told[f"{model}{stages}{way}"].prefill[operation] for told in ranks.results for operation in operations)
        for way, operations in (("", ["all_reduce"]), (" scattered", ["reduce_scatter", "all_gather"]))
    ]
    assert totals[0] == totals[1]


def test_only_rows_that_sample_come_together_for_the_head(ranks: Ranks) -> None:
    """Of 72 rows four sample: as a sum of four rows, rather than all rows gathered."""
    hidden, layers = 64 * 4, 3
    for told in ranks.results:
        sent = told["greedy scattered"].prefill
        assert sent["all_gather"] == 2 * layers * 3 * 18 * hidden
        assert sent["reduce_scatter"] == (2 * layers + 1) * 3 * 18 * hidden
        assert sent["all_reduce"] == 2 * 3 * 4 * hidden // 4


def test_greedy_rows_send_one_candidate_each(ranks: Ranks) -> None:
    steps = ranks.kit.NUM_TOKENS - 1
    for rank, told in enumerate(ranks.results):
        assert told["greedy"].decode["gather"] == (4 * 8 * steps if rank else 0)
        assert told["greedy"].prefill["gather"] == (4 * 8 if rank else 0)


@pytest.mark.parametrize("model", DENSE)
@pytest.mark.parametrize("stages", ["", " stages"])
def test_each_rank_reads_its_slices_only(ranks: Ranks, model: str, stages: str) -> None:
    """All ranks together read the file once; again only what several of them need whole."""
    job = ranks.jobs[model + stages]
    checkpoint = open_checkpoint(ranks.kit.driver.settings_for(job.paths[0]).model)
    config = checkpoint.config
    for name in checkpoint.names():
        copies = 1
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            copies = job.tp
        elif "k_proj" in name or "v_proj" in name:
            copies = max(1, job.tp // config.num_kv_heads)
        elif name == "model.embed_tokens.weight" and config.tie_embeddings and job.pp > 1:
            copies = 2  # the first stage embeds, the last has the head
        size = 4 * torch.Size(checkpoint.shape(name)).numel()
        read = [told[job.name].bytes_read[name] for told in ranks.results]
        assert sum(read) == copies * size, name
        if copies == 1:
            assert max(read) <= -(-size // job.tp) + 4 * config.hidden_size, name


def test_a_rank_with_other_files_is_named_before_anything_is_loaded(ranks: Ranks) -> None:
    for told in ranks.results:
        result = told["other files"]
        assert result.took_s < 10
        assert not result.bytes_read
        assert "The ranks do not load the same model" in result.refused
        assert "model.safetensors: rank 0 (tensor 0/4, stage 0/1) on " in result.refused
        assert "rank 3 (tensor 3/4, stage 0/1) on " in result.refused
        assert "rank 1" not in result.refused


def test_padding_would_win_if_it_could(ranks: Ranks) -> None:
    """The model of the padding test is what it claims to be."""
    assert ranks.expected("padding").logits.max() < -50.0
