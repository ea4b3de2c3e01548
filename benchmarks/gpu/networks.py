"""Networks beside PyTorch and cuDNN's bare graph: ``python -m benchmarks.gpu.networks``.

Prints microseconds for each call: of one asker, who waits for each reply; of several at once; of the graph by
cuDNN's front end where there is one; and of PyTorch. Each is the least of five rounds. A small product tells
what an ask takes whatever it is for. It needs a GPU, PyTorch and cuDNN's front end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import trio

import trio_accel as ta

__all__ = ["main"]

_ROUNDS = 5
_CALLS, _ASKERS = 50, 4
_ATTENTION = ((4, 16, 2048, 64), (2, 16, 4096, 128), (1, 8, 512, 64))
_IMAGES, _WEIGHT = (16, 64, 56, 56), (64, 64, 3, 3)
_SMALL, _SMALL_WEIGHT = (1, 8, 8, 8), (8, 8, 3, 3)

_torch: Any = None


def _time(call: Callable[[], object]) -> float:
    """Measure a call that enqueues."""
    least = float("inf")
    for _ in range(_ROUNDS):
        _torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        _torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least / _CALLS * 1e6


async def _time_ours(device: ta.Device, make: Callable[[], Any]) -> tuple[float, float]:
    """Measure asks of a message that is made for each: by one task, and by several."""

    async def ask(count: int) -> None:
        for _ in range(count):
            await device.ask(make())

    await ask(1)
    alone = together = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        await ask(_CALLS)
        middle = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(_ASKERS):
                nursery.start_soon(ask, _CALLS)
        alone = min(alone, middle - start)
        together = min(together, time.perf_counter() - middle)
    return alone / _CALLS * 1e6, together / _CALLS / _ASKERS * 1e6


def _bare(arrays: Sequence[Any], describe: Callable[[Any, list[Any]], Any]) -> float:
    """Measure a graph of cuDNN; the last array is the result."""
    cudnn = import_module("cudnn")
    handle, stream = cudnn.create_handle(), _torch.cuda.Stream()
    cudnn.set_stream(handle, stream.cuda_stream)
    types = {
        _torch.float16: cudnn.data_type.HALF,
        _torch.float32: cudnn.data_type.FLOAT,
    }
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, handle=handle
    )
    given = [
        graph.tensor(dim=list(one.shape), stride=list(one.stride()), data_type=types[one.dtype], uid=number)
        for number, one in enumerate(arrays[:-1], 1)
    ]
    made, out = describe(graph, given), arrays[-1]
    made.set_output(True).set_uid(len(arrays)).set_data_type(types[out.dtype])
    made.set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = _torch.empty(max(1, graph.get_workspace_size()), dtype=_torch.uint8, device="cuda")
    addresses = {number: one.data_ptr() for number, one in enumerate(arrays, 1)}

    def execute() -> None:
        graph.execute(addresses, workspace.data_ptr(), handle=handle)

    execute()
    least = _time(execute)
    cudnn.destroy_handle(handle)
    return least


def _say(name: str, ours: tuple[float, float], bare: float | None, peer: float) -> None:
    told = "" if bare is None else f"{bare:.1f}"
    sys.stdout.write(f"{name:44}{ours[0]:10.1f}{ours[1]:12.1f}{told:>10}{peer:10.1f}\n")
    sys.stdout.flush()


async def _attention(device: ta.Device, shape: tuple[int, ...]) -> None:
    attend = _torch.nn.functional.scaled_dot_product_attention
    q, k, v, made = (_torch.randn(shape, device="cuda", dtype=_torch.float16) for _ in range(4))
    refs = [await device.put(one.cpu().numpy()) for one in (q, k, v)]
    out, scale = await device.zeros(shape, "float16"), shape[-1] ** -0.5
    message: Any = ta.nn.ScaledDotProductAttention
    ours = await _time_ours(device, lambda: message(*refs, is_causal=True, out=out))

    def describe(graph: Any, given: list[Any]) -> Any:
        return graph.sdpa(*given, attn_scale=scale, generate_stats=False, diagonal_band_right_bound=0)[0]

    bare = _bare((q, k, v, made), describe)
    _say(f"attention {shape} float16, causal", ours, bare, _time(lambda: attend(q, k, v, is_causal=True)))


async def _images(device: ta.Device, dtype: str) -> None:
    nn, functional, grad = ta.nn, _torch.nn.functional, _torch.nn.grad
    x = _torch.randn(_IMAGES, device="cuda", dtype=getattr(_torch, dtype))
    w = _torch.randn(_WEIGHT, device="cuda", dtype=x.dtype)
    image, weight = [await device.put(one.cpu().numpy()) for one in (x, w)]
    out = await device.zeros(_IMAGES, dtype)
    ours = await _time_ours(device, lambda: nn.Conv2d(image, weight, padding=1, out=out))

    def describe(graph: Any, given: list[Any]) -> Any:
        return graph.conv_fprop(*given, padding=[1, 1], stride=[1, 1], dilation=[1, 1])

    bare = _bare((x, w, _torch.empty_like(x)), describe)
    _say(f"conv2d {_IMAGES} {dtype}", ours, bare, _time(lambda: functional.conv2d(x, w, padding=1)))
    ours = await _time_ours(device, lambda: nn.ConvInputGrad(_IMAGES, weight, image, padding=1))
    _say("  gradient for its input", ours, None, _time(lambda: grad.conv2d_input(_IMAGES, w, x, padding=1)))
    ours = await _time_ours(device, lambda: nn.ConvWeightGrad(image, _WEIGHT, image, padding=1))
    peer = _time(lambda: grad.conv2d_weight(x, _WEIGHT, x, padding=1))
    _say("  gradient for its weights", ours, None, peer)
    for message, function in ((nn.AvgPool2d, "avg_pool2d"), (nn.MaxPool2d, "max_pool2d")):
        named: Any = message
        ours = await _time_ours(device, partial(named, image, 3, 2))
        _say(
            f"  {function}, 3 by 3, stride 2",
            ours,
            None,
            _time(partial(getattr(functional, function), x, 3, 2)),
        )


async def _small(device: ta.Device) -> None:
    x, w = (_torch.randn(shape, device="cuda") for shape in (_SMALL, _SMALL_WEIGHT))
    image, weight = [await device.put(one.cpu().numpy()) for one in (x, w)]
    out = await device.zeros(_SMALL, "float32")
    ours = await _time_ours(device, lambda: ta.nn.Conv2d(image, weight, padding=1, out=out))
    _say(f"conv2d {_SMALL} float32", ours, None, _time(lambda: _torch.nn.functional.conv2d(x, w, padding=1)))
    a = _torch.randn((8, 8), device="cuda")
    matrix = await device.put(a.cpu().numpy())
    ours = await _time_ours(device, lambda: ta.linalg.Matmul(matrix, matrix))
    _say("matmul (8, 8) float32", ours, None, _time(lambda: a @ a))


async def _measure() -> None:
    header = f"{'us':44}{'one asks':>10}{'four ask':>12}{'graph':>10}{'PyTorch':>10}"
    sys.stdout.write(f"{_torch.cuda.get_device_name()}\n{header}\n")
    inline = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("networks") as system, system.open_device("cuda", options=inline) as device:
        for shape in _ATTENTION:
            await _attention(device, shape)
        for dtype in ("float16", "float32"):
            await _images(device, dtype)
        await _small(device)


def main() -> int:
    """Measure."""
    globals()["_torch"] = import_module("torch")
    _torch.backends.cudnn.allow_tf32 = False
    trio.run(_measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
