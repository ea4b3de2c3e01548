"""Programs on a GPU: their arguments, their results, and their failures."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from isolations import inline

if BACKEND != "cuda" or not IS_STAND_IN:
    pytest.skip("these programs need a GPU whose memory the host sees", allow_module_level=True)

import gpu_programs
import trio
from gpu_programs import Enqueues, Layer, Marks

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices import Fill

RANDOM = np.random.default_rng(1)
WEIGHTS, BIAS = RANDOM.standard_normal((4, 3)), RANDOM.standard_normal(3)
X = RANDOM.standard_normal((5, 4))
EXPECTED = np.tanh(X @ WEIGHTS + BIAS)


@pytest.fixture
async def layer(device: ta.Device) -> AsyncGenerator[ta.programs.Program[Layer], None]:
    async with await ta.open_program(device, Layer, {"weights": WEIGHTS, "bias": BIAS}) as program:
        yield program


async def test_functions_run_without_opening(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.arange(6.0))
    for _ in range(3):
        doubled = await ta.run(gpu_programs.doubled, x)
        assert doubled.device is device
        np.testing.assert_array_equal(await doubled.to_host(), np.arange(6.0) * 2)
        more = await ta.run(gpu_programs.declared, doubled)
        np.testing.assert_array_equal(await more.to_host(), np.arange(6.0) * 2 + 1)
    assert await ta.run(gpu_programs.add, x, number=0.5) is None
    # Each function has its own stream, so later work on it sees the update.
    doubled = await ta.run(gpu_programs.doubled, x)
    np.testing.assert_array_equal(await doubled.to_host(), np.arange(6.0) * 2 + 1)
    places, most, nothing = await ta.run(gpu_programs.peaks, {"a": x, "b": np.arange(6.0)}, count=2)
    assert ((await places.to_host()).tolist(), most, nothing) == ([5, 4], 10.5, None)
    programs = [node for node in system.tree().walk() if node.actor_class == "ProgramActor"]
    assert len(programs) == 4


@pytest.mark.parametrize("function", [gpu_programs.copies_late, gpu_programs.copies_late_in_the_loop])
async def test_a_function_that_raises_after_it_has_enqueued(
    system: ta.System, device: ta.Device, function: Callable[..., Any]
) -> None:
    x = await device.put(X)
    for number in range(3):
        # Its copy on the device belongs only to the call, and its memory is returned after the enqueued work.
        with pytest.raises(KeyError, match="too late"):
            await ta.run(function, x, X + number)
        others = [await device.put(np.full(X.shape, 7.0)) for _ in range(4)]
        await device.synchronize()
        np.testing.assert_array_equal(await (await ta.run(gpu_programs.copied, x)).to_host(), X + number)
        del others
    assert all(not node.restarts for node in system.tree().walk())
    assert (device.generation, (await device.statistics()).in_flight) == (1, 0)


async def test_methods_compute(device: ta.Device, layer: ta.programs.Program[Layer]) -> None:
    x = await device.put(X)
    for method in (Layer.forward, Layer.written, Layer.declared, Layer.on_the_host):
        for given in (x, X, x):
            result = await layer.ask(method, given)
            np.testing.assert_allclose(await result.to_host(), EXPECTED, rtol=1e-12)
    found = await layer.ask(Layer.transposed, x)
    np.testing.assert_array_equal(await found["turned"].to_host(), X.T)
    np.testing.assert_array_equal(await found["same"].to_host(), X)
    np.testing.assert_array_equal(await found["weights"].to_host(), WEIGHTS)
    assert (found["empty"].shape, found["number"]) == ((0, 2), 3)
    about = await layer.ask(Layer.about, x)
    assert about == {
        "read only": True,
        # PyTorch takes no array with this mark.
        "flag": False,
        "has stream": True,
        "weights have stream": False,
        "copied": pytest.approx(WEIGHTS.sum()),
    }
    assert await layer.ask(Layer.crosses, x) == 5
    assert (await device.statistics()).in_flight == 0


async def test_state_is_marked_as_read_only_for_methods_that_do_not_declare_it(device: ta.Device) -> None:
    async with ta.open_program(device, Marks, np.zeros(2), np.zeros(2)) as program:
        for _ in range(2):
            assert await program.ask(Marks.declared) == [False, True]
            assert await program.ask(Marks.undeclared) == [True, False]
            assert await program.ask(Marks.plain) == [True, True]


async def test_kept_results_are_given_back(device: ta.Device, layer: ta.programs.Program[Layer]) -> None:
    for _ in range(3):
        await layer.ask(Layer.forward, X)
    await device.synchronize()
    first = (await device.statistics()).memory
    for _ in range(20):
        await layer.ask(Layer.forward, X)
    await device.synchronize()
    assert (await device.statistics()).memory.workspace == first.workspace
    assert (await device.statistics()).memory.blocks == first.blocks


async def test_calls_are_ordered_with_other_operations(
    device: ta.Device, layer: ta.programs.Program[Layer]
) -> None:
    x = await device.put(np.ones(1000))
    for number in range(20):
        pending = [device.submit(Fill(x, float(number))), device.submit(ta.linalg.Scal(3.0, x))]
        await layer.ask(Layer.double, x)
        for one in pending:
            await one.wait()
        np.testing.assert_array_equal(await x.to_host(), np.full(1000, 6.0 * number))


async def test_an_error_restarts_only_the_program(
    system: ta.System, device: ta.Device, layer: ta.programs.Program[Layer]
) -> None:
    x = await device.put(X)
    with pytest.raises(ta.ActorFailedError, match=r"ZeroDivisionError.*of \(5, 4\)"):
        await layer.ask(Layer.fails, x)
    np.testing.assert_allclose(await (await layer.ask(Layer.forward, x)).to_host(), EXPECTED, rtol=1e-12)
    assert device.generation == 1
    assert [node.restarts for node in system.tree().walk() if node.actor_class == "ProgramActor"] == [1]
    with pytest.raises(ta.OutOfMemoryError):
        await layer.ask(Layer.runs_out)
    assert [node.restarts for node in system.tree().walk() if node.actor_class == "ProgramActor"] == [1]


async def test_a_kept_argument_is_refused_later(device: ta.Device, layer: ta.programs.Program[Layer]) -> None:
    await layer.ask(Layer.keep, await device.put(X))
    with pytest.raises(ta.ActorFailedError, match="the call is over for which the program got this array"):
        await layer.ask(Layer.use_kept)


async def test_a_lost_context_makes_it_again(system: ta.System, isolation: Isolation, tmp_path: Path) -> None:
    made = tmp_path / "made"
    options = ta.DeviceOptions(
        isolation=isolation, retry=1, retry_suspects=True, backoff=ta.Backoff(base=0.0)
    )
    async with system.open_device("cuda", options=options) as device:
        weights = {"weights": await device.put(WEIGHTS), "bias": await device.put(BIAS)}
        async with await ta.open_program(device, Layer, weights, path=str(made)) as program:
            await program.ask(Layer.forward, X)
            ta.testing.poison(device, "for the test")
            if isolation == "inline":
                # Its arrays are lost with the context, and so it is lost for good.
                with pytest.raises(ta.AccelError):
                    await until_it_fails(program)
                return
            for _ in range(3):
                result = await program.ask(Layer.forward, X)
                np.testing.assert_allclose(await result.to_host(), EXPECTED, rtol=1e-12)
            while device.generation == 1:
                await program.ask(Layer.forward, X)
            np.testing.assert_array_equal(await weights["weights"].to_host(), WEIGHTS)
            result = await program.ask(Layer.forward, X)
            np.testing.assert_allclose(await result.to_host(), EXPECTED, rtol=1e-12)
        assert len(made.read_text().split()) == 2


async def until_it_fails(program: ta.programs.Program[Layer]) -> None:
    while True:
        await program.ask(Layer.forward, X)


class _Stream:
    """A stream of PyTorch or CuPy, without an end of its own."""

    def __init__(self, streams: _Streams, handle: int) -> None:
        self._streams = streams
        self.cuda_stream = self.ptr = handle

    def use(self) -> None:
        self._streams.used.append(self.ptr)
        self._streams.of_thread.current = self


class _Streams:
    """Their common state: the current stream of each thread, and all streams made current."""

    def __init__(self, used: list[int]) -> None:
        self.used = used
        self.of_thread = threading.local()

    def current(self) -> _Stream:
        found: _Stream | None = getattr(self.of_thread, "current", None)
        return found or _Stream(self, 0)


class _TorchStreams(_Streams):
    """Stands for `torch.cuda`: notes which stream is made the current one."""

    def ExternalStream(self, stream_ptr: int, device: int) -> Any:  # noqa: N802  # theirs
        return _Stream(self, stream_ptr)

    def current_stream(self, device: int) -> Any:
        return self.current()

    def set_stream(self, stream: Any) -> None:
        stream.use()

    def is_initialized(self) -> bool:
        return True

    def memory_reserved(self, index: int) -> int:
        return 4000 + index


class _OldCupyStreams(_Streams):
    """Stands for `cupy.cuda` before CuPy 14."""

    def __init__(self, used: list[int]) -> None:
        super().__init__(used)
        self.Stream: Any = types.SimpleNamespace()
        self.runtime = types.SimpleNamespace(getDevice=lambda: 0)

    def get_current_stream(self) -> Any:
        return self.current()

    def ExternalStream(self, ptr: int, device_id: int = -1) -> Any:  # noqa: N802
        return _Stream(self, ptr)

    def Device(self, index: int) -> Any:  # noqa: N802
        return nullcontext()


class _CupyStreams(_OldCupyStreams):
    """And since then."""

    def __init__(self, used: list[int]) -> None:
        super().__init__(used)
        self.Stream.from_external = self._from_external

    def ExternalStream(self, ptr: int, device_id: int = -1) -> Any:  # noqa: N802
        raise DeprecationWarning("use Stream.from_external")

    def _from_external(self, stream: Any) -> Any:
        version, handle = stream.__cuda_stream__()
        assert (version, type(handle)) == (0, int)
        return _Stream(self, handle)


def stand_in(name: str, streams: Callable[[list[int]], Any]) -> Any:
    """A module in the place of PyTorch or CuPy; `used` has the streams made current."""
    used: list[int] = []
    module: Any = types.ModuleType(name)
    module.used, module.cuda = used, streams(used)
    module.version = types.SimpleNamespace(cuda="13.0")
    module.Tensor = type("Tensor", (), {})
    module.ndarray = type("ndarray", (), {})
    module.get_default_memory_pool = lambda: types.SimpleNamespace(total_bytes=lambda: 300)
    return module


@inline
async def test_a_program_that_imports_pytorch_has_its_own_stream_from_the_constructor_on(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_torch.py").write_text(
        "import sys\n"
        "from test_cuda_programs import _TorchStreams, stand_in\n"
        "sys.modules['torch'] = torch = stand_in('torch', _TorchStreams)\n"
        "class Program:\n"
        "    def __init__(self):\n"
        "        self.used = list(torch.used)\n"
        "    def tell(self):\n"
        "        return self.used\n"
    )
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "test_cuda_programs", sys.modules[__name__])
    # The context's process imports it: this process has the class only by its path.
    monkeypatch.setattr(ta.programs._open, "_import_path", lambda *_: "imports_torch:Program")
    try:
        async with await ta.open_program(device, _Teller) as program:
            (stream,) = await program.ask(_Teller.tell)
            assert stream != 0
    finally:
        sys.modules.pop("imports_torch", None)
        sys.modules.pop("torch", None)


class _Teller:
    def tell(self) -> list[int]:
        raise NotImplementedError


@inline
@pytest.mark.parametrize("cupy_streams", [_CupyStreams, _OldCupyStreams])
async def test_the_stream_of_the_call_is_the_current_one_of_pytorch_and_cupy(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, cupy_streams: Callable[[list[int]], Any]
) -> None:
    assert (await device.statistics()).memory.foreign == 0
    monkeypatch.setitem(sys.modules, "torch", stand_in("torch", _TorchStreams))
    monkeypatch.setitem(sys.modules, "cupy", stand_in("cupy", cupy_streams))
    async with await ta.open_program(device, Layer, {"weights": WEIGHTS, "bias": BIAS}) as program:
        torch, cupy, stream = await program.ask(Layer.streams, X)
        assert torch == cupy == stream
        assert (await device.statistics()).memory.foreign == 4300
        assert await program.ask(Layer.streams, X) == [stream] * 3
        for name in ("torch", "cupy"):
            # The constructor's own, in a thread used by others after it; then the stream of the program's
            # thread.
            first, *others = sys.modules[name].used
            assert first not in (0, stream)
            assert others == [0, stream]


@inline
async def test_a_stream_that_a_method_has_made_current_is_not_the_next_calls(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", stand_in("torch", _TorchStreams))
    async with await ta.open_program(device, Layer, {"weights": WEIGHTS, "bias": BIAS}) as program:
        own = await program.ask(Layer.takes_another_stream)
        assert own not in (0, 77)
        assert await program.ask(Layer.takes_another_stream) == own


@inline
async def test_a_method_that_only_enqueues_is_called_in_the_loop(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a busy machine does not make a call long.
    monkeypatch.setattr("trio_accel.backends.cuda.libraries.program._MAX_INLINE_SECONDS", 0.2)
    async with await ta.open_program(device, Enqueues) as program:
        threads = [await program.ask(Enqueues.thread) for _ in range(4)]
        # The first call, which may compile kernels, is made in the thread.
        assert threads == [False, True, True, True]
        x = await device.put(X)
        for method in (Enqueues.declared, Enqueues.undeclared):
            for _ in range(4):
                result = await program.ask(method, x)
                np.testing.assert_array_equal(await result.to_host(), X * 2)
        # A slow one uses the thread with its next call.
        assert [await program.ask(Enqueues.slow, number == 2) for number in range(6)] == [
            False,
            True,
            True,
            False,
            True,
            True,
        ]


async def test_a_call_in_the_loop_fails_as_one_in_a_thread(device: ta.Device) -> None:
    intensity, backoff = ta.Intensity(100, 60.0), ta.Backoff(base=0.0)
    async with await ta.open_program(device, Enqueues, intensity=intensity, backoff=backoff) as program:
        x = await device.put(X)
        for _ in range(3):
            await program.ask(Enqueues.checked, x, 1)
        for _ in range(3):
            with pytest.raises(ta.programs.Refused, match="a number below zero"):
                await program.ask(Enqueues.checked, x, -1)
            result = await program.ask(Enqueues.checked, x, 1)
            np.testing.assert_array_equal(await result.to_host(), X * 2)
        with pytest.raises(ta.ActorFailedError, match="made again") as caught:
            await program.ask(Enqueues.checked, x, 0)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert (await program.ask(Enqueues.count), device.generation) == (0, 1)
        result = await program.ask(Enqueues.checked, x, 1)
        np.testing.assert_array_equal(await result.to_host(), X * 2)
        assert (await device.statistics()).in_flight == 0
        # Its target may be half changed.
        for _ in range(3):
            await program.ask(Enqueues.doubles, x, fails=False)
        np.testing.assert_array_equal(await x.to_host(), X * 8)
        with pytest.raises(ta.ActorFailedError, match="half way"):
            await program.ask(Enqueues.doubles, x, fails=True)
        with pytest.raises(ta.StaleRefError):
            await x.to_host()


async def test_calls_are_handed_over_in_advance(device: ta.Device) -> None:
    """Calls of many callers, with calls of other libraries, and calls that must wait for another."""
    async with await ta.open_program(device, Enqueues) as program:
        x, kept = await device.put(X), await device.zeros(X.shape)

        async def ask(number: int) -> None:
            for turn in range(10):
                if number % 3 == 0:
                    result = await program.ask(Enqueues.in_thread, x)
                elif number % 3 == 1:
                    result = await program.ask(Enqueues.in_thread, X)
                else:
                    # Its argument is computed on another stream, after a call of this one.
                    half = await program.ask(Enqueues.in_thread, x)
                    result = await program.ask(Enqueues.in_thread, await ta.linalg.scal(0.5, half))
                np.testing.assert_array_equal(await result.to_host(), X * 2)
                if turn % 5 == number % 5:
                    await program.ask(Enqueues.adds, kept, result)

        async with trio.open_nursery() as nursery:
            for number in range(15):
                nursery.start_soon(ask, number)
        np.testing.assert_allclose(await kept.to_host(), X * 60, rtol=1e-12)
        assert (await device.statistics()).in_flight == 0
