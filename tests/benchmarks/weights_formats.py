"""Weight formats side by side on one model: what they cost in quality, and what they give in speed.

    python tests/benchmarks/weights_formats.py [MODEL] [--text FILE] [--llama-bench PROGRAM] [--json FILE]

Quality: logits over windows of a text against dense float32, whose weights are those of the file. Speed: rounds in
which every format takes its turn (and, when named, llama.cpp's llama-bench on the same file), so that what else the
machine does meets all alike; the median over the rounds is printed, with the best.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import roofline
import torch

from shoal.kernels.ops import LinearWeight
from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.quantization.schemes import make_scheme
from shoal.model_shards.runner.footprint import weights_bytes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource, resolve_model

FORMATS = {  # name -> (weights, dtype)
    "float32": ("dense", torch.float32),
    "bfloat16": ("dense", torch.bfloat16),
    "packed": ("packed", torch.bfloat16),
    "int8": ("int8", torch.bfloat16),
}
TIMED = ("bfloat16", "packed", "int8")
BATCHES = (1, 8, 32)
BLOCK_SIZE = 16
WINDOW = 512
CONTEXT = 128
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Quality:
    name: str
    weight_bytes: int
    perplexity: float
    max_difference: float
    mean_difference: float
    same_best_token: float
    kl_divergence: float
    """Mean over the positions, nats, from float32 to this format."""


@dataclass(frozen=True)
class Speed:
    name: str
    batch: int
    median_ms: float
    best_ms: float
    tokens_per_s: float
    weights_gb_s: float


class Model:
    """A runner, with one decode step of some batch at a time."""

    def __init__(self, source: ModelSource, name: str, threads: int) -> None:
        weights, dtype = FORMATS[name]
        self.name = name
        blocks = max(BATCHES) * (2 * CONTEXT // BLOCK_SIZE + 1) + WINDOW // BLOCK_SIZE + 1
        self.settings = RunnerSettings(
            model=source, device="cpu", dtype=dtype, kv_dtype=dtype, weights=weights, block_size=BLOCK_SIZE,
            num_blocks=blocks, max_num_batched_tokens=8192, max_num_seqs=max(BATCHES), max_model_len=2 * WINDOW,
            num_threads=threads,
        )  # fmt: skip
        self.runner = ModelRunner(self.settings, ParallelContext.single())
        checkpoint = open_checkpoint(source)
        self.weight_bytes = weights_bytes(checkpoint.config, make_scheme(weights, dtype, checkpoint))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] of one sequence in a step of its own."""
        seen: list[torch.Tensor] = []
        forward = self.runner.model.forward
        self.runner.model.forward = lambda *a: seen.append(forward(*a)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        try:
            self._run({0: (0, len(tokens))}, [self._new(0, tokens)])
        finally:
            self.runner.model.forward = forward  # type: ignore[method-assign]
        self.runner.execute(StepPlan(0, removed=[0]))
        with torch.inference_mode():
            logits = self.runner.model.logits(seen[0])
        assert logits is not None
        return logits

    def decode_seconds(self, batch: int, steps: int) -> float:
        """Mean over the steps that follow prompts of CONTEXT tokens."""
        prompts = {seq: [(seq * 31 + i) % 5000 + 100 for i in range(CONTEXT)] for seq in range(batch)}
        self._run(dict.fromkeys(prompts, (0, CONTEXT)), [self._new(seq, tokens) for seq, tokens in prompts.items()])
        start = time.perf_counter()
        for step in range(steps):
            self._run(dict.fromkeys(prompts, (CONTEXT + step, 1)), [])
        took = (time.perf_counter() - start) / steps
        self.runner.execute(StepPlan(0, removed=list(prompts)))
        return took

    def linear_seconds(self, batch: int) -> float:
        """All matrices of one step, one after the other, on random activations."""
        weights = self._weights()
        inputs = {weight.in_features: torch.randn(batch, weight.in_features) for weight in weights}
        start = time.perf_counter()
        for weight in weights:
            self.runner.model.ops.linear(inputs[weight.in_features], weight)
        return time.perf_counter() - start

    def _weights(self) -> list[LinearWeight]:
        model: Any = self.runner.model
        parts = [
            (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down) for layer in model.layers
        ]
        return [part.weight for layer in parts for part in layer] + [model.head.weight]

    def _new(self, seq_id: int, tokens: list[int]) -> NewSequence:
        return NewSequence(seq_id, 0, tokens, len(tokens), GREEDY, 0, 0, [])

    def _run(self, chunks: dict[int, tuple[int, int]], new: list[NewSequence]) -> None:
        """`chunks`: sequence -> (first position, tokens). Each sequence has a range of blocks of its own."""
        per_sequence = max(2 * CONTEXT, WINDOW if len(chunks) == 1 else 0) // BLOCK_SIZE
        planned = []
        for seq_id, (start, count) in chunks.items():
            had, wanted = -(-start // BLOCK_SIZE), -(-(start + count) // BLOCK_SIZE)
            first = 1 + seq_id * per_sequence
            planned.append(ScheduledChunk(seq_id, start, count, list(range(first + had, first + wanted)), True))
        output = self.runner.execute(StepPlan(0, new=new, chunks=planned))
        assert not output.errors, output.errors


def measure_quality(models: dict[str, Model], windows: list[list[int]]) -> list[Quality]:
    totals = {name: {"nll": 0.0, "max": 0.0, "mean": 0.0, "same": 0.0, "kl": 0.0} for name in models}
    for tokens in windows:
        targets = torch.tensor(tokens[1:])[:, None]
        expected = models["float32"].logits(tokens)
        reference = expected.log_softmax(1)
        for name, model in models.items():
            logits = expected if name == "float32" else model.logits(tokens)
            scores, difference, total = logits.log_softmax(1), (logits - expected).abs(), totals[name]
            total["nll"] -= scores[:-1].gather(1, targets).mean().item()
            total["max"] = max(total["max"], difference.max().item())
            total["mean"] += difference.mean().item()
            total["same"] += (logits.argmax(1) == expected.argmax(1)).float().mean().item()
            total["kl"] += (reference.exp() * (reference - scores)).sum(1).mean().item()
    n = len(windows)
    return [
        Quality(
            name, model.weight_bytes, math.exp(totals[name]["nll"] / n), totals[name]["max"], totals[name]["mean"] / n,
            totals[name]["same"] / n, totals[name]["kl"] / n,
        )
        for name, model in models.items()
    ]  # fmt: skip


def measure_speed(
    models: dict[str, Model], measure: Callable[[Model, int], float], rounds: int, peer: Callable[[], float] | None
) -> list[Speed]:
    """`peer`: seconds a token of one sequence."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for batch in BATCHES:
            for name in TIMED:
                times.setdefault((name, batch), []).append(measure(models[name], batch))
            if batch == 1 and peer is not None:
                times.setdefault(("llama.cpp", 1), []).append(peer())
    file_bytes = models["packed"].weight_bytes  # what llama.cpp reads of the same file
    return [
        Speed(
            name, batch, statistics.median(values) * 1e3, min(values) * 1e3, batch / statistics.median(values),
            (models[name].weight_bytes if name in models else file_bytes) / statistics.median(values) / 1e9,
        )
        for (name, batch), values in sorted(times.items(), key=lambda item: item[0][1])
    ]  # fmt: skip


def llama_bench(program: Path, model: Path, threads: int, tokens: int) -> float:
    """Seconds a token of llama.cpp, one sequence after CONTEXT tokens."""
    options = ["-m", model, "-t", threads, "-p", 0, "-n", tokens, "-d", CONTEXT, "-r", 1, "-o", "json"]
    done = subprocess.run([str(program), *map(str, options)], capture_output=True, text=True, check=True)
    return 1.0 / float(json.loads(done.stdout)[-1]["avg_ts"])


def text_windows(source: ModelSource, file: Path, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(source)
    tokens = tokenizer.encode(file.read_text(encoding="utf-8")[: count * WINDOW * 8])
    windows = [tokens[start : start + WINDOW] for start in range(0, count * WINDOW, WINDOW)]
    assert len(windows[-1]) == WINDOW, "the text is too short"
    return windows


def print_rows(title: str, rows: list[Any]) -> None:
    print(f"\n{title}")
    names = list(asdict(rows[0]))
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    default_text = Path(__file__).parents[2] / "../shared/data/prompts/wikitext2_test_raw_first260k.txt"
    parser.add_argument("--text", type=Path, default=default_text)
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="decode steps a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program, to take its turn at batch 1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = resolve_model(args.model)
    models = {name: Model(source, name, args.threads) for name in FORMATS}
    quality = measure_quality(models, text_windows(source, args.text, args.windows)) if args.windows else []
    if quality:
        print_rows(f"Quality, {args.windows} windows of {WINDOW} tokens of {args.text.name}", quality)
    sizes = sorted({models[name].weight_bytes for name in TIMED})
    limits = roofline.measure(sizes, args.threads)
    print(f"\nread bandwidth, {args.threads} threads: { ({size: limits.read_gb_s[size] for size in sizes}) } GB/s")
    products = measure_speed(models, lambda model, batch: model.linear_seconds(batch), args.rounds, None)
    print_rows("Products of one step alone", products)
    peer = None
    if args.llama_bench is not None:
        peer = lambda: llama_bench(args.llama_bench, source.path, args.threads, args.steps * 2)  # noqa: E731
    steps = measure_speed(models, lambda model, batch: model.decode_seconds(batch, args.steps), args.rounds, peer)
    print_rows(f"Whole decode steps after {CONTEXT} tokens", steps)
    if args.json is not None:
        tables = {"quality": quality, "products": products, "steps": steps}
        found = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
        args.json.write_text(json.dumps({"limits": limits.to_json(), **found}, indent=1))


if __name__ == "__main__":
    main()
