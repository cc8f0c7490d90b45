"""Tokens to text as they come, for one sequence: never half a character, never part of a stop string.

Text, token ids and logprobs leave together: a token whose text cannot be shown whole yet is held, and so is all that
comes after it. What is emitted does not depend on where the token borders fall: the joined text is the text that
decoding everything at once and cutting at the stop string would give.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.params import SamplingParams


class TokenTexts(Protocol):
    """The part of a tokenizer that incremental decoding needs."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TextTable:
    """The texts of tokens that are text by themselves, looked up once each: most tokens of most answers need nothing
    more. One a tokenizer."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def text(self, token_id: int) -> str | None:
        """None for a special token, and for bytes that are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = self._look_up(token_id)
            return text

    def _look_up(self, token_id: int) -> str | None:
        if token_id in self._tokenizer.special_token_ids:
            return None
        try:
            return self._tokenizer.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces (Knuth-Morris-Pratt, one automaton a string).

    The match that ends first wins, and of those the longest; so the result is the same however the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)

    def ignores(self, text: str) -> bool:
        """Nothing is begun, and nothing begins in this text: feeding it would change nothing."""
        return not self._stops or not (any(self._matched) or not self._first_characters.isdisjoint(text))

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Takes more text. Returns (offset in `text` just after the match, stop string) or None. Not `armed`: complete
        matches do not count (the sequence is not allowed to end yet)."""
        if self.ignores(text):
            return None
        for offset, character in enumerate(text):
            found = self._step(character)
            if armed and found is not None:
                return offset + 1, found
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may still become a stop string."""
        return max(self._matched, default=0)

    def _step(self, character: str) -> str | None:
        found: str | None = None
        for index, (stop, failure) in enumerate(zip(self._stops, self._failure, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                matched = failure[matched - 1]
                if found is None or len(stop) > len(found):
                    found = stop
            self._matched[index] = matched
        return found


def _failure_table(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of pattern[:i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = table[matched - 1]
        matched += pattern[matched] == pattern[index]
        table[index] = matched
    return table


@dataclass(slots=True)
class Piece:
    """What may be shown after some more tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop: str | None = None
    """The stop string that was completed; nothing comes after it."""

    def extend(self, other: Piece) -> None:
        """Appends what comes right after this piece."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.stop = other.stop


class Detokenizer:
    """Feed it each token once, in order; call `flush` when the sequence ends for another reason than a stop string."""

    def __init__(
        self,
        tokenizer: TokenTexts,
        sampling: SamplingParams,
        prompt: Sequence[int] = (),
        table: TextTable | None = None,
    ) -> None:
        """`prompt`: the token ids that come before; their text is not given again. `table` may be shared by all
        sequences of a tokenizer."""
        self._tokenizer = tokenizer
        self._table = table or TextTable(tokenizer)
        self._skip_special = sampling.skip_special_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._matcher = StopMatcher(sampling.stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        """Decoded, not yet emitted."""
        self._start = 0
        """Characters emitted, so the offset of `_text` in the whole."""
        self._tokens: deque[tuple[int, int, TokenLogprobs | None]] = deque()
        """Not yet emitted: (offset of the character after the token's text, id, logprobs)."""
        self._at_start = all(token_id in tokenizer.special_token_ids for token_id in prompt)
        """Nothing but special tokens yet."""
        self._num_tokens = 0
        self._shown_tokens = 0
        """Of the first of `_tokens`: shown before, by another."""
        self._shown_until = 0
        """Offset of the character after their text."""

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that another detokenizer has given out already; what is emitted begins after them. The other
        one may have known more (that a possible stop string did not become one), so some may be held here again."""
        for token_id in token_ids:
            if self.feed_plain(token_id) is None:
                self.feed(token_id, None)
        self._shown_tokens = len(self._tokens)
        self._shown_until = self._tokens[-1][0] if self._tokens else self._start

    def feed_plain(self, token_id: int) -> str | None:
        """The usual case of `feed` at a fraction of its cost: a token without logprobs that is shown whole at once,
        because nothing is held and it holds nothing. Its text, or None when it is not so; nothing is changed then."""
        if self._tokens or self._at_start:
            return None
        text = self._table.text(token_id)
        if text is None or not self._matcher.ignores(text):
            return None
        self._num_tokens += 1
        self._start += len(text)
        return text

    def feed(self, token_id: int, logprobs: TokenLogprobs | None, *, hidden: bool = False) -> Piece:
        """One more token. `hidden`: it ends the sequence and its text is not shown (end-of-sequence)."""
        self._num_tokens += 1
        new = "" if hidden else self._decode(token_id)
        offset = self._start + len(self._text)
        self._text += new
        half_a_character = bool(self._utf8.getstate()[0])
        self._tokens.append((offset + len(new) + half_a_character, token_id, logprobs))
        match = self._matcher.feed(new, armed=self._num_tokens >= self._min_tokens)
        if match is not None:
            after, stop = match
            cut = offset + after - (0 if self._include_stop else len(stop))
            return self._emit(cut, everything=True, stop=stop)
        held = 0 if self._include_stop else self._matcher.held
        return self._emit(self._start + len(self._text) - held)

    def flush(self) -> Piece:
        """The sequence is over: all that was held. Bytes that never became a character are replaced here, once."""
        self._text += self._utf8.decode(b"", final=True)
        return self._emit(self._start + len(self._text), everything=True)

    def _decode(self, token_id: int) -> str:
        if self._skip_special and token_id in self._tokenizer.special_token_ids:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            # SentencePiece marks the start of a word with a space, which decoding drops at the start of a text; after
            # the text of a prompt it stands.
            shown = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if data.startswith(b" ") and not shown.startswith(" "):
                data = data[1:]
            self._at_start = False
        return self._utf8.decode(data)

    def _emit(self, until: int, *, everything: bool = False, stop: str | None = None) -> Piece:
        """Emits the tokens whose text ends at or before `until`. With `everything`, all tokens and the text up to
        `until`, even if that is inside a token."""
        piece = Piece(stop=stop)
        end = until if everything else self._start
        while self._tokens and (everything or self._tokens[0][0] <= until):
            token_end, token_id, logprobs = self._tokens.popleft()
            piece.token_ids.append(token_id)
            if logprobs is not None:
                piece.logprobs.append(logprobs)
            if not everything:
                end = token_end
        count = end - self._start
        piece.text, self._text = self._text[:count], self._text[count:]
        if self._shown_tokens:
            self._leave_out_shown(piece)
        self._start = end
        return piece

    def _leave_out_shown(self, piece: Piece) -> None:
        """They have no logprobs here, so these belong to the rest already."""
        count = min(self._shown_tokens, len(piece.token_ids))
        self._shown_tokens -= count
        piece.token_ids = piece.token_ids[count:]
        piece.text = piece.text[max(0, self._shown_until - self._start) :]
