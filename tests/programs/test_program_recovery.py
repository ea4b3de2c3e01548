"""Programs and the loss of their contexts: the calls that run again, the others, and the new instances."""

from __future__ import annotations

import hashlib
from collections import Counter as Counts
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from bad_programs import Process, Streams
from chosen import BACKEND
from sample_programs import Counter, Layer, Noted, scaled

import trio_accel as ta
from trio_accel.programs import _messages
from trio_accel.testing import inject_fault, poison

RANDOM = np.random.default_rng(3)
PARAMETERS = {"weights": RANDOM.standard_normal((64, 3)), "bias": RANDOM.standard_normal(3)}
ASKERS = 32
BATCHES = [RANDOM.standard_normal((number % 5 + 1, 64)) for number in range(ASKERS)]
AT_ONCE = ta.Backoff(base=0.0, maximum=0.0)
MANY = ta.Intensity(1000, 60.0)


def recovering(**more: Any) -> ta.DeviceOptions:
    return ta.DeviceOptions(isolation="process", intensity=MANY, backoff=AT_ONCE, **more)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def hashes(arrays: dict[str, ta.AccelRef]) -> dict[str, str]:
    return {
        name: hashlib.sha256((await array.to_host()).tobytes()).hexdigest() for name, array in arrays.items()
    }


def fetch_of(where: str) -> Any:
    return _messages.message_class(_messages.Fetch, f"{where}.fetch")


async def ask_all(program: ta.programs.Program[Layer], method: Any) -> list[bytes]:
    found: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        result = await program.ask(method, BATCHES[number])
        assert number not in found
        found[number] = (await result.to_host()).tobytes()

    async with trio.open_nursery() as nursery:
        for number in range(ASKERS):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(ASKERS)]


@pytest.mark.parametrize("how", ["kill", "poison", "segfault"])
@pytest.mark.parametrize("method", [Layer.forward, Layer.written, Layer.copied], ids=lambda one: one.__name__)
async def test_no_request_is_lost_and_results_match_a_run_without_faults(
    system: ta.System, how: Any, method: Any
) -> None:
    async with system.open_device("cpu", options=recovering(retry=1, retry_suspects=True)) as device:
        arrays = {name: await device.put(array) for name, array in PARAMETERS.items()}
        before = await hashes(arrays)
        async with ta.open_program(device, Layer, arrays) as program:
            expected = await ask_all(program, method)
            for number in range(2):
                fault = inject_fault(device, program.operation(method), **{how: True})
                assert await ask_all(program, method) == expected
                assert (fault.hit, device.generation) == (1, number + 2)
            assert await hashes(arrays) == before
            for number, batch in enumerate(BATCHES):
                result = np.tanh(batch @ PARAMETERS["weights"] + PARAMETERS["bias"])
                np.testing.assert_allclose(np.frombuffer(expected[number]), result.ravel(), rtol=1e-12)


async def test_without_retry_requests_in_flight_fail(system: ta.System) -> None:
    async with (
        system.open_device("cpu", options=recovering()) as device,
        ta.open_program(device, Layer, PARAMETERS) as program,
    ):
        inject_fault(device, program.operation(Layer.written), kill=True)
        with pytest.raises(ta.ContextLostError, match=r"result was not made; ask again") as caught:
            await program.ask(Layer.written, BATCHES[0])
        assert caught.value.operation == "sample_programs.Layer.written"
        assert (await program.ask(Layer.written, BATCHES[0])).shape == (1, 3)


