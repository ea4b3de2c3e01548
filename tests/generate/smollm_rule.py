"""The tokens of a text by the rule that llama.cpp calls "smollm", in plain Python.

Each character of \\p{N} is a word on its own. What is between is cut by GPT-2's pattern, which is
``'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+``. The bytes of a word
are merged in the order of the merges.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise

WHITE = {
    *range(9, 14),
    32,
    0x85,
    0xA0,
    0x1680,
    *range(0x2000, 0x200B),
    0x2028,
    0x2029,
    0x202F,
    0x205F,
    0x3000,
}
SHORT = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
REST = [byte for byte in range(256) if byte not in PRINTED]
LETTERS = {byte: chr(byte) for byte in PRINTED} | {byte: chr(256 + place) for place, byte in enumerate(REST)}


def tokens_of(text: str, words: Mapping[str, int], merges: Mapping[tuple[str, str], int]) -> list[int]:
    return [words[part] for word in words_of(text) for part in merged(word, merges)]


def words_of(text: str) -> Iterator[str]:
    start = 0
    for place, letter in enumerate(text):
        if kind(letter) == "N":
            yield from cut(text[start:place])
            yield letter
            start = place + 1
    yield from cut(text[start:])


def kind(letter: str) -> str:
    if ord(letter) in WHITE:
        return "white"
    first = unicodedata.category(letter)[0]
    return first if first in "LN" else "other"


def cut(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = at + (length_of_word(text, at) or length_of_white(text, at))
        yield text[at:end]
        at = end


def length_of_word(text: str, at: int) -> int:
    for short in SHORT:
        if text.startswith(short, at):
            return len(short)
    begin = at + (text[at] == " ")
    if begin == len(text) or kind(text[begin]) == "white":
        return 0
    end = begin
    while end < len(text) and kind(text[end]) == kind(text[begin]):
        end += 1
    return end - at


def length_of_white(text: str, at: int) -> int:
    end = at
    while end < len(text) and kind(text[end]) == "white":
        end += 1
    # The last one belongs to the next, unless it is alone.
    return end - at - (end < len(text) and end - at > 1)


def merged(word: str, merges: Mapping[tuple[str, str], int]) -> list[str]:
    parts = [LETTERS[byte] for byte in word.encode()]
    while True:
        pairs = [(merges[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in merges]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
