"""The plug-in of PyTorch's devices: kills, leftovers, and PyTorch in every bad state."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import operations_table
import pytest
import trio
from chosen import BACKEND, NAME, SEARCHED

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends import resolve
from trio_accel.backends.base import ArraySpec, Isolation
from trio_accel.backends.base.contract import ops

# The worker's imports are next to this module.
sys.path.insert(0, str(Path(__file__).parent))

pytestmark = pytest.mark.skipif(BACKEND != "torch", reason="nox -s torch runs it")

KILLS = 12
PROCESS = ta.DeviceOptions(isolation="process")


def natives() -> int:
    """Count the threads of this process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


async def test_arrays_survive_twelve_kills(system: ta.System) -> None:
    host = np.arange(1e6)
    add = jit.elementwise("r = x + 1")
    async with system.open_device(NAME, options=PROCESS) as device:
        x = await device.put(host)
        made = await add(x)
        small = x[:1000]
        product = await ta.linalg.matmul(small.reshape(10, 100), small.reshape(100, 10))
        want = host[:1000].reshape(10, 100) @ host[:1000].reshape(100, 10)
        for _ in range(KILLS):
            os.kill((await device.statistics()).pid, signal.SIGKILL)
            with trio.fail_after(60):
                while True:
                    try:
                        again = await (await add(made)).to_host()
                        break
                    except ta.AccelError:
                        pass
            np.testing.assert_array_equal(again, host + 2)
            np.testing.assert_array_equal(await x.to_host(), host)
            np.testing.assert_array_equal(await made.to_host(), host + 1)
            np.testing.assert_allclose(await product.to_host(), want, rtol=1e-12)


NOT_EXPORTED = """
import os, signal
import numpy as np
import trio
import trio_accel as ta

async def main():
    options = ta.DeviceOptions(isolation="process", spares=1, intensity=ta.Intensity(100, 60.0))
    async with ta.open_system("s") as system, system.open_device("torch", options=options) as device:
        for generation in range(1, 4):
            x = await device.put(np.arange(1e5))
            total = await ta.arrays.sum(x)
            assert float(await total.to_host()) == sum(range(100000))
            os.kill((await device.statistics()).pid, signal.SIGKILL)
            while device.generation == generation:
                await trio.sleep(0.01)
            try:
                await ta.arrays.sum(x)
            except ta.StaleRefError as error:
                print(error)
trio.run(main)
"""


def test_unexported_arrays_are_lost_with_a_worker() -> None:
    done = run(program=NOT_EXPORTED, TRIO_ACCEL_TORCH_EXPORT="no")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for generation, line in enumerate(lines, 1):
        assert f"its memory was lost with generation {generation} of the device; make it again" in line


async def test_no_thread_or_descriptor_is_left(system: ta.System) -> None:
    async def use() -> tuple[int, int]:
        async with system.open_device(NAME, options=ta.DeviceOptions(isolation="inline")) as device:
            x = await device.put(np.ones((300, 300)))
            await ta.linalg.matmul(x, x)
            await ta.fft.rfft(x)
        return natives(), len(os.listdir("/proc/self/fd"))

    await use()
    before = await use()
    for _ in range(3):
        after = await use()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert not [thread for thread in threading.enumerate() if "arrays" in thread.name]


def run(*paths: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    searched = os.pathsep.join([*map(str, paths), SEARCHED])
    env = {**os.environ, "PYTHONPATH": searched, **variables}
    env.pop("TRIO_ACCEL_BACKEND", None)
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=50)


REFUSAL = """
import sys
from trio_accel.backends import list_devices, resolve
try:
    resolve("torch")
except Exception as error:
    print(type(error).__name__, error)
assert "cpu:0" in [info.name for info in list_devices()]
assert "torch" not in sys.modules
"""


