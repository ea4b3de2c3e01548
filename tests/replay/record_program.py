"""Runs a program with its first device recorded: record_program.py JOURNAL contents|bare PROGRAM ..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recorded_devices import record_devices

from trio_accel import replay

if __name__ == "__main__":
    path, contents, program, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = program
    sys.path[0] = str(Path(program).parent)
    journals = iter([replay.FileJournal(path)])
    record_devices(lambda: next(journals, None), contents=contents == "contents")
    runpy.run_path(program, run_name="__main__")
