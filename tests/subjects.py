"""Comments and docstrings without a subject: `python tests/subjects.py` counts them, `-v` shows them.

The rule reads the first sentence only, up to its first full stop, colon or semicolon:

* A sentence counts always if it begins with a word of `BARE`, or as `_FRAGMENT` says.
* A word of `SUBORDINATE` at its beginning counts unless a comma ends that clause and a main one follows.
* A word of `LEADING` at its beginning counts unless a verb of `VERBS` follows, ahead of any "that" or "as".

A noun phrase without a verb does not count, and neither does "Whether", which describes a truth value.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PACKAGE", "Text", "bare_texts", "comments", "docstrings", "is_bare"]

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trio_accel"

_BARE = "Of By As Those Also Like What How Which Why Who Whose Nor Else Otherwise Besides"
_SUBORDINATE = "Where When Before After Until Once If While Because Since Though"
_LEADING = (
    "Ahead Again Among At Behind Below Between Beyond For From Here In Not On Only Over Through To Under Up"
    " With Within Without"
)
# The verbs of main clauses that stand in the package behind a word of `_LEADING`.
_VERBS = (
    "is are was were be has have had does do did can may might must will would could should need needs asks"
    " begins broadcast broadcasts comes come converts copies copy costs counts divides ends falls get gets"
    " give gives goes go holds keep keeps lies make makes means names polls read reads refuses replaces"
    " returns rounds run runs says sees stands starts stays stops take takes wait waits wakes"
)
BARE, SUBORDINATE, LEADING, VERBS = (
    frozenset(words.split()) for words in (_BARE, _SUBORDINATE, _LEADING, _VERBS)
)
_FRAGMENT = re.compile(
    r"That of\b|Not (?:where|when|if|in|of|by|at|on|here|from|to|with|before|behind|the|None|for)\b"
)
_DIRECTIVE = re.compile(r"noqa|type:|pyright|fmt:|pragma|!")


class Text(NamedTuple):
    """One comment, or the first paragraph of a docstring, at its place."""

    path: Path
    line: int
    text: str


def is_bare(text: str) -> bool:
    """Tell whether the first sentence names no subject."""
    sentence = re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]
    word = re.match(r"[A-Z][a-z]*(?=[ ,]|$)", sentence)
    if word is None:
        return False
    first = word.group()
    if first in SUBORDINATE:
        return not re.search(r"\w .*, (?!and |or |in |which |as )\S", sentence)
    if first in LEADING:
        main = re.split(r"\b(?:which|that|as|where|because)\b", sentence, maxsplit=1)[0]
        if not VERBS.intersection(re.findall(r"[a-z]+", main)):
            return True
    return first in BARE or _FRAGMENT.match(sentence) is not None


def comments(root: Path) -> Iterator[Text]:
    """Yield each block of lines of comments, and each comment behind code."""
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        block: list[str] = []
        first = last = 0
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            words = token.string.lstrip("#").strip()
            if token.type != tokenize.COMMENT or _DIRECTIVE.match(words):
                continue
            line = token.start[0]
            is_whole = lines[line - 1].lstrip().startswith("#")
            if block and is_whole and last == line - 1:
                block.append(words)
            else:
                if block:
                    yield Text(path, first, " ".join(block))
                block, first = [words], line
            last = line if is_whole else 0
        if block:
            yield Text(path, first, " ".join(block))


def docstrings(root: Path) -> Iterator[Text]:
    """Yield the first paragraph of each docstring."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield Text(path, node.body[0].lineno, " ".join(text.split("\n\n")[0].split()))


def bare_texts(texts: list[Text]) -> list[Text]:
    """Return those that begin without a subject."""
    return [text for text in texts if is_bare(text.text)]


def _print(name: str, texts: list[Text]) -> None:
    bare = bare_texts(texts)
    print(f"{name} without a subject: {len(bare)} of {len(texts)}, {len(bare) / len(texts):.1%}")
    for text in bare if "-v" in sys.argv else ():
        print(f"{text.path.relative_to(ROOT)}:{text.line}: {text.text}")


if __name__ == "__main__":
    _print("comments", list(comments(PACKAGE)))
    _print("first lines of docstrings", list(docstrings(PACKAGE)))
