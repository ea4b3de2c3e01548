"""The generated sources of expressions, kept while a recording runs.

A source is stored once, without the language that it begins with, which `heads` has. So the sources of two
recordings differ only where an expression's own lines differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from trio_accel.backends.base.expressions import _source, compiled
from trio_accel.backends.cpu.compiled import _plans, _text

Executor: TypeAlias = Callable[[Any, Any], bool]


@attrs.define(eq=False)
class RecordedTexts:
    """Sources of the expressions that run, for processors and for GPUs.

    Attributes:
        folder: Where sources are stored, each by the hash of its text.
        names: The files of the operations since the last `take`.
    """

    folder: Path
    names: list[str] = attrs.field(factory=list[str])

    def take(self) -> list[str]:
        """Return the files of the last operations, and forget these."""
        taken, self.names = self.names, []
        return taken

    def store(self, text: str, suffix: str, head: str) -> str:
        """Store a source.

        Args:
            text: The source.
            suffix: The suffix of its file.
            head: The text that its own lines follow.

        Returns:
            The name of its file.
        """
        before, _, own = text.rpartition(head)
        self._write("heads", suffix, before + head)
        return self._write("texts", suffix, own)

    def _write(self, folder: str, suffix: str, text: str) -> str:
        path = self.folder / folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path.name

    def add(self, spec: Any) -> None:
        """Store the sources of an operation: for GPUs, and for the processor where it is compiled."""
        self.names.append(self.store(compiled.make_kernel(spec, "cuda").text, ".cu", _source.prelude()))
        plan = _plans.find_plan(spec)
        if plan.text is not None:
            language = (Path(_text.__file__).parent / "processor.h").read_text(encoding="utf-8")
            self.names.append(self.store(plan.text(), ".cpp", language.partition("//PRELUDE\n")[2]))


@contextmanager
def recorded_texts(folder: Path) -> Generator[RecordedTexts]:
    """Store the sources of all expressions that the CPU backend runs meanwhile."""
    texts = RecordedTexts(folder)
    executor: Executor = _plans.compute

    def observed(spec: Any, call: Any) -> bool:
        done = executor(spec, call)
        texts.add(spec)
        return done

    try:
        setattr(_plans, "compute", observed)  # noqa: B010  # a type checker refuses another function
        yield texts
    finally:
        setattr(_plans, "compute", executor)  # noqa: B010
