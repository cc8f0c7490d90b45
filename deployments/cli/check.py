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
    from shoal.configs.app import AppConfig
    from shoal.configs.resolve import ResolvedEngine
    from shoal.deployments.model_peek import PeekedModel
    from shoal.deployments.placement import Placement
    from shoal.kvcache.planner import MemoryPlan
    from shoal.model_shards.models.config import ModelConfig
    from shoal.model_shards.quantization.schemes import WeightScheme

_DESCRIPTION = """\
Reads a `serve deploy` file, or a model, and says whether it will work: every setting known and in its place, the model
of a supported family and divisible by its ranks, the memory (weights, activations, KV cache, how many tokens fit), and
where each rank would go. Checked is this machine, or the cluster that the file's `placement` section or the options
describe. Nothing is allocated or started; a model that is known by name is fetched first, of one on the Hugging Face
hub only its configuration. Exit status 0 when all is well, 2 when not.
"""
_EPILOG = """\
examples:
  shoal check configs/smollm2-local.yaml
  shoal check smollm2-135m --engine '{"max_model_len": 4096, "kv_cache_memory": "512MiB"}'
  shoal check configs/tp8-pp2.yaml --nodes 2 --gpus-per-node 8 --gpu-memory 80GB
"""


_OTHER_AXES = ("data_parallel_size", "context_parallel_size")


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
    parser.add_argument("--nodes", type=int, metavar="N", help="of the cluster to plan for")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="of that cluster")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="free on each of those GPUs, such as 80GB")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    if Path(args.what).suffix.lower() in (".yaml", ".yml"):
        configs = _configs_of(Path(args.what))
    else:
        from shoal.configs.app import AppConfig
        from shoal.configs.schema import parse_engine_config

        configs = {args.what: AppConfig(engine=parse_engine_config({"model": args.what, **args.engine}))}
    findings = {name: explain(_planned_for(config, args)) for name, config in configs.items()}
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        print("\n\n".join(_text(name, finding) for name, finding in findings.items()))
    return 0


def _configs_of(path: Path) -> dict[str, AppConfig]:
    """By application. Raises ConfigError for a setting out of place, and for rails that cannot be used."""
    from shoal.deployments.config_check import check_document, read_yaml
    from shoal.guardrails.pipeline import load_rails

    configs = check_document(read_yaml(path))
    for config in configs.values():
        load_rails(config.guard)
    return configs


def _planned_for(config: AppConfig, args: argparse.Namespace) -> AppConfig:
    """The options over what the file says of its cluster."""
    from shoal.deployments.config_check import parse_app_config

    options = {"nodes": args.nodes, "gpus_per_node": args.gpus_per_node, "gpu_memory": args.gpu_memory}
    placement = {name: value for name, value in options.items() if value is not None}
    values = config.model_dump(exclude_unset=True)
    return parse_app_config({**values, "placement": {**values.get("placement", {}), **placement}}, "settings")


def explain(config: AppConfig) -> dict[str, Any]:
    """What would be served, where its ranks would be and how their memory would be used. Raises ConfigError for
    whatever would not start."""
    from shoal.configs.resolve import resolve_engine
    from shoal.configs.schema import SCRIPTED
    from shoal.deployments.engine_placement import mesh_of
    from shoal.deployments.placement import plan_placement
    from shoal.deployments.planned_cluster import plan_cluster

    cluster = plan_cluster(config)
    placement = plan_placement(mesh_of(config.engine), config.placement, cluster.device)
    node_of_bundle = cluster.lay_out(placement)
    settings = resolve_engine(cluster.engine, cluster.machine)
    if settings.model.startswith(SCRIPTED):
        return _explain_script(settings)
    return _explain_model(settings, placement, node_of_bundle)


