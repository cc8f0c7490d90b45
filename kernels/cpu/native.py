"""The native unit's functions, by ctypes. A call costs about a microsecond; ctypes releases the GIL while it runs."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.kernels.cpu.build import NativeUnavailableError, build

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

# Parameters in the order of the C declarations (see the .cpp files, which say what each is).
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack_weight": (_P, _I, _L, _L, _P, _I),
    "weight_rows": (_P, _I, _L, _P, _L, _P, _I),
    "linear": (_P, _L, _P, _I, _P, _P, _L, _L, _L, _I),
    "head_linear": (_P, _L, _P, _I, _P, _L, _L, _L, _L, _I),
    "pack_quantized": (_I, _P, _P, _P, _L, _L, _P, _I),
    "quantized_rows": (_I, _P, _L, _P, _L, _P, _I),
    "quantized_linear": (_I, _P, _L, _P, _P, _P, _L, _L, _L, _L, _I),
    "grouped_linear": (_P, _L, _P, _I, _P, _L, _P, _L, _L, _I),
    "grouped_quantized_linear": (_I, _P, _L, _P, _P, _L, _P, _L, _L, _I),
    "choose_experts": (_P, _P, _L, _L, _L, _L, _L, _I, _I, _F, _P, _P, _I),
    "group_rows": (_P, _L, _L, _P, _L, _L, _L, _P, _P, _P, _I),
    "combine_experts": (_P, _L, _P, _P, _L, _L, _P, _I),
    "rms_norm": (_P, _L, _P, _L, _P, _F, _P, _P, _L, _L, _I),
    "head_rms_norm": (_P, _L, _P, _F, _P, _L, _L, _L, _I),
    "rotary": (_P, _L, _L, _P, _L, _L, _P, _P, _L, _L, _I),
    "gated": (_P, _L, _I, _P, _L, _L, _I),
    "store_kv": (_P, _L, _P, _L, _P, _P, _I, _P, _L, _L, _L, _L, _I),
    "sample": (_P, _L, _P, _L, _L, _P, _P, _I),
    "paged_attention": (_P, _P, _P, _I, _P, _P, _P, _P, _F, _P, _P, _L, _I),
    "merge_attention": (_P, _L, _P, _L, _P, _L, _P, _L, _L, _L, _I),
    "rotary_store_latent": (_P, _L, _P, _L, _P, _F, _P, _P, _P, _I, _P, _L, _P, _I),
    "mla_attention": (_P, _P, _L, _P, _I, _P, _P, _P, _P, _F, _P, _L, _I),
    "run_program": (_P, _L),
    "add": (_P, _P, _P, _L),
    "scale": (_P, _F, _P, _L),
    "take_rows": (_P, _I, _L, _P, _L, _P),
    "widen": (_P, _P, _L),
}


class Native:
    """A loaded library: one attribute a function, and `panel_outputs`, the width of a packed panel. `replayable`: the
    functions that a program may call, each with the address of its `SHOAL_REPLAYABLE`."""

    pack_weight: Callable[..., None]
    weight_rows: Callable[..., None]
    linear: Callable[..., None]
    head_linear: Callable[..., None]
    pack_quantized: Callable[..., None]
    quantized_rows: Callable[..., None]
    quantized_linear: Callable[..., None]
    grouped_linear: Callable[..., None]
    grouped_quantized_linear: Callable[..., None]
    choose_experts: Callable[..., None]
    group_rows: Callable[..., None]
    combine_experts: Callable[..., None]
    rms_norm: Callable[..., None]
    head_rms_norm: Callable[..., None]
    rotary: Callable[..., None]
    gated: Callable[..., None]
    store_kv: Callable[..., None]
    sample: Callable[..., None]
    paged_attention: Callable[..., None]
    merge_attention: Callable[..., None]
    rotary_store_latent: Callable[..., None]
    mla_attention: Callable[..., None]
    run_program: Callable[..., None]
    add: Callable[..., None]
    scale: Callable[..., None]
    take_rows: Callable[..., None]
    widen: Callable[..., None]

    def __init__(self, library: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise NativeUnavailableError(f"the native unit could not be loaded: {error}") from error
        self.signatures = _SIGNATURES
        self.replayable: dict[str, int] = {}
        for name, parameters in _SIGNATURES.items():
            function = getattr(loaded, f"shoal_{name}")
            function.argtypes, function.restype = parameters, None
            setattr(self, name, function)
            if hasattr(loaded, f"shoal_replay_{name}"):
                self.replayable[name] = _address(getattr(loaded, f"shoal_replay_{name}"))
        self.panel_outputs = int(loaded.shoal_panel_outputs())
        self.library = library


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def load() -> Native:
    """The process's native unit, built if need be. Raises NativeUnavailableError, also where SHOAL_NATIVE=0 is set."""
    if os.environ.get("SHOAL_NATIVE") == "0":
        raise NativeUnavailableError("the native unit is switched off (SHOAL_NATIVE=0)")
    return _load()


@functools.cache
def _load() -> Native:
    return Native(build())
