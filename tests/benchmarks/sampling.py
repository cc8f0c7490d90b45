"""Time of one sampling step on the CPU, beside what reading the logits once would take.

    python tests/benchmarks/sampling.py [--threads 2] [--repeats 15] [--backend cpu|torch_cpu] [--clock wall|cpu]

`torch_cpu` draws in numpy, as on machines without a compiler. The roofline is bytes of the logits / bandwidth of one
thread summing them (measured here, in the same minute). Figures are the best of several runs; a busy machine makes them
worse, never better.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from shoal.kernels.registry import select_ops
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SamplerState

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50 + top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "greedy + 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
PROMPT_TOKENS = 512
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backend", choices=("cpu", "torch_cpu"), default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sampler = Sampler((0,), select_ops(torch.device("cpu"), torch.float32, backend=options.backend))
    for vocab in (49_152, 151_936):
        for batch in (1, 32):
            measure(sampler, vocab, batch, partial(best, CLOCKS[options.clock], options.repeats))


def measure(sampler: Sampler, vocab: int, batch: int, best: Callable[[Callable[[], object]], float]) -> None:
    generator = np.random.default_rng(0)
    # A decoder's logits: a few dozen likely tokens above a broad mass of unlikely ones.
    values = generator.normal(0.0, 2.0, (batch, vocab)).astype(np.float32)
    values[:, :40] += np.linspace(14.0, 6.0, 40, dtype=np.float32)
    logits = torch.from_numpy(values)
    roofline = best(values.sum)
    print(
        f"\nvocab {vocab:,}, batch {batch}: reading the logits once {roofline * 1e3:.3f} ms "
        f"({values.nbytes / roofline / 1e9:.1f} GB/s)"
    )
    for name, params in CASES.items():
        prompts = generator.integers(0, vocab, (batch, PROMPT_TOKENS)).tolist()
        states = [SamplerState(params, 1, row, prompt, PROMPT_TOKENS) for row, prompt in enumerate(prompts)]
        seconds = best(partial(sampler.sample, logits, states))
        print(
            f"  {name:22} {seconds * 1e3:8.3f} ms   {seconds / roofline:6.1f} x   {seconds / batch * 1e6:7.0f} us a row"
        )


def best(clock: Callable[[], float], repeats: int, call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
