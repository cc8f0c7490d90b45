"""Programs repeat exactly what was recorded, on what the inputs hold then; what they cannot repeat they refuse."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.kernels.cpu.ops import CpuOps


@pytest.fixture
def capturer(native_ops):
    return native_ops.capturer(1 << 20)


def test_a_program_follows_its_inputs(native_ops, capturer) -> None:
    weight, x, norm = native_ops.prepare_linear(torch.randn(70, 40)), torch.randn(5, 40), torch.randn(70)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        y = native_ops.linear(x, weight)
        y, total = native_ops.rms_norm(y, norm, 1e-5, residual=y)
        return native_ops.silu_and_mul(y) * 1.7, total

    expected = run()
    first, program = capturer.capture(run)
    assert all(map(torch.equal, first, expected))
    for _ in range(3):
        x.normal_()
        assert all(map(torch.equal, program.replay(), run()))


def test_what_models_leave_to_torch_has_the_bits_of_torch(native_ops, capturer) -> None:
    x, y = torch.randn(37, 19), torch.randn(37, 19)
    table, index = torch.randn(50, 24), torch.tensor([3, 0, 49, 3])

    def run() -> tuple[torch.Tensor, ...]:
        rows = torch.nn.functional.embedding(index, table)
        narrow = torch.nn.functional.embedding(index, table_bf16).to(torch.float32)
        return x + y, x * 0.1, y * 3, rows, narrow, x.view(19, 37).float()

    table_bf16 = table.bfloat16()
    with torch.inference_mode():
        expected = run()
        results, program = capturer.capture(run)
        assert program is not None, capturer.refusal
        for mine in (results, program.replay()):
            assert all(map(torch.equal, mine, expected))
        index.copy_(torch.tensor([7, 7, 1, 2]))
        x.normal_()
        expected = run()
        assert all(map(torch.equal, program.replay(), expected))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: torch.sin(x), "sin"),
        (lambda x: x.add_(1), "add_"),
        (lambda x: x + x.sum().item(), "sum"),
        (lambda x: x[:, ::2].contiguous(), "contiguous|clone"),
        (lambda x: x.double(), "to"),
        (lambda x: x.t() + x.t(), "add"),
        (lambda x: torch.add(x, x, alpha=2), "add"),
        (lambda x: torch.tensor([1.0]), "lift_fresh"),
        (lambda x: torch.empty(1 << 20), "empty"),
    ],
)
def test_what_cannot_be_repeated_is_refused_and_still_right(capturer, run, reason: str) -> None:
    import re

    x = torch.randn(4, 4)
    expected = run(x.clone())
    result, program = capturer.capture(lambda: run(x))
    assert program is None
    assert re.search(reason, capturer.refusal)
    if "empty" not in reason:
        assert torch.equal(result, expected)


def test_a_tensor_that_is_kept_but_is_no_result_is_refused(capturer) -> None:
    x, kept = torch.randn(4), []
    _, program = capturer.capture(lambda: kept.append(x + x))
    assert program is None
    assert "outlives" in capturer.refusal
    _, program = capturer.capture(lambda: x + x)
    assert program is not None
    assert capturer.refusal is None


def test_memory_is_used_again_within_a_program_and_by_the_next(native_ops) -> None:
    """A chain of a hundred results in room for three; and a second program in the same room."""
    x = torch.randn(1000)
    capturer = native_ops.capturer(3 * 4096)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(100):
            y = y + x
        return y

    for _ in range(2):
        _, program = capturer.capture(chain)
        assert program is not None, capturer.refusal
        assert torch.equal(program.replay(), chain())


def test_other_threads_are_not_recorded(native_ops, capturer) -> None:
    weight, x, y = native_ops.prepare_linear(torch.randn(64, 64)), torch.randn(2, 64), torch.randn(3, 64)
    expected, elsewhere = native_ops.linear(y, weight), []

    def run() -> torch.Tensor:
        other = threading.Thread(target=lambda: elsewhere.append(native_ops.linear(y, weight)))
        other.start()
        other.join()
        return native_ops.linear(x, weight)

    _, program = capturer.capture(run)
    assert program.num_steps == 1
    assert torch.equal(elsewhere[0], expected)


def test_an_error_in_the_captured_function_leaves_no_trace(native_ops, capturer) -> None:
    x = torch.randn(4, 8)
    before = native_ops._native.gated

    def run() -> None:
        native_ops.silu_and_mul(x)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        capturer.capture(run)
    assert native_ops._native.gated is before
    _, program = capturer.capture(lambda: native_ops.silu_and_mul(x))
    assert torch.equal(program.replay(), native_ops.silu_and_mul(x))


def test_with_checked_operators_there_are_no_programs(native_ops, random_batch, monkeypatch) -> None:
    """A replay follows the indices that its inputs hold then; only operators that are called one by one check them."""
    monkeypatch.setenv("SHOAL_KERNEL_CHECKS", "1")
    checked = CpuOps(native_ops._native)
    assert checked.capturer(1 << 20) is None
    batch = random_batch.random((20,))
    q, meta = batch.whole()
    meta.block_tables[0, 1] = batch.num_blocks
    with pytest.raises(IndexError, match="block out of range"):
        checked.paged_attention(q, batch.pages(checked), meta, 0.125)
    meta.slot_mapping[3] = batch.num_blocks * batch.block_size
    with pytest.raises(IndexError, match="slot out of range"):
        checked.store_kv(batch.k[0], batch.v[0], batch.pages(checked), meta.slot_mapping)


def test_every_operator_of_a_step_can_be_in_a_program(native_ops) -> None:
    native = native_ops._native
    others = native.signatures.keys() - native.replayable.keys()
    # Weights are packed at load; tokens are drawn when the step is done; partial attention is merged where other ranks
    # are waited for, which no program can.
    assert {name for name in others if not name.startswith("pack_")} == {"run_program", "sample", "merge_attention"}
