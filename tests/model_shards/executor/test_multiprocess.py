"""Ranks in processes of their own give the tokens of one rank, and die together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import ConfigError, EngineDeadError, ModelLoadError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor.multiprocess import MultiprocessExecutor
from shoal.model_shards.sampling.params import SamplingParams

TinyCheckpoint = Callable[..., Path]

PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]
GREEDY = SamplingParams(temperature=0.0)

UNTIED = ("llama", {"num_hidden_layers": 4})
TIED_PADDED = ("llama", {"tie_word_embeddings": True, "vocab_size": 321, "attention_bias": True})
ONE_KV_HEAD = ("qwen3", {"num_key_value_heads": 1})  # held by both ranks
GEMMA3: tuple[str, dict[str, Any]] = ("gemma3", {})  # tied: first and last stage both hold the table
DEEPSEEK: tuple[str, dict[str, Any]] = ("deepseek_v3", {})  # latents are on every rank, heads and experts are split


def mesh(settings: Any, tp: int, pp: int) -> Any:
    return replace(settings, tensor_parallel_size=tp, pipeline_parallel_size=pp)


def processes(executor: MultiprocessExecutor) -> list[int]:
    return [rank.process.pid for rank in executor._ranks]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # whoever reaps orphans may be slow


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "rank processes are left"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        (UNTIED, 2, 1),
        (UNTIED, 1, 2),
        (TIED_PADDED, 2, 1),
        (TIED_PADDED, 1, 2),
        (ONE_KV_HEAD, 2, 1),
        (GEMMA3, 2, 2),
        (DEEPSEEK, 2, 1),
        (DEEPSEEK, 1, 2),
    ],
)
def test_a_mesh_draws_the_tokens_of_one_rank(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, model: tuple[str, dict[str, Any]], tp: int, pp: int
) -> None:
    family, overrides = model
    path = tiny_checkpoint(family, **overrides)
    runner = driver.make_runner(path)
    sampling = replace(GREEDY, prompt_logprobs=1, logprobs=2)
    expected = driver.generate(runner.execute, runner.settings, PROMPTS, 12, chunk_size=16, sampling=sampling)
    executor = MultiprocessExecutor(mesh(runner.settings, tp, pp))
    try:
        outputs: list[StepOutput] = []

        def execute(plan: StepPlan) -> StepOutput:
            outputs.append(executor.submit(plan).result(120))
            return outputs[-1]

        assert driver.generate(execute, runner.settings, PROMPTS, 12, chunk_size=16, sampling=sampling) == expected
        scored = [entry for output in outputs for entry in output.prompt_logprobs.get(1, [])]
        assert [entry.token_id for entry in scored] == PROMPTS[1][1:]
        assert executor.vocab_size == overrides.get("vocab_size", 320)

        # Several plans under way, each made before the tokens of those before it are known.
        plays = driver.Driver(runner.settings)
        ahead = plays.prefill_plans({100 + i: prompt for i, prompt in enumerate(PROMPTS)})
        ahead[0].removed = list(range(len(PROMPTS)))
        lengths = {100 + i: len(prompt) + 1 for i, prompt in enumerate(PROMPTS)}
        ahead += [plays.decode_plan(lengths) for _ in range(11)]
        drawn = [future.result(120).token_ids for future in [executor.submit(plan) for plan in ahead]]
        assert [list(column) for column in zip(*drawn, strict=True)] == expected
    finally:
        pids = processes(executor)
        executor.close()
    wait_until_gone(pids, 0.0)


def test_stages_interleave_sequences_and_drop_what_was_removed(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType
) -> None:
    """Two groups take turns in a pipeline; one is removed while its last tokens are still under way."""
    path = tiny_checkpoint("llama")
    settings = driver.settings_for(path)
    runner = driver.make_runner(path)
    expected = driver.generate(runner.execute, settings, PROMPTS[:1], 10)[0]
    executor = MultiprocessExecutor(mesh(settings, 1, 2))
    try:
        plays = driver.Driver(settings)
        plans = [*plays.prefill_plans({1: PROMPTS[0]}), *plays.prefill_plans({2: PROMPTS[1]})]
        first, second = {1: 4}, {2: len(PROMPTS[1]) + 1}
        for _ in range(3):
            plans += [plays.decode_plan(first), plays.decode_plan(second)]
        plans.append(plays.plan([], removed=[2], new=[plays.new(3, PROMPTS[0])]))
        plans += [plays.decode_plan(first) for _ in range(6)]
        outputs = [future.result(120) for future in [executor.submit(plan) for plan in plans]]
        assert [o.token_ids[o.seq_ids.index(1)] for o in outputs if 1 in o.seq_ids] == expected
    finally:
        executor.close()


def test_a_killed_rank_fails_every_future_and_ends_the_others(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType
) -> None:
    settings = driver.settings_for(tiny_checkpoint("llama"))
    executor = MultiprocessExecutor(mesh(settings, 2, 1))
    pids = processes(executor)
    plays = driver.Driver(settings)
    plans = plays.prefill_plans({1: PROMPTS[1]})
    lengths = {1: len(PROMPTS[1]) + 1}
    executor.submit(plans[0]).result(60)
    assert executor.failure is None
    os.kill(pids[1], signal.SIGKILL)
    futures = [executor.submit(plays.decode_plan(lengths)) for _ in range(3)]
    began = time.monotonic()
    for future in futures:
        with pytest.raises(EngineDeadError, match=r"rank 1 \(tensor 1/2, stage 0/1\) was killed by SIGKILL"):
            future.result(30)
    assert time.monotonic() - began < 10
    wait_until_gone(pids, 5.0)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        executor.submit(StepPlan(99)).result(1)
    assert "SIGKILL" in str(executor.failure)
    executor.close()


def test_a_rank_that_hangs_is_found_by_the_deadline(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    settings = driver.settings_for(tiny_checkpoint("llama"))
    executor = MultiprocessExecutor(mesh(settings, 1, 2), step_timeout_s=3.0)
    pids = processes(executor)
    os.kill(pids[0], signal.SIGSTOP)
    future = executor.submit(driver.Driver(settings).prefill_plans({1: [1, 2, 3]})[0])
    with pytest.raises(EngineDeadError, match=r"not done within 3 s|failed; another rank is gone or hangs"):
        future.result(30)
    wait_until_gone(pids, 5.0)
    executor.close()


def test_a_result_that_comes_after_the_deadline_is_dropped(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    settings = driver.settings_for(tiny_checkpoint("llama"))
    executor = MultiprocessExecutor(mesh(settings, 2, 1))
    for rank in executor._ranks:
        os.kill(rank.process.pid, signal.SIGSTOP)
    future = executor.submit(driver.Driver(settings).prefill_plans({1: [1, 2, 3]})[0])
    executor._fail_all(EngineDeadError("too late"))
    for rank in executor._ranks:
        os.kill(rank.process.pid, signal.SIGCONT)
    with pytest.raises(EngineDeadError, match="too late"):
        future.result(0)
    executor.close()  # the ranks finish the step before they stop
    assert "cannot be followed" not in caplog.text


def test_a_step_that_raises_names_the_rank_and_the_reason(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    settings = driver.settings_for(tiny_checkpoint("llama"))
    executor = MultiprocessExecutor(mesh(settings, 1, 2))
    pids = processes(executor)
    with pytest.raises(EngineDeadError, match=r"rank 0 .*KeyError: 77"):
        executor.submit(StepPlan(1, removed=[77])).result(60)
    wait_until_gone(pids, 5.0)
    executor.close()


def test_closing_fails_what_is_under_way(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    settings = driver.settings_for(tiny_checkpoint("llama"))
    executor = MultiprocessExecutor(mesh(settings, 1, 2))
    os.kill(processes(executor)[1], signal.SIGSTOP)
    future = executor.submit(driver.Driver(settings).prefill_plans({1: [1, 2, 3]})[0])
    executor.close()
    with pytest.raises(EngineDeadError, match="closed"):
        future.result(1)
    wait_until_gone(processes(executor), 0.0)


def test_ranks_end_when_their_parent_is_killed(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """The parent gets no chance to tell them."""
    program = (
        "import msgpack, sys, time\n"
        "from shoal.model_shards.executor.multiprocess import MultiprocessExecutor\n"
        "from shoal.model_shards.runner.settings import RunnerSettings\n"
        "settings = RunnerSettings.from_wire(msgpack.unpackb(sys.stdin.buffer.read()))\n"
        "executor = MultiprocessExecutor(settings)\n"
        "print(*[rank.process.pid for rank in executor._ranks], flush=True)\n"
        "time.sleep(600)\n"
    )
    import msgpack

    wire = msgpack.packb(mesh(driver.settings_for(tiny_checkpoint("llama")), 1, 2).to_wire())
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(wire)
        parent.stdin.close()
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    wait_until_gone(pids, 5.0)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, r"num_heads 4 cannot be split over tensor_parallel_size 3"),
        ({"pipeline_parallel_size": 4}, ConfigError, r"pipeline_parallel_size 4 is more than the model's 3 layers"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    tiny_checkpoint: TinyCheckpoint,
    driver: ModuleType,
    changes: dict[str, int],
    error: type[Exception],
    named: str,
) -> None:
    before = open_descriptors()
    with pytest.raises(error, match=named):
        MultiprocessExecutor(driver.settings_for(tiny_checkpoint("llama"), **changes))
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_tensor_missing_in_one_stage_is_named(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "edited"
    shutil.copytree(tiny_checkpoint("llama"), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing \(model\.layers\.2\.mlp\.up_proj\.weight\)"):
        MultiprocessExecutor(mesh(driver.settings_for(path), 1, 2))
