"""`shoal bench`: drives any OpenAI-compatible server, or the engine in this process, and reports what users feel."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.results import dump_results
from shoal.deployments.bench.workloads import WAVES, Workload, describe_presets, preset
from shoal.deployments.cli.main import COMMANDS
from shoal.deployments.cli.options import json_object

if TYPE_CHECKING:
    from shoal.deployments.bench.prompts import Ruler
    from shoal.deployments.bench.results import ResultRun
    from shoal.deployments.bench.session import Measurement, Plan, Report
    from shoal.deployments.bench.target import Target

_DESCRIPTION = """\
Sends streaming requests with prompts of an exact token length to a server and measures, at the client:

  TTFT  time to first token: from when the request was due to the first event that carries text
  ITL   inter-token latency: every gap between two such events, raw (a burst is one gap)
  TPOT  time per output token after the first: (E2E - TTFT) / (output tokens - 1)
  E2E   from due to the last byte
  goodput   requests a second that kept both --slo-ttft and --slo-tpot; failed ones count as misses
"""


def _epilog() -> str:
    presets = "\n".join(f"  {name}  {summary}" for name, summary in describe_presets())
    return f"""\
workloads:
{presets}
  Without --workload, one workload is made of --input-tokens, --output-tokens, --requests and the rest.

examples:
  shoal bench                                         W1 and W2 against http://127.0.0.1:8000
  shoal bench --concurrency 16 --requests 64 --input-tokens 512
  shoal bench --rate 1,2,4 --slo-ttft 500 --slo-tpot 50     which rate is still served within the objectives?
  shoal bench --concurrency 1,2,4,8,16,32 --plot figures    throughput against concurrency, drawn
  shoal bench --plot figures --from a.json --from b.json    compares results that are there, without measuring
  shoal bench --offline smollm2-135m --workload W3 --json w3.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help=COMMANDS["bench"],
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_target_options(parser.add_argument_group("what is measured"))
    _add_load_options(parser.add_argument_group("load"))
    out = parser.add_argument_group("results")
    out.add_argument("--slo-ttft", type=float, metavar="MS", help="TTFT objective; with --slo-tpot reports goodput")
    out.add_argument("--slo-tpot", type=float, metavar="MS", help="TPOT objective")
    out.add_argument("--json", metavar="FILE", help="also write everything as JSON; - for standard output only")
    out.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw figures (PNG and SVG) of throughput, TTFT and ITL; keeps the JSON there too (needs shoal[plot])",
    )
    out.add_argument(
        "--from",
        dest="results",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="with --plot: measure nothing, draw this JSON (repeatable; engines are named after their files)",
    )
    out.add_argument("--server-pid", type=int, metavar="PID", help="root of the server's processes, for CPU shares")


def _add_target_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="root of the server (default: %(default)s)")
    group.add_argument("--model", help="model name to ask for (default: the first of /v1/models)")
    group.add_argument("--api", choices=["chat", "completions"], default="chat", help="which endpoint (default: chat)")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="fields for every request")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="per request (default: %(default)s)")
    group.add_argument("--tokenizer", metavar="MODEL", help="measure prompts with this model's tokenizer, here")
    group.add_argument("--offline", metavar="MODEL", help="no server: run the engine in this process")
    group.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="engine settings for --offline, as in the YAML"
    )


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", metavar="NAMES", help="presets, in order: W1,W2,...  (see below)")
    group.add_argument("--scale", type=float, default=1.0, help="times the presets' numbers of requests")
    group.add_argument("--capacity", type=float, metavar="REQ/S", help="what W3 reached, for W6")
    group.add_argument("--input-tokens", type=int, help="prompt length, template included")
    group.add_argument("--output-tokens", type=int, help="answer length")
    group.add_argument("--requests", type=int, help="how many")
    arrival = group.add_mutually_exclusive_group()
    arrival.add_argument(
        "--concurrency",
        type=_counts,
        metavar="N[,N...]",
        help=f"closed loop: streams that wait for each answer; several are a sweep, {WAVES} requests a stream each "
        "unless --requests says otherwise",
    )
    arrival.add_argument("--rate", type=_rates, metavar="R[,R...]", help="open loop: Poisson arrivals, requests/s")
    group.add_argument("--shared-prefix-tokens", type=int, metavar="N", help="a system prompt that all have in common")
    group.add_argument("--repetitions", type=int, default=1, help="passes over all workloads (default: 1)")
    group.add_argument("--warm-up", type=int, default=2, metavar="N", help="unmeasured requests (default: 2)")
    group.add_argument("--seed", default="shoal", help="same seed, same prompts")


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of requests a second") from None


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of streams") from None