def _explain_model(settings: ResolvedEngine, placement: Placement, node_of_bundle: list[str]) -> dict[str, Any]:
    from shoal.deployments.model_peek import peek_model
    from shoal.model_shards.runner.loading import check_mesh

    peeked = peek_model(settings.model, fetch=True)
    if peeked is None:
        return {
            "served_as": settings.served_model_name or settings.model,
            "not_checked": [
                f"{settings.model} itself: its config.json is not on this machine and cannot be fetched from the "
                "Hugging Face hub, so neither its shape nor its memory is known"
            ],
        }
    check_mesh(peeked.config, placement.mesh)
    finding = {
        "served_as": settings.served_model_name or peeked.source.name,
        "files": str(peeked.source.path),
        "format": peeked.source.kind,
        "model": _model_facts(peeked.config),
        "not_checked": [],
    }
    return finding | _explain_memory(settings, peeked, placement, node_of_bundle)


def _explain_memory(
    settings: ResolvedEngine, peeked: PeekedModel, placement: Placement, node_of_bundle: list[str]
) -> dict[str, Any]:
    from shoal.deployments.rank_table import placement_facts, rank_rows, render
    from shoal.model_shards.engine.build import plan_engine_memory

    scheme, found = _scheme_and_files(settings, peeked)
    max_model_len, plan = plan_engine_memory(settings, peeked.config, scheme)
    rows = rank_rows(placement, node_of_bundle, peeked.config, scheme, plan)
    return {
        **found,
        "engine": _engine_facts(settings, max_model_len),
        "memory_of_a_rank": _memory_facts(plan),
        "placement": {**placement_facts(placement, rows), "text": render(placement, rows)},
    }


def _scheme_and_files(settings: ResolvedEngine, peeked: PeekedModel) -> tuple[WeightScheme, dict[str, Any]]:
    """How matrices will be kept, and what the files beside the configuration say, if they are here."""
    import torch

    from shoal.model_shards.engine.build import weight_scheme
    from shoal.model_shards.quantization.schemes import DenseScheme, Int8Scheme
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.open import open_checkpoint

    if peeked.has_weights:
        tokenizer = load_tokenizer(peeked.source)
        scheme = weight_scheme(settings, open_checkpoint(peeked.source))
        return scheme, {"chat_template": tokenizer.chat_template is not None}
    dtype = getattr(torch, settings.dtype)
    told = "the weights' files and the tokenizer: of this model only config.json is here"
    return Int8Scheme(dtype) if settings.weights == "int8" else DenseScheme(dtype), {"not_checked": [told]}


def _explain_script(settings: ResolvedEngine) -> dict[str, Any]:
    from shoal.configs.schema import SCRIPTED
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
    from shoal.model_shards.models.stage import count_parameters

    facts: dict[str, Any] = {
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
    if model.moe is not None:
        total, active = count_parameters(model)
        facts |= {"experts": model.moe.num_experts, "experts_per_token": model.moe.experts_per_token}
        facts |= {"parameters": total, "active_parameters": active}
    return facts


def _engine_facts(settings: ResolvedEngine, max_model_len: int) -> dict[str, Any]:
    return {
        "device": settings.device,
        "weights": settings.dtype if settings.weights == "dense" else f"{settings.weights}, else {settings.dtype}",
        "kv_cache": settings.kv_dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        **{name: size for name in _OTHER_AXES if (size := getattr(settings, name)) > 1},
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
    lines = [f"{name}: served as {finding['served_as']!r}"]
    if "files" in finding:
        lines[0] += f" from {finding['files']} ({finding['format']})"
        lines.append("  " + _facts_line(finding["model"]))
    if "engine" in finding:
        if not finding.get("chat_template", True):
            lines.append("  no chat template: /v1/completions only")
        lines.append("  " + _facts_line(finding["engine"]))
        lines.append("memory of the heaviest rank:")
        lines += ["  " + line for line in finding["memory_of_a_rank"]["text"].splitlines()]
        ranks = finding["placement"]["ranks"]
        if len(ranks) > 1:
            lines.append(f"{len(ranks)} ranks:")
            lines += ["  " + line for line in finding["placement"]["text"].splitlines()]
    unknown = finding.get("not_checked", [])
    lines += [f"Not checked: {what}." for what in unknown]
    lines.append("What could be checked is right." if unknown else "It will start.")
    return "\n".join(lines)


def _facts_line(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name.replace('_', ' ')} {value}"
        for name, value in facts.items()
    )
