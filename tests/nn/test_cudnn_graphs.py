"""Graphs of cuDNN in their description and execution, by a front end of NumPy's on the stand-in driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE, IS_STAND_IN
from dnn_references import check, convolved, numbers, results, spread
from hidden_keys import check_hidden_blocks, check_hidden_keys

import trio_accel as ta
from trio_accel import nn

HAS_GRAPHS = BACKEND == "cuda" and IS_STAND_IN

pytestmark = pytest.mark.skipif(not HAS_GRAPHS, reason="the front end computes in memory of the stand-in")

if HAS_GRAPHS:
    import fake_cudnn

    from trio_accel.backends.cuda.libraries import _cudnn

attention: Any = nn.scaled_dot_product_attention
attention_grad: Any = nn.scaled_dot_product_attention_grad


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The built graphs, of devices in this process."""
    monkeypatch.setattr(_cudnn, "front_end", lambda: sys.modules["fake_cudnn"])
    monkeypatch.setattr(fake_cudnn.Graph, "built", [])
    yield fake_cudnn.Graph.built
    assert set(fake_cudnn.STREAMS.values()) <= {-1}, "handles are given back"


@pytest.mark.parametrize("refused", [frozenset(), frozenset({"bias"}), frozenset({"conv_fprop"})])
async def test_convolutions(
    system: ta.System, built: list[str], monkeypatch: pytest.MonkeyPatch, refused: frozenset[str]
) -> None:
    monkeypatch.setattr(fake_cudnn.Graph, "refused", refused)
    x, weight, bias = (
        numbers((2, 4, 7, 6), "float16"),
        numbers((6, 2, 3, 2), "float16", 1),
        numbers((6,), "float16", 2),
    )
    sizes: dict[str, Any] = {"stride": (2, 1), "dilation": (1, 2), "groups": 2}
    async with system.open_device(BACKEND, options=INLINE) as device:
        # In the second, there are more zeros after than before.
        for padding in ([(1, 1), (2, 2)], [(0, 1), (1, 2)]):
            expected = convolved(x, weight, bias, padding=padding, **sizes)
            ref = await device.put(x)
            for _ in range(2):
                made = await nn.conv2d(ref, weight, bias, padding=padding, **sizes)
                check(await made.to_host(), expected, "float16", terms=12)
            # A view that begins where nothing can be read at once, and a result with gaps.
            odd = await device.put(np.concatenate([x[..., :1], x], -1))
            out = await device.zeros((*expected.shape[:3], expected.shape[3] + 1), "float16")
            await nn.conv2d(odd[..., 1:], weight, bias, padding=padding, **sizes, out=out[..., 1:])
            check((await out.to_host())[..., 1:], expected, "float16", terms=12)
            grad = numbers(expected.shape, "float16", 3)
            back = await nn.conv_input_grad(x.shape, weight, await device.put(grad), padding=padding, **sizes)
            before = [first for first, _ in padding]
            right = spread(grad.astype(float), weight.astype(float), x.shape[2:], padding=before, **sizes)
            check(await back.to_host(), right, "float16", terms=18)
            slopes = await nn.conv_weight_grad(ref, weight.shape, grad, padding=padding, **sizes)
            unit = np.zeros(weight.shape)
            unit[3, 1, 2, 0] = 1
            slope = (convolved(x, unit, padding=padding, **sizes) * grad).sum()
            assert abs((await slopes.to_host())[3, 1, 2, 0] - slope) < 0.05
        line = await nn.conv_transpose1d(
            await device.put(x[:, :, 0]), numbers((4, 3, 3), "float16", 4), bias[:3], 2, 1, 1
        )
        right = spread(
            x[:, :, 0].astype(float),
            numbers((4, 3, 3), "float16", 4).astype(float),
            (12,),
            stride=[2],
            padding=[1],
            dilation=[1],
            groups=1,
        )
        check(await line.to_host(), right + bias[:3].astype(float)[:, None], "float16", terms=12)
        wide = await nn.conv2d(
            await device.put(x.astype(float)), weight.astype(float), padding=padding, **sizes
        )
        check(await wide.to_host(), convolved(x, weight, padding=padding, **sizes), terms=12)
    by_name = {
        frozenset[str](): {"conv_fprop bias", "conv_dgrad", "conv_dgrad bias", "conv_wgrad"},
        frozenset({"bias"}): {"conv_fprop", "conv_dgrad", "conv_wgrad"},
        frozenset({"conv_fprop"}): {"conv_dgrad", "conv_dgrad bias", "conv_wgrad"},
    }
    assert set(built) == by_name[refused]


