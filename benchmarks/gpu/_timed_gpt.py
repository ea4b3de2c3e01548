"""The GPT of `training.py` that notes how long the parts of its steps take, on the host and on the GPU.

``PHASES`` in the environment names the file: the first rank writes a line of JSON for each step.
"""

# ruff: noqa: SLF001  # the parts of a step are not public
from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
torch: Any = import_module("torch")
Base: Any = import_module("gpt_model").GptModule


class TimedGpt(Base):  # type: ignore[misc]
    """A model that notes times between its parts."""

    def _note(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.notes.append((name, time.perf_counter(), event))

    def _step(self, source: Any, target: Any, work: Any) -> Any:
        last = getattr(self, "notes", [None])[-1]
        self.notes: list[Any] = []
        self._note("between")
        told = Base._step(self, source, target, work)
        self._note("end")
        torch.cuda.synchronize()
        before = last or self.notes[0]
        line: dict[str, list[float]] = {}
        for note in self.notes:
            line[note[0]] = [1e3 * (note[1] - before[1]), before[2].elapsed_time(note[2])]
            before = note
        if self.mesh.rank == 0 and "PHASES" in os.environ:
            with Path(os.environ["PHASES"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return told

    def _begin(self, *given: Any) -> None:
        Base._begin(self, *given)
        self._note("begin")

    def _backward_all(self, work: Any) -> Any:
        made = Base._backward_all(self, work)
        self._note("forward and backward")
        return made

    def _summed(self, data: Any) -> Any:
        made = Base._summed(self, data)
        self._note("sums")
        return made

    def _optimize(self, *given: Any) -> None:
        self._note("norm")
        Base._optimize(self, *given)
        self._note("optimizer")
