"""Programs with code that raises: only they restart, and only they end."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import numpy as np
import pytest
import trio
from bad_programs import ColdStart, Exhausts, ExitsInConstructor, Fragile, raises
from sample_programs import Counter, Layer

import trio_accel as ta

X = np.ones((2, 4))
PARAMETERS = {"weights": np.zeros((4, 3)), "bias": np.zeros(3)}
AT_ONCE = ta.Backoff(base=0.0)
NOT_ASKED = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "StopIteration"]
OURS = ["ContextPoisonedError", "DeviceLostError", "StaleRefError", "ActorStoppedError"]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def restarts(system: ta.System, device: ta.Device) -> dict[str, int]:
    context = system.tree().find(f"{device.path}/context")
    return {node.path.removeprefix(f"{context.path}/"): node.incarnation for node in context.walk()}


async def test_an_error_restarts_only_the_program(system: ta.System, device: ta.Device) -> None:
    async with (
        ta.open_program(device, Layer, PARAMETERS, name="bad", backoff=AT_ONCE) as bad,
        ta.open_program(device, Layer, PARAMETERS, name="good") as good,
    ):
        await bad.ask(Layer.forward, X)
        await good.ask(Layer.forward, X)
        for _ in range(2):
            with pytest.raises(
                ta.ActorFailedError, match=r"sample_programs.Layer.fails.*of \(2, 4\)"
            ) as caught:
                await bad.ask(Layer.fails, X)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            text = text_of(caught.value)
            assert 'raise ZeroDivisionError(f"of {x.shape}")' in text
            assert "sample_programs.py" in text
            assert "in sample_programs.Layer.fails" in text
            # The next instance knows nothing of the calls.
            assert (await bad.ask(Layer.about))["calls"] == 0
        assert (await good.ask(Layer.about))["calls"] == 1
        found = restarts(system, device)
        assert {name: count for name, count in found.items() if count} == {"bad/program": 2}
    assert device.generation == 1


async def test_too_many_errors_end_only_it(
    system: ta.System, device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    intensity = ta.Intensity(2, 60.0)
    bad = await ta.open_program(device, Layer, PARAMETERS, name="bad", intensity=intensity, backoff=AT_ONCE)
    good = await ta.open_program(device, Layer, PARAMETERS)
    for _ in range(3):
        with pytest.raises(ta.ActorFailedError, match=r"crashed while serving sample_programs\.Layer\.fails"):
            await bad.ask(Layer.fails, X)
        assert not bad.has_ended
    for _ in range(2):
        with pytest.raises(
            ta.ActorFailedError,
            match=r"context/bad has ended for good: .* ZeroDivisionError.*; `await program.reset\(\)` makes",
        ):
            await bad.ask(Layer.forward, X)
        assert (bad.has_ended, good.has_ended) == (True, False)
    np.testing.assert_array_equal(await (await good.ask(Layer.forward, X)).to_host(), np.zeros((2, 3)))
    assert device.generation == 1
    assert not [name for name in restarts(system, device) if name.startswith("bad")]
    # Without a configured log, the end is printed, and the crashes before it are not.
    printed = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(printed) == 1
    assert printed[0].startswith(f"actor {device.path}/context/bad crashed: ActorFailedError(")
    await bad.aclose()
    # It may be opened again.
    async with ta.open_program(device, Layer, PARAMETERS, name="bad") as again:
        assert (await again.ask(Layer.about))["calls"] == 0
    await good.aclose()


async def test_the_default_intensity_does_not_count_losses_after_progress(device: ta.Device) -> None:
    async with ta.open_program(device, Layer, PARAMETERS, backoff=AT_ONCE) as program:
        for _ in range(6):
            await program.ask(Layer.about)
            with pytest.raises(ta.ActorFailedError):
                await program.ask(Layer.fails, X)


@pytest.mark.parametrize("ends", [False, True])
async def test_requests_in_the_meantime_are_refused(device: ta.Device, ends: bool) -> None:
    counts, outcomes = await device.zeros(1), list[str]()
    intensity = ta.Intensity(0, 60.0) if ends else ta.Intensity(100, 60.0)
    program = await ta.open_program(device, Layer, PARAMETERS, intensity=intensity, backoff=AT_ONCE)
    counter = await ta.open_program(device, Counter, counts)

    async def ask(number: int) -> None:
        try:
            await program.ask(Layer.fails if number == 10 else Layer.forward, X)
        except ta.ActorFailedError as error:
            outcomes.append("ended" if "for good" in str(error) else "failed")
        else:
            await counter.ask(Counter.add, np.ones(1))
            outcomes.append("done")

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(ask, number)
    assert len(outcomes) == 32
    assert outcomes.count("failed") == 1
    if not ends:
        assert outcomes.count("done") == 31
    assert (await counts.to_host())[0] == outcomes.count("done")
    assert device.generation == 1
    await program.aclose()
    await counter.aclose()


async def test_a_constructor_that_raises_is_the_openers_error(
    system: ta.System, any_device: ta.Device, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.touch()
    for _ in range(5):
        with pytest.raises(LookupError, match="the file is there") as caught:
            await ta.open_program(any_device, Fragile, str(path), name="mine")
        assert "in program 'mine': bad_programs:Fragile()" in text_of(caught.value)
        assert "raise LookupError" in text_of(caught.value)
    with pytest.raises(OSError, match="no warmth") as other:
        await ta.open_program(any_device, ColdStart)
    assert "bad_programs:ColdStart.warm_up()" in text_of(other.value)
    assert not [name for name in restarts(system, any_device) if "program" in name]
    path.unlink()
    async with ta.open_program(any_device, Fragile, str(path), name="mine") as program:
        assert await program.ask(Fragile.works) == 1
    assert any_device.generation == 1


async def test_a_constructor_that_raises_again_and_again_ends_the_program(
    system: ta.System, any_device: ta.Device, tmp_path: Path
) -> None:
    path, intensity = tmp_path / "file", ta.Intensity(3, 60.0)
    program = await ta.open_program(any_device, Fragile, str(path), intensity=intensity, backoff=AT_ONCE)
    assert await program.ask(Fragile.works) == 1
    with pytest.raises(ta.ActorFailedError, match="it breaks"):
        await program.ask(Fragile.breaks)
    for _ in range(2):
        with pytest.raises(ta.ActorFailedError, match=r"has ended for good: .*the file is there") as caught:
            await program.ask(Fragile.works)
    assert isinstance(caught.value.__cause__, LookupError)
    assert any_device.generation == 1
    await (await any_device.put(X)).to_host()
    await program.aclose()


@pytest.mark.parametrize("how", [*NOT_ASKED, *OURS, "RecursionError", "UnprintableError"])
async def test_all_exceptions_are_errors_of_the_program(any_device: ta.Device, how: str) -> None:
    async with ta.open_program(
        any_device, raises, backoff=AT_ONCE, intensity=ta.Intensity(9, 60.0)
    ) as program:
        for _ in range(2):
            with pytest.raises(ta.ActorFailedError) as caught:
                await program.ask(how)
            if how != "UnprintableError":
                assert how in text_of(caught.value)
                assert "bad_programs.raises" in text_of(caught.value)
        assert any_device.generation == 1


@pytest.mark.parametrize("how", [*NOT_ASKED, *OURS])
async def test_all_exceptions_of_a_constructor_are_the_openers_errors(
    any_device: ta.Device, how: str
) -> None:
    with pytest.raises((RuntimeError, StopIteration)) as caught:
        await ta.open_program(any_device, ExitsInConstructor, how)
    assert how in text_of(caught.value)
    assert "bad_programs:ExitsInConstructor()" in text_of(caught.value)
    assert any_device.generation == 1


async def test_a_failed_call_damages_its_declared_targets(device: ta.Device) -> None:
    target = await device.zeros(3)
    async with ta.open_program(device, Counter, target) as program:
        with pytest.raises(ta.ActorFailedError, match=r"Counter\.add_to"):
            await program.ask(Counter.add_to, target, "no number")
        with pytest.raises(ta.StaleRefError, match=r"spoiled by sample_programs\.Counter\.add_to"):
            await target.to_host()


async def test_a_method_that_changes_an_array_and_finds_no_memory_runs_once(
    system: ta.System, any_device: ta.Device
) -> None:
    async with ta.open_program(any_device, Exhausts) as program:
        for number in range(1, 4):
            with pytest.raises(ta.OutOfMemoryError):
                await program.ask(Exhausts.allocates, await any_device.zeros(3))
            # The program continues.
            assert await program.ask(Exhausts.told) == number
        assert not any(restarts(system, any_device).values())
