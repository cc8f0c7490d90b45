"""A request goes on in another engine from prompt and outputs, and nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.configs.errors import EngineDeadError, InvalidRequestError
from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.detokenizer import Detokenizer, Piece
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.plan import StepOutput, StepPlan, TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta, ResumedOutput
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.sampling.params import SamplingParams

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

Choice = tuple[str, list[int], list[TokenLogprobs], FinishReason | None, Any, int]
"""Text, tokens, logprobs, end, what ended it, tokens counted."""


# --- the detokenizer ----------------------------------------------------------------------------------------------


class Tokens:
    """A vocabulary made up as it goes: each piece of bytes is a token; 0 is special."""

    special_token_ids = frozenset({0})

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"<|special|>", *pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[i] for i in token_ids if i or not skip_special_tokens).decode(errors="replace")


def emit(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[Piece]:
    """What each token gives, and the flush, unless a stop string comes before."""
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.feed(token_id, TokenLogprobs(token_id, -1.0, 1, [])))
        if pieces[-1].stop is not None:
            return pieces
    return [*pieces, detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab😀é ", min_size=1, max_size=14),
    st.lists(st.integers(0, 60), max_size=12),
    st.lists(st.text("ab😀", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_a_detokenizer_that_replays_goes_on_where_the_other_stopped(
    text: str, borders: list[int], stops: list[str], include: bool
) -> None:
    """Whatever was held back at the moment of the loss: half a character, the beginning of a stop string, both."""
    data = text.encode()
    cuts = sorted({0, len(data), *(border % (len(data) + 1) for border in borders)})
    tokens = Tokens([data[a:b] for a, b in pairwise(cuts)])
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    ids = [token_id for i in range(1, len(tokens.pieces)) for token_id in ((i, 0) if i % 3 == 0 else (i,))]
    whole = emit(Detokenizer(tokens, sampling), ids)
    for lost_after in range(len(whole)):
        seen = whole[:lost_after]
        shown = [token_id for piece in seen for token_id in piece.token_ids]
        resumed = Detokenizer(tokens, sampling)
        resumed.replay(shown)
        rest = emit(resumed, ids[len(shown) :])
        for name in ("text", "token_ids", "logprobs"):
            joined = [item for piece in (*seen, *rest) for item in getattr(piece, name)]
            assert joined == [item for piece in whole for item in getattr(piece, name)]
        assert rest[-1].stop == whole[-1].stop


# --- the engine on ranks that compute nothing ---------------------------------------------------------------------


class Client:
    """What reaches a client: all deltas but those with which an engine gives up."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.deltas: list[RequestDelta] = []

    def take(self, deltas: Sequence[RequestDelta]) -> None:
        self.deltas += [delta for delta in deltas if delta.finish_reason is not FinishReason.ABORT]

    def choice(self, index: int) -> Choice:
        mine = [delta for delta in self.deltas if delta.index == index]
        return (
            "".join(delta.text for delta in mine),
            [token_id for delta in mine for token_id in delta.token_ids],
            [entry for delta in mine for entry in delta.logprobs],
            mine[-1].finish_reason if mine else None,
            mine[-1].stop_reason if mine else None,
            mine[-1].num_output_tokens if mine else 0,
        )

    def answer(self) -> list[Choice]:
        return [self.choice(index) for index in range(self.request.sampling.n)]

    @property
    def done(self) -> bool:
        return all(choice[3] is not None for choice in self.answer())

    def rest(self) -> Request:
        """The request with which the next engine goes on."""
        resumed = tuple(ResumedOutput(choice[1], choice[3] is not None) for choice in self.answer())
        sampling = self.request.sampling
        if any(delta.prompt_logprobs is not None for delta in self.deltas):
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.request, sampling=sampling, resumed=resumed)


