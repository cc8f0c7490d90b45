"""The generator against the published known answers, and the numbers made of it."""

import numpy as np
import pytest

from shoal.model_shards.sampling.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: list[int], key: list[int], expected: str) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert " ".join(f"{int(word):08x}" for word in words[:, 0]) == expected


def test_a_number_depends_on_its_position_only_not_on_what_is_made_with_it() -> None:
    together = uniforms(42, 3, range(1000))
    for start in (0, 1, 63, 500, 999):
        np.testing.assert_array_equal(uniforms(42, 3, range(start, start + 1))[0], together[start])


def test_seed_index_and_position_all_matter_to_the_last_bit() -> None:
    streams = [
        tuple(uniforms(seed, index, range(position, position + 1))[0])
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for index in (0, 1, 127)
        for position in (0, 1, 2**32)
    ]
    assert len(set(streams)) == 5 * 3 * 3


def test_negative_seeds_are_seeds_modulo_two_to_the_64() -> None:
    np.testing.assert_array_equal(uniforms(-1, 0, range(4)), uniforms(2**64 - 1, 0, range(4)))


def test_the_numbers_are_uniform_and_independent() -> None:
    """Kolmogorov-Smirnov distance and correlation within 5 sigma for n = 200,000."""
    count = 200_000
    numbers = uniforms(7, 0, range(count))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    grid = np.arange(1, count + 1) / count
    for column in numbers.T:
        assert np.abs(np.sort(column) - grid).max() < 2.5 / count**0.5
    pairs = [(numbers[:, 0], numbers[:, 1]), (numbers[:-1, 0], numbers[1:, 0])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 5 / count**0.5 for a, b in pairs)
