"""An ONNX model as a program: its worker is killed, and the next worker creates the session again."""

import argparse
import os

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array, method

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # telemetry opens a file, which forks must not share
try:
    import onnx
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install onnx onnxruntime (for CUDA: onnxruntime-gpu)") from None
WEIGHTS = np.random.default_rng(0).standard_normal((4, 3), "f")


class OnnxModel:
    """An ONNX session from the path or the bytes of a file, on the CPU or on a GPU."""

    def __init__(self, model: str | bytes, gpu: int | None = None) -> None:
        self.gpu, options = gpu, ort.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # so idle threads sleep
        provider, settings = ("CPU", {}) if gpu is None else ("CUDA", {"device_id": str(gpu)})
        self.session = ort.InferenceSession(model, options, [(f"{provider}ExecutionProvider", settings)])
        if f"{provider}ExecutionProvider" not in self.session.get_providers():
            raise RuntimeError(f"onnxruntime does not support {provider} here")  # it would run without

    @method(out=lambda x: ((x.shape[0], 3), "float32"), refuses=(ValueError, InvalidArgument))
    def predict(self, x: Array, out: Array = None) -> None:
        """Run the session. On CUDA, it reads x and writes out in device memory, without copies."""
        if self.gpu is None:
            out[...] = self.session.run(["y"], {"x": x})[0].reshape(out.shape)
            return
        from cuda.core import Stream

        binding, (at, to) = self.session.io_binding(), (each.__cuda_array_interface__ for each in (x, out))
        if x.dtype != np.float32 or x.shape[1:] != (4,) or at["strides"]:  # a binding does not check this
            raise ValueError("x must be float32 of shape (rows, 4), without gaps")
        Stream.from_handle(at["stream"]).sync()  # the session uses another stream
        binding.bind_input("x", "cuda", self.gpu, np.float32, x.shape, at["data"][0])
        binding.bind_output("y", "cuda", self.gpu, np.float32, out.shape, to["data"][0])
        self.session.run_with_iobinding(binding)


def network() -> bytes:
    """Return the contents of an ONNX file."""
    head = '<ir_version: 10, opset_import: ["": 21]> layer (float[rows, 4] x) => (float[rows, 3] y)'
    model = onnx.parser.parse_model(head + "{ product = MatMul(x, weights) y = Tanh(product) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS, "weights"))
    return bytes(model.SerializeToString())


async def main(backend: str) -> bool:
    """Return whether any answer differs from NumPy's in float64."""
    options, error = ta.DeviceOptions(isolation="process", retry=1), 0.0
    async with ta.open_system("onnx") as system, system.open_device(backend, options=options) as device:
        gpu = None if device.info.backend == "cpu" else device.info.index
        async with ta.open_program(device, OnnxModel, network(), gpu) as program:
            for number in range(10):
                if number == 5:  # kill the worker at the next request; another worker answers it
                    ta.testing.inject_fault(device, program.operation(OnnxModel.predict), kill=True)
                x = np.random.default_rng(number).standard_normal((8, 4), "f")
                y = await (await program.ask(OnnxModel.predict, x)).to_host()
                error = max(error, float(abs(y - np.tanh(x.astype(float) @ WEIGHTS)).max()))
        is_right = error < 1e-6 and device.generation == 2
        print(f"generation {device.generation}, largest error {error:.0e}:", "right" if is_right else "WRONG")
        return not is_right


if __name__ == "__main__":
    import onnx_model  # because workers cannot import its class from `__main__`

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu", help="device to use, such as cpu or cuda:1")
    raise SystemExit(trio.run(onnx_model.main, parser.parse_args().backend))
