"""SmolLM2 through the whole engine: what a request gets does not depend on how it was scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.pacing import StepPacer
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.engine.policy import FirstComeFirstServed
from shoal.model_shards.engine.request import Request
from shoal.model_shards.engine.scheduler import Scheduler, SchedulerSettings
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.sampling.params import SamplingParams

if TYPE_CHECKING:
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = pytest.mark.real_model

BLOCK_SIZE = 16
NUM_BLOCKS = 500
TOPICS = [
    "volcanoes", "the sea", "a lighthouse", "bread", "prime numbers", "trains", "winter", "the moon", "honey bees",
    "chess", "a violin", "deserts", "glass", "rivers", "the alphabet", "ink", "owls", "salt", "maps", "clocks",
]  # fmt: skip
Outputs = dict[tuple[str, int], list[int]]


class _Borrowed(Executor):
    """The one executor of this module, lent to an engine: step ids go on, and what an engine leaves is cleared."""

    def __init__(self, executor: Executor) -> None:
        self.vocab_size = executor.vocab_size
        self.executor = executor
        self.known: set[int] = set()

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        self.known -= set(plan.removed)
        self.known |= {new.seq_id for new in plan.new}
        return self.executor.submit(plan)

    def close(self) -> None:
        self.executor.submit(StepPlan(0, removed=sorted(self.known))).result()


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelSource) -> Tokenizer:
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def executor(smollm2: ModelSource) -> Iterator[Executor]:
    from shoal.model_shards.executor.local import LocalExecutor
    from shoal.model_shards.runner.settings import RunnerSettings

    local = LocalExecutor(
        RunnerSettings(
            model=smollm2,
            device="cpu",
            dtype=torch.float32,
            kv_dtype=torch.float32,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS + 1,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            max_model_len=512,
            num_threads=2,
        )
    )
    yield local
    local.close()


class Lab:
    """Runs requests through engines of different make on the same ranks."""

    def __init__(self, kit: ModuleType, executor: Executor, tokenizer: Tokenizer) -> None:
        self.kit, self.executor, self.tokenizer = kit, executor, tokenizer
        self.engines: list[Engine] = []

    def engine(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        chunk: int | None = None,
        max_num_seqs: int = 64,
        target_s: float | None = None,
    ) -> Engine:
        """A cold cache, and nothing else on the ranks."""
        self.stop()
        settings = SchedulerSettings(
            max_num_seqs, 512, 512, frozenset(self.tokenizer.eos_token_ids), prefill_chunk_size=chunk
        )
        kv = KVCacheManager(num_blocks + 1, BLOCK_SIZE)
        pacer = None if target_s is None else StepPacer(target_s)
        scheduler = Scheduler(settings, kv, FirstComeFirstServed(), pacer)
        options = EngineSettings("smollm2-135m", AdmissionLimits(1000, 1_000_000), 120.0)
        engine = Engine(_Borrowed(self.executor), scheduler, self.tokenizer, options)
        engine.start()
        self.engines.append(engine)
        return engine

    def stop(self) -> None:
        while self.engines:
            engine = self.engines.pop()
            engine.shutdown()
            engine._scheduler.kv.check_integrity()
            assert engine.stats().kv_blocks_free == engine.stats().kv_blocks

    def run(self, engine: Engine, requests: list[Request]) -> Any:
        """The sink with everything that came."""
        sink = self.kit.Collector()
        for request in requests:
            engine.submit(request, sink)
        for request in requests:
            sink.wait(request.request_id, n=request.sampling.n, timeout=300)
        return sink

    def tokens(self, engine: Engine, requests: list[Request]) -> Outputs:
        sink = self.run(engine, requests)
        return {
            (request.request_id, index): sink.tokens(request.request_id, index)
            for request in requests
            for index in range(request.sampling.n)
        }


@pytest.fixture
def lab(kit: ModuleType, executor: Executor, tokenizer: Tokenizer) -> Iterator[Lab]:
    laboratory = Lab(kit, executor, tokenizer)
    yield laboratory
    laboratory.stop()


@pytest.fixture(scope="module")
def ask(tokenizer: Tokenizer) -> Callable[..., Request]:
    """ask(i, **sampling) -> a greedy request about the i-th topic, 8 tokens long unless told otherwise."""

    def make(index: int, name: str | None = None, **sampling: Any) -> Request:
        topic = TOPICS[index % len(TOPICS)]
        prompt = tokenizer.encode(f"Question {index}: tell me in one sentence what you know about {topic}.\nAnswer:")
        seed = sampling.pop("request_seed", index)
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        return Request(name or str(index), prompt, params, seed)

    return make


def test_greedy_is_the_same_alone_and_in_a_batch_of_64(lab: Lab, ask: Callable[..., Request]) -> None:
    together = lab.tokens(lab.engine(), [ask(i, max_tokens=6) for i in range(64)])
    alone = lab.engine()
    for index in range(0, 64, 8):
        assert lab.tokens(alone, [ask(index, max_tokens=6)])[str(index), 0] == together[str(index), 0]


def test_greedy_is_the_same_for_all_chunk_sizes(lab: Lab, ask: Callable[..., Request]) -> None:
    requests = [ask(i) for i in range(4)]
    whole = lab.tokens(lab.engine(), requests)
    for chunk in (1, 7, 16, 64):
        assert lab.tokens(lab.engine(chunk=chunk), requests) == whole


def test_greedy_is_the_same_however_short_steps_are_to_be(lab: Lab, ask: Callable[..., Request]) -> None:
    """Pieces of prompts come in whatever sizes the clock says."""
    requests = [ask(i, max_tokens=4 + 3 * i) for i in range(6)]
    whole = lab.tokens(lab.engine(), requests)
    for target_s in (1e-6, 0.06):
        engine = lab.engine(target_s=target_s, max_num_seqs=3)
        assert lab.tokens(engine, requests) == whole


def test_greedy_is_the_same_when_prompts_follow_each_other(lab: Lab, tokenizer: Tokenizer) -> None:
    shared = tokenizer.encode(" ".join(TOPICS * 3))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), [*shared, *tokenizer.encode(f" {topic}")], params, 0) for i, topic in enumerate(TOPICS)]
    together = lab.engine(chunk=32)
    sink = lab.run(together, requests[:8])
    cached = [sink.of(request.request_id)[-1].num_cached_tokens for request in requests[:8]]
    assert sorted(cached) == [0] + [len(shared) // BLOCK_SIZE * BLOCK_SIZE] * 7
    for request in requests[:8:3]:
        assert lab.run(lab.engine(), [request]).tokens(request.request_id) == sink.tokens(request.request_id)


def test_greedy_is_the_same_cold_and_from_the_prefix_cache(lab: Lab, ask: Callable[..., Request]) -> None:
    engine = lab.engine()
    cold = lab.run(engine, [ask(3)])
    warm = lab.run(engine, [ask(3)])
    assert cold.of("3")[-1].num_cached_tokens == 0
    assert warm.of("3")[-1].num_cached_tokens == BLOCK_SIZE
    assert warm.tokens("3") == cold.tokens("3")


def test_o17_greedy_is_the_same_in_a_starved_pool(lab: Lab, ask: Callable[..., Request], tokenizer: Tokenizer) -> None:
    text = " ".join(TOPICS * 4)
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), tokenizer.encode(text)[i : i + 40], params, 0) for i in range(6)]
    ample = lab.run(lab.engine(), requests)
    starved = lab.engine(num_blocks=24)
    crowded = lab.run(starved, requests)
    assert starved.stats().preemptions_total > 0
    for request in requests:
        name = request.request_id
        assert crowded.tokens(name) == ample.tokens(name)
        assert crowded.text(name) == ample.text(name)
        assert crowded.of(name)[-1].num_output_tokens == 80
    alone = lab.run(starved, requests[:1])
    assert alone.tokens("0") == ample.tokens("0")


def test_samples_that_were_forked_are_those_of_separate_prefills(lab: Lab, ask: Callable[..., Request]) -> None:
    request = ask(5, n=4, temperature=1.0, request_seed=42)
    forked = lab.tokens(lab.engine(), [request])
    assert len({tuple(tokens) for tokens in forked.values()}) > 1
    # One seat: no sibling can be forked, each prefills by itself when the one before it has ended.
    separate = lab.engine(max_num_seqs=1)
    assert lab.tokens(separate, [request]) == forked
    assert separate.stats().cached_prompt_tokens_total < 4 * len(request.prompt_token_ids)


def test_o15_a_seeded_request_does_not_depend_on_its_neighbours(lab: Lab, ask: Callable[..., Request]) -> None:
    mine = ask(0, "mine", max_tokens=16, temperature=0.8, request_seed=42)
    neighbour = ask(1, "neighbour", max_tokens=16, temperature=0.8, request_seed=7)
    others = [ask(i, max_tokens=3 + i, temperature=1.0) for i in range(2, 9)]
    alone = lab.tokens(lab.engine(), [mine])["mine", 0]
    assert lab.tokens(lab.engine(), [neighbour, mine])["mine", 0] == alone
    assert lab.tokens(lab.engine(chunk=7), [*others, mine])["mine", 0] == alone
    assert lab.tokens(lab.engine(num_blocks=8), [neighbour, mine])["mine", 0] == alone


def test_o16_prompt_logprobs_with_a_warm_cache(lab: Lab, tokenizer: Tokenizer) -> None:
    shared = tokenizer.encode(" ".join(TOPICS * 6))[:117]
    score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    first, second = tokenizer.encode(" one")[-1], tokenizer.encode(" two")[-1]
    cold = lab.run(lab.engine(), [Request("x", [*shared, second], score, 0)]).of("x")[0].prompt_logprobs
    engine = lab.engine(chunk=50)
    lab.run(engine, [Request("warm", [*shared, first], SamplingParams(max_tokens=1), 0)])
    sink = lab.run(engine, [Request("x", [*shared, second], score, 0)])
    warm = sink.of("x")[0].prompt_logprobs
    assert len(warm) == 118
    assert warm[0] is None
    assert [entry.token_id for entry in warm[1:]] == [*shared[1:], second]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(warm[1:], cold[1:], strict=True)) < 1e-4
    assert [entry.rank for entry in warm[1:]] == [entry.rank for entry in cold[1:]]


def test_greedy_text_of_20_prompts_is_that_of_transformers(
    lab: Lab, ask: Callable[..., Request], smollm2: ModelSource, tokenizer: Tokenizer
) -> None:
    oracle = _transformers_model(smollm2)
    requests = [ask(i, max_tokens=12, ignore_eos=False) for i in range(20)]
    sink = lab.run(lab.engine(chunk=16), requests)
    for request in requests:
        expected = _greedy(oracle, request.prompt_token_ids, 12, tokenizer.eos_token_ids)
        assert sink.tokens(request.request_id) == expected
        assert sink.text(request.request_id) == tokenizer.decode(expected)


def _transformers_model(source: ModelSource) -> Any:
    """transformers' Llama in fp32 on the same weights (that they are the file's is shown in models/test_smollm2.py)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.model_shards.weights.open import open_checkpoint

    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=True,
        )
    )
    weights = {name: checkpoint.read(name, torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


def _greedy(model: Any, prompt: list[int], max_tokens: int, eos_token_ids: tuple[int, ...]) -> list[int]:
    options = {"do_sample": False, "eos_token_id": list(eos_token_ids), "pad_token_id": eos_token_ids[0]}
    prompts = torch.tensor([prompt])
    output = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=max_tokens, **options)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
