"""Settings of the whole application graph: what `serve deploy` YAML holds under `args`.

Each part receives its own section, never the tree. Unknown keys are refused anywhere.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.configs.schema import Bytes, EngineConfig

MIB = 1 << 20


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RequestLimits(Section):
    """What one HTTP request may ask for; more is a 4xx that names the field."""

    max_body_bytes: int = Field(default=8 * MIB, gt=0)
    max_json_depth: int = Field(default=32, ge=4, le=200)
    max_messages: int = Field(default=4096, gt=0)
    max_tools: int = Field(default=256, gt=0)
    max_stop: int = Field(default=16, gt=0, le=16)
    max_n: int = Field(default=64, gt=0, le=128)
    max_prompts: int = Field(default=256, gt=0)
    max_choices: int = Field(default=256, gt=0)
    """Of one request: prompts times n."""
    max_prompt_chars: int = Field(default=4 * MIB, gt=0)
    """Of one prompt, after the chat template."""


class GatewayConfig(Section):
    """The HTTP side. Times are in seconds."""

    limits: RequestLimits = RequestLimits()
    request_timeout_s: float = Field(default=1800.0, gt=0)
    """A request that runs longer is aborted and told so."""
    progress_timeout_s: float = Field(default=60.0, gt=0)
    """An engine that has work and finishes no step for so long counts as hung: readiness goes, its streams end."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Between two looks at the engine's health."""
    max_continuations: int = Field(default=3, ge=0)
    """How often a request whose engine was lost goes on in another one, or in the one that takes its place, from the
    prompt and what it has given so far. 0: it ends with an error. Colocated stages have no other engine."""
    continuation_timeout_s: float = Field(default=60.0, gt=0)
    """While no engine is ready, such a request waits so long; then it ends with an error."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """A client that takes nothing off its socket for so long is treated as gone."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """A stream that waits for its next token sends an SSE comment this often, so that nothing between us and the
    client takes the silence for death."""
    drain_s: float = Field(default=30.0, ge=0)
    """At shutdown, how long running requests may go on."""
    max_ongoing_requests: int = Field(default=4096, gt=0)
    """Per gateway replica; the engine's own queue limits answer long before."""


class TokenizerConfig(Section):
    threads: int = Field(default=2, gt=0, le=64)
    """Long texts are rendered and encoded there, never on an event loop."""
    max_pending: int = Field(default=1024, gt=0)
    """Requests waiting for a thread; more are answered with 503."""


class GuardConfig(Section):
    """Rails. Without a rule pack the stage passes everything on."""

    deny_list: Path | None = None
    """A file of regular expressions, one a line; see `guardrails/denylist.py`."""
    check_input: bool = True
    check_output: bool = True
    max_hold_back_chars: int = Field(default=512, gt=0, le=65536)
    """How much of a stream may wait because it could still become a match; a longer candidate counts as one."""
    timeout_ms: float = Field(default=50.0, gt=0)
    """Of one search; a pattern that takes longer blocks (fails closed) and is counted."""


class WiringConfig(Section):
    """Where the stages run: all in the gateway's process, or each in a deployment of its own."""

    mode: Literal["colocated", "separate"] = "colocated"
    data_plane_host: str = "127.0.0.1"
    """Address on which a gateway receives tokens when the stages are separate; the shard groups connect to it."""
    allow_remote: bool = False
    """Must be true for a `data_plane_host` other than loopback."""
    call_timeout_s: float = Field(default=30.0, gt=0)
    """Of one unary call between stages."""
    gateway_lease_s: float = Field(default=15.0, gt=0)
    """A shard group aborts the requests of a gateway that it has not heard of for so long."""

    @field_validator("data_plane_host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        ipaddress.ip_address(host)
        return host


class PlacementConfig(Section):
    """How the ranks of a model are laid out over the nodes of a cluster; see `deployments/placement.py`."""

    tensor_parallel_across_nodes: bool = False
    """Tensor-parallel ranks talk after every matrix, so they stay on one node, or the model is refused; true: they may
    be on several."""
    stages_on_separate_nodes: bool = False
    """Each pipeline stage whole on a node of its own. False: on as few nodes as Ray can find room on."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """CPUs (Ray's, logical) that a rank holds."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """Of the cluster that this file is for, so that it can be checked elsewhere. None: what is found."""
    gpu_memory: Bytes | None = None
    """Free on each of those GPUs. None: what is found, or else not checked."""
    nodes: int | None = Field(default=None, ge=1)
    """Of that cluster. None: what is found, or else as many as are needed."""


class AppConfig(Section):
    engine: EngineConfig
    gateway: GatewayConfig = GatewayConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    guard: GuardConfig = GuardConfig()
    wiring: WiringConfig = WiringConfig()
    placement: PlacementConfig = PlacementConfig()
