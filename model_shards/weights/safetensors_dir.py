"""A directory of safetensors files with `config.json` (a Hugging Face model) as a Checkpoint."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint
from shoal.model_shards.weights.hf_config import parse_hf_config, read_json

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_FLOATS = {"F64", "F32", "F16", "BF16"}

# Not weights (recomputed from the config), or the vision half of Gemma 3: ignored with one log line.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
# Gemma 3 with vision keeps its decoder under another prefix (transformers before and after 4.52).
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class SafetensorsCheckpoint(Checkpoint):
    """Opening checks that every file the index names is there, and reads the headers only."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config = parse_hf_config(directory)
        files = _weight_files(directory)
        self._stored: dict[str, tuple[Any, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        ignored: list[str] = []
        for file in files:
            handle = _open(directory / file)
            for stored_name in handle.keys():  # noqa: SIM118  (not a mapping)
                if _IGNORED.fullmatch(stored_name):
                    ignored.append(stored_name)
                    continue
                self._add(stored_name, handle, file)
        _check_index(directory, {name for _, name in self._stored.values()} | set(ignored))
        if ignored:
            logger.info("ignoring %d tensors that the decoder does not use, for example %s", len(ignored), ignored[0])

    def _add(self, stored_name: str, handle: Any, file: str) -> None:
        name = _canonical(stored_name)
        if name in self._stored:
            raise ModelLoadError(f"{self.path}: tensor {name} is in {file} and again in another file or spelling.")
        view = handle.get_slice(stored_name)
        if view.get_dtype() not in _FLOATS:
            raise ModelLoadError(
                f"{self.path / file}: tensor {stored_name} is of type {view.get_dtype()}; quantized safetensors are "
                "not supported. Use an unquantized checkpoint or a GGUF file."
            )
        self._stored[name] = (handle, stored_name)
        self._shapes[name] = tuple(view.get_shape())

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelLoadError(f"{self.path} has no tensor {name}.")
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        dims = len(self.shape(name))
        handle, stored_name = self._stored[name]
        view = handle.get_slice(stored_name)
        values: torch.Tensor = view[rows] if dims == 1 else view[rows, cols]
        return values.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def _weight_files(directory: Path) -> list[str]:
    """The shards that the index names, or the single file. Raises ModelLoadError naming every file that is missing."""
    if not (directory / INDEX_FILE).is_file():
        if (directory / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        hint = ""
        if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
            hint = " Its weights are pickles (.bin/.pth), which are not read; convert them to safetensors."
        raise ModelLoadError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint}")
    files = sorted(set(_weight_map(directory).values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"{directory / INDEX_FILE} names {len(files)} weight files, but these are missing: "
            f"{', '.join(missing[:10])}. Download the model again."
        )
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    good = isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())
    if not isinstance(weight_map, dict) or not good:
        raise ModelLoadError(f"{directory / INDEX_FILE} has no usable weight_map.")
    for file in weight_map.values():
        if Path(file).name != file:
            raise ModelLoadError(f"{directory / INDEX_FILE} names {file!r}, which is not a plain file name.")
    return weight_map


def _check_index(directory: Path, stored: set[str]) -> None:
    """Every tensor that the index names must be in the shards."""
    if not (directory / INDEX_FILE).is_file():
        return
    absent = sorted(_weight_map(directory).keys() - stored)
    if absent:
        raise ModelLoadError(
            f"{directory / INDEX_FILE} names {len(absent)} tensors that no shard holds: {', '.join(absent[:10])}."
        )


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a usable safetensors file: {error}. Download it again.") from error


def _canonical(stored_name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if stored_name.startswith(prefix):
            return replacement + stored_name.removeprefix(prefix)
    return stored_name
