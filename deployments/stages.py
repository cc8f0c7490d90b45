"""How the stages of a request's way call each other, in one process or over Serve handles.

A stage is a class with async methods that take and return plain values. Colocated, its neighbour holds the object and
awaits the methods. Separate, the neighbour holds a `RemoteStage` that makes one unary handle call a method; errors
meant for a person come back as values then, because an exception that crosses a Ray call loses its type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

from shoal.configs.errors import EngineDeadError, OverloadedError, RateLimitError, ShoalError
from shoal.guardrails.verdicts import Verdict
from shoal.model_shards.engine.request import Request

if TYPE_CHECKING:
    from shoal.model_shards.engine.output import DeltaSink


@dataclass(frozen=True, slots=True)
class ChatJob:
    """What a chat template needs. `messages` are dicts as templates take them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    add_special_tokens: bool = False
    bad_words: list[str] | None = None


@dataclass(frozen=True, slots=True)
class PromptsJob:
    """Prompts of /v1/completions: texts to encode, or token ids to check."""

    prompts: list[str] | list[list[int]]
    add_special_tokens: bool
    decode: bool
    """Also give the text of prompts that came as token ids (for echo and for the input rail)."""
    bad_words: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """One entry a prompt; `texts` are the prompts' texts ("" for token ids that nobody asked to decode)."""

    token_ids: list[list[int]]
    texts: list[str]
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a gateway must know of the engine behind it. Fixed for the life of `instance_id`."""

    instance_id: str
    model_name: str
    max_model_len: int
    vocab_size: int
    fingerprint: str
    """OpenAI's `system_fingerprint`: equal values mean equal model, formats and software."""
    created: int
    data_plane_key: bytes
    """CURVE public key (Z85) with which its tokens come to a gateway in another process."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One look at the engine."""

    instance_id: str
    """Empty when the asking gateway is not attached (any more)."""
    alive: bool
    running: int
    """Sequences."""
    waiting: int
    live_requests: int
    """Requests that are accepted and not ended, of all gateways."""
    own_requests: frozenset[str]
    """Ids of those of the asking gateway."""
    seconds_since_step: float
    """Since a step ended, or the engine was last seen idle."""
    kv_blocks: int
    kv_blocks_free: int
    """Cached ones included."""

    def to_wire(self) -> list[Any]:
        return [
            self.instance_id,
            self.alive,
            self.running,
            self.waiting,
            self.live_requests,
            list(self.own_requests),
            self.seconds_since_step,
            self.kv_blocks,
            self.kv_blocks_free,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> EngineStatus:
        instance_id, alive, running, waiting, live, own, *rest = wire
        return cls(instance_id, alive, running, waiting, live, frozenset(own), *rest)


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a gateway in another process receives its tokens (deployments/data_plane.py)."""

    endpoint: str
    server_key: bytes
    """CURVE public key of the receiver, Z85."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which of several replicas a call is for; the router sees to it (deployments/router.py)."""

    to: str = ""
    """This one (the engine's `instance_id`). When it is gone, another one gets the call and answers EngineGoneError."""
    unlike: frozenset[str] = frozenset()
    """Any, but preferably none of these."""


class EngineGoneError(ShoalError):
    """The replica that was called takes no calls any more: it has died, or is being stopped."""

    status = 503
    code = "engine_gone"


class UnknownGatewayError(ShoalError):
    """The caller has not attached (this shard group has restarted); it should, and try again."""

    status = 503
    code = "unknown_gateway"


class EngineDirectory(Protocol):
    """Where a gateway learns of the engines it can send requests to."""

    may_grow: bool
    """An engine may come at any time, in place of one that was lost. False: those there are now are all."""

    async def find(self, known: frozenset[str]) -> tuple[EngineInfo, EngineStage] | None:
        """An engine whose `instance_id` is not among these; None when there is none now. Raises EngineDeadError when
        nobody answers."""


class TokenizerStage(Protocol):
    async def encode_chat(self, job: ChatJob) -> Encoded: ...
    async def encode_prompts(self, job: PromptsJob) -> Encoded: ...
    async def decode(self, token_ids: list[int]) -> str: ...
    async def vocabulary(self) -> tuple[list[bytes], frozenset[int]]: ...


class GuardStage(Protocol):
    async def check_input(self, texts: list[str]) -> Verdict: ...


class EngineStage(Protocol):
    async def describe(self) -> EngineInfo: ...
    async def attach(self, gateway_id: str, reply: ReplyAddress | DeltaSink) -> None: ...
    async def submit(self, gateway_id: str, requests: list[Request]) -> None: ...
    async def abort(self, request_ids: list[str]) -> None: ...
    async def heartbeat(self, gateway_id: str) -> EngineStatus: ...
    async def metrics_text(self) -> str: ...


class RemoteCallable:
    """Base of the stages: the one method that Serve handles call."""

    async def answer(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """(True, value), or (False, the error as plain values)."""
        if method.startswith("_"):
            raise AttributeError(method)
        try:
            return True, await getattr(self, method)(*args)
        except ShoalError as error:
            return False, error_to_wire(error)


class RemoteStage:
    """A stage behind a Serve handle: every attribute is its async method, called over the handle.

    Raises what the method raised when that is a ShoalError; EngineDeadError when the call itself fails or takes
    longer than `timeout_s`.
    """

    def __init__(self, handle: Any, name: str, timeout_s: float, route: Route | None = None) -> None:
        """`route`: for a stage that may have several replicas; its `answer` takes it as a third argument."""
        self._handle, self._name, self._timeout_s = handle, name, timeout_s
        self._more = () if route is None else (route,)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            try:
                response = self._handle.answer.remote(method, args, *self._more)
                ok, value = await asyncio.wait_for(response, self._timeout_s)
            except asyncio.CancelledError:
                raise
            except TimeoutError:
                raise EngineDeadError(f"{self._name} did not answer {method} in {self._timeout_s:g} s.") from None
            except Exception as error:
                message = f"{self._name} failed on {method}: {type(error).__name__}."
                raise EngineDeadError(message) from error
            if not ok:
                raise error_from_wire(value)
            return value

        return call


class OneEngine:
    """A directory of one engine that is here, and no other will come."""

    may_grow = False

    def __init__(self, engine: EngineStage) -> None:
        self._engine = engine

    async def find(self, known: frozenset[str]) -> tuple[EngineInfo, EngineStage] | None:
        info = await self._engine.describe()
        return None if info.instance_id in known else (info, self._engine)


class RemoteEngines:
    """A directory of the replicas behind a handle: asks the router for one that is not known yet."""

    may_grow = True

    def __init__(self, handle: Any, name: str, timeout_s: float) -> None:
        self._handle, self._name, self._timeout_s = handle, name, timeout_s

    async def find(self, known: frozenset[str]) -> tuple[EngineInfo, EngineStage] | None:
        info: EngineInfo = await self._stage(Route(unlike=known)).describe()
        if info.instance_id in known:
            return None
        return info, self._stage(Route(to=info.instance_id))

    def _stage(self, route: Route) -> Any:
        return RemoteStage(self._handle, self._name, self._timeout_s, route)


def error_to_wire(error: ShoalError) -> dict[str, Any]:
    return {
        "class": type(error).__name__,
        "message": error.message,
        "param": error.param,
        "code": error.code,
        "retry_after_s": getattr(error, "retry_after_s", None),
    }


def error_from_wire(wire: dict[str, Any]) -> ShoalError:
    known = {cls.__name__: cls for cls in _subclasses(ShoalError)}
    cls = known.get(wire["class"], ShoalError)
    if issubclass(cls, OverloadedError):
        return cls(wire["message"], retry_after_s=wire["retry_after_s"])
    if issubclass(cls, RateLimitError):
        return cls(wire["message"], retry_after_s=wire["retry_after_s"], param=wire["param"])
    return cls(wire["message"], param=wire["param"], code=wire["code"])


def _subclasses(cls: type[ShoalError]) -> list[type[ShoalError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in _subclasses(child))]


def package_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown"
