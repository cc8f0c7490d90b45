"""A model that computes nothing and says what a file tells it, so that a client has one right answer to be tested for.

Scheduling, limits, stop strings and all that follows are the engine's own; only the forward pass is replaced. Sampling
parameters change nothing: every token has probability 1. The file's format: `script_file.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.configs.errors import EngineDeadError, InvalidRequestError
from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepOutput, StepPlan, TokenLogprobs
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.executor.script_file import Script, ScriptBook

if TYPE_CHECKING:
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer

_QUANTUM_S = 0.005
"""A step waits at most so long for slow scripts, so that whoever comes meanwhile is not delayed by more."""


class LastUserMessage:
    """Cuts the last user message out of a rendered chat. Where user turns begin is learnt from the chat template: what
    it writes just before two different user messages, as far as both agree."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opener = _user_turn_opener(tokenizer)

    def of(self, prompt_token_ids: list[int]) -> str:
        """The text from the last user turn on; all of the prompt when there is none."""
        text = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        if not self._opener or self._opener not in text:
            return text
        return text[text.rindex(self._opener) + len(self._opener) :]


def _user_turn_opener(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        return ""
    first, reply, second = "shoalfirst", "shoalreply", "shoalsecond"
    turns = [("user", first), ("assistant", reply), ("user", second)]
    try:
        text = tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])
    except InvalidRequestError:
        return ""
    before_first, _, rest = text.partition(first)
    before_second = rest.partition(second)[0].partition(reply)[2]
    length = 0
    while length < min(len(before_first), len(before_second)) and (
        before_first[-1 - length] == before_second[-1 - length]
    ):
        length += 1
    opener = before_first[len(before_first) - length :]
    return opener if opener.strip() else ""


@dataclass(slots=True)
class _Actor:
    """A sequence on stage."""

    known: NewSequence
    script: Script
    ready_at: float


class ScriptedExecutor(Executor):
    """Runs steps on a thread of its own, as the real ones do."""

    def __init__(self, book: ScriptBook, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.steps_in_flight = 1 if book.has_delays else 2
        """A step that defers slow sequences must be over before the next one is planned."""
        self._book = book
        self._last_user_message = LastUserMessage(tokenizer)
        self._clock = clock
        self._actors: dict[int, _Actor] = {}
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-script")

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        if self._closed.is_set():
            closed: Future[StepOutput] = Future()
            closed.set_exception(EngineDeadError("The executor is closed."))
            return closed
        return self._thread.submit(self._step, plan)

    def close(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _step(self, plan: StepPlan) -> StepOutput:
        for seq_id in plan.removed:
            del self._actors[seq_id]
        for known in plan.new:
            script = self._book.script_for(self._last_user_message.of(known.token_ids[: known.num_prompt_tokens]))
            self._actors[known.seq_id] = _Actor(known, script, self._clock() + script.delay_s)
        self._wait_for_the_first(plan)
        output = StepOutput(plan.step_id)
        for chunk in plan.chunks:
            self._speak(chunk, output)
        return output

    def _wait_for_the_first(self, plan: StepPlan) -> None:
        if all(chunk.samples for chunk in plan.chunks):
            earliest = min(self._actors[chunk.seq_id].ready_at for chunk in plan.chunks)
            wait = min(earliest - self._clock(), _QUANTUM_S)
            if wait > 0:
                self._closed.wait(wait)

    def _speak(self, chunk: ScheduledChunk, output: StepOutput) -> None:
        actor = self._actors[chunk.seq_id]
        known, script = actor.known, actor.script
        end = chunk.start + chunk.num_tokens
        position = end - known.num_prompt_tokens
        if chunk.samples and actor.ready_at > self._clock():
            output.deferred.append(chunk.seq_id)
            return
        if chunk.samples and script.fail_after is not None and position >= script.fail_after:
            output.errors[chunk.seq_id] = f"The script failed after {script.fail_after} tokens, as its file says."
            return
        if known.sampling.prompt_logprobs is not None:
            targets = known.token_ids[chunk.start + 1 : min(end + 1, known.num_prompt_tokens)]
            top = known.sampling.prompt_logprobs
            output.prompt_logprobs[chunk.seq_id] = [_certain(token_id, top) for token_id in targets]
        if chunk.samples:
            token_id = script.token(position)
            actor.ready_at = self._clock() + script.delay_s
            output.seq_ids.append(chunk.seq_id)
            output.generations.append(known.generation)
            output.token_ids.append(token_id)
            k = known.sampling.logprobs
            output.logprobs.append(None if k is None else _certain(token_id, k))


def _certain(token_id: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, 0.0, 1, [(token_id, 0.0)] if k else [])
