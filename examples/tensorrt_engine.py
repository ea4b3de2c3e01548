"""A TensorRT engine as a program of a device, from a file with its plan.

TensorRT is a program of your own, and not a part of the package, because its wheels are too large for the
machines that test the package. So this file was compared with the documented interface of TensorRT 10, by its
types and a stand-in, and never ran on a GPU. Use: python examples/tensorrt_engine.py network.plan
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array, method

CLASSES = 1000


class Engine:
    """A network with one input of float32, (rows, features), and one output, (rows, `CLASSES`)."""

    def __init__(self, plan: bytes) -> None:
        import tensorrt as trt  # in the worker only: the application needs no TensorRT

        self.runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ValueError("this TensorRT on this GPU did not make the plan; build it again here")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        outputs = [name for name in names if name not in inputs]
        if (len(inputs), len(outputs)) != (1, 1):
            raise ValueError(f"the engine must have one input and one output, got {inputs} and {outputs}")
        [self.input], [self.output] = inputs, outputs
        if {engine.get_tensor_dtype(name) for name in names} != {trt.float32}:
            raise ValueError("the engine's input and output must be float32; build it with a cast")
        # The context refers to the engine, so both live as long as the program.
        context = engine.create_execution_context()
        if context is None:
            raise RuntimeError("TensorRT made no context, because memory is short; its log has the reason")
        self.engine, self.context = engine, context

    @method(out=lambda x: ((x.shape[0], CLASSES), "float32"), refuses=(ValueError,))
    def predict(self, x: Array, out: Array = None) -> None:
        """Enqueue the network on the call's stream: it reads x and writes out, without copies."""
        source, target = x.__cuda_array_interface__, out.__cuda_array_interface__
        if x.dtype != np.float32 or source["strides"]:  # an address says neither
            raise ValueError(f"x must be float32 without gaps, got {x.dtype} of shape {x.shape}")
        if not self.context.set_input_shape(self.input, tuple(x.shape)):
            raise ValueError(f"no profile of the engine has inputs of shape {tuple(x.shape)}")
        shape = tuple(self.context.get_tensor_shape(self.output))
        if shape != tuple(out.shape):
            raise ValueError(f"the engine's output has shape {shape}, and the result {tuple(out.shape)}")
        self.context.set_tensor_address(self.input, source["data"][0])
        self.context.set_tensor_address(self.output, target["data"][0])
        if not self.context.execute_async_v3(source["stream"]):
            raise RuntimeError("TensorRT did not enqueue the network; its log has the reason")


async def main(plan: str, rows: int, features: int, backend: str) -> None:
    """Print the likeliest class of random inputs. A lost worker is replaced, and makes the engine again."""
    options = ta.DeviceOptions(isolation="process", retry=1)
    x: np.ndarray[Any, Any] = np.random.default_rng(0).standard_normal((rows, features), np.float32)
    async with ta.open_system("trt") as system, system.open_device(backend, options=options) as device:
        content = await trio.Path(plan).read_bytes()
        async with ta.open_program(device, Engine, content) as program:
            scores = await program.ask(Engine.predict, x)
            print((await scores.to_host()).argmax(axis=1))


if __name__ == "__main__":
    import tensorrt_engine  # because workers cannot import its class from `__main__`

    parser = argparse.ArgumentParser(description="Run a TensorRT engine as a program of a device.")
    parser.add_argument("plan", type=Path, help="the serialized engine")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--backend", default="cuda:0")
    given = parser.parse_args()
    trio.run(tensorrt_engine.main, str(given.plan), given.rows, given.features, given.backend)
