"""A model's configuration, as far as it can be had without its weights: for checks that are to take seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.configs.errors import ModelLoadError

if TYPE_CHECKING:
    from shoal.model_shards.models.config import ModelConfig
    from shoal.model_shards.weights.sources import ModelSource


logger = logging.getLogger("shoal.model_peek")

_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PeekedModel:
    source: ModelSource
    config: ModelConfig
    has_weights: bool
    """Whether their files are here too."""


def peek_model(model: str, *, fetch: bool) -> PeekedModel | None:
    """None: its config.json is not on this machine; with `fetch`, nor can it be fetched. Of a model on the Hugging Face
    hub nothing but that is fetched. Raises ConfigError for a name that is none, and for a configuration that is not
    supported."""
    from shoal.model_shards.weights.open import read_config, weight_files
    from shoal.model_shards.weights.sources import KNOWN_MODELS, ModelSource, cache_dir, resolve_model

    path = Path(model).expanduser()
    if model.lower() in KNOWN_MODELS:
        if not fetch and not (cache_dir() / KNOWN_MODELS[model.lower()].file_name).is_file():
            return None
        source = resolve_model(model, progress=False)
    elif path.exists() or "/" not in model or path.suffix.lower() == ".gguf":
        source = resolve_model(model, progress=False)
    else:
        snapshot = _hub_snapshot(model, fetch=fetch)
        if snapshot is None:
            return None
        source = ModelSource(model.split("/")[-1], "safetensors", snapshot)
    return PeekedModel(source, read_config(source), bool(weight_files(source)))


def _hub_snapshot(model_id: str, *, fetch: bool) -> Path | None:
    """The directory that holds the model's config.json."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(model_id, "config.json", local_files_only=True)).parent
    except LocalEntryNotFoundError:
        if not fetch:
            return None
    try:
        # Asked once: the download itself would try for half a minute to reach a hub that cannot be reached.
        get_hf_file_metadata(hf_hub_url(model_id, "config.json"), timeout=_HUB_TIMEOUT_S)
        return Path(hf_hub_download(model_id, "config.json")).parent
    except LocalEntryNotFoundError:
        return None
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        message = f"{model_id!r} is no directory here, and no safetensors model of the Hugging Face hub: {error}"
        raise ModelLoadError(message.splitlines()[0], param="model") from None
    except Exception as error:  # of whatever HTTP client the hub's library uses: it is not reached, or refuses
        logger.info("the Hugging Face hub did not give %s's config.json: %s", model_id, error)
        return None
