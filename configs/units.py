"""Bytes as people write them."""

from __future__ import annotations

import re

from shoal.configs.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + "ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{prefix + "b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str | int, *, param: str | None = None) -> int:
    """ "512MiB", "1.5 GiB", "2GB", "4096" or a number of bytes -> bytes. KiB .. TiB are powers of 1024, kB .. TB of
    1000. Raises ConfigError (naming `param`) for anything else, and for 0."""
    if isinstance(text, int) and not isinstance(text, bool):
        count = text
    else:
        match = _PATTERN.fullmatch(str(text))
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(
                f"{text!r} is not a size; write for example 512MiB, 1.5GiB or a number of bytes.", param=param
            )
        count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if count <= 0:
        raise ConfigError(f"A size must be greater than 0 bytes; got {text!r}.", param=param)
    return count


def format_bytes(count: int) -> str:
    """Four significant digits at most, in powers of 1024: "512 B", "46.08 KiB", "1.5 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5:
            return f"{value:.4g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB" if abs(value) < 1000 else f"{value:,.0f} TiB"
