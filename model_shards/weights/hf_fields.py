"""Typed access to a `config.json`: a value of the wrong type is an error that names the key, never a crash later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.configs.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Fields:
    """`defaults` are what transformers assumes for an absent key; a null counts as absent where a value is required."""

    raw: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        """Whether the file itself gives a value."""
        return self.raw.get(key) is not None

    def present(self, key: str) -> bool:
        """Whether there is a value: the file's, or the default unless the file says null."""
        return (self.raw[key] if key in self.raw else self.defaults.get(key)) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = self.defaults.get(key, default)
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(key, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; () when absent."""
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self.bad(key, value, "a token id or a list of token ids")
        return tuple(values)

    def bad(self, key: str, value: Any, expected: str) -> ModelLoadError:
        found = "missing" if value is None else f"{value!r:.100}"
        return ModelLoadError(f"{self.where}: {key} is {found}; expected {expected}.")