@pytest.fixture
def make(kit: ModuleType) -> Iterator[Callable[[], Engine]]:
    """A started engine on fake ranks that takes a step whenever its executor is released."""
    engines: list[Engine] = []

    def build() -> Engine:
        scheduler = kit.make_scheduler(num_blocks=60, max_num_batched_tokens=16)
        executor = kit.FakeExecutor(kit.ranks_for(scheduler), hold=True)
        settings = EngineSettings("fake", AdmissionLimits(1000, 100_000), 20.0)
        engines.append(Engine(executor, scheduler, kit.ByteTokenizer(), settings))
        engines[-1].start()
        return engines[-1]

    yield build
    for engine in engines:
        engine._executor.release(1000)  # type: ignore[attr-defined]
        engine.shutdown()
        engine._scheduler.kv.check_integrity()
        assert engine.stats().kv_usage == 0


def run(kit: ModuleType, engine: Engine, request: Request, steps: int | None) -> list[RequestDelta]:
    """All deltas of a request; the engine fails after so many steps, or does not."""
    sink = kit.Collector()
    executor: Any = engine._executor
    executor.break_at = steps
    engine.submit(request, sink)
    executor.release(1000)
    for index in request.open_indices:
        sink.wait_until(lambda index=index: sink.reason(request.request_id, index))
    return list(sink.deltas)


SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 24},
    {"max_tokens": 24, "n": 3, "ignore_eos": True},
    {"max_tokens": 30, "n": 3, "logprobs": 0},
    {"max_tokens": 30, "ignore_eos": True, "stop": ("\x07", "\x05\x06")},
    {"max_tokens": 30, "ignore_eos": True, "stop": ("\x0b", "\x10"), "n": 2, "include_stop_str_in_output": True},
    {"max_tokens": 20, "min_tokens": 10, "stop_token_ids": (3, 9), "n": 2},
    {"max_tokens": 12, "prompt_logprobs": 0, "n": 2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: ",".join(sampling))
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_dies_at_any_moment_is_not_felt(
    kit: ModuleType, make: Callable[[], Engine], sampling: dict[str, Any], seed: int
) -> None:
    """Lost several times over; the samples of a request are then at different places, and some have ended."""
    rng = random.Random(seed)
    request = kit.make_request("r", rng.choices(range(40), k=rng.randint(1, 30)), seed=seed, **sampling)
    undisturbed, client = Client(request), Client(request)
    undisturbed.take(run(kit, make(), request, None))
    losses = 0
    while not client.done:
        steps = rng.randint(1, 9) if losses < 3 else None
        client.take(run(kit, make(), client.rest() if losses else request, steps))
        losses += 1
    assert client.answer() == undisturbed.answer()
    scores = [delta.prompt_logprobs for delta in client.deltas if delta.prompt_logprobs is not None]
    assert scores == [delta.prompt_logprobs for delta in undisturbed.deltas if delta.prompt_logprobs is not None]


def test_a_shutdown_gives_requests_back_in_the_same_way(kit: ModuleType, make: Callable[[], Engine]) -> None:
    request = kit.make_request("r", [1, 2, 3], max_tokens=40, ignore_eos=True)
    engine, sink = make(), kit.Collector()
    engine.submit(request, sink)
    engine._executor.release(6)  # type: ignore[attr-defined]
    sink.wait_until(lambda: len(sink.tokens("r")) >= 3)
    engine._executor.release(2)  # type: ignore[attr-defined]
    engine.shutdown()
    assert sink.reason("r") is FinishReason.ABORT
    client = Client(request)
    client.take(sink.deltas)
    client.take(run(kit, make(), client.rest(), None))
    assert client.choice(0)[1] == kit.unbatched(request, 0, 40)


def test_only_what_is_new_is_counted(kit: ModuleType, make: Callable[[], Engine]) -> None:
    request = kit.make_request("r", [1, 2, 3], max_tokens=10, ignore_eos=True)
    tokens = kit.unbatched(request, 0, 10)
    engine = make()
    deltas = run(kit, engine, replace(request, resumed=(ResumedOutput(tokens[:7]),)), None)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens[7:]
    assert [delta.num_output_tokens for delta in deltas if delta.token_ids] == [8, 9, 10]
    assert engine.stats().output_tokens_total == 3