async def test_updates_of_the_state_never_run_twice(system: ta.System, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with system.open_device("cpu", options=recovering(retry=5)) as device:
        state = await device.zeros(3)
        async with ta.open_program(device, Noted, str(path), state) as program:
            await program.ask(Noted.changes, np.ones(3))
            inject_fault(device, program.operation(Noted.changes), kill=True)
            with pytest.raises(ta.ContextLostError, match="make the arrays that it was to change again"):
                await program.ask(Noted.changes, np.ones(3))
            assert Counts(line.split()[0] for line in lines(path))["changed"] <= 2
            for method in (Noted.changes, Noted.called):
                with pytest.raises(ta.StaleRefError, match=r"state: its contents were spoiled by .*changes"):
                    await program.ask(method, np.ones(3))


async def test_a_result_lost_before_it_is_fetched(system: ta.System, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with system.open_device("cpu", options=recovering(retry=1)) as device:
        state = await device.zeros(3)
        async with ta.open_program(device, Noted, str(path), state) as program:
            inject_fault(device, fetch_of("sample_programs.Noted.called"), kill=True)
            result = await program.ask(Noted.called, np.arange(3.0))
            np.testing.assert_array_equal(await result.to_host(), np.arange(3.0))
            # It changes nothing, so that it was called again.
            assert [line.split()[0] for line in lines(path)] == ["made", "called", "made", "called"]
            inject_fault(device, fetch_of("sample_programs.Noted.changes"), kill=True)
            with pytest.raises(ta.ContextLostError, match=r"the result of .*changes was lost") as caught:
                await program.ask(Noted.changes, np.ones(3))
            assert "make the arrays that it changes again" in str(caught.value)
            assert [line.split()[0] for line in lines(path)].count("changed") == 1
            np.testing.assert_array_equal(await state.to_host(), np.ones(3))


@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_program_remade_before_a_result_is_fetched(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: int, is_lost: bool
) -> None:
    """A neighbour's error costs a caller nothing, and without `retry` no call runs again after a loss."""
    path = tmp_path / "notes"
    async with (
        system.open_device("cpu", options=recovering(retry=retry)) as device,
        ta.open_program(device, Noted, str(path), await device.zeros(3)) as program,
    ):
        fetch = program._fetch

        async def fail_first(*args: Any) -> Any:
            monkeypatch.undo()
            if is_lost:
                poison(device)
                # With `retry`, the call that loses the context is asked again and succeeds.
                with suppress(ta.ContextLostError):
                    await device.zeros(1)
            else:
                with pytest.raises(ta.ActorFailedError):
                    await program.ask(Noted.called, "no array")
            return await fetch(*args)

        monkeypatch.setattr(program, "_fetch", fail_first)
        if is_lost and not retry:
            with pytest.raises(ta.ContextLostError, match="was fetched; ask again"):
                await program.ask(Noted.called, np.ones(3))
        else:
            result = await program.ask(Noted.called, np.ones(3))
            np.testing.assert_array_equal(await result.to_host(), np.ones(3))
        called = [line.split()[0] for line in lines(path)].count("called")
        assert called == (1 + retry if is_lost else 3)
        assert device.generation == 1 + is_lost


async def test_the_next_worker_makes_open_programs_and_nothing_else(
    system: ta.System, tmp_path: Path
) -> None:
    async with system.open_device("cpu", options=recovering()) as device:
        state = await device.zeros(3)
        paths = [tmp_path / "kept", tmp_path / "closed"]
        kept = await ta.open_program(device, Noted, str(paths[0]), state)
        closed = await ta.open_program(device, Noted, str(paths[1]), state)
        await closed.ask(Noted.called, np.ones(3))
        await closed.aclose()
        poison(device)
        with pytest.raises(ta.ContextLostError):
            await device.zeros(1)
        await kept.ask(Noted.called, np.ones(3))
        assert device.generation == 2
        made = [line for line in lines(paths[0]) if "made" in line]
        assert len(made) == len(set(made)) == 2
        assert len(lines(paths[1])) == 2
        await kept.aclose()


@pytest.mark.parametrize("name", ["exits", "closes"])
async def test_a_program_that_ends_its_process(system: ta.System, name: str) -> None:
    async with system.open_device(BACKEND, options=recovering()) as device:
        x = await device.put(np.arange(5.0))
        async with ta.open_program(device, Process, x) as program:
            with pytest.raises(ta.ContextLostError):
                await program.ask(name, *([3] if name == "closes" else []))
            assert await program.ask(Process.prints) == 1
            assert device.generation == 2
            assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_program_that_closes_its_standard_streams(system: ta.System) -> None:
    async with (
        system.open_device(BACKEND, options=recovering()) as device,
        ta.open_program(device, Streams) as program,
    ):
        for _ in range(3):
            assert await program.ask(Streams.closes) == 1
        assert device.generation == 1


async def test_a_program_that_never_returns(system: ta.System) -> None:
    async with (
        system.open_device(BACKEND, options=recovering(stuck_after=0.3)) as device,
        ta.open_program(device, Process, np.arange(5.0)) as program,
    ):
        with pytest.raises(ta.CompletionTimeoutError):
            await program.ask(Process.never_returns)
        assert await program.ask(Process.prints) == 1
        assert device.generation == 2


async def test_cancelled_askers_leave_no_results_behind(device: ta.Device) -> None:
    async with ta.open_program(device, Layer, PARAMETERS) as program:
        for _ in range(5):
            with trio.CancelScope() as scope:
                scope.cancel()
                await program.ask(Layer.forward, BATCHES[0])
        async with trio.open_nursery() as nursery:
            for number in range(ASKERS):
                nursery.start_soon(program.ask, Layer.forward, BATCHES[number])
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        used = (await device.statistics()).memory.used
        for _ in range(3):
            await program.ask(Layer.forward, BATCHES[0])
        await device.synchronize()
        assert (await device.statistics()).memory.used <= used


async def test_a_cancelled_opener_leaves_nothing(system: ta.System, device: ta.Device) -> None:
    async def cancel(scope: trio.CancelScope, rounds: int) -> None:
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    for rounds in range(12):  # turns of the loop, since an opening takes less than any time in seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel, nursery.cancel_scope, rounds)
            async with ta.open_program(device, Layer, PARAMETERS, name="mine"):
                pass  # it may be open before it is cancelled
    async with ta.open_program(device, Layer, PARAMETERS, name="mine") as program:
        assert await program.ask(Layer.defaults) == [1, 2, 3]
    assert not [node for node in system.tree().walk() if "mine" in node.path]


@pytest.mark.parametrize("isolation", ["inline"])
async def test_inline_the_arrays_are_lost_with_the_context(device: ta.Device) -> None:
    counts = await device.zeros(1)
    async with ta.open_program(device, Counter, counts) as program, ta.open_program(device, scaled) as other:
        await program.ask(Counter.add, np.ones(1))
        poison(device)
        with pytest.raises(ta.ContextLostError):
            await other.ask(np.ones(3))
        np.testing.assert_array_equal(await (await other.ask(np.ones(3))).to_host(), np.full(3, 2.0))
        with pytest.raises(
            ta.StaleRefError, match=r"Counter\.add: counts: its memory was lost with generation 1"
        ):
            await program.ask(Counter.add, np.ones(1))


async def test_a_spare_takes_over_with_the_program(system: ta.System, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with system.open_device("cpu", options=recovering(retry=1, spares=1)) as device:
        state = await device.zeros(3)
        async with ta.open_program(device, Noted, str(path), state) as program:
            for number in range(1, 4):
                inject_fault(device, program.operation(Noted.called), kill=True)
                result = await program.ask(Noted.called, np.arange(3.0))
                np.testing.assert_array_equal(await result.to_host(), np.arange(3.0))
                assert device.generation == number + 1
