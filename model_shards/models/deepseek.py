"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): Llama's layer with latent attention; the first layers have a
plain MLP, the others experts chosen by sigmoid scores, a bias and groups, beside one that every token visits."""

from __future__ import annotations

from functools import partial

from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.models.llama import LlamaLayer
from shoal.model_shards.models.mla import LatentAttention
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.loader import WeightLoader


def make_deepseek(config: ModelConfig, stage: Stage, load: WeightLoader, num_positions: int) -> Decoder:
    return Decoder(config, stage, load, num_positions, partial(LlamaLayer, make_attention=LatentAttention))
