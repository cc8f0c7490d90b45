"""Small random Hugging Face checkpoints of each family, with a byte-level tokenizer beside them, for tests.

transformers writes them (`save_pretrained`), so that names, layouts and `config.json` are the real ones; the same
directory loads in transformers as the oracle and in Shoal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
"""Rows of the embedding. The tokenizer knows fewer ids, as it does in real checkpoints with padded vocabularies."""

BOS, EOS, END_OF_TURN = "<|bos|>", "<|eos|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}

# family -> (transformers' config class, model class, what differs from _SHAPE)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "sliding_window": 24},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 40,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


def make_tiny_checkpoint(family: str, directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random fp32 checkpoint and its tokenizer into `directory` and returns it.

    `overrides` go to the transformers config (`tie_word_embeddings=True`, `num_hidden_layers=2`, ...), but for
    `max_shard_size` (a transformers size such as "100KB"), which splits the weights into shards with an index.
    Every parameter is random, norms and biases too, so that a forgotten one changes the logits.
    """
    import torch
    import transformers

    config_class, model_class, differs = _FAMILIES[family]
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    config = getattr(transformers, config_class)(**{**_SHAPE, **differs, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).to(torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith(".bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # some experts are above all others, some below
                    buffer.add_(torch.randn_like(buffer) * 0.2)
            if config.tie_word_embeddings:  # else the input token wins every argmax and greedy text says nothing
                model.get_input_embeddings().weight.mul_(0.25)
    directory = Path(directory)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    save_tiny_tokenizer(directory)
    return directory


def save_tiny_tokenizer(directory: str | Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a byte-level BPE tokenizer: ids 0-255 are single bytes, then bos, eos, the two ChatML marks, 20 merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [BOS, EOS, "<|im_start|>", END_OF_TURN]
    vocab = {piece: index for index, piece in enumerate(alphabet + specials)}
    merges = [tuple(pair.split("|")) for pair in _MERGES]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    if chat_template is not None:
        wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
    return Path(directory)


_MERGES = (
    *("h|e", "i|n", "Ġ|t", "r|e", "o|n", "e|r", "a|t", "o|r", "e|n", "Ġ|a"),
    *("Ġt|he", "in|g", "a|n", "o|u", "i|s", "l|l", "Ġ|w", "l|o", "he|ll", "Ġw|or"),
)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file (a `config.json`); a value of None removes the key."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))
