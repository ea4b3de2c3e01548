"""Runs sections within the time that there is, keeps their logs, and prints one short table."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from ._sections import ROOT, SECTIONS, Section, Settings, choose

__all__ = ["main"]

# To end what is cut off, and for the table.
_RESERVE = 15.0
# What the soak needs beside its own time.
_AROUND_SOAK = 45.0
_KILL_AFTER = 5.0
_NAMED = 4
_PYTEST_END = re.compile(r"=* ?((?:\d+ \w+,? ?)+ in .*?)(?: ?=*)$")


@attrs.frozen(kw_only=True)
class Outcome:
    """How a section went.

    Attributes:
        name: Its name.
        verdict: ``"ok"``, ``"FAILED"``, ``"MISSED"`` where goals were, ``"CUT OFF"`` or ``"no time"``.
        seconds: How long it took.
        text: What it came to, in a few words.
    """

    name: str
    verdict: str
    seconds: float
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns 0 if everything went well."""
    given = _parse(arguments)
    started = time.monotonic()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        out=out, pairs=given.pairs, is_small=given.small, backend=given.backend, soak=given.soak
    )
    ends = started + given.minutes * 60.0
    kept = _load(out)
    for section in choose(given.only.split(",") if given.only else ()):
        outcome = _run(section, settings, ends)
        kept[section.name] = outcome
        _save(out, kept)
        _say(f"{outcome.name}: {outcome.verdict}, {outcome.seconds:.0f} s")
    _say(_table(kept, time.monotonic() - started))
    return int(any(outcome.verdict != "ok" for outcome in kept.values()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(section.name for section in SECTIONS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Tests, faults, benchmarks and a soak on the hardware.",
        epilog=f"Sections, in their order: {names}. The table shows earlier runs in the folder, too.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for everything (default: 60)")
    parser.add_argument("--only", default="", help="sections, with commas in between")
    parser.add_argument("--pairs", type=int, default=25, help="measurements of each side (default: 25)")
    parser.add_argument("--soak", type=float, default=480.0, help="seconds of the soak (default: 480)")
    parser.add_argument("--backend", default="cuda", help="the device (default: cuda)")
    parser.add_argument("--small", action="store_true", help="so little that a stand-in can do it")
    given = parser.parse_args(arguments)
    try:
        choose(given.only.split(",") if given.only else ())
    except ValueError as error:
        parser.error(str(error))
    return given


def _run(section: Section, settings: Settings, ends: float) -> Outcome:
    """Run one section in a process of its own, for as long as there is time."""
    if section.needs_tests and not (ROOT / "tests").is_dir():
        return Outcome(name=section.name, verdict="FAILED", seconds=0.0, text="only from a checkout")
    left = ends - time.monotonic() - _RESERVE
    if left <= 0:
        return Outcome(name=section.name, verdict="no time", seconds=0.0, text="")
    if section.name == "soak":
        # A shorter one says more than one that is cut off.
        settings = attrs.evolve(settings, soak=max(5.0, min(settings.soak, left - _AROUND_SOAK)))
    log = settings.out / f"{section.name}.log"
    start = time.monotonic()
    with log.open("wb") as file:
        code = _call(section, settings, file, left)
    seconds = time.monotonic() - start
    text = _summary(section, settings, log)
    verdict = "CUT OFF" if code is None else "FAILED" if code else "ok"
    if verdict == "FAILED" and section.measures and "MISSED" in text:
        verdict = "MISSED"
    return Outcome(name=section.name, verdict=verdict, seconds=seconds, text=text)


def _call(section: Section, settings: Settings, file: Any, seconds: float) -> int | None:
    """Its exit code; None if the time was over, and it was ended with all that it had started."""
    environment = {**os.environ, **section.environment(settings)}
    process = subprocess.Popen(  # noqa: S603  # our own
        section.arguments(settings),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            # Workers end with their application; what else it has started is in its session.
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _summary(section: Section, settings: Settings, log: Path) -> str:
    """The gist of a log."""
    said = log.read_text(encoding="utf-8", errors="replace")
    if section.measures:
        return _goals(settings.out / f"{section.name}.json")
    if section.tests:
        ends = [match[1] for line in said.splitlines() if (match := _PYTEST_END.fullmatch(line.strip()))]
        text = ends[-1] if ends else "pytest did not come to its end"
        return f"{text}; soak of {settings.soak:.0f} s" if section.name == "soak" else text
    try:
        document = json.loads(said)
    except ValueError:
        return (said.strip().splitlines() or ["no output"])[-1]
    return str(document.get("summary", ""))


def _goals(path: Path) -> str:
    if not path.exists():
        return "nothing was measured"
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    missed = [row["name"] for row in rows if row["verdict"] == "MISSED"]
    met = sum(row["verdict"] == "met" for row in rows)
    skipped = sum(row["verdict"] == "not run" for row in rows)
    names = ", ".join(missed[:_NAMED]) + (" ..." if len(missed) > _NAMED else "")
    parts = [f"{met} met", f"{len(missed)} MISSED: {names}" if missed else "none missed"]
    return ", ".join(parts + ([f"{skipped} not run"] if skipped else []))


def _load(out: Path) -> dict[str, Outcome]:
    path = out / "summary.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: Outcome(**fields) for name, fields in found.items()}


def _save(out: Path, kept: dict[str, Outcome]) -> None:
    fields = {name: attrs.asdict(outcome) for name, outcome in kept.items()}
    (out / "summary.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")


def _table(kept: dict[str, Outcome], seconds: float) -> str:
    order = [section.name for section in SECTIONS]
    lines = [
        f"{outcome.name:12} {outcome.verdict:8} {outcome.seconds:6.0f} s  {outcome.text}"
        for outcome in sorted(kept.values(), key=lambda outcome: order.index(outcome.name))
    ]
    return "\n".join(["", *lines, f"{'':12} {'':8} {seconds:6.0f} s  this run"])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
