"""Names as a notebook's completion offers them, and names of other libraries."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.backends.base.contract import foreign_names
from trio_accel.interop import BlockingDevice

untyped: Any = ta
# The names of others, and of ours that the error has to name.
OF_JAX_AND_PYTORCH = {
    "vectorize": "ta.vmap",
    "jacobian": "ta.gradients.jacobian",
    "jacrev": "ta.gradients.jacobian",
    "hessian": "ta.gradients.hessian",
    "jvp": "ta.gradients.jvp",
    "no_grad": "ta.grad",
    "enable_grad": "ta.grad",
    "compile": "ta.step",
    "pmap": "ta.open_world",
    "Tensor": "device.put",
    "as_tensor": "device.put",
    "from_numpy": "device.put",
    "device_put": "device.put",
    "device_get": "to_host",
    "device": "open_device",
    "cuda": "open_device",
    "optim": "ta.train",
    "manual_seed": "ta.random.Generator",
    "rand": "ta.random.Generator",
    "randn": "ta.random.Generator",
    "PRNGKey": "ta.random.Generator",
    "float32": "ta.DType.float32",
    "int8": "ta.DType.int8",
    "bfloat16": "ta.DType.bfloat16",
    "DataLoader": "ta.stream",
    "custom_vjp": "ta.custom_gradient",
    "autograd": "ta.grad",
    "lax": "ta.arrays",
    "softmax": "ta.arrays.softmax",
    "block_until_ready": "synchronize",
    "relu": "ta.nn.relu",
    "cat": "ta.arrays.concat",
}
OF_ARRAYS = {
    "backward": "ta.grad",
    "grad": "ta.grad",
    "requires_grad": "ta.grad",
    "detach": "ta.stop_gradient",
    "block_until_ready": "synchronize",
    "cuda": "copy_to",
    "cpu": "to_host",
    "numpy": "to_host",
    "tolist": "to_host",
    "clone": "x.copy()",
    "contiguous": "x.copy()",
    "unsqueeze": "expand_dims",
    "squeeze": "ta.arrays.squeeze",
    "expand": "broadcast_to",
    "permute": "x.transpose",
    "dim": "x.ndim",
    "numel": "x.size",
    "float": "x.cast",
    "half": "x.cast",
    "long": "x.cast",
    "add_": "x.assign",
    "zero_": "x.fill",
    "argmax": "ta.arrays.argmax",
    "sort": "ta.arrays.sort",
    "clamp": "ta.arrays.clip",
    "cumsum": "ta.arrays.cumulative_sum",
    "mm": "x @ y",
    "asnumpy": "to_host",
}


def test_dir_has_each_public_name() -> None:
    """A new interpreter, because names are added at their first use."""
    text = "import trio_accel as ta, sys; print(sorted(set(ta.__all__) - set(dir(ta))), len(ta.__all__))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout.split("]")[0] + "]") == []
    assert int(done.stdout.split("]")[1]) > 120


@pytest.mark.parametrize("package", [name for name in ta.__all__ if name.islower()])
def test_dir_of_a_package_has_no_internal_names(package: str) -> None:
    module = getattr(ta, package)
    if package not in ("interop", "__version__") and hasattr(module, "__all__"):
        names = dir(module)
        assert set(module.__all__) <= set(names)
        assert [name for name in names if name[0] == "_" and not name.endswith("__")] == []


@pytest.mark.parametrize(("name", "told"), OF_JAX_AND_PYTORCH.items())
def test_a_name_of_another_library_names_ours(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; .*{re.escape(told)}"):
        getattr(ta, name)


def test_each_advice_names_only_existing_names() -> None:
    for text in (*foreign_names.OF_PACKAGE.values(), *foreign_names.OF_ARRAYS.values()):
        for path in re.findall(r"\bta((?:\.\w+)+)", text):
            part: Any = ta
            for name in path.split(".")[1:]:
                part = getattr(part, name)
    for name in foreign_names.OF_PACKAGE:
        assert name not in ta.__all__


@pytest.mark.parametrize(
    ("name", "told"),
    [("jit", "ta.jit.elementwise"), ("tensor", "device.put"), ("devices", "ta.list_devices")],
)
def test_a_package_with_the_name_of_a_function_names_that_function(name: str, told: str) -> None:
    for argument in (lambda x: x, [1.0, 2.0]):
        with pytest.raises(TypeError, match=rf"module 'trio_accel\.{name}' is not callable; .*{told}"):
            getattr(untyped, name)(argument)
    assert not callable(ta.linalg)  # otherwise completion would add a parenthesis


async def test_attributes_of_arrays_of_other_libraries(device: ta.Device) -> None:
    x: Any = await device.put(np.eye(2))
    for array in (x, x + 1.0):
        for name, told in OF_ARRAYS.items():
            with pytest.raises(AttributeError, match=rf"no attribute '{name}'; .*{re.escape(told)}"):
                getattr(array, name)


async def test_dir_of_an_array_is_for_programs(device: ta.Device) -> None:
    x = await device.put(np.eye(2))
    y = x + 1.0
    for array in (x, y):
        names = [name for name in dir(array) if not name.endswith("__")]
        assert {"T", "dtype", "shape", "to_host", "cast", "item"} <= set(names)
        assert [name for name in names if name[0] == "_"] == []
        assert {"noun", "refuse", "silence", "block", "first", "throw"}.isdisjoint(names)
    y.close()


def test_dir_of_an_array_of_a_blocking_namespace() -> None:
    from trio_accel.interop import Array

    names = [name for name in dir(Array.__new__(Array)) if not name.endswith("__")]
    assert {"T", "dtype", "shape", "ref", "to_device"} <= set(names)
    assert [name for name in names if name[0] == "_" or name == "what_to_do"] == []
    assert "wait" in dir(BlockingDevice)
