"""The exact bytes behind a vocabulary's strings."""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: printable Latin-1 as itself, the other 68 bytes, in
    order, as U+0100 onwards (OpenAI's GPT-2 encoder)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary. One that is not written in the byte alphabet is literal text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_bytes(token: str, *, byte_fallback: bool) -> bytes:
    """A token of a SentencePiece vocabulary: `<0x0A>` is a byte (with byte fallback), the space mark a space."""
    match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
