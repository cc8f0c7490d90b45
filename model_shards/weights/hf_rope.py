"""Rotary settings of a `config.json`: `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (5)."""

from __future__ import annotations

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
}
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling | None
    local_theta: float | None


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
    scaling = _scaling(fields, source, key)
    return Rope(_theta(fields, source, "rope_theta", DEFAULT_THETA), scaling, None)


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
    kind = source.get("rope_type") or source.get("type") or "default"
    if kind not in _KEYS:
        raise ModelLoadError(
            f"{inner.where}: rope_type {kind!r} is not supported. Supported: {', '.join(sorted(_KEYS))}."
        )
    if source.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(
            f"{inner.where}: partial_rotary_factor {source['partial_rotary_factor']} is not supported."
        )
    unknown = {name for name in source.keys() - _ALWAYS - _KEYS[kind] if source[name] is not None}
    if kind == "default":
        return None  # transformers reads nothing else for this kind
    if unknown:
        raise ModelLoadError(f"{inner.where}: {sorted(unknown)} is not supported with rope_type {kind!r}.")
    if kind == "linear":
        return RopeScaling("linear", factor=inner.number("factor"))
    return RopeScaling(
        "llama3",
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position=inner.integer("original_max_position_embeddings"),
    )


def _mapping(fields: Fields, key: str) -> Mapping[str, Any] | None:
    value = fields.raw.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.bad(key, value, "an object")
    return value
