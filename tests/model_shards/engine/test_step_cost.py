"""What a step will take is learnt from what steps took."""

from __future__ import annotations

import random

import pytest

from shoal.model_shards.engine.step_cost import StepCostModel, StepShape

TRUTH = (0.012, 0.0016, 1.9e-6, 0.0012, 0.9e-6)
"""Seconds for the step, a decode, a position it attends to, a prompt's token, a pair of its attention."""


def shape(decodes: int = 0, context: int = 200, prompt: int = 0, start: int = 0) -> StepShape:
    made = StepShape()
    for _ in range(decodes):
        made.add(context, 1)
    if prompt:
        made.add(start, prompt)
    return made


def seconds(of: StepShape, scale: float = 1.0) -> float:
    return scale * sum(weight * feature for weight, feature in zip(TRUTH, of.features(), strict=True))


def random_shape(rng: random.Random) -> StepShape:
    prompt = rng.choice([0, 16, 32, 64, 128])
    return shape(rng.choice([1, 4, 8, 20]), rng.randrange(50, 600), prompt, rng.choice([0, 128, 500, 3000]))


def trained(scale: float, noise: float = 0.0, steps: int = 100) -> StepCostModel:
    rng, model = random.Random(3), StepCostModel()
    for _ in range(steps):
        of = random_shape(rng)
        model.observe(of, seconds(of, scale) * (1 + rng.uniform(-noise, noise)))
    return model


def errors(model: StepCostModel, scale: float) -> list[float]:
    """Relative, smallest first, over shapes that it was not shown."""
    rng = random.Random(4)
    shapes = [random_shape(rng) for _ in range(100)]
    return sorted(abs(model.predict(of) / seconds(of, scale) - 1) for of in shapes)


def test_shapes_count_rows_and_what_they_attend_to() -> None:
    of = shape(decodes=2, context=10, prompt=3, start=100)
    assert (of.decodes, of.decode_context) == (2, 22)
    assert (of.prompt_tokens, of.prompt_context) == (3, 101 + 102 + 103)


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_it_learns_any_machine(scale: float) -> None:
    assert errors(StepCostModel(), scale)[50] > 0.3
    assert errors(trained(scale), scale)[-1] < 0.1
    assert errors(trained(scale, noise=0.1), scale)[-1] < 0.15


def test_a_few_steps_are_enough_for_the_shapes_that_come() -> None:
    """A prompt, the tokens after it, and then a prompt beside them: what a fresh server sees first."""
    model, beside = StepCostModel(), shape(4, 200, 32, 0)
    for of in [shape(prompt=128), *[shape(4)] * 4, beside, beside, beside]:
        model.observe(of, seconds(of, 10))
    assert model.predict(beside) == pytest.approx(seconds(beside, 10), rel=0.15)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_when_all_steps_are_alike_a_token_is_not_charged_for_the_whole_step(scale: float) -> None:
    """Else pieces that were once cut short by a slow start would look too dear to grow again."""
    model, of = StepCostModel(), shape(4, 200, 8, 400)
    model.observe(shape(prompt=256), 10 * seconds(shape(prompt=256), scale))
    for _ in range(50):
        model.observe(of, seconds(of, scale))
    assert model.predict(of) == pytest.approx(seconds(of, scale), rel=0.05)
    assert model.price_of_prompt()[0] == pytest.approx(scale * TRUTH[3], rel=1.0)


def test_a_stall_is_not_believed_but_two_are() -> None:
    of = shape(8, 200, 32, 100)
    model = trained(1.0)
    model.observe(of, 50 * seconds(of))
    assert model.predict(of) < 1.1 * seconds(of)
    for _ in range(3):
        model.observe(of, 50 * seconds(of))
    assert model.predict(of) > 25 * seconds(of)
    model.observe(of, seconds(of))
    model.observe(of, seconds(of))
    assert model.predict(of) < 2 * seconds(of)


def test_a_machine_that_slows_down_is_followed() -> None:
    model, rng = trained(1.0), random.Random(5)
    for _ in range(40):
        of = random_shape(rng)
        model.observe(of, seconds(of, 3))
    assert errors(model, 3)[50] < 0.1
    assert errors(model, 3)[-1] < 0.3


def test_a_thousand_decodes_do_not_wipe_out_what_prompts_cost() -> None:
    model, rng = trained(1.0), random.Random(6)
    for _ in range(1000):
        of = shape(rng.choice([7, 8, 9]), rng.randrange(100, 300))
        model.observe(of, seconds(of) * rng.uniform(0.95, 1.05))
    of = shape(8, 200, 32, 1000)
    assert model.predict(of) == pytest.approx(seconds(of), rel=0.1)


def test_no_price_is_ever_negative_and_equal_histories_give_equal_models() -> None:
    def history() -> StepCostModel:
        rng, model = random.Random(8), StepCostModel()
        for _ in range(300):
            model.observe(random_shape(rng), rng.uniform(0.001, 0.2))  # nothing to do with the shape
            assert min(model.price_of_prompt()) >= 0
            assert model.predict(shape(1)) >= 0
        return model

    a, b = history(), history()
    assert a.price_of_prompt() == b.price_of_prompt()
    assert a.predict(shape(3, 50, 70, 20)) == b.predict(shape(3, 50, 70, 20))
