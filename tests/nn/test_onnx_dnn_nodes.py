"""The node tests of ONNX for convolutions, pooling and attention.

Each is a node with inputs and the outputs that ONNX's reference implementation has for them. Those that need
what there is not are counted by the reason.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from dnn_references import Array

import trio_accel as ta
from trio_accel import nn

pytest.importorskip("onnx")

MODULES = (
    *("attention", "averagepool", "conv", "convtranspose", "globalaveragepool", "globalmaxpool"),
    *("lppool", "maxpool"),
)
# Of onnx 1.23.2, by operator: how many pass; then how many need what there is not, by the reason.
COUNTS: dict[str, tuple[int, dict[str, int]]] = {
    "Attention": (66, {"queries that are not the last ones": 1, "scores as a result": 15, "softcap": 11}),
    "AveragePool": (12, {"dilations of avg_pool": 6, "padding of more than half of a window": 2}),
    "Conv": (6, {}),
    "ConvTranspose": (11, {}),
    "GlobalAveragePool": (2, {}),
    "GlobalMaxPool": (2, {}),
    "LpPool": (6, {"dilations of lp_pool": 1, "padding of more than half of a window": 1}),
    "MaxPool": (17, {"padding of more than half of a window": 1, "integers": 1}),
}

Run = Callable[
    [ta.Device, Sequence[Array | None], Mapping[str, Any]], Coroutine[Any, Any, list[Array | None]]
]


class NotThereError(Exception):
    """The function lacks such an argument."""


def pads_of(spatial: Sequence[int], window: Sequence[int], given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The pads of each axis, before and after."""
    dims, kind = len(spatial), given.get("auto_pad", "NOTSET")
    strides, dilations = given.get("strides", [1] * dims), given.get("dilations", [1] * dims)
    if not kind.startswith("SAME"):
        pads = given.get("pads", [0] * 2 * dims)
        return list(zip(pads[:dims], pads[dims:], strict=True))
    made: list[tuple[int, int]] = []
    for extent, k, s, d in zip(spatial, window, strides, dilations, strict=True):
        total = max(0, (math.ceil(extent / s) - 1) * s + d * (k - 1) + 1 - extent)
        few, more = total // 2, total - total // 2
        made.append((few, more) if kind == "SAME_UPPER" else (more, few))
    return made


async def conv(device: ta.Device, inputs: Sequence[Any], given: Mapping[str, Any]) -> list[Array | None]:
    x, weight, *bias = inputs
    dims = x.ndim - 2
    pads = pads_of(x.shape[2:], weight.shape[2:], given)
    function: Any = (nn.conv1d, nn.conv2d, nn.conv3d)[dims - 1]
    strides, dilations = given.get("strides", 1), given.get("dilations", 1)
    made = await function(
        await device.put(x), weight, *(bias or [None]), strides, pads, dilations, given.get("group", 1)
    )
    return [await made.to_host()]


