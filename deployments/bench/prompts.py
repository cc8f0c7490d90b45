"""Prompts of an exact token length, made of plain words, the same for the same seed.

Each word below is one token (with its leading space) in the byte-level BPE vocabularies of current models, so that a
prompt's length can be set by counting words; a ruler corrects what a vocabulary or a chat template does differently.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.workloads import Workload

_WORD_LIST = """
able action activity add age air allow appear area art ask bad beauty begin believe best better bird boat body book
bread bring build business buy call car case center certain change city clear clock close color common company
consider continue cost court create culture cut dance data day decide die different door doctor dream early earth
east event expect eye face fact fall farm fear feel field figure find fire fish follow force form free full game
general girl give glass gold good great ground group grow hand happen hard health hear help high history home hope
house idea image important include increase industry iron issue join keep kill language large last late law lead
learn leave length let letter level life light line list little live local long look lose love main make market
matter meet milk minute money morning mother mountain move movie music name nature new news next night north note
number offer office oil old open own page paper part pay peace person phone picture piece place plan plane plant
play point possible power practice problem product project provide pull question raise rate reach read real reason
recent record remain remember report require research rest result right river road room run same say school science
sea season seem sell send serve set shape ship short show side silver simple sing single situation size sleep small
smile song sound south space speak speed spend spring stand star start stay step stone stop story street strong
student study suggest summer sun table take talk teacher team tell test thing think time town trade train tree truth
turn type understand use view voice wait walk wall war watch water way weight west wheel white whole win window
winter woman wood word work worker world write year young
"""
WORDS = tuple(_WORD_LIST.split())
_MAX_CORRECTIONS = 12

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload before it is sent."""

    messages: list[Message]
    max_tokens: int
    tag: str = ""


class Ruler(ABC):
    """Measures prompts in the tokens of one model."""

    exact: bool = True

    @abstractmethod
    async def count(self, messages: list[Message]) -> int:
        """Tokens of the rendered prompt, template included."""


class PromptMaker:
    """Makes the requests of workloads. Two makers with the same seed make the same texts for the same model."""

    def __init__(self, ruler: Ruler, seed: str) -> None:
        self._ruler = ruler
        self._random = random.Random(seed)

    async def requests(self, workload: Workload) -> list[PlannedRequest]:
        """All requests of a workload whose number is known, in order of sending."""
        if not workload.shared_prefix_tokens:
            counts = range(workload.requests)
            return [PlannedRequest(await self._fit([], workload.input_tokens), workload.output_tokens) for _ in counts]
        requests: list[PlannedRequest] = []
        for number in range(workload.prefixes):
            share = workload.requests // workload.prefixes + (number < workload.requests % workload.prefixes)
            requests += await self._behind_one_prefix(workload, share)
        return requests

    async def _behind_one_prefix(self, workload: Workload, count: int) -> list[PlannedRequest]:
        head = [{"role": "system", "content": " ".join(self._words(workload.shared_prefix_tokens))}]
        target = workload.input_tokens + workload.shared_prefix_tokens
        return [
            PlannedRequest(
                await self._fit(head, target), workload.output_tokens, "cold" if i < workload.concurrency else "hit"
            )
            for i in range(count)
        ]

    async def long_requests(self, workload: Workload) -> list[PlannedRequest]:
        """The long prompts of a mixed workload, tagged `long`."""
        long = workload.long
        if long is None:
            return []
        return [
            PlannedRequest(await self._fit([], long.input_tokens), long.output_tokens, "long")
            for _ in range(long.requests)
        ]

    async def short_requests(self, workload: Workload) -> Iterator[PlannedRequest]:
        """Endless short prompts of a mixed workload, tagged `short`: fresh words, measured once for all."""
        first = await self._fit([], workload.input_tokens)
        words = first[-1]["content"].count(" ") + 1

        def endless() -> Iterator[PlannedRequest]:
            while True:
                yield PlannedRequest([_user(self._words(words))], workload.output_tokens, "short")

        return endless()

    def _words(self, count: int) -> list[str]:
        return self._random.choices(WORDS, k=count)

    async def _fit(self, head: list[Message], target: int) -> list[Message]:
        """`head` plus a user message such that the whole prompt has `target` tokens (or as near as words allow)."""
        words = self._words(max(1, target - sum(len(message["content"].split()) for message in head)))
        best: tuple[int, list[Message]] | None = None
        for _ in range(_MAX_CORRECTIONS):
            messages = [*head, _user(words)]
            excess = await self._ruler.count(messages) - target
            if best is None or abs(excess) < abs(best[0]):
                best = (excess, messages)
            if excess == 0 or (excess > 0 and len(words) == 1):
                break
            if excess > 0:
                words = words[: max(1, len(words) - excess)]
            else:
                words = words + self._words(-excess)
        assert best is not None
        if best[0] > 0 and len(best[1][-1]["content"].split()) == 1:
            raise ConfigError(
                f"A prompt of {target} tokens is too short: one word in this model's chat template already takes "
                f"{target + best[0]}. Ask for at least that many input tokens.",
                param="input_tokens",
            )
        return best[1]


def _user(words: list[str]) -> Message:
    return {"role": "user", "content": " ".join(words)}
