"""Which of several engines gets a request: the one that has seen the beginning of its prompt, within bounds of load.

A gateway knows the load of each engine as of the last heartbeat, and what it sent itself since then. What an engine has
in its prefix cache it does not ask: it remembers where prompts that begin alike went last.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from shoal.model_shards.engine.request import Request

_SHORTEST = 32
"""Tokens; a beginning that is shorter is not worth a detour."""
_LONGEST = 1 << 15
_REMEMBERED = 65_536
"""Beginnings; about 10 MB."""
_SLACK = 1.25
_SLACK_SEQUENCES = 4
"""An engine may have so much more load than the least loaded one and still be preferred for its cache."""


class Loaded(Hashable, Protocol):
    @property
    def load(self) -> int:
        """Sequences that it runs or that wait there."""


Target = TypeVar("Target", bound=Loaded)


class PrefixAffinity:
    """Remembers, for each beginning of a prompt (of 32, 64, 128, ... tokens, with its salt), who got it last."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, object] = OrderedDict()

    def choose(self, request: Request, candidates: Sequence[Target]) -> Target:
        """One of the candidates, of which there is at least one: who got the longest beginning of this prompt, unless
        its load is too far above the least; else the least loaded. Remembered as the one that got it."""
        chosen = min(candidates, key=lambda candidate: candidate.load)
        bound = _SLACK * chosen.load + _SLACK_SEQUENCES
        keys = _beginnings(request)
        for key in reversed(keys):
            known = next((candidate for candidate in candidates if candidate is self._last.get(key)), None)
            if known is not None and known.load <= bound:
                chosen = known
                break
        for key in keys:
            self._last[key] = chosen
            self._last.move_to_end(key)
        while len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        return chosen

    def forget(self, target: object) -> None:
        """It is gone, and its cache with it."""
        for key in [key for key, last in self._last.items() if last is target]:
            del self._last[key]


def _beginnings(request: Request) -> list[bytes]:
    """Digests of the beginnings of the prompt, shortest first. Each token is hashed once."""
    tokens = array("q", request.prompt_token_ids[:_LONGEST])
    digest = hashlib.blake2b(request.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16)
    keys, start, end = [], 0, _SHORTEST
    while end <= len(tokens):
        digest.update(tokens[start:end])
        keys.append(digest.digest())
        start, end = end, 2 * end
    return keys
