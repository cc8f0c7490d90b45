"""`shoal check`: will it start? Reads a deployment file or a model's metadata, allocates nothing, starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.deployments.cli.main import COMMANDS
from shoal.deployments.cli.options import json_object

if TYPE_CHECKING:
    from shoal.configs.resolve import ResolvedEngine
    from shoal.configs.schema import EngineConfig
    from shoal.kvcache.planner import MemoryPlan
    from shoal.model_shards.models.config import ModelConfig

_DESCRIPTION = """\
Reads a `serve deploy` file, or a model, and says whether it will work on this machine: every setting known and in its
place, the model of a supported family, and the memory: weights, activations, KV cache, how many tokens fit. Nothing is
allocated or started; a model that is known by name is fetched first. Exit status 0 when all is well, 2 when not.
"""
_EPILOG = """\
examples:
  shoal check configs/smollm2-local.yaml
  shoal check smollm2-135m --engine '{"max_model_len": 4096, "kv_cache_memory": "512MiB"}'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help=COMMANDS["check"],
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="FILE.yaml|MODEL", help="a deployment file, or a model as for `shoal serve`")
    parser.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="engine settings, when MODEL is given"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    if Path(args.what).suffix.lower() in (".yaml", ".yml"):
        engines = _engines_of(Path(args.what))
    else:
        from shoal.configs.schema import parse_engine_config

        engines = {args.what: parse_engine_config({"model": args.what, **args.engine})}
    findings = {name: explain_engine(config) for name, config in engines.items()}
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        print("\n\n".join(_text(name, finding) for name, finding in findings.items()))
    return 0


def _engines_of(path: Path) -> dict[str, EngineConfig]:
    """Application name -> engine. Raises ConfigError for a setting out of place, and for rails that cannot be used."""
    from shoal.deployments.config_check import check_document, read_yaml
    from shoal.guardrails.pipeline import load_rails

    configs = check_document(read_yaml(path))
    for config in configs.values():
        load_rails(config.guard)
    return {name: config.engine for name, config in configs.items()}


def explain_engine(config: EngineConfig) -> dict[str, Any]:
    """What would be served and how its memory would be used. Raises ConfigError for whatever would not start."""
    from shoal.configs.resolve import resolve_engine
    from shoal.model_shards.engine.build import SCRIPTED
    from shoal.model_shards.engine.machine import measure_machine

    settings = resolve_engine(config, measure_machine())
    if settings.model.startswith(SCRIPTED):
        return _explain_script(settings)
    return _explain_model(settings)


def _explain_model(settings: ResolvedEngine) -> dict[str, Any]:
    from shoal.model_shards.engine.build import plan_engine_memory, weight_scheme
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.open import open_checkpoint
    from shoal.model_shards.weights.sources import resolve_model

    source = resolve_model(settings.model)
    checkpoint = open_checkpoint(source)
    model = checkpoint.config
    tokenizer = load_tokenizer(source)
    max_model_len, plan = plan_engine_memory(settings, model, weight_scheme(settings, checkpoint))
    return {
        "served_as": settings.served_model_name or source.name,
        "files": str(source.path),
        "format": source.kind,
        "model": _model_facts(model),
        "chat_template": tokenizer.chat_template is not None,
        "engine": _engine_facts(settings, max_model_len),
        "memory_of_a_rank": _memory_facts(plan),
    }


def _explain_script(settings: ResolvedEngine) -> dict[str, Any]:
    from shoal.model_shards.engine.build import SCRIPTED
    from shoal.model_shards.executor.script_file import encode_scripts, read_script_file
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.sources import resolve_model

    path = Path(settings.model.removeprefix(SCRIPTED)).expanduser()
    file = read_script_file(path)
    encode_scripts(path, file, load_tokenizer(resolve_model(file.tokenizer)))
    return {
        "served_as": settings.served_model_name or path.stem,
        "files": str(path),
        "format": "script",
        "model": {"tokenizer": file.tokenizer, "rules": len(file.rules)},
    }


def _model_facts(model: ModelConfig) -> dict[str, Any]:
    facts = {
        "family": model.family,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocabulary": model.vocab_size,
        "context": model.max_position,
    }
    if model.sliding_window is not None:
        facts["sliding_window"] = model.sliding_window
    return facts


def _engine_facts(settings: ResolvedEngine, max_model_len: int) -> dict[str, Any]:
    return {
        "device": settings.device,
        "weights": settings.dtype if settings.weights == "dense" else f"{settings.weights}, else {settings.dtype}",
        "kv_cache": settings.kv_dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "target_itl_ms": settings.target_itl_ms or "none",
    }


def _memory_facts(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
        "tokens": plan.num_tokens,
        "bytes_per_token": plan.bytes_per_token,
        "ledger": [{"what": what.strip(), "bytes": size, "note": note} for what, size, note in plan.ledger],
        "text": plan.render(),
    }


def _text(name: str, finding: Mapping[str, Any]) -> str:
    lines = [f"{name}: served as {finding['served_as']!r} from {finding['files']} ({finding['format']})"]
    lines.append("  " + _facts_line(finding["model"]))
    if "engine" in finding:
        if not finding["chat_template"]:
            lines.append("  no chat template: /v1/completions only")
        lines.append("  " + _facts_line(finding["engine"]))
        lines.append("memory of one rank:")
        lines += ["  " + line for line in finding["memory_of_a_rank"]["text"].splitlines()]
    lines.append("It will start.")
    return "\n".join(lines)


def _facts_line(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name.replace('_', ' ')} {value}"
        for name, value in facts.items()
    )