async def conv_transpose(
    device: ta.Device, inputs: Sequence[Any], given: Mapping[str, Any]
) -> list[Array | None]:
    x, weight, *bias = inputs
    dims = x.ndim - 2
    strides, dilations = given.get("strides", [1] * dims), given.get("dilations", [1] * dims)
    more, shape = given.get("output_padding", [0] * dims), given.get("output_shape")
    pads = pads_of(x.shape[2:], weight.shape[2:], {"pads": given.get("pads", [0] * 2 * dims)})
    if given.get("auto_pad", "NOTSET").startswith("SAME"):
        shape = [extent * s for extent, s in zip(x.shape[2:], strides, strict=True)]
    if shape is not None:
        reach = zip(x.shape[2:], weight.shape[2:], strides, dilations, more, shape, strict=True)
        totals = [s * (n - 1) + extra + d * (k - 1) + 1 - wanted for n, k, s, d, extra, wanted in reach]
        if min(totals) < 0:
            # The result has more elements than there are windows.
            more = [extra - min(0, total) for extra, total in zip(more, totals, strict=True)]
            totals = [max(0, total) for total in totals]
        is_upper = given.get("auto_pad") == "SAME_UPPER"
        pads = [(t // 2, t - t // 2) if is_upper else (t - t // 2, t // 2) for t in totals]
    function: Any = (nn.conv_transpose1d, nn.conv_transpose2d, nn.conv_transpose3d)[dims - 1]
    made = await function(
        await device.put(x), weight, *(bias or [None]), strides, pads, more, given.get("group", 1), dilations
    )
    return [await made.to_host()]


def pool(kind: str) -> Run:
    async def run(device: ta.Device, inputs: Sequence[Any], given: Mapping[str, Any]) -> list[Array | None]:
        [x] = inputs
        if x.dtype == np.uint8:
            raise NotThereError("integers")
        window, dims = given["kernel_shape"], x.ndim - 2
        pads = pads_of(x.shape[2:], window, given)
        dilations = given.get("dilations", [1] * dims)
        strides, is_ceil = given.get("strides", [1] * dims), bool(given.get("ceil_mode", 0))
        if (
            max(
                max(pair) - ((k - 1) * d + 1) // 2 for pair, k, d in zip(pads, window, dilations, strict=True)
            )
            > 0
        ):
            raise NotThereError("padding of more than half of a window")
        if kind != "max" and max(dilations) > 1:
            raise NotThereError(f"dilations of {kind}_pool")
        function: Any = getattr(nn, f"{kind}_pool{dims}d")
        ref = await device.put(x)
        if kind == "avg":
            counts_pad = bool(given.get("count_include_pad", 0))
            return [await (await function(ref, window, strides, pads, is_ceil, counts_pad)).to_host()]
        if kind == "lp":
            made = await function(ref, given.get("p", 2), window, strides, is_ceil, padding=pads)
            return [await made.to_host()]
        found = await function(ref, window, strides, pads, dilations, is_ceil, return_indices=True)
        indices = await found.indices.to_host()
        if given.get("storage_order", 0):
            # Places are counted by columns there.
            indices = np.ravel_multi_index(np.unravel_index(indices, x.shape[2:]), x.shape[2:], order="F")
        # They are counted over the whole array there.
        images = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *(1,) * dims)
        return [await found.output.to_host(), indices + images * math.prod(x.shape[2:])]

    return run


def global_pool(kind: str) -> Run:
    async def run(device: ta.Device, inputs: Sequence[Any], given: Mapping[str, Any]) -> list[Array | None]:
        [x] = inputs
        function: Any = getattr(nn, f"adaptive_{kind}_pool{x.ndim - 2}d")
        return [await (await function(await device.put(x), 1)).to_host()]

    return run


def apart(x: Array, heads: int) -> Array:
    """Take the heads out of the last axis."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


async def attend(device: ta.Device, inputs: Sequence[Any], given: Mapping[str, Any]) -> list[Array | None]:
    query, key, value, mask, past_key, past_value, lengths = [*inputs, *[None] * 7][:7]
    if given.get("softcap", 0.0):
        raise NotThereError("softcap")
    if "qk_matmul_output" in given["outputs"]:
        raise NotThereError("scores as a result")
    is_flat = query.ndim == 3
    if is_flat:
        query = apart(query, given["q_num_heads"])
        key, value = (apart(one, given["kv_num_heads"]) for one in (key, value))
    if past_key is not None:
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    window = given.get("left_window_size", -1), given.get("right_window_size", -1)
    is_banded = given.get("is_causal", 0) or max(window) >= 0
    if is_banded and past_key is not None and key.shape[2] - past_key.shape[2] != query.shape[2]:
        raise NotThereError("queries that are not the last ones")
    if mask is not None:
        missing = key.shape[2] - mask.shape[-1]
        if missing:
            hidden = False if mask.dtype == bool else -np.inf
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=hidden)
        if mask.dtype != bool:
            mask = mask.astype(query.dtype)
    made = await nn.scaled_dot_product_attention(
        await device.put(query),
        key,
        value,
        mask,
        is_causal=bool(given.get("is_causal", 0)),
        scale=given.get("scale"),
        enable_gqa=True,
        causal_alignment="upper_left" if past_key is None and lengths is None else "lower_right",
        window_size=window,
        key_lengths=lengths,
    )
    out = await made.to_host()
    if is_flat:
        out = out.swapaxes(1, 2).reshape(len(out), out.shape[2], -1)
    return [out, key, value][: 1 if past_key is None else 3]


RUNS: dict[str, Run] = {
    "Attention": attend,
    "AveragePool": pool("avg"),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "GlobalAveragePool": global_pool("avg"),
    "GlobalMaxPool": global_pool("max"),
    "LpPool": pool("lp"),
    "MaxPool": pool("max"),
}


LOOSE = {"bfloat16": 2e-2, "float16": 2e-3 if BACKEND == "cuda" else 0.0}


def cases() -> list[Any]:
    """The declarations of these operators' modules at their import, and no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("onnx.backend.test.case.node")
        for name in MODULES:
            import_module(f"{package.__name__}.{name}")
    known = {case.name: case for case in package._NodeTestCases}
    return [case for case in known.values() if len(case.model.graph.node) == 1]


async def check_case(device: ta.Device, case: Any) -> None:
    onnx: Any = import_module("onnx")
    [node] = case.model.graph.node
    given = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    given = {name: one.decode() if isinstance(one, bytes) else one for name, one in given.items()}
    given["outputs"] = list(node.output)
    for values, expected in case.data_sets:
        left = iter(values)
        inputs = [next(left) if name else None for name in node.input]
        found = await RUNS[node.op_type](device, inputs, given)
        for one, other in zip(found, expected, strict=False):
            assert one is not None
            assert one.shape == other.shape, case.name
            # Halves have no tolerances of their own there. Vendors' kernels also round weights.
            loose = LOOSE.get(str(other.dtype), 0.0)
            np.testing.assert_allclose(
                one.astype(float),
                other.astype(float),
                rtol=max(case.rtol, loose),
                atol=max(case.atol, loose),
                err_msg=case.name,
            )


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_nodes(system: ta.System) -> None:
    passed, failed = Counter[str](), list[str]()
    not_there: dict[str, Counter[str]] = {name: Counter() for name in RUNS}
    async with system.open_device(BACKEND, options=INLINE) as device:
        for case in cases():
            operator = case.model.graph.node[0].op_type
            if operator not in RUNS:
                continue
            try:
                await check_case(device, case)
            except NotThereError as error:
                not_there[operator][str(error)] += 1
            except Exception as error:  # noqa: BLE001  # all that fail are told at once
                failed.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
            else:
                passed[operator] += 1
    counts = {name: (passed[name], dict(sorted(not_there[name].items()))) for name in sorted(RUNS)}
    print(counts)
    assert not failed, "\n".join(failed)
    assert counts == COUNTS
