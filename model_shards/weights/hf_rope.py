"""Rotary settings of a `config.json`: `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import Family, RopeScaling
from shoal.model_shards.weights.hf_fields import Fields

DEFAULT_THETA = 10_000.0
GEMMA_THETA, GEMMA_LOCAL_THETA = 1_000_000.0, 10_000.0

# Every key each kind of scaling reads; anything else in the object is refused.
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"}
    ),
}
_DEEPSEEK_ONLY = frozenset({"yarn"})
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling | None
    local_theta: float | None
    softmax_factor: float = 1.0
    """DeepSeek's YaRN multiplies attention's scores by it, beside what it does to cosines and sines."""


def parse_rope(fields: Fields, family: Family) -> Rope:
    """Raises ModelLoadError for a kind of scaling, or a key inside it, that is not supported."""
    new, old = _mapping(fields, "rope_parameters"), _mapping(fields, "rope_scaling")
    if new and old and new != old:
        raise ModelLoadError(f"{fields.where}: rope_parameters and rope_scaling contradict each other; remove one.")
    source = new or old or {}
    key = "rope_parameters" if new else "rope_scaling"
    if family == "gemma3":
        return _gemma(fields, source, key)
    if source.keys() & _LAYER_KINDS:
        raise ModelLoadError(f"{fields.where}: {key} by kind of layer is not supported for {family}.")
    theta = _theta(fields, source, "rope_theta", DEFAULT_THETA)
    if family == "deepseek_v3" and _kind(source) == "yarn":
        return _yarn(fields, source, key, theta)
    return Rope(theta, _scaling(fields, source, key), None)


def _yarn(fields: Fields, source: Mapping[str, Any], key: str, theta: float) -> Rope:
    """YaRN as DeepSeek's models have it (Peng et al. 2023, arXiv:2309.00071, with magnitudes of its own)."""
    inner = Fields(source, {"beta_fast": 32, "beta_slow": 1}, f"{fields.where}: {key}")
    _refuse_unknown(inner, source, "yarn")
    factor = inner.number("factor")
    mscale, all_dims = (inner.number(name) if source.get(name) else None for name in ("mscale", "mscale_all_dim"))
    amplitude = _magnitude(factor, 1.0)
    if mscale is not None and all_dims is not None:
        amplitude = _magnitude(factor, mscale) / _magnitude(factor, all_dims)
    scaling = RopeScaling(
        "yarn",
        factor=factor,
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
        original_max_position=inner.integer("original_max_position_embeddings"),
        amplitude=amplitude,
    )
    return Rope(theta, scaling, None, 1.0 if all_dims is None else _magnitude(factor, all_dims) ** 2)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _gemma(fields: Fields, source: Mapping[str, Any], key: str) -> Rope:
    """Two rotary tables: scaled for the layers that see everything, plain for those with a window."""
    wide, local = source, dict[str, Any]()
    if source.keys() & _LAYER_KINDS:
        unknown = source.keys() - _LAYER_KINDS
        if unknown:
            raise ModelLoadError(f"{fields.where}: {key} has {sorted(unknown)}, which is not supported.")
        wide, local = source.get("full_attention") or {}, source.get("sliding_attention") or {}
    if _scaling(fields, local, f"{key}.sliding_attention") is not None:
        raise ModelLoadError(f"{fields.where}: scaled rotary positions in sliding layers are not supported.")
    return Rope(
        _theta(fields, wide, "rope_theta", GEMMA_THETA),
        _scaling(fields, wide, key),
        _theta(fields, local, "rope_local_base_freq", GEMMA_LOCAL_THETA),
    )


def _theta(fields: Fields, source: Mapping[str, Any], flat_key: str, default: float) -> float:
    inner = Fields(source, {}, fields.where)
    return inner.number("rope_theta") if inner.has("rope_theta") else fields.number(flat_key, default)


def _scaling(fields: Fields, source: Mapping[str, Any], key: str) -> RopeScaling | None:
    inner = Fields(source, {}, f"{fields.where}: {key}")
    kind = _kind(source)
    supported = _KEYS.keys() - _DEEPSEEK_ONLY
    if kind not in supported:
        raise ModelLoadError(
            f"{inner.where}: rope_type {kind!r} is not supported. Supported: {', '.join(sorted(supported))}."
        )
    if source.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(
            f"{inner.where}: partial_rotary_factor {source['partial_rotary_factor']} is not supported."
        )
    if kind == "default":
        return None  # transformers reads nothing else for this kind
    _refuse_unknown(inner, source, kind)
    if kind == "linear":
        return RopeScaling("linear", factor=inner.number("factor"))
    return RopeScaling(
        "llama3",
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position=inner.integer("original_max_position_embeddings"),
    )


def _kind(source: Mapping[str, Any]) -> Any:
    return source.get("rope_type") or source.get("type") or "default"


def _refuse_unknown(inner: Fields, source: Mapping[str, Any], kind: str) -> None:
    unknown = {name for name in source.keys() - _ALWAYS - _KEYS[kind] if source[name] is not None}
    if unknown:
        raise ModelLoadError(f"{inner.where}: {sorted(unknown)} is not supported with rope_type {kind!r}.")


def _mapping(fields: Fields, key: str) -> Mapping[str, Any] | None:
    value = fields.raw.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.bad(key, value, "an object")
    return value
