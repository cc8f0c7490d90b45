"""`shoal version`: what to name in a report of a fault."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from shoal.deployments.cli.main import COMMANDS, shoal_version

_FOUNDATIONS = ("ray", "torch", "triton", "transformers", "tokenizers", "gguf")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("version", help=COMMANDS["version"], description="Prints versions.")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    versions = {"shoal": shoal_version(), "python": platform.python_version()}
    versions |= {name: _version(name) for name in _FOUNDATIONS}
    if args.json:
        print(json.dumps(versions, indent=2))
    else:
        for name, found in versions.items():
            print(f"{name:<13} {found}")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
