"""The conversation of `shoal chat`: history, commands, and what is printed. Knows no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console

from shoal.configs.errors import ContextLengthError, ShoalError
from shoal.deployments.cli.answers import Answers, Message, Turn

HELP = """\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and forget the conversation; without TEXT: remove it
/stats          speed of the last answer and length of the conversation
/quit           leave (also Ctrl-D)
Ctrl-C          stops the current answer, which stays in the conversation as far as it came
"""
# What a terminal would act on: a model must not move the cursor, set titles or colours. Tabs and line ends may stay.
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


class Conversation:
    """Messages so far, and one turn at a time."""

    def __init__(self, answers: Answers, console: Console, system: str | None = None) -> None:
        self._answers = answers
        self._console = console
        self.system = system
        self.history: list[Message] = []
        self.last: Turn | None = None

    @property
    def messages(self) -> list[Message]:
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.history

    def loop(self, read_line: Callable[[], str]) -> None:
        """Until /quit or the end of input. `read_line` raises EOFError at the end."""
        self._note(f"Talking to {self._answers.label}. /help lists the commands, Ctrl-C stops an answer.")
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note("Nothing is being answered; /quit or Ctrl-D leaves.")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.say(line)

    def say(self, text: str) -> bool:
        """Asks, prints the answer as it comes, keeps both; False when the turn failed (and left no trace)."""
        self.history.append({"role": "user", "content": text})
        turn = self.last = Turn()
        try:
            asyncio.run(self._answers.answer(self.messages, turn, self._print_piece))
        except KeyboardInterrupt:
            turn.finish_reason = "stopped"
        except ShoalError as error:
            self._failed(error, turn)
            return False
        self._console.print()
        if turn.text:
            self.history.append({"role": "assistant", "content": turn.text})
        else:
            # Two user messages in a row are refused by many chat templates.
            self.history.pop()
        self._note(describe(turn))
        return True

    def _failed(self, error: ShoalError, turn: Turn) -> None:
        self.history.pop()
        if turn.text:
            self._console.print()
        too_long = isinstance(error, ContextLengthError) or "context" in error.message.lower()
        hint = " /reset forgets the conversation." if too_long and self.history else ""
        self._console.print(f"{error.message}{hint}", style="red", markup=False)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self.history.clear()
            self._note("Forgotten.")
        elif name == "/system":
            self.system = argument.strip() or None
            self.history.clear()
            self._note("System message set." if self.system else "System message removed.")
        elif name == "/stats":
            last = describe(self.last) if self.last else "No answer yet."
            self._note(f"{last} {len(self.history)} messages in the conversation.")
        elif name == "/help":
            self._note(HELP.rstrip())
        else:
            self._note(f"No command {name}.\n{HELP.rstrip()}")

    def _print_piece(self, piece: str) -> None:
        self._console.out(printable(piece), end="", highlight=False)
        self._console.file.flush()

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def printable(text: str) -> str:
    """Without the control characters that a terminal would obey."""
    return text.translate(_CONTROL)


def describe(turn: Turn) -> str:
    """One line on how fast an answer came."""
    if turn.ttft is None:
        return "No text came."
    parts = [f"{turn.ttft:.2f} s to first token", f"{turn.tokens} tokens"]
    if turn.tokens_per_s is not None:
        parts.append(f"{turn.tokens_per_s:.1f} tokens/s")
    if turn.prompt_tokens is not None:
        cached = f", {turn.cached_tokens} cached" if turn.cached_tokens else ""
        parts.append(f"prompt {turn.prompt_tokens} tokens{cached}")
    if turn.finish_reason not in (None, "stop"):
        parts.append({"length": "ended by the length limit"}.get(str(turn.finish_reason), str(turn.finish_reason)))
    return ", ".join(parts) + "."