def run(args: argparse.Namespace) -> int:
    from shoal.deployments.bench.session import Plan
    from shoal.deployments.bench.summary import Objective

    if args.plot is not None:
        from shoal.deployments.bench.figures import require_matplotlib

        require_matplotlib()
    if args.results:
        return _plot_files(args)
    if (args.slo_ttft is None) != (args.slo_tpot is None):
        raise ConfigError("--slo-ttft and --slo-tpot belong together: goodput needs both.", param="slo")
    plan = Plan(
        workloads=plan_workloads(args),
        repetitions=args.repetitions,
        seed=args.seed,
        objective=None if args.slo_ttft is None else Objective(args.slo_ttft, args.slo_tpot),
        warm_up=args.warm_up,
        capacity=args.capacity,
        server_pid=args.server_pid,
    )
    report = asyncio.run(_measure(args, plan))
    _write(report, args.json)
    if args.plot is not None:
        from shoal.deployments.bench.results import parse_runs

        document = report.to_json()
        _write(report, str(_made(args.plot) / "results.json"))
        _draw(parse_runs(document["runs"], str(document["target"]["model"])), args.plot)
    return 1 if any(measurement.summary.errors for measurement in report.measurements) else 0


def plan_workloads(args: argparse.Namespace) -> list[Workload]:
    """The presets named, each with the options that were given; or one workload made of the options alone."""
    given = {
        name: getattr(args, name)
        for name in ("input_tokens", "output_tokens", "requests", "shared_prefix_tokens")
        if getattr(args, name) is not None
    }
    streams = args.concurrency or []
    if len(streams) == 1:
        given["concurrency"] = streams[0]
    if args.workload is not None:
        base = [workload for name in args.workload.split(",") for workload in preset(name, args.scale)]
    elif given or streams or args.rate:
        base = [Workload("custom", "", 24)]
    else:
        base = [workload for name in ("W1", "W2") for workload in preset(name, args.scale)]
    shaped = [replace(workload, **given) for workload in base]
    if len(streams) > 1:
        return _sweep(shaped, streams, args.requests)
    if not args.rate:
        return shaped
    if any(workload.long for workload in shaped):
        raise ConfigError("W5 is a closed loop by design; leave out --rate.", param="rate")
    return [
        replace(workload, name=f"{workload.name}@{rate:g}/s", rate=rate, capacity_share=None)
        for workload in shaped
        for rate in args.rate
    ]


def _sweep(shaped: list[Workload], streams: list[int], requests: int | None) -> list[Workload]:
    if any(workload.open_loop or workload.long for workload in shaped):
        raise ConfigError("W5 and W6 have their own concurrency; a sweep is for the others.", param="concurrency")
    return [workload.at_concurrency(count, requests) for workload in shaped for count in streams]


async def _measure(args: argparse.Namespace, plan: Plan) -> Report:
    from rich.console import Console

    from shoal.deployments.bench.render import ProgressWatcher, measurement_view, overview
    from shoal.deployments.bench.session import Session

    results = Console(stderr=args.json == "-", highlight=False)

    def show(measurement: Measurement) -> None:
        results.print(measurement_view(measurement))

    target = await asyncio.to_thread(_target, args)
    async with target:
        ruler = await _ruler(args, target)
        with ProgressWatcher(Console(stderr=True)) as watcher:
            results.print(f"Measuring {target.label}")
            report = await Session(target, ruler, watcher).run(plan, show)
    if len(report.measurements) > 1:
        results.print(overview(report.measurements))
    if report.dropped_options:
        results.print(f"The server refused {', '.join(report.dropped_options)}; answers may stop early.")
    if not report.exact_prompts:
        results.print("Prompt lengths are estimates: the server has no /tokenize (--tokenizer MODEL makes them exact).")
    return report


def _target(args: argparse.Namespace) -> Target:
    if args.offline is not None:
        from shoal.configs.schema import parse_engine_config
        from shoal.deployments.bench.offline_target import OfflineTarget
        from shoal.model_shards.engine.build import build_engine

        engine = build_engine(parse_engine_config({"model": args.offline, **args.engine}))
        engine.start()
        return OfflineTarget(engine)
    from shoal.deployments.bench.http_target import HttpSettings, HttpTarget

    return HttpTarget(
        HttpSettings(
            url=args.url,
            model=args.model,
            api=args.api,
            api_key=args.api_key,
            timeout_s=args.timeout,
            extra_body=args.extra_body,
        )
    )


async def _ruler(args: argparse.Namespace, target: Target) -> Ruler:
    if args.tokenizer is None:
        return await target.ruler()
    from shoal.deployments.bench.rulers import local_ruler

    return await local_ruler(args.tokenizer)


def _plot_files(args: argparse.Namespace) -> int:
    """Figures of results that are there."""
    from shoal.deployments.bench.results import read_results

    if args.plot is None:
        raise ConfigError("--from FILE says what to draw; --plot DIR says where.", param="from")
    _draw([run for path in args.results for run in read_results(path)], args.plot)
    return 0


def _draw(runs: Sequence[ResultRun], directory: Path) -> None:
    from shoal.deployments.bench.plot import plot_results

    for path in plot_results(runs, directory):
        print(f"wrote {path}", file=sys.stderr)


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make {directory}: {error.strerror}.", param="plot") from error
    return directory


def _write(report: Report, destination: str | None) -> None:
    if destination is None:
        return
    try:
        with nullcontext(sys.stdout) if destination == "-" else Path(destination).open("w") as file:
            file.write(dump_results(report.to_json()))
    except OSError as error:
        raise ConfigError(f"Cannot write {destination}: {error.strerror}.", param="json") from error
