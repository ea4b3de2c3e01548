"""Runs steps of the demo on one device: live on a terminal, or as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TypeAlias

import attrs
import trio

import trio_accel as ta
from trio_accel.cli._board import Bench, Step, StepResult, as_json, make_console, open_screen
from trio_accel.cli._recover import RecoverStep
from trio_accel.cli._run import Isolation, isolation_of, open_device, run_async, run_for_json

__all__ = ["run_demo"]

# `open_device` with the choices of the command line.
_Opening: TypeAlias = Callable[..., Awaitable[ta.Device]]

_STUCK_AFTER = 2.0
_WHERE: dict[Isolation, str] = {"inline": "inline", "process": "in a worker process"}


@attrs.define(kw_only=True, eq=False)
class _Document:
    """The document of ``--json``, filled while the steps run.

    Attributes:
        device: The device of the first step.
        isolation: Where the context of the first step's device lives; the data of `RecoverStep` has its own.
        results: The steps that have run.
    """

    device: ta.DeviceInfo | None = None
    isolation: Isolation | None = None
    results: list[StepResult] = attrs.field(factory=list[StepResult])

    def render(self, code: int, error: str | None) -> str:
        info = self.device
        document = {
            "command": "demo",
            "version": ta.__version__,
            "ok": code == 0,
            "exit_code": code,
            "error": error,
            "device": None if info is None else info.name,
            "backend": None if info is None else info.backend,
            "description": None if info is None else info.description,
            "isolation": self.isolation,
            "steps": [as_json(result) for result in self.results],
        }
        return json.dumps(document, allow_nan=False, indent=2)


def run_demo(steps: Sequence[Step], backend: str | None, isolation: Isolation | None, is_json: bool) -> int:
    """Run ``steps`` one after the other.

    Args:
        steps: The steps to run.
        backend: Device to open, ``None`` for the best one.
        isolation: Where its context lives; ``None`` for the backend's default, but for `RecoverStep` a
            worker process where the device has one. That step has the device opened anew.
        is_json: Print one JSON document and nothing else.

    Returns:
        0 if every check of every step holds, else 1.

    Raises:
        InputError: An input, the backend or an option cannot be used.
        InterruptError: A signal ended the run.
        AccelError, ActorError: A step failed.
    """
    document = _Document()
    opening = partial(open_device, backend=backend, isolation=isolation)
    job = partial(_run, steps, opening, document, is_json)
    return run_for_json(job, document.render) if is_json else run_async(job)


async def _run(steps: Sequence[Step], opening: _Opening, document: _Document, is_json: bool) -> int:
    """Run the steps; those that lose contexts on purpose have a device of their own, opened for that."""
    for step in steps:
        await step.prepare()
    console = make_console(is_quiet=is_json)
    async with ta.open_system("demo") as system, open_screen(console, [one.name for one in steps]) as screen:
        for is_lossy, group in groupby(steps, lambda step: isinstance(step, RecoverStep)):
            # An operation hangs there and has to be given up; no operation of any step takes so long.
            how = {"preferred": "process", "stuck_after": _STUCK_AFTER} if is_lossy else {}
            async with await opening(system, **how) as device:
                screen.show_header(_header(device, document))
                for step in group:
                    screen.begin(step.name)
                    start = trio.current_time()
                    result = await step.run(Bench(system=system, device=device, progress=screen))
                    seconds = round(trio.current_time() - start, 6)
                    result = attrs.evolve(result, name=step.name, seconds=seconds)
                    document.results.append(result)
                    screen.finish(result)
        console.print(_verdict(document.results))
    return 0 if all(result.is_ok for result in document.results) else 1


def _header(device: ta.Device, document: _Document) -> str:
    """Print the heading of a device's steps; the first device goes into the document."""
    where = f"{device.info.name} ({_WHERE[isolation_of(device)]})"
    if document.device is not None:
        return f"now on {where}"
    document.device, document.isolation = device.info, isolation_of(device)
    return f"trio-accel {ta.__version__} on {where}, {device.info.description}"


def _verdict(results: Sequence[StepResult]) -> str:
    checks = [check for result in results for check in result.checks]
    failed = sum(not check.is_ok for check in checks)
    is_one = len(checks) == 1
    if failed or not all(result.is_ok for result in results):
        text = "the check failed" if is_one else f"{failed} of {len(checks)} checks failed"
        return f"[bold red]{text}[/]"
    return f"[bold green]{'the check holds' if is_one else f'all {len(checks)} checks hold'}[/]"
