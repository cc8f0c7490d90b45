"""`shoal chat`: talk to a served model, or to the engine in this process, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from shoal.configs.errors import ConfigError
from shoal.deployments.cli.main import COMMANDS
from shoal.deployments.cli.options import json_object

if TYPE_CHECKING:
    from shoal.deployments.cli.answers import Answers

_DESCRIPTION = """\
Talks to a model and shows each answer as it comes, with its time to first token and its speed. Ctrl-C stops the
current answer only. With a MESSAGE, or when standard input is no terminal, it asks once, prints the answer and ends.
"""
_EPILOG = """\
in the chat: /reset /system TEXT /stats /help /quit

examples:
  shoal chat
  shoal chat "Name three fish."
  shoal chat --system "Answer in French." < question.txt
  shoal chat --offline smollm2-135m        no server: the engine runs in this process
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help=COMMANDS["chat"],
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("message", nargs="?", help="ask this and end")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of the server (default: %(default)s)")
    parser.add_argument("--model", help="model name to ask for (default: the first that is served)")
    parser.add_argument("--offline", metavar="MODEL", help="no server: run the engine in this process")
    parser.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="engine settings for --offline, as in the YAML"
    )
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: as the context allows)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from shoal.deployments.cli.conversation import Conversation

    message = args.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
        if not message:
            raise ConfigError("Standard input is empty; there is nothing to ask.")
    answers = _answers(args)
    try:
        if message is not None:
            return _once(answers, args.system, message)
        conversation = Conversation(answers, Console(highlight=False), args.system)
        _enable_line_editing()
        conversation.loop(lambda: input("> "))
    finally:
        answers.close()
    return 0


def _answers(args: argparse.Namespace) -> Answers:
    from shoal.deployments.cli.answers import EngineAnswers, HttpAnswers, Sampling

    sampling = Sampling(args.max_tokens, args.temperature, args.seed)
    if args.offline is not None:
        from shoal.configs.schema import parse_engine_config
        from shoal.model_shards.engine.build import build_engine

        engine = build_engine(parse_engine_config({"model": args.offline, **args.engine}))
        engine.start()
        return EngineAnswers(engine, sampling)
    answers = HttpAnswers(args.url, args.model, args.api_key, sampling)
    asyncio.run(answers.connect())
    return answers


def _once(answers: Answers, system: str | None, message: str) -> int:
    """The answer alone on standard output, so that it can be piped; how fast it came on standard error."""
    from shoal.deployments.cli.answers import Turn
    from shoal.deployments.cli.conversation import describe, printable

    show = printable if sys.stdout.isatty() else str

    def write(piece: str) -> None:
        sys.stdout.write(show(piece))
        sys.stdout.flush()

    messages = [{"role": "system", "content": system}] if system else []
    turn = Turn()
    asyncio.run(answers.answer([*messages, {"role": "user", "content": message}], turn, write))
    print()
    print(describe(turn), file=sys.stderr)
    return 0


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  (importing it is what makes input() editable)
