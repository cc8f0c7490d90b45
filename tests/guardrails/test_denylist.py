"""The deny-list: what it takes, what it finds, and that streams and whole texts agree."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import regex

from shoal.configs.app import GuardConfig
from shoal.configs.errors import ConfigError
from shoal.guardrails.denylist import MAX_PATTERN_CHARS, DenyList, check_pattern
from shoal.guardrails.pipeline import RailPipeline, load_rails


def stream(deny_list: DenyList, pieces: list[str]) -> tuple[list[str], bool]:
    """What came out after each piece and at the end, and whether the text was allowed."""
    guarded = RailPipeline([deny_list]).open_stream()
    out = [guarded.feed(piece) for piece in pieces]
    return [*out, guarded.finish()], guarded.verdict.allowed


def test_text_that_cannot_become_a_match_goes_out_at_once() -> None:
    assert stream(DenyList({"w": r"\bkumquat\b"}), ["I like ", "pie", " a lot"]) == (
        ["I like ", "pie", " a lot", ""],
        True,
    )


def test_what_may_become_a_match_is_held_until_it_is_known() -> None:
    out, allowed = stream(DenyList({"w": "kumquat"}), ["a ku", "mq", "at!"])
    assert (out, allowed) == (["a ", "", "kumqat!", ""], True)


def test_no_part_of_a_blocked_word_gets_out() -> None:
    out, allowed = stream(DenyList({"w": "kumquat"}), ["a k", "um", "quat pie", " more"])
    assert ("".join(out), allowed) == ("a ", False)


def test_a_word_boundary_is_decided_by_the_next_character() -> None:
    deny_list = DenyList({"w": r"\bcat\b"})
    assert stream(deny_list, ["cat", "alogue"]) == (["", "catalogue", ""], True)
    assert stream(deny_list, ["cat", " food"])[1] is False
    assert stream(deny_list, ["the cat"])[1] is False
    assert stream(deny_list, ["con", "cat"]) == (["con", "cat", ""], True)


def test_case_is_ignored_and_the_rule_is_named() -> None:
    verdict = DenyList({"list.txt:3": "kumquat"}).check("A KUMQUAT")
    assert (verdict.allowed, verdict.rail, verdict.rule) == (False, "deny_list", "list.txt:3")


def test_streams_and_whole_texts_agree_on_random_texts() -> None:
    patterns = (r"\bkumquat\b", r"ab+c\b", r"-\bfoo", "ab bcd", r"x\s+y", "a(b|bc)d")
    deny_list = DenyList({pattern: pattern for pattern in patterns}, max_hold_back_chars=60)
    words = ["kumquat", "Kumquat", "s", " ", "ab", "abbc", "abc", "bcd", "-", "foo", "x", "  ", "y", "\n", "é", "abcd"]
    rng = random.Random(20)
    for _ in range(5000):
        text = "".join(rng.choice(words) for _ in range(rng.randint(0, 9)))
        pieces, start = [], 0
        while start < len(text):
            size = rng.randint(1, 4)
            pieces.append(text[start : start + size])
            start += size
        out, allowed = stream(deny_list, pieces)
        assert allowed == deny_list.check(text).allowed, text
        assert text.startswith("".join(out))
        if allowed:
            assert "".join(out) == text
        else:
            first = regex.search("|".join(f"(?:{pattern})" for pattern in patterns), text, regex.IGNORECASE)
            assert first is not None
            assert len("".join(out)) <= first.start()


def test_a_candidate_longer_than_the_hold_back_limit_is_blocked() -> None:
    deny_list = DenyList({"w": r"secret.*key"}, max_hold_back_chars=20)
    out, allowed = stream(deny_list, ["the secret ", "is something ", "long and longer"])
    assert ("".join(out), allowed) == ("the ", False)


def test_a_search_that_takes_too_long_blocks() -> None:
    deny_list = DenyList({"w": r"(?:\w+\s?)+[!?]"}, timeout_ms=20, max_hold_back_chars=60000)
    started = time.perf_counter()
    verdict = deny_list.check("word " * 3000)
    assert (verdict.allowed, verdict.rule) == (False, "timeout")
    assert time.perf_counter() - started < 5.0


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a valid regular expression"),
        ("(?=a)b", "not supported"),
        ("(?<!a)b", "not supported"),
        (r"(a)\1", "not supported"),
        ("(?i)a", "not supported"),
        ("^a", "anchor"),
        ("a$", "anchor"),
        (r"a\Z", "not supported"),
        (r"\Ba", "not supported"),
        ("(foo){e<=1}", "not a count"),
        ("a*", "matches the empty text"),
        ("x" * (MAX_PATTERN_CHARS + 1), "longer than"),
    ],
)
def test_patterns_that_a_stream_cannot_follow_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_pattern("line 1", pattern)


@pytest.mark.parametrize(
    "pattern", [r"[$^{]x", r"\$5", r"[\]]a", r"(?:ab)+\d{2,3}", r"a{,3}b", r"\p{Greek}", r"[[:alpha:]]1"]
)
def test_ordinary_patterns_are_taken(pattern: str) -> None:
    assert check_pattern("line 1", pattern) == pattern


def test_the_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("# fruit\n\n  kumquat  \nblue[ -]?print\n")
    rails, _ = load_rails(GuardConfig(deny_list=path))
    assert rails.check(["no fruit"]).allowed
    assert rails.check(["a blue-print"]).rule == "words.txt:4"


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("fine\n(broken\n")
    with pytest.raises(ConfigError, match=r"\(broken.*words\.txt:2"):
        load_rails(GuardConfig(deny_list=path))


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\n# nothing\n", "no pattern"), (b"\xff\xfe", "UTF-8"), (None, "read")]
)
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        load_rails(GuardConfig(deny_list=path))


def test_directions_are_switched_off_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("kumquat\n")
    inputs, outputs = load_rails(GuardConfig(deny_list=path, check_input=False))
    assert not inputs
    assert outputs


def test_a_match_across_two_messages_counts() -> None:
    assert not RailPipeline([DenyList({"w": r"blue\s+print"})]).check(["the blue", "print"]).allowed
