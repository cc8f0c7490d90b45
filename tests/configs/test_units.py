import pytest

from shoal.configs.errors import ConfigError
from shoal.configs.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        (" 2gb ", 2_000_000_000),
        ("64kB", 64_000),
        ("1TiB", 1 << 40),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_as_people_write_them(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "12 parsecs", "1.2.3GiB", "0", 0, -5, "0.0001B", True, "٣GiB"]
)
def test_anything_else_is_refused_and_named(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, param="kv_cache_memory")
    assert caught.value.param == "kv_cache_memory"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (46_080, "45 KiB"),
        (1000 << 20, "1000 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5,120 TiB"),
    ],
)
def test_sizes_are_printed_with_four_digits_at_most(count: int, expected: str) -> None:
    assert format_bytes(count) == expected