@pytest.mark.parametrize(
    "resumed",
    [
        (ResumedOutput([1]),),
        (ResumedOutput([1], True), ResumedOutput([2], True)),
        (ResumedOutput([1]), ResumedOutput([50])),
        (ResumedOutput([1]), ResumedOutput([1] * 8)),
    ],
)
def test_outputs_that_a_request_cannot_have_had_are_refused(
    kit: ModuleType, make: Callable[[], Engine], resumed: tuple[ResumedOutput, ...]
) -> None:
    request = replace(kit.make_request("r", [1], n=2, max_tokens=8), resumed=resumed)
    with pytest.raises(InvalidRequestError) as refused:
        make().submit(request, kit.Collector())
    assert refused.value.param in ("resumed", None)


def test_a_resumed_request_survives_the_wire(kit: ModuleType) -> None:
    request = replace(kit.make_request("r", [1], n=2), resumed=(ResumedOutput([4, 5]), ResumedOutput([], True)))
    assert Request.from_wire(request.to_wire()) == request
    assert request.open_indices == [0]


# --- a real model -------------------------------------------------------------------------------------------------

REAL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "seeded samples": {"temperature": 0.9, "top_p": 0.95, "n": 3, "logprobs": 2},
    "stop string": {"temperature": 0.0, "stop": ("wh", ".\n\n")},
}


class Mortal(Executor):
    """Runs so many steps and then fails, as ranks that are killed do."""

    def __init__(self, executor: Executor, steps: int) -> None:
        self.vocab_size = executor.vocab_size
        self._executor, self._steps = executor, steps

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        if plan.step_id < self._steps:
            return self._executor.submit(plan)
        future: Future[StepOutput] = Future()
        future.set_exception(EngineDeadError("killed"))
        return future

    def close(self) -> None:
        self._executor.close()


@pytest.mark.real_model
def test_smollm2_goes_on_in_another_engine(kit: ModuleType, smollm2: ModelSource) -> None:
    from shoal.configs.schema import EngineConfig
    from shoal.model_shards.engine.build import build_engine

    config = EngineConfig(model=str(smollm2.path), max_model_len=256, max_num_seqs=16, kv_cache_memory="64MiB")
    engines = [build_engine(config) for _ in range(2)]
    first, second = engines
    first._executor = Mortal(first._executor, steps=12)
    for engine in engines:
        engine.start()
    try:
        prompt = first.tokenizer.encode("The three things I like about the sea are")
        requests = [
            Request(name, prompt, SamplingParams(max_tokens=24, ignore_eos=True, **fields), seed=5)
            for name, fields in REAL.items()
        ]
        whole, cut = kit.Collector(), kit.Collector()
        for request in requests:
            second.submit(request, whole)
        for request in requests:
            whole.wait(request.request_id, request.sampling.n, timeout=120.0)
        for request in requests:
            first.submit(request, cut)
        for request in requests:
            cut.wait(request.request_id, request.sampling.n, timeout=120.0)
        clients = {request.request_id: Client(request) for request in requests}
        for name, client in clients.items():
            client.take([delta for delta in cut.deltas if delta.request_id == name])
        rests = kit.Collector()
        for client in clients.values():
            if not client.done:
                second.submit(client.rest(), rests)
        for name, client in clients.items():
            for index in client.rest().open_indices:
                rests.wait_until(lambda name=name, index=index: rests.reason(name, index), timeout=120.0)
            client.take([delta for delta in rests.deltas if delta.request_id == name])
            undisturbed = Client(client.request)
            undisturbed.take([delta for delta in whole.deltas if delta.request_id == name])
            assert client.answer() == undisturbed.answer()
        assert {delta.request_id for delta in rests.deltas} >= {"greedy", "penalties", "seeded samples"}
    finally:
        for engine in engines:
            engine.shutdown()
