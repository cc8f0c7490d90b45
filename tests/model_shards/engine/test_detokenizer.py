"""Whatever the token borders, the stream is the text: no half character, no part of a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model_shards.engine.detokenizer import Detokenizer, Piece, StopMatcher, TextTable
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.params import SamplingParams

EVERYTHING = "ďábelské 😀 中文 👩‍👩‍👧"


class Tokens:
    """A vocabulary made up as it goes: each distinct piece of bytes is a token."""

    special_token_ids = frozenset({0})

    def __init__(self, pieces: Sequence[bytes], *, strips_space: bool = False) -> None:
        self.pieces = [b"<|special|>", *pieces]
        self.strips_space = strips_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        data = b"".join(self.pieces[i] for i in token_ids if not (skip_special_tokens and i == 0))
        return (data.removeprefix(b" ") if self.strips_space else data).decode(errors="replace")


def split(data: bytes, borders: Sequence[int]) -> list[bytes]:
    cuts = sorted({0, len(data), *(border % (len(data) + 1) for border in borders)})
    return [data[a:b] for a, b in pairwise(cuts)]


def run(pieces: Sequence[bytes], **sampling: object) -> tuple[list[Piece], str | None]:
    """Every piece of output, the flush included, and the stop string that ended it."""
    detokenizer = Detokenizer(Tokens(pieces), SamplingParams(**sampling))  # type: ignore[arg-type]
    emitted = []
    for token_id in range(1, len(pieces) + 1):
        emitted.append(detokenizer.feed(token_id, TokenLogprobs(token_id, -1.0, 1, [])))
        if emitted[-1].stop is not None:
            return emitted, emitted[-1].stop
    return [*emitted, detokenizer.flush()], None


def run_plainly(pieces: Sequence[bytes], **sampling: object) -> tuple[list[Piece], str | None, int]:
    """As `run`, by `feed_plain` where that has an answer; also how often it had."""
    tokens = Tokens(pieces)
    detokenizer = Detokenizer(tokens, SamplingParams(**sampling), (), TextTable(tokens))  # type: ignore[arg-type]
    emitted, plain = [], 0
    for token_id in range(1, len(pieces) + 1):
        text = detokenizer.feed_plain(token_id)
        plain += text is not None
        emitted.append(detokenizer.feed(token_id, None) if text is None else Piece(text, [token_id]))
        if emitted[-1].stop is not None:
            return emitted, emitted[-1].stop, plain
    return [*emitted, detokenizer.flush()], None, plain


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The oracle: (end, stop) of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def test_o06_characters_split_over_tokens_are_never_shown_in_half() -> None:
    data = EVERYTHING.encode()
    for seed in range(300):
        rng = random.Random(seed)
        pieces, _ = run(split(data, [rng.randrange(len(data)) for _ in range(rng.randrange(40))]))
        assert all("\ufffd" not in piece.text for piece in pieces)
        assert text_of(pieces) == EVERYTHING


def test_o06_byte_by_byte() -> None:
    pieces, _ = run([bytes([byte]) for byte in EVERYTHING.encode()])
    assert [piece.text for piece in pieces if piece.text] == list(EVERYTHING)


def test_a_character_cut_off_by_the_end_is_replaced_once_at_the_very_end() -> None:
    pieces, _ = run([b"a", "😀".encode()[:2], "😀".encode()[2:3]])
    assert [piece.text for piece in pieces] == ["a", "", "", "\ufffd"]
    assert pieces[-1].token_ids == [2, 3]


def test_bytes_that_can_never_be_a_character_are_replaced_when_that_is_known() -> None:
    pieces, _ = run([b"a\xff", b"b"])
    assert text_of(pieces) == "a\ufffdb"


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5, 6], [10], [8, 9, 10, 11]])
def test_o07_nothing_that_may_become_a_stop_string_leaks(cuts: list[int]) -> None:
    pieces, stop = run(split(b"ABC: DEFGHIJ", cuts), stop=("DEFGHIJ",))
    assert text_of(pieces) == "ABC: "
    assert stop == "DEFGHIJ"


def test_o07_what_was_held_is_released_when_it_cannot_match() -> None:
    pieces, stop = run([b"DEF", b"X"], stop=("DEFGHIJ",))
    assert [piece.text for piece in pieces] == ["", "DEFX", ""]
    assert [piece.token_ids for piece in pieces] == [[], [1, 2], []]
    assert stop is None


def test_only_the_longest_possible_beginning_is_held() -> None:
    pieces, _ = run([b"abcde", b"fgh", b"hij", b"D"], stop=("DEFGHIJ",))
    assert [piece.text for piece in pieces] == ["abcde", "fgh", "hij", "", "D"]


def test_held_text_is_released_at_the_end() -> None:
    pieces, stop = run([b"abc", b"DEF"], stop=("DEFGHIJ",))
    assert text_of(pieces) == "abcDEF"
    assert stop is None


def test_the_stop_string_that_ends_first_wins_and_of_two_the_longer() -> None:
    assert text_of(run([b"xabcd"], stop=("abcd", "bc"))[0]) == "xa"
    assert text_of(run([b"xabc"], stop=("bc", "abc"))[0]) == "x"


def test_stop_string_in_the_output_when_asked_for() -> None:
    pieces, stop = run([b"one. ", b"Ob", b"server: two"], stop=("Observer",), include_stop_str_in_output=True)
    assert text_of(pieces) == "one. Observer"
    assert stop == "Observer"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    pieces, stop = run([b"END", b"a", b"END", b"b"], stop=("END",), min_tokens=2)
    assert text_of(pieces) == "ENDa"
    assert stop == "END"


def test_text_ids_and_logprobs_leave_together() -> None:
    pieces, _ = run([b"ab", "中".encode()[:1], "中".encode()[1:], b"c"])
    assert [(p.text, p.token_ids) for p in pieces] == [("ab", [1]), ("", []), ("中", [2, 3]), ("c", [4]), ("", [])]
    assert all([entry.token_id for entry in piece.logprobs] == piece.token_ids for piece in pieces)


def test_special_tokens_are_skipped_or_shown() -> None:
    for skip, text in ((True, "ab"), (False, "a<|special|>b")):
        detokenizer = Detokenizer(Tokens([b"a", b"b"]), SamplingParams(skip_special_tokens=skip))
        assert text_of([detokenizer.feed(token_id, None) for token_id in (1, 0, 2)]) == text


def test_the_space_that_sentencepiece_puts_before_a_text_is_dropped_once() -> None:
    tokens = Tokens([b" Hello", b" world", b" "], strips_space=True)
    for ids in ([1, 2], [3, 1], [0, 1], [2]):
        detokenizer = Detokenizer(tokens, SamplingParams())
        text = text_of([detokenizer.feed(token_id, None) for token_id in ids] + [detokenizer.flush()])
        assert text == tokens.decode(ids)


def test_after_the_text_of_a_prompt_the_first_space_stands() -> None:
    tokens = Tokens([b" Hello", b" world"], strips_space=True)
    for prompt, text in (([1], " world"), ([0, 1], " world"), ([0], "world"), ([], "world")):
        detokenizer = Detokenizer(tokens, SamplingParams(), prompt)
        assert detokenizer.feed(2, None).text == text
        assert tokens.decode([*prompt, 2]) == tokens.decode(prompt) + text


texts = st.text(alphabet="abXé😀", max_size=30)
stop_strings = st.lists(st.text(alphabet="abXé😀", min_size=1, max_size=4), max_size=3)
cut_points = st.lists(st.integers(0, 200), max_size=20)


@settings(max_examples=300, deadline=None)
@given(texts, cut_points, stop_strings, st.booleans())
def test_every_split_gives_the_same_stream(text: str, borders: list[int], stops: list[str], include: bool) -> None:
    pieces, stop = run(split(text.encode(), borders), stop=tuple(stops), include_stop_str_in_output=include)
    expected = first_stop(text, stops)
    if expected is None:
        assert (text_of(pieces), stop) == (text, None)
    else:
        end, found = expected
        assert stop == found
        assert text_of(pieces) == text[: end if include else end - len(found)]
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert token_ids == list(range(1, len(token_ids) + 1))
    assert stop is not None or len(token_ids) == len(split(text.encode(), borders))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | texts.map(str.encode), cut_points, stop_strings, st.booleans(), st.integers(0, 4))
def test_the_short_way_gives_the_same_pieces(
    data: bytes, borders: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    sampling = {"stop": tuple(stops), "include_stop_str_in_output": include, "min_tokens": min_tokens}
    pieces = split(data, borders)
    expected, stop = run(pieces, **sampling)
    shown, shown_stop, _ = run_plainly(pieces, **sampling)
    assert ([(p.text, p.token_ids) for p in shown], shown_stop) == ([(p.text, p.token_ids) for p in expected], stop)


def test_the_short_way_is_taken_for_all_but_the_first_token_of_a_plain_text() -> None:
    assert run_plainly([b"a ", b"plain ", "täxt ".encode(), b"of ", b"words"], stop=("###",))[2] == 4


def test_a_special_token_and_half_a_character_do_not_go_the_short_way() -> None:
    detokenizer = Detokenizer(Tokens([b"a", b"\xc3", b"\xa4"]), SamplingParams())
    assert detokenizer.feed(1, None).text == "a"
    assert [detokenizer.feed_plain(token_id) for token_id in (0, 2, 3)] == [None, None, None]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), cut_points)
def test_any_bytes_give_what_decoding_them_at_once_gives(data: bytes, borders: list[int]) -> None:
    assert text_of(run(split(data, borders))[0]) == data.decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_the_held_length_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    if matcher.feed(text) is not None:
        return
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert matcher.held == max(len(b) for b in beginnings if text.endswith(b))
