"""Contractions beside cuTENSOR, PyTorch and CuPy, in one run: ``python -m benchmarks.gpu.tensors``.

Each row is a sum of products of two tensors, or of several: milliseconds of one ask that is awaited. It is by
`ta.tensor.contract` (which writes axes in the order that was asked for), by `ta.tensor.einsum` and by
`ta.linalg.einsum`, and by copies and one `matmul`. "eight" is one of eight contractions in flight.
Beside it are the bare calls of cuTENSOR, `torch.einsum` and `cupy.einsum`, each with a wait. PyTorch
multiplies float32 without TF32, as we do. Then permutations. It needs a GPU, PyTorch and CuPy.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import trio

import trio_accel as ta

__all__ = ["main"]

_ROUNDS = 15
_IN_FLIGHT = 8
# Codes of `cudaDataType`.
_CODES = {"float32": 0, "bfloat16": 14}

# Some from TCCG (P. Springer and P. Bientinesi, 2018), a bilinear form, attention, and products of matrices.
_CASES = (
    ("ij,jk->ik", {"i": 4096, "j": 4096, "k": 4096}),
    ("bij,bjk->ibk", {"b": 64, "i": 512, "j": 512, "k": 512}),
    ("bqhd,bkhd->bhqk", {"b": 16, "h": 16, "q": 1024, "d": 64, "k": 1024}),
    ("abcd,dbea->ec", {"a": 64, "b": 64, "c": 256, "d": 64, "e": 256}),
    ("abc,acd->db", {"a": 128, "b": 1024, "c": 128, "d": 1024}),
    ("abcd,ea->ebcd", {"a": 256, "b": 64, "c": 64, "d": 64, "e": 128}),
    ("abcde,ecbfa->fd", {"a": 24, "b": 24, "c": 24, "d": 256, "e": 24, "f": 256}),
    ("abcdef,dega->gfbc", {"a": 24, "b": 16, "c": 16, "d": 24, "e": 16, "f": 24, "g": 24}),
    ("abkl,kcld->adbc", {"a": 32, "b": 32, "c": 32, "d": 32, "k": 64, "l": 64}),
    ("bi,bj->ij", {"b": 65536, "i": 64, "j": 64}),
    ("iajb,jkbl->iakl", {"i": 48, "a": 48, "j": 48, "b": 48, "k": 48, "l": 48}),
    ("ai,ij,aj->a", {"a": 65536, "i": 256, "j": 256}),
    ("ab,bc,cd,de->ae", {"a": 1024, "b": 2048, "c": 512, "d": 4096, "e": 256}),
    ("aik,kja->ji", {"a": 8, "i": 16, "k": 8, "j": 16}),
)
_PERMUTATIONS = (
    ("ij->ji", (16384, 16384)),
    ("ijk->kij", (512, 512, 1024)),
    ("abcd->dbca", (128, 64, 64, 512)),
)


async def _ours(ask: Callable[[], Awaitable[Any]]) -> float:
    took: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        await ask()
        took.append(time.perf_counter() - start)
    return float(np.median(took[2:])) * 1e3


def _peer(call: Callable[[], object], wait: Callable[[], object]) -> float:
    took: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        wait()
        took.append(time.perf_counter() - start)
    return float(np.median(took[2:])) * 1e3


async def _by_matmul(subscripts: str, a: ta.AccelRef, b: ta.AccelRef) -> ta.AccelRef:
    """Copy what has to be copied by launches of their own, and multiply stacks of matrices."""
    inputs, _, output = subscripts.partition("->")
    of_a, of_b = inputs.split(",")
    batch = [x for x in output if x in of_a and x in of_b]
    rows, columns = [x for x in output if x not in of_b], [x for x in output if x not in of_a]
    inner = [x for x in of_a if x not in output]
    stacks: list[ta.AccelRef] = []
    for term, array, sides in ((of_a, a, (rows, inner)), (of_b, b, (inner, columns))):
        order = [term.index(x) for x in (*batch, *sides[0], *sides[1])]
        view = ta.arrays.permute_dims(array, order)
        extents = dict(zip(term, array.shape, strict=True))
        shape = [*(extents[x] for x in batch), *(math.prod(extents[x] for x in side) for side in sides)]
        try:
            stacks.append(view.reshape(shape))
        except ValueError:
            stacks.append((await view.copy()).reshape(shape))
    product = await ta.linalg.matmul(*stacks)
    made = [*batch, *rows, *columns]
    every = {**dict(zip(of_a, a.shape, strict=True)), **dict(zip(of_b, b.shape, strict=True))}
    return ta.arrays.permute_dims(product.reshape([every[x] for x in made]), [made.index(x) for x in output])


def _bare(subscripts: str, a: Any, b: Any, out: Any) -> Callable[[], object]:
    """Plan a contraction of PyTorch's tensors by cuTENSOR's bindings; returns its call."""
    cutensor: Any = import_module("nvmath.bindings.cutensor")
    torch: Any = import_module("torch")
    handle = cutensor.create()
    terms = [[ord(letter) for letter in term] for term in subscripts.replace("->", ",").split(",")]
    tensors = [
        cutensor.create_tensor_descriptor(
            handle, one.dim(), list(one.shape), list(one.stride()), _CODES[str(one.dtype).split(".")[1]], 16
        )
        for one in (a, b, out)
    ]
    (of_a, of_b, of_out), (at_a, at_b, at_out) = terms, tensors
    contraction = cutensor.create_contraction(
        handle,
        at_a,
        of_a,
        1,
        at_b,
        of_b,
        1,
        at_out,
        of_out,
        1,
        at_out,
        of_out,
        cutensor.ComputeDesc.COMPUTE_32F(),
    )
    preference = cutensor.create_plan_preference(handle, cutensor.Algo.DEFAULT, cutensor.JitMode.NONE)
    wanted = cutensor.estimate_workspace_size(handle, contraction, preference, 2)
    plan = cutensor.create_plan(handle, contraction, preference, wanted)
    room = torch.empty(max(wanted, 1), dtype=torch.uint8, device="cuda")
    factors = np.array([1, 0], np.float32)
    alpha, beta = factors.ctypes.data, factors.ctypes.data + 4
    stream = torch.cuda.current_stream().cuda_stream
    places = a.data_ptr(), b.data_ptr(), beta, out.data_ptr(), out.data_ptr(), room.data_ptr(), wanted, stream

    def call() -> None:
        # What it holds must live as long as the call.
        cutensor.contract(handle, plan, alpha, *places)
        _ = factors, room

    return call


async def _beside_cutensor(
    device: ta.Device, subscripts: str, arrays: list[ta.AccelRef], peers: list[Any]
) -> dict[str, float]:
    """Measure one of eight contractions in flight, and the same by cuTENSOR alone; and one alone of that."""
    torch: Any = import_module("torch")
    out = await ta.tensor.contract(subscripts, *arrays[:2])

    async def eight() -> None:
        message = ta.tensor.Contract(subscripts, arrays[0], arrays[1], out=out)
        for reply in [device.submit(message) for _ in range(_IN_FLIGHT)]:
            await reply.wait()

    times = {"eight": await _ours(eight) / _IN_FLIGHT}
    try:
        call = _bare(
            subscripts, peers[0], peers[1], torch.empty(out.shape, dtype=peers[0].dtype, device="cuda")
        )
    except Exception as error:  # noqa: BLE001  # it need not be there
        _say(f"  cutensor: {type(error).__name__}: {error}")
        return times

    def bare() -> None:
        for _ in range(_IN_FLIGHT):
            call()

    times["cutensor"] = _peer(call, torch.cuda.synchronize)
    times["cutensor eight"] = _peer(bare, torch.cuda.synchronize) / _IN_FLIGHT
    return times


async def _case(device: ta.Device, subscripts: str, extents: dict[str, int], dtype: str) -> None:
    torch: Any = import_module("torch")
    cupy: Any = import_module("cupy")
    terms = subscripts.partition("->")[0].split(",")
    generator = torch.Generator(device="cuda").manual_seed(0)
    peers = [
        torch.randn([extents[x] for x in term], device="cuda", generator=generator).to(getattr(torch, dtype))
        for term in terms
    ]
    arrays = [await device.put(peer.to(torch.float32).cpu().numpy()) for peer in peers]
    arrays = [await array.cast(dtype) for array in arrays]
    wait = torch.cuda.synchronize
    expected = torch.einsum(subscripts, *peers).to(torch.float32)
    times: dict[str, float] = {}
    ways: dict[str, Callable[[], Awaitable[ta.AccelRef]]] = {
        "tensor.einsum": partial(ta.tensor.einsum, subscripts, *arrays),
        "linalg.einsum": partial(ta.linalg.einsum, subscripts, *arrays),
    }
    if len(arrays) == 2:
        ways["contract"] = partial(ta.tensor.contract, subscripts, *arrays)
        ways["matmul"] = partial(_by_matmul, subscripts, *arrays)
    worst = 0.0
    for name, ask in ways.items():
        result = await ask()
        host = await (await result.cast("float32")).to_host()
        off = torch.from_numpy(host).cuda() - expected
        worst = max(worst, float(off.abs().max() / expected.abs().max()))
        times[name] = await _ours(ask)
    if len(arrays) == 2:
        times |= await _beside_cutensor(device, subscripts, arrays, peers)
    times["torch"] = _peer(lambda: torch.einsum(subscripts, *peers), wait)
    if dtype == "float32":
        theirs = [cupy.asarray(peer) for peer in peers]
        try:
            times["cupy"] = _peer(lambda: cupy.einsum(subscripts, *theirs), wait)
        except Exception as error:  # noqa: BLE001  # a peer's trouble is a row of the table
            _say(f"  cupy: {type(error).__name__}: {error}")
    flops = ta.tensor.contract_path(subscripts, *arrays).flops
    best = min(times[name] for name in ways)
    told = ", ".join(f"{name} {time:8.3f}" for name, time in sorted(times.items()))
    _say(
        f"{subscripts:<20} {dtype:<9} {told} ms; best of ours / torch {best / times['torch']:.2f}, "
        f"{flops / best / 1e9:.1f} TFLOP/s, difference {worst:.1e}"
    )


async def _permutation(device: ta.Device, subscripts: str, shape: tuple[int, ...]) -> None:
    torch: Any = import_module("torch")
    peer = torch.randn(shape, device="cuda")
    x = await device.put(peer.cpu().numpy())
    axes = [subscripts.partition("->")[0].index(letter) for letter in subscripts.partition("->")[2]]
    view = ta.arrays.permute_dims(x, axes)
    times = {
        "permute": await _ours(partial(ta.tensor.permute, subscripts, x)),
        "view.copy": await _ours(view.copy),
        "torch": _peer(lambda: peer.permute(axes).contiguous(), torch.cuda.synchronize),
        "torch copy": _peer(peer.clone, torch.cuda.synchronize),
    }
    told = ", ".join(f"{name} {time:.3f} ms" for name, time in times.items())
    _say(f"{subscripts:<20} {8 * x.size / times['permute'] / 1e6:.0f} GB/s: {told}")


async def _run() -> None:
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("tensors") as system, system.open_device("cuda", options=options) as device:
        torch: Any = import_module("torch")
        torch.backends.cuda.matmul.allow_tf32 = False
        _say(f"{device.info.description}, PyTorch {torch.__version__}")
        for subscripts, extents in _CASES:
            await _case(device, subscripts, extents, "float32")
        for subscripts, extents in (_CASES[2], _CASES[4]):
            await _case(device, subscripts, extents, "bfloat16")
        for subscripts, shape in _PERMUTATIONS:
            await _permutation(device, subscripts, shape)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Print all rows."""
    trio.run(_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