async def test_attention(system: ta.System, built: list[str]) -> None:
    e = 8
    query, key, value = (numbers((2, h, n, e), "float16", h) for h, n in ((4, 5), (2, 9), (2, 9)))
    grad = numbers(query.shape, "float16", 5)
    mask = np.random.default_rng(6).random((4, 5, 9)) < 0.7
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "sdpa_backward"),
        ({"is_causal": True, "causal_alignment": "lower_right", "scale": 0.5}, "sdpa_backward"),
        ({"is_causal": True, "causal_alignment": "lower_right", "scale": 0.25}, "sdpa_backward"),
        ({"window_size": (2, 1)}, "sdpa_backward"),
        ({"key_lengths": np.array([9, 0])}, ""),
        ({"query_lengths": np.array([2, 5]), "is_causal": True}, ""),
        ({"attn_mask": mask}, ""),
        ({"attn_mask": numbers((5, 1), "float16", 7)}, ""),
    ]
    async with system.open_device(BACKEND, options=INLINE) as device:
        for options, backward in cases:
            left, right = options.get("window_size", (-1, -1))
            formula = {
                "mask": options.get("attn_mask"),
                "scale": options.get("scale"),
                "left": left,
                "right": 0 if options.get("is_causal") else right,
                "is_lower_right": "causal_alignment" in options,
                "query_lengths": options.get("query_lengths"),
                "key_lengths": options.get("key_lengths"),
            }
            expected, logs, gradients = results(query, key, value, grad, formula)
            ref = await device.put(query)
            built.clear()
            made = await attention(ref, key, value, enable_gqa=True, return_lse=True, **options)
            assert built == ["sdpa"], options
            check(await made.output.to_host(), expected, "float16", terms=9)
            found = await made.logsumexp.to_host()
            check(np.nan_to_num(found, neginf=-9), np.nan_to_num(logs, neginf=-9), "float32", terms=9)
            back = await attention_grad(grad, ref, key, value, *made, enable_gqa=True, **options)
            assert built == ["sdpa", backward] if backward else built == ["sdpa"], options
            for one, right_one in zip(back, gradients, strict=True):
                check(await one.to_host(), right_one, "float16", terms=9)
        # Heads after rows, in place.
        built.clear()
        turned = await device.put(np.ascontiguousarray(query.swapaxes(1, 2)))
        out = await device.zeros((2, 5, 4, e), "float16")
        await attention(
            turned.transpose(0, 2, 1, 3), key, value, enable_gqa=True, out=out.transpose(0, 2, 1, 3)
        )
        check(
            (await out.to_host()).swapaxes(1, 2),
            results(query, key, value, grad, formula_of_none())[0],
            "float16",
            terms=9,
        )
        assert built == ["sdpa"]
        # A graph with wrong results is never tried.
        await attention(ref, key, value, enable_gqa=True, scale=-0.5)
        await attention(
            await device.put(query.astype(np.float32)),
            key.astype(np.float32),
            value.astype(np.float32),
            enable_gqa=True,
        )
        assert built == ["sdpa"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_hidden_keys_may_hold_anything(system: ta.System, built: list[str], dtype: str) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        await check_hidden_keys(device, dtype)
        await check_hidden_blocks(device, dtype)
        assert set(built) == {"sdpa", "sdpa_backward"}


def formula_of_none() -> dict[str, Any]:
    names = "mask", "scale", "query_lengths", "key_lengths"
    return {**dict.fromkeys(names), "left": -1, "right": -1, "is_lower_right": False}


@pytest.mark.parametrize("found", [None, object()])
async def test_without_a_known_front_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: object
) -> None:
    monkeypatch.delenv("TRIO_ACCEL_STAND_IN")
    monkeypatch.setitem(sys.modules, "cudnn._compiled_module", found)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert _cudnn.front_end() is None
    (record,) = caplog.records
    assert "convolutions and attention go without cuDNN" in record.getMessage()
    assert "pip install '.[cuda13]'" in record.getMessage()
