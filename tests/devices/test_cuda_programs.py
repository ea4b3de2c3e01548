"""Programs on a GPU: what they get, what they return, and how they fail."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from isolations import inline

if BACKEND != "cuda" or not IS_STAND_IN:
    pytest.skip("these programs need a GPU whose memory the host sees", allow_module_level=True)

from gpu_programs import Layer

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
        # PyTorch takes no array that is marked so.
        "flag": False,
        "has stream": True,
        "weights have stream": False,
        "copied": pytest.approx(WEIGHTS.sum()),
    }
    assert await layer.ask(Layer.crosses, x) == 5
    assert (await device.statistics()).in_flight == 0


async def test_results_that_are_kept_are_given_back(
    device: ta.Device, layer: ta.programs.Program[Layer]
) -> None:
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


async def test_an_error_restarts_the_program_alone(
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


async def test_an_argument_that_is_kept_is_refused_later(
    device: ta.Device, layer: ta.programs.Program[Layer]
) -> None:
    await layer.ask(Layer.keep, await device.put(X))
    with pytest.raises(ta.ActorFailedError, match="the call is over for which the program got this array"):
        await layer.ask(Layer.use_kept)


async def test_a_lost_context_makes_it_anew(system: ta.System, isolation: Isolation, tmp_path: Path) -> None:
    made = tmp_path / "made"
    options = ta.DeviceOptions(isolation=isolation, retry=1, backoff=ta.Backoff(base=0.0))
    async with system.open_device("cuda", options=options) as device:
        weights = {"weights": await device.put(WEIGHTS), "bias": await device.put(BIAS)}
        async with await ta.open_program(device, Layer, weights, path=str(made)) as program:
            await program.ask(Layer.forward, X)
            ta.testing.poison(device, "for the test")
            if isolation == "inline":
                # Its arrays are gone with the context, and so it is for good.
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


class _TorchStreams:
    """Stands for `torch.cuda`: notes which stream is made the current one."""

    def __init__(self, used: list[int]) -> None:
        self._used = used

    def ExternalStream(self, stream_ptr: int, device: int) -> Any:  # noqa: N802  # theirs
        return _Current(self._used, stream_ptr)

    def stream(self, stream: Any) -> Any:
        return stream

    def is_initialized(self) -> bool:
        return True

    def memory_reserved(self, index: int) -> int:
        return 4000 + index


class _OldCupyStreams:
    """Stands for `cupy.cuda` before CuPy 14."""

    def __init__(self, used: list[int]) -> None:
        self._used = used
        self.Stream: Any = types.SimpleNamespace()

    def ExternalStream(self, ptr: int, device_id: int = -1) -> Any:  # noqa: N802
        return _Current(self._used, ptr)

    def Device(self, index: int) -> Any:  # noqa: N802
        return _Current([], index)


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
        return _Current(self._used, handle)


class _Current:
    def __init__(self, used: list[int], handle: int) -> None:
        self._used, self._handle = used, handle

    def __enter__(self) -> None:
        self._used.append(self._handle)

    def __exit__(self, *_: object) -> None:
        self._used.append(0)


def stand_in(name: str, streams: Callable[[list[int]], Any]) -> Any:
    """A module that stands for PyTorch or CuPy; `used` are the streams that were current."""
    used: list[int] = []
    module: Any = types.ModuleType(name)
    module.used, module.cuda = used, streams(used)
    module.version = types.SimpleNamespace(cuda="13.0")
    module.Tensor = type("Tensor", (), {})
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
    # The context's process imports it: this one has the class by its path alone.
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
        assert sys.modules["torch"].used[-1] == sys.modules["cupy"].used[-1] == 0
        assert sys.modules["torch"].used[0] not in (0, stream)  # the constructor's own
