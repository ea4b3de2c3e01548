"""``tensorrt_engine.py`` with a stand-in for TensorRT, with device memory on the host."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.examples, pytest.mark.no_device]

EXAMPLES = Path(__file__).parents[2] / "examples"
STREAM = 0x5EED


class InMemory:
    """An array as a program gets it on CUDA."""

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host, self.dtype, self.shape = host, host.dtype, host.shape
        strides = None if host.flags.c_contiguous else host.strides
        self.__cuda_array_interface__ = {
            "data": (host.ctypes.data, False),
            "strides": strides,
            "stream": STREAM,
        }


class Context:
    """Doubles the first column into all classes; takes at most eight rows."""

    def __init__(self, calls: list[str], classes: int) -> None:
        self.calls, self.classes, self.addresses = calls, classes, dict[str, int]()
        self.input_shape: tuple[int, ...] = ()
        self.is_enqueued = True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "x"
        self.input_shape = shape
        return shape[0] <= 8

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert name == "y"
        return self.input_shape[0], self.classes

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        rows, columns = self.input_shape
        x, y = [
            np.ctypeslib.as_array((ctypes.c_float * (rows * count)).from_address(self.addresses[name]))
            for name, count in (("x", columns), ("y", self.classes))
        ]
        y.reshape(rows, -1)[:] = 2 * x.reshape(rows, -1)[:, :1]
        self.calls.append("enqueued")
        return self.is_enqueued


class Tensorrt:
    """The module, as far as the example calls it."""

    float32 = "float32"
    TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")

    class Logger:
        WARNING = "warning"

        def __init__(self, severity: str) -> None:
            assert severity == "warning"

    def __init__(self, *, modes: dict[str, str], dtype: str, classes: int) -> None:
        self.calls: list[str] = []
        self.modes, self.dtype, self.context = modes, dtype, Context(self.calls, classes)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802  # TensorRT's name
        return SimpleNamespace(deserialize_cuda_engine=self._engine)

    def _engine(self, plan: bytes) -> Any:
        return (
            None
            if plan == b"of another version"
            else SimpleNamespace(
                num_io_tensors=len(self.modes),
                get_tensor_name=lambda index: [*self.modes][index],
                get_tensor_mode=self.modes.__getitem__,
                get_tensor_dtype=lambda name: self.dtype,
                create_execution_context=lambda: self.context,
            )
        )


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("tensorrt_engine")


def installed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Tensorrt:
    found = Tensorrt(**{"modes": {"x": "in", "y": "out"}, "dtype": "float32", "classes": 1000, **changes})
    monkeypatch.setitem(sys.modules, "tensorrt", found)  # type: ignore[arg-type]
    return found


def test_the_engine_reads_and_writes_the_arrays_on_the_calls_stream(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(monkeypatch)
    engine = example.Engine(b"plan")
    for rows in (3, 8, 1):
        x, out = np.random.default_rng(rows).random((rows, 5), np.float32), np.zeros((rows, 1000), np.float32)
        engine.predict(InMemory(x), InMemory(out))
        np.testing.assert_array_equal(out, np.broadcast_to(2 * x[:, :1], out.shape))
    assert library.calls == ["enqueued"] * 3


def test_bad_requests_are_refused_before_a_launch(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = installed(monkeypatch)
    engine, out = example.Engine(b"plan"), InMemory(np.zeros((2, 1000), np.float32))
    for x, reason in (
        (np.zeros((2, 5)), "float32"),
        (np.zeros((5, 2), np.float32).T, "without gaps"),
        (np.zeros((9, 5), np.float32), "no profile"),
        (np.zeros((3, 5), np.float32), "the engine's output has shape"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.predict(InMemory(x), out)
    assert not library.calls
    library.context.is_enqueued = False
    with pytest.raises(RuntimeError, match="did not enqueue"):
        engine.predict(InMemory(np.zeros((2, 5), np.float32)), out)


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        (b"of another version", {}, "did not make the plan"),
        (b"plan", {"modes": {"a": "in", "b": "in", "y": "out"}}, "one input and one output"),
        (b"plan", {"dtype": "half"}, "must be float32"),
    ],
)
def test_other_engines_are_refused(
    example: Any, monkeypatch: pytest.MonkeyPatch, plan: bytes, changes: dict[str, Any], reason: str
) -> None:
    installed(monkeypatch, **changes)
    with pytest.raises(ValueError, match=reason):
        example.Engine(plan)


def test_help_needs_no_tensorrt() -> None:
    command = [sys.executable, "tensorrt_engine.py", "--help"]
    shown = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=True).stdout
    assert re.match("usage: tensorrt_engine.py ", shown)
