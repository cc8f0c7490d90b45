"""From a checkpoint to this rank's part of the model."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.ops import Ops
from shoal.kernels.registry import select_ops
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder, checkpoint_names
from shoal.model_shards.models.registry import model_factory
from shoal.model_shards.models.stage import cut_stages
from shoal.model_shards.parallel.agreement import require_same_files
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.parallel.split import HeadSplit, split_evenly
from shoal.model_shards.quantization.schemes import make_scheme
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.weights.checkpoint import CheckpointReader
from shoal.model_shards.weights.open import open_checkpoint, weight_files

logger = logging.getLogger(__name__)


def check_mesh(config: ModelConfig, mesh: MeshShape) -> None:
    """Raises ConfigError, with the numbers, when the model cannot be shared out over so many ranks."""
    cut_stages(config, mesh.pp_size)
    _check_context(config, mesh)
    HeadSplit.of_rank(config.num_heads, config.num_kv_heads, mesh.tp_size, 0)
    if config.moe is None or config.moe.dense_layers:
        split_evenly("intermediate_size", config.intermediate_size, mesh.tp_size, 0)
    _check_experts(config, mesh)


def _check_context(config: ModelConfig, mesh: MeshShape) -> None:
    ranks = mesh.cp_size
    if ranks == 1:
        return
    for setting, used in (
        ("data_parallel_size above 1", mesh.dp_size > 1),
        ("multi-head latent attention", config.mla is not None),
    ):
        if used:
            raise ConfigError(
                f"context_parallel_size is {ranks}, which does not go together with {setting}. Set it to 1.",
                param="context_parallel_size",
            )
    if config.sliding_layers and config.sliding_window is not None and config.sliding_window % ranks:
        raise ConfigError(
            f"context_parallel_size {ranks} does not divide the sliding window of {config.sliding_window} tokens: "
            "each rank must hold equally many of its keys.",
            param="context_parallel_size",
        )


def _check_experts(config: ModelConfig, mesh: MeshShape) -> None:
    moe, ranks, redundant = config.moe, mesh.ep_size, mesh.num_redundant_experts
    if mesh.dp_size > 1 and not mesh.expert_parallel:
        raise ConfigError(
            f"data_parallel_size is {mesh.dp_size}, but expert_parallel is off: the parts of one engine have nothing "
            "in common but experts. Set expert_parallel to true (for a model of experts), or run more replicas.",
            param="data_parallel_size",
        )
    if mesh.expert_parallel and moe is None:
        raise ConfigError(
            f"expert_parallel is true, but this {config.family} model has no experts. Set it to false.",
            param="expert_parallel",
        )
    if moe is None:
        return
    split_evenly("shared_size", moe.shared_size, mesh.tp_size, 0)
    if not mesh.expert_parallel:
        split_evenly("expert_size", moe.expert_size, mesh.tp_size, 0)
    elif (moe.num_experts + redundant) % ranks:
        fits = -(moe.num_experts + redundant) % ranks + redundant
        raise ConfigError(
            f"{moe.num_experts} experts and num_redundant_experts {redundant} are {moe.num_experts + redundant} slots, "
            f"which cannot be shared out over the {ranks} ranks of a stage evenly. Set num_redundant_experts to "
            f"{fits}, or change the parallel sizes.",
            param="num_redundant_experts",
        )
    elif redundant > moe.num_experts * (ranks - 1):
        raise ConfigError(
            f"num_redundant_experts is {redundant}, but {moe.num_experts} experts on {ranks} ranks can use at most "
            f"{moe.num_experts * (ranks - 1)}: then every rank has all of them.",
            param="num_redundant_experts",
        )


@contextmanager
def _one_torch_thread() -> Iterator[int]:
    """Thousands of small operations, each with a barrier of torch's threads behind it, take twice the CPU time that one
    thread needs, and ten times as long beside other work. Yields how many threads the work may be shared out to
    instead, in pieces of a size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _return_free_memory() -> None:
    """Loading leaves holes between the weights, some 20 % of their size, which the C library would keep for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)


def load_stage(settings: RunnerSettings, context: ParallelContext, device: torch.device) -> Decoder:
    """Reads this rank's slices and accounts for every tensor of the checkpoint.

    Raises ModelLoadError for tensors that are missing, misshapen or belong to no layer, ConfigError for a mesh that
    does not divide the model.
    """
    ops = select_ops(device, settings.dtype, backend=settings.backend)  # packs with the threads there are now
    with _one_torch_thread() as threads:
        return _load_stage(settings, context, ops, device, threads)


def _load_stage(
    settings: RunnerSettings, context: ParallelContext, ops: Ops, device: torch.device, threads: int
) -> Decoder:
    began = time.monotonic()
    position = context.position
    checkpoint = open_checkpoint(settings.model, threads)
    require_same_files(context, checkpoint, weight_files(settings.model))
    config = checkpoint.config
    check_mesh(config, position.shape)
    stages = cut_stages(config, position.pp_size)
    stage = stages[position.pp_rank]
    reader = CheckpointReader(checkpoint)
    scheme = make_scheme(settings.weights, settings.dtype, checkpoint)
    load = WeightLoader(reader, ops, context, scheme, device)
    model = model_factory(config.family)(config, stage, load, settings.max_model_len)
    # Whole experts are read by other ranks of the same stage too.
    others = [other for other in stages if other is not stage or position.ep_size > 1]
    reader.finish(frozenset[str]().union(*(checkpoint_names(config, other) for other in others)))
    _return_free_memory()
    logger.info(
        "%s: layers %d to %d of %s loaded in %.1f s (%s %s weights, %s operators)",
        position, stage.start, stage.stop - 1, settings.model.name, time.monotonic() - began,
        settings.weights, str(settings.dtype).removeprefix("torch."), ops.name,
    )  # fmt: skip
    return model
