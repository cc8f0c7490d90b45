"""The file of a scripted model: checked, and encoded with its tokenizer.

    {"tokenizer": "smollm2-135m",
     "rules": [{"match": "weather", "pieces": ["It ", "ra", "ins."], "delay_ms": 20, "fail_after": 2}],
     "default": {"pieces": ["ok"]}}

Every error is a ConfigError that names the place in the file, as in "$.rules[1].pieces[0]".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.configs.errors import ConfigError

if TYPE_CHECKING:
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer

_Text = Annotated[str, Field(min_length=1)]
_HOUR_MS = 3_600_000


class ScriptSpec(BaseModel):
    """What is said, as written."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    pieces: list[_Text] | None = None
    """Each is encoded by itself, so token borders fall where the pieces end."""
    tokens: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids, instead of pieces."""
    eos: bool = True
    """End with the end-of-sequence token; false: start over until a limit ends it."""
    delay_ms: float = Field(default=0, ge=0, le=_HOUR_MS)
    """Before each token."""
    fail_after: int | None = Field(default=None, ge=0)
    """The sequence fails inside the step after so many tokens."""


class RuleSpec(ScriptSpec):
    match: _Text
    """The rule speaks when the last user message (or the prompt) holds this text."""


class ScriptFile(BaseModel):
    """The whole file, as written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tokenizer: str = "smollm2-135m"
    """Any model that has a tokenizer: a known name, a file, a directory, a hub id."""
    rules: list[RuleSpec] = []
    """The first that matches speaks."""
    default: ScriptSpec
    """Speaks when no rule matches."""


@dataclass(frozen=True, slots=True)
class Script:
    """What is said, as tokens."""

    tokens: tuple[int, ...]
    """Not empty; the end-of-sequence token included, if the script has one."""
    delay_s: float = 0.0
    fail_after: int | None = None

    def token(self, position: int) -> int:
        """The output token at `position`, from 0. Past its end (`eos` false, or `ignore_eos`) a script starts over."""
        return self.tokens[position % len(self.tokens)]


@dataclass(frozen=True, slots=True)
class ScriptBook:
    rules: tuple[tuple[str, Script], ...]
    default: Script

    @property
    def has_delays(self) -> bool:
        return any(script.delay_s > 0 for script in (self.default, *(script for _, script in self.rules)))

    def script_for(self, text: str) -> Script:
        return next((script for match, script in self.rules if match in text), self.default)


def read_script_file(path: Path) -> ScriptFile:
    try:
        return ScriptFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"The scripted model's file {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        raise ConfigError(f"The scripted model's file {path}: {place}: {first['msg']}.", param=place) from error


def encode_scripts(path: Path, file: ScriptFile, tokenizer: Tokenizer) -> ScriptBook:
    """`path` only serves the messages."""
    try:
        rules = [(rule.match, _encode(rule, f"$.rules[{i}]", tokenizer)) for i, rule in enumerate(file.rules)]
        return ScriptBook(tuple(rules), _encode(file.default, "$.default", tokenizer))
    except _BadScriptError as error:
        raise ConfigError(f"The scripted model's file {path}: {error}", param=error.place) from None


class _BadScriptError(Exception):
    def __init__(self, place: str, rule: str) -> None:
        super().__init__(f"{place} {rule}.")
        self.place = place


def _encode(spec: ScriptSpec, place: str, tokenizer: Tokenizer) -> Script:
    if (spec.pieces is None) == (spec.tokens is None):
        raise _BadScriptError(place, 'needs either "pieces" or "tokens"')
    tokens = list(spec.tokens or [])
    for index, token_id in enumerate(tokens):
        if token_id >= tokenizer.vocab_size:
            raise _BadScriptError(f"{place}.tokens[{index}]", f"must be below {tokenizer.vocab_size}")
    for index, piece in enumerate(spec.pieces or []):
        tokens += _encode_piece(piece, f"{place}.pieces[{index}]", tokenizer)
    if spec.eos:
        if not tokenizer.eos_token_ids:
            raise _BadScriptError(place, 'needs "eos": false, for the tokenizer has no end-of-sequence token')
        tokens.append(tokenizer.eos_token_ids[0])
    if not tokens:
        raise _BadScriptError(place, 'has nothing to say and "eos": false; give it a token')
    return Script(tuple(tokens), spec.delay_ms / 1000, spec.fail_after)


def _encode_piece(piece: str, place: str, tokenizer: Tokenizer) -> list[int]:
    """Ids whose bytes are exactly the piece's."""
    wanted = piece.encode()
    ids = tokenizer.encode(piece, add_special_tokens=False)
    if _bytes_of(ids, tokenizer) == wanted:
        return ids
    # SentencePiece puts a space before a text, which would show behind a prompt: encode behind an anchor and take what
    # comes after it.
    anchor = tokenizer.encode("\n", add_special_tokens=False)
    behind = tokenizer.encode("\n" + piece, add_special_tokens=False)
    if behind[: len(anchor)] == anchor and _bytes_of(behind[len(anchor) :], tokenizer) == wanted:
        return behind[len(anchor) :]
    raise _BadScriptError(place, 'cannot be encoded by itself with this tokenizer; give its ids in "tokens"')


def _bytes_of(token_ids: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
