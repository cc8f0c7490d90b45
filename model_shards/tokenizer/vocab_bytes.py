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


BYTE_ALPHABET = _byte_alphabet()
"""Character -> byte."""
# For str.translate: each character of the alphabet to the Latin-1 character of its byte, any other Latin-1 character to
# one that Latin-1 cannot encode. Three times faster than a dict look-up per character, of which there are millions.
_TO_LATIN_1 = dict.fromkeys(range(0x80, 0x100), "\uffff") | {
    ord(character): chr(byte) for character, byte in BYTE_ALPHABET.items()
}


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary. One that is not written in the byte alphabet is literal text."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8")


def sentencepiece_bytes(token: str, *, byte_fallback: bool) -> bytes:
    """A token of a SentencePiece vocabulary: `<0x0A>` is a byte (with byte fallback), the space mark a space."""
    match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
