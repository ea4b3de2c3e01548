"""Comments and docstrings of the package name their subjects."""

from __future__ import annotations

from pathlib import Path

import pytest
from subjects import PACKAGE, Text, bare_texts, comments, docstrings, is_bare

pytestmark = pytest.mark.lint

# The most there may be in a hundred: a sentence may begin with such a word where it reads best.
SHARE = 1


def told(bare: list[Text]) -> str:
    return "\n".join(f"{text.path.relative_to(PACKAGE)}:{text.line}: {text.text}" for text in bare)


def test_comments_name_their_subjects() -> None:
    texts = list(comments(PACKAGE))
    assert len(texts) > 1000
    bare = bare_texts(texts)
    assert 100 * len(bare) <= SHARE * len(texts), told(bare)


def test_first_lines_of_docstrings_name_their_subjects() -> None:
    texts = list(docstrings(PACKAGE))
    assert len(texts) > 3000
    bare = bare_texts(texts)
    assert 100 * len(bare) <= SHARE * len(texts), told(bare)


@pytest.mark.parametrize(
    "text",
    [
        "By stream: where its area begins, and its size.",
        "As in dnn.cu.",
        "Of two as long as each other, the one with the smaller stride.",
        "Those of a process, by the application's numbers.",
        "What was posted came first, and goes first.",
        "Not in the kernel: the engine may want to withdraw the copy before that begins.",
        "Without the lock: a loss calls `forget` of every stream.",
        "Before the addresses are sent: the worker refuses blocks that overlap.",
        "In this order: blocks that are dropped after the flag wake the loop.",
        "That of the message.",
        "How many there are.",
        "Ahead of the answer, which is the last that is said of a request.",
        "Where the array is, and how it is laid out.",
    ],
)
def test_fragments_count(text: str) -> None:
    assert is_bare(text)


@pytest.mark.parametrize(
    "text",
    [
        "In a worker the loop polls.",
        "Where no neighbours are left, there will be none.",
        "Without this, `logging` would print warnings too.",
        "If a copy has failed, all are invalid.",
        "The beginning of each stream's area, and its size.",
        "Whether values are only counted.",
        "That memory is gone.",
        "Seconds between two beats.",
        "`whatever` begins with code.",
    ],
)
def test_sentences_and_noun_phrases_do_not_count(text: str) -> None:
    assert not is_bare(text)


def test_lines_of_one_comment_are_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A module\nof two lines.\n\nMore."""\n\n# One\n# text.\n'
        "x = 1  # another\n# a third  \ny = 2  # noqa\n"
    )
    assert [(text.line, text.text) for text in comments(tmp_path)] == [
        (6, "One text."),
        (8, "another"),
        (9, "a third"),
    ]
    assert [(text.line, text.text) for text in docstrings(tmp_path)] == [(1, "A module of two lines.")]
