"""The `shoal` command. Each subcommand is a module of its own, imported only when it is the one asked for: `shoal
--help` must not wait for torch or ray."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from shoal.configs.errors import ShoalError

COMMANDS: dict[str, str] = {
    "serve": "serve a model over an OpenAI-compatible API on this machine",
    "chat": "talk to a served model in the terminal",
    "bench": "measure a server (or the engine in-process): TTFT, ITL, TPOT, throughput, goodput",
    "check": "read a deployment file or a model and say whether it will fit, before anything starts",
    "models": "list the models that can be served by name",
    "version": "print the versions of Shoal and of what it stands on",
}
"""Subcommand -> its line in the help. `shoal.deployments.cli.NAME` offers `add_parser(subparsers)` and `run(args)`."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = """\
Shoal serves language models on Ray Serve with an engine of its own: paged and prefix-cached KV memory, continuous
batching, tensor- and pipeline-parallel shards, an OpenAI-compatible API. The same graph runs on a laptop and on a
cluster; only its YAML differs.
"""
_EXAMPLES = """\
examples:
  shoal serve smollm2-135m            a small real model on http://127.0.0.1:8000/v1, fetched on first use
  shoal chat                          talk to it, in another terminal
  shoal bench --workload W1,W2        how fast is it? TTFT, ITL, TPOT, tokens/s

`shoal COMMAND --help` explains each command. On a cluster: `serve deploy configs/smollm2-local.yaml`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (2: the user can mend it, 130: interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, modules = build_parser(arguments)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(modules[args.command].run(args))
    except ShoalError as error:
        print(paragraph(f"shoal {args.command}: {error.message}"), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has gone; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser, with the options of the asked command only, and that command's module."""
    parser = argparse.ArgumentParser(
        prog="shoal",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    modules: dict[str, ModuleType] = {}
    for name, summary in COMMANDS.items():
        if name == asked:
            modules[name] = importlib.import_module(f"shoal.deployments.cli.{name}")
            modules[name].add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser, modules


def paragraph(text: str) -> str:
    """Wrapped to the terminal; lines of a longer explanation (a ledger) are kept as they are."""
    if "\n" in text:
        return text
    return textwrap.fill(text, width=100, break_long_words=False, break_on_hyphens=False)


def shoal_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
