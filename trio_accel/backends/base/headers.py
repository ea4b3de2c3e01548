"""Which files a source in C++ includes: their contents are part of what is compiled."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["header_parts"]

# What brings a file in: #include, #include_next, #embed and __has_include, with comments and line splices
# where the language allows them. A name that is a macro cannot be followed.
_GAP = r"(?:[ \t]|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
_NAME = rf"{_GAP}(?:\"(?P<quoted>[^\"\n]+)\"|<(?P<angled>[^>\n]+)>|(?P<other>[^\s\"<]))"
_INCLUDE = re.compile(
    rf"(?:^{_GAP}(?:\#|%:){_GAP}(?:include|include_next|embed)\b|__has_(?:include|embed){_GAP}\(){_NAME}",
    re.MULTILINE,
)
_SPLICE = re.compile(r"\\\r?\n")
# Every header of the CUDA toolkit together is fewer.
_MOST_FILES = 20_000


def header_parts(
    source: str,
    *,
    folder: Path | None = None,
    folders: Sequence[Path] = (),
    first: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
) -> tuple[str | bytes, ...] | None:
    """Names and digests of everything that a source may include, directly or by way of other headers.

    Conditions of the preprocessor are not evaluated, so a header counts where it may be included. What is
    found nowhere counts by its name: it is a header of the compiler's own, whose version is another part of
    the key. It is looked for again each time, so a header that turns up later changes the result.

    Args:
        source: The text.
        folder: The folder of the file that the text is from, where ``"..."`` is looked for first.
        folders: Where headers are looked for, in this order.
        first: Headers that the compiler includes before the source.
        named: Headers that the compiler is handed as texts, by name.

    Returns:
        Parts for `code_key`; None if that cannot be told, because a name of a header is a macro or there are
        too many. Then nothing is to be kept.
    """
    named = named or {}
    parts: list[str | bytes] = []
    # By the file, or the name of a text, so that a circle of headers ends.
    seen: set[Path | str] = set()
    waiting: list[tuple[str, Path | None, bool]] = []
    if not _follow(source, folder, waiting):
        return None
    waiting += [(name, folder, True) for name in first]
    while waiting:
        name, near, is_quoted = waiting.pop()
        found = name if name in named else _find(name, near if is_quoted else None, folders)
        if found is None:
            parts += [name, b""]
            continue
        # The name counts each time: it may mean another file elsewhere.
        parts += [name, str(found)]
        if found in seen:
            continue
        seen.add(found)
        data = named[name].encode() if isinstance(found, str) else _content(found)
        if data is None or len(seen) > _MOST_FILES:
            return None
        parts.append(hashlib.sha256(data).digest())
        next_to = None if isinstance(found, str) else found.parent
        if not _follow(data.decode("utf-8", "surrogateescape"), next_to, waiting):
            return None
    return tuple(parts)


def _follow(text: str, folder: Path | None, waiting: list[tuple[str, Path | None, bool]]) -> bool:
    """Add what a text includes; False if one of the names is a macro."""
    added = set[tuple[str, bool]]()
    for match in _INCLUDE.finditer(_SPLICE.sub("", text)):
        if match["other"]:
            return False
        added.add((match["quoted"] or match["angled"], bool(match["quoted"])))
    waiting += [(name, folder, is_quoted) for name, is_quoted in sorted(added)]
    return True


def _find(name: str, near: Path | None, folders: Sequence[Path]) -> Path | None:
    for path in _candidates(name, near, folders):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):
            # A name that no file can have.
            continue
    return None


def _candidates(name: str, near: Path | None, folders: Sequence[Path]) -> Iterator[Path]:
    if near is not None:
        yield near / name
    for folder in folders:
        yield folder / name


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
