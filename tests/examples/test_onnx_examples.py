"""The program of ``onnx_model.py`` with bad input: the errors of its callers, and the program's state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.programs import Program

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only"),
]
# Its import opens files of its telemetry, which a later look for leaks would count.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
pytest.importorskip("onnxruntime")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import onnx  # noqa: E402
from onnx_model import WEIGHTS, InvalidArgument, OnnxModel, network  # noqa: E402

X = np.ones((5, 4), np.float32)
OPTIONS = ta.DeviceOptions(isolation="process", retry=1)
# A refusal restarts nothing, and any other error would end the program.
NEVER = ta.Intensity(0, 60.0)


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device("cpu", options=OPTIONS) as device:
        yield device


def renamed(old: str, new: str) -> bytes:
    """The network with another name of its input, or another length of an axis."""
    model = onnx.load_from_string(network())
    (x,) = model.graph.input
    if old == "x":
        x.name = model.graph.node[0].input[0] = new
    else:
        x.type.tensor_type.shape.dim[1].dim_param = new
    return bytes(model.SerializeToString())


async def answer(program: Program[OnnxModel], x: Any) -> Any:
    return await (await program.ask(OnnxModel.predict, x)).to_host()


@pytest.mark.no_device
def test_the_library_has_no_file_of_its_telemetry_open() -> None:
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert not [one for one in map(os.path.realpath, links) if "onnxruntime.db" in one]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (X.astype(np.float64), "Unexpected input data type.*double.*float"),
        (np.ones((5, 5), np.float32), "index: 1 Got: 5 Expected: 4"),
        (np.ones(4, np.float32), "Invalid rank for input: x Got: 1 Expected: 2"),
        (np.ones((5, 4, 1), np.float32), "Invalid rank for input: x Got: 3 Expected: 2"),
    ],
    ids=["dtype", "length", "vector", "rank"],
)
async def test_a_bad_request_is_refused(device: ta.Device, x: Any, text: str) -> None:
    async with ta.open_program(device, OnnxModel, network(), intensity=NEVER) as program:
        with pytest.raises(InvalidArgument, match=text):
            await program.ask(OnnxModel.predict, x)
        np.testing.assert_allclose(await answer(program, X), np.tanh(X @ WEIGHTS), atol=1e-6)
    assert device.generation == 1


async def test_a_model_with_an_input_of_another_name_refuses_all(device: ta.Device) -> None:
    async with ta.open_program(device, OnnxModel, renamed("x", "z"), intensity=NEVER) as program:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"Required inputs \(\['z'\]\) are missing"):
                await program.ask(OnnxModel.predict, X)


async def test_a_refusal_of_a_node_restarts_the_program(device: ta.Device) -> None:
    async with ta.open_program(device, OnnxModel, renamed("4", "columns")) as program:
        with pytest.raises(ta.ActorFailedError, match="MatMul dimension mismatch"):
            await program.ask(OnnxModel.predict, np.ones((5, 5), np.float32))
        np.testing.assert_allclose(await answer(program, X), np.tanh(X @ WEIGHTS), atol=1e-6)
    assert device.generation == 1


async def test_no_rows_and_rows_with_gaps(device: ta.Device) -> None:
    rows = np.random.default_rng(3).standard_normal((6, 8), np.float32)
    async with ta.open_program(device, OnnxModel, network(), intensity=NEVER) as program:
        assert (await answer(program, X[:0])).shape == (0, 3)
        view = (await device.put(rows))[::2, ::2]
        np.testing.assert_allclose(await answer(program, view), np.tanh(rows[::2, ::2] @ WEIGHTS), atol=1e-6)


@pytest.mark.parametrize(("model", "text"), [(b"no model", "InvalidProtobuf"), ("none.onnx", "NoSuchFile")])
async def test_an_invalid_model_is_reported_when_it_is_opened(
    device: ta.Device, model: Any, text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        await ta.open_program(device, OnnxModel, model)


async def test_a_file_is_read_again_by_the_next_worker(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(network())
    async with ta.open_program(device, OnnxModel, str(path)) as program:
        ta.testing.inject_fault(device, program.operation(OnnxModel.predict), kill=True)
        np.testing.assert_allclose(await answer(program, X), np.tanh(X @ WEIGHTS), atol=1e-6)
    assert device.generation == 2


def test_a_missing_provider_is_an_error() -> None:
    # ONNX Runtime itself warns, and continues by the CPU.
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(RuntimeError, match="does not support CUDA here"),
    ):
        OnnxModel(network(), gpu=0)


def test_a_missing_package_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'onnxruntime'\")", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "onnx_model.py")],
        env={"PYTHONPATH": f"{tmp_path}:{EXAMPLES.parent}"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "No module named 'onnxruntime': pip install onnx onnxruntime (for CUDA: onnxruntime-gpu)\n"
    )