def test_devices_are_found_without_an_import_of_pytorch() -> None:
    done = run(program=REFUSAL + "print([info.name for info in list_devices()][-1])")
    assert (done.stdout, done.stderr) == ("torch:0\n", "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libcudnn.so.9: cannot open shared object file')", "libcudnn.so.9: cannot open"),
        ("__version__ = '1.13.1'", "PyTorch 1.13.1 is too old, install 2.6 or later"),
        ("import os; os.abort()", "PyTorch fails while it looks for devices"),
        ("print('hello')\nraise OSError('no driver')", "OSError: no driver"),
    ],
)
def test_a_broken_pytorch_is_refused_with_the_reason(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(source)
    done = run(tmp_path, program=REFUSAL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NotSupportedError 'torch': ")
    assert reason in done.stdout


def test_a_missing_pytorch_is_named() -> None:
    hidden = "import importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
    done = run(program=hidden + REFUSAL)
    assert done.stdout.startswith("NotSupportedError 'torch': PyTorch is not installed: pip install torch; ")


GONE = """
from trio_accel.backends import resolve

backend = resolve("torch")[0]
backend._found["devices"][0] |= {"kind": "cuda", "number": 5, "name": "a card", "memory": 1 << 30, "units": 1}
for ask in (lambda: backend.open_device(0, memory_limit=None), lambda: resolve("torch:7")):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_gone_device_is_refused() -> None:
    pytest.importorskip("torch")
    done = run(program=GONE)
    assert done.returncode == 0, done.stderr
    gone, unknown = done.stdout.splitlines()
    assert gone.startswith("DriverError PyTorch cannot use cuda:5: ")
    assert unknown.startswith("ValueError spec: 'torch:7': the device does not exist; available: ")
    # Real cards are listed before.
    assert "cpu:0" in unknown


@pytest.fixture
def bare_device() -> Iterator[Any]:
    """A device without an engine."""
    pytest.importorskip("torch")
    backend, info = resolve(BACKEND)
    device = backend.open_device(info.index, memory_limit=None)
    yield device
    assert device.close(5.0)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_wide_numbers_on_apples_devices_are_refused(
    bare_device: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = sys.modules["torch"]
    stream, library = bare_device.open_stream("s"), bare_device.open_library("arrays")
    kind = ta.DType(dtype)
    x = ArraySpec(0, 0, kind, (3,), (kind.itemsize,))
    with monkeypatch.context() as patch:
        patch.setattr(bare_device, "where", torch.device("mps"))
        with pytest.raises(ta.NotSupportedError, match=f"Apple's devices have no {dtype}; use float32 or"):
            library.call_of(ops.SortSpec(0, False, x, x, None, None), stream)


def test_a_module_named_as_a_library_of_the_package_is_not_imported(bare_device: Any) -> None:
    with pytest.raises(ta.NotSupportedError, match="the plug-in of PyTorch has no library 'sparse'"):
        bare_device.open_library("sparse")


def test_a_missing_kind_is_refused() -> None:
    for kind, reason in (
        ("abacus", "must be one of cpu, cuda, xpu, mps, got 'abacus'"),
        ("xpu", "no device of the"),
    ):
        assert reason in run(program=REFUSAL, TRIO_ACCEL_TORCH=kind).stdout


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64"])
async def test_unsigned_integers_match_numpy(device: ta.Device, name: str) -> None:
    limits = np.iinfo(name)
    a = np.array([0, 1, 5, limits.max // 2, limits.max - 1, limits.max, 77], name)
    b = np.array([3, limits.max, 2, 3, limits.max // 2 + 1, 7, 0], name)
    x, y = await device.put(a), await device.put(b)
    functions: dict[str, Any] = {
        "r = x + y": np.add,
        "r = x - y": np.subtract,
        "r = x * y": np.multiply,
        "r = x // y": np.floor_divide,
        "r = x % y": np.remainder,
        "r = maximum(x, y)": np.maximum,
        "r = x < y": np.less,
        "r = float64(x)": lambda a, _: a.astype(np.float64),
        "r = x >> 3": lambda a, _: a >> a.dtype.type(3),
    }
    for text, function in functions.items():
        with np.errstate(all="ignore"):
            want = function(a, b)
        inputs = ("x", "y") if "y" in text else ("x",)
        made = await jit.elementwise(text, inputs=inputs)(*[x, y][: len(inputs)])
        np.testing.assert_array_equal(await made.to_host(), want, err_msg=text)


async def test_views_at_any_offset_and_step(device: ta.Device) -> None:
    host = np.arange(24, dtype=np.int16).reshape(4, 6)
    x = await device.put(host)
    for take in (np.s_[::-1, ::2], np.s_[1:, ::-3], np.s_[::-1], np.s_[:, 5:0:-1]):
        np.testing.assert_array_equal(await (await ta.arrays.negative(x[take])).to_host(), -host[take])


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(1, (3,), (9,)), (19, (3,), (-9,)), (3, (2, 2), (11, -3)), (5, (3,), (0,))],
)
def test_elements_at_no_multiple_of_their_size(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    torch: Any = pytest.importorskip("torch")
    from trio_accel_torch._views import View

    # As fields of structures lie.
    memory = np.random.default_rng(0).integers(0, 255, 40, np.uint8)
    wanted = np.ndarray(shape, np.int64, memory.copy(), offset, strides)
    mine = torch.from_numpy(memory.copy())
    view = View.of(mine, ArraySpec(0, offset, ta.DType.int64, shape, strides))
    np.testing.assert_array_equal(view.read().numpy(), wanted)
    values = np.arange(7, 7 + wanted.size).reshape(shape)
    view.write(torch.from_numpy(values))
    wanted[...] = values
    assert isinstance(wanted.base, np.ndarray)
    np.testing.assert_array_equal(mine.numpy(), wanted.base)


def test_an_array_outside_of_its_block_is_refused() -> None:
    torch: Any = pytest.importorskip("torch")
    from trio_accel_torch._views import View

    for offset, strides in ((36, (8,)), (0, (-8,)), (-4, (4,))):
        with pytest.raises(ValueError, match=r"outside of block 3, of 40 bytes"):
            View.of(torch.zeros(40, dtype=torch.uint8), ArraySpec(3, offset, ta.DType.int32, (2,), strides))


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_program_computes_by_pytorch(system: ta.System, isolation: Isolation) -> None:
    pytest.importorskip("torch")
    from torch_programs import Network

    random = np.random.default_rng(3)
    first, second, x = (random.standard_normal(shape) for shape in ((4, 5), (5, 3), (6, 4)))
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(NAME, options=options) as device:
        arrays = [await device.put(one) for one in (first, second)]
        async with ta.open_program(device, Network, *arrays) as program:
            made = await program.ask(Network.forward, x)
            np.testing.assert_allclose(await made.to_host(), np.maximum(x @ first, 0) @ second, rtol=1e-12)
            gradient = await program.ask(Network.gradient, await device.put(x))
            np.testing.assert_allclose(await gradient.to_host(), 3 * x**2, rtol=1e-12)


async def test_custom_kernels_are_refused_by_name(device: ta.Device) -> None:
    source = 'extern "C" __global__ void twice(float *x) { *x *= 2; }'
    parameters = {"x": jit.updates("float32", ndim=1)}
    kernel = jit.Kernel("twice", source, parameters=parameters, grid=1, block=1)
    x = await device.put(np.ones(3, np.float32))
    with pytest.raises(ta.NotSupportedError, match=r"library 'jit' has no .*KernelSpec"):
        await kernel(x)


def test_a_fork_of_a_process_with_an_open_card_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_accel_torch._driver_check import driver_in_use

    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_initialized():
        assert driver_in_use() is None
    opened = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", opened)
    assert driver_in_use() == "has opened a card by torch.cuda, which no fork can use"


class FakeStream(SimpleNamespace):
    def __init__(self, _device: object, *, priority: int) -> None:
        super().__init__(priority=priority)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class Card:
    """A card without hardware: its events are done at the test's request."""

    def __init__(self) -> None:
        self.work = threading.Event()
        self.fault: Exception | None = None

    Stream = FakeStream

    def device(self, _device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, _stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def Event(self, **_options: bool) -> Any:  # noqa: N802  # as PyTorch names it
        return SimpleNamespace(record=lambda: None, synchronize=self._synchronize)

    def _synchronize(self) -> None:
        assert self.work.wait(30)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def card_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Card]]:
    """A stream with work on such a card."""
    torch: Any = pytest.importorskip("torch")
    from trio_accel_torch._streams import TorchContext, TorchStream

    card = Card()
    monkeypatch.setattr(torch, "xpu", card)
    stream = TorchStream("card", TorchContext("torch:0"), torch.device("xpu"))
    yield stream, card
    card.work.set()
    stream.close()
    stream.join()
    assert stream.has_ended


def test_a_card_gets_the_next_work_before_the_last_is_done(card_stream: tuple[Any, Card]) -> None:
    stream, card = card_stream
    ran: list[str] = []
    launched = threading.Event()
    stream.enqueue(lambda: ran.append("first"))
    first = stream.record()
    stream.enqueue(lambda: ran.append("second"))
    second = stream.record()
    stream.enqueue(launched.set)
    assert launched.wait(30)
    assert ran == ["first", "second"]
    assert not first.is_done
    card.work.set()
    stream.synchronize()
    assert first.is_done
    assert second.is_done
    assert first.error is None


def test_a_fault_of_a_card_ends_the_context(card_stream: tuple[Any, Card]) -> None:
    stream, card = card_stream
    torch: Any = sys.modules["torch"]
    card.fault = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")
    stream.enqueue(lambda: None)
    event = stream.record()
    card.work.set()
    stream.synchronize()
    assert isinstance(event.error, ta.ContextPoisonedError)
    with pytest.raises(ta.ContextPoisonedError, match="device-side assert"):
        stream.enqueue(lambda: None)


def test_memory_that_ran_out_on_a_card_loses_nothing(card_stream: tuple[Any, Card]) -> None:
    stream, card = card_stream
    torch: Any = sys.modules["torch"]
    card.fault = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory")
    event = stream.record()
    card.work.set()
    stream.synchronize()
    assert event.error is card.fault
    stream.enqueue(lambda: None)


async def test_the_table_of_functions_is_of_this_plug_in(device: ta.Device) -> None:
    """Functions of one array compute in each dtype that the page shows as passed."""
    pytest.importorskip("torch")
    record = operations_table.records()["torch"]
    assert record["runs"][0]["versions"].keys() >= {"PyTorch", "Python", "numpy"}
    count = 0
    for name, (_, function) in operations_table.public_functions().items():
        required = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        if required == ["x"] and name.startswith("arrays."):
            for dtype in record["operations"].get(name, {"passed": ""})["passed"].split():
                for shape in ((4,), (2, 2), ()):
                    try:
                        await function(await device.put(np.ones(shape, ta.DType(dtype).dtype)))
                    except ValueError:
                        # Of another number of axes.
                        continue
                    count += 1
                    break
                else:
                    pytest.fail(f"{name} of {dtype}: no shape fits")
    assert count > 200
