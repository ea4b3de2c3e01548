"""What there is to run, and how each part is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

__all__ = ["SECTIONS", "Section", "Settings", "choose"]

ROOT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--durations=5")


@attrs.frozen(kw_only=True)
class Settings:
    """How much is run, and where it is written.

    Attributes:
        out: Folder of the logs.
        pairs: Measurements of each side of a comparison.
        is_small: So little that a stand-in for the hardware can do it.
        backend: The device.
        soak: Seconds of the soak.
    """

    out: Path
    pairs: int = 25
    is_small: bool = False
    backend: str = "cuda"
    soak: float = 480.0


@attrs.frozen(kw_only=True)
class Section:
    """One part.

    Attributes:
        name: What it is called.
        text: What it is.
        tests: Folders and files for pytest, below the folder of the tests.
        marks: Which of those tests.
        measures: Benchmarks to measure.
        command: Arguments of the command line.
        in_full: Those that are left out where little is run.
    """

    name: str
    text: str
    tests: Sequence[str] = ()
    marks: str = ""
    measures: Sequence[str] = ()
    command: Sequence[str] = ()
    in_full: Sequence[str] = ()

    @property
    def needs_tests(self) -> bool:
        """Whether it runs from a checkout only."""
        return bool(self.tests)

    def arguments(self, settings: Settings) -> list[str]:
        """The command."""
        if self.tests:
            files = [str(ROOT / "tests" / name) for name in self.tests]
            # What tests print are measurements.
            shown = ("-s", "-o", "timeout_method=thread") if "gpu" in self.tests[0] else ()
            return [sys.executable, *_PYTEST, *shown, "-m", self.marks, *files]
        if self.measures:
            quick = ("--scale", "0.002") if settings.is_small else ()
            options = ("--pairs", str(settings.pairs), "--backend", settings.backend, *quick)
            target = str(settings.out / f"{self.name}.json")
            module = "benchmarks.gpu._measure"
            return [sys.executable, "-m", module, *self.measures, "--json", target, *options]
        in_full = () if settings.is_small else self.in_full
        return [sys.executable, "-m", "trio_accel.cli", *self.command, *in_full]

    def environment(self, settings: Settings) -> Mapping[str, str]:
        """Variables that are added."""
        return {
            "TRIO_ACCEL_BACKEND": settings.backend,
            "TRIO_ACCEL_GPU_SCALE": "small" if settings.is_small else "full",
            "TRIO_ACCEL_SOAK_SECONDS": f"{settings.soak:g}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": search_path(),
        }


def search_path() -> str:
    """`PYTHONPATH` of a program that is started from elsewhere: the package need not be installed."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


SECTIONS = (
    Section(name="info", text="what is there", command=("info", "--json")),
    Section(
        name="conformance",
        text="the backend against its protocols",
        tests=("backends",),
        marks="not gpu",
    ),
    Section(
        name="functional",
        text="capabilities, devices and helpers for tests",
        tests=("linalg", "fft", "random", "sparse", "interop", "devices", "testing"),
        marks="not gpu and not slow",
    ),
    Section(
        name="recover",
        text="the demo of faults under load",
        command=("demo", "recover", "--json"),
        in_full=("--rounds", "20"),
    ),
    Section(
        name="rounds",
        text="faults of the device, 20 rounds each",
        tests=("gpu/test_rounds.py",),
        marks="gpu",
    ),
    Section(name="leaks", text="what operations and losses leave", tests=("gpu/test_leaks.py",), marks="gpu"),
    Section(name="latency", text="one small product", measures=("cuda.latency", "cuda.latency-process")),
    Section(name="mixed", text="40 mixed shapes", measures=("cuda.mixed", "cuda.mixed-process")),
    Section(name="throughput", text="64 askers", measures=("cuda.throughput", "cuda.throughput-process")),
    Section(name="engine", text="words and callbacks", measures=("cuda.engine",)),
    Section(name="bandwidth", text="large work", measures=("cuda.bandwidth", "cuda.bandwidth-process")),
    Section(
        name="completion",
        text="strategies of completion",
        measures=("cuda.completion", "cuda.completion-process"),
    ),
    Section(name="lag", text="the loop beside kernels and plans", measures=("cuda.lag", "cuda.lag-process")),
    Section(name="recovery", text="from a fault to a product", measures=("cuda.recovery-process",)),
    Section(name="soak", text="minutes of everything", tests=("gpu/test_soak.py",), marks="gpu"),
)


def choose(names: Sequence[str]) -> tuple[Section, ...]:
    """The sections of some names, in the order in which they are run; all of them where there is no name.

    Raises:
        ValueError: A name is none.
    """
    known = {section.name for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no section {', '.join(unknown)}; there are {', '.join(s.name for s in SECTIONS)}")
    return tuple(section for section in SECTIONS if not names or section.name in names)
