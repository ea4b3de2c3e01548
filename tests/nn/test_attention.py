"""Attention against its formula in float64, row by row, and gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from dnn_references import NUMPYS, TOLERANCE, Array, attended, check, numbers
from hidden_keys import check_hidden_blocks, check_hidden_keys
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import nn

attention: Any = nn.scaled_dot_product_attention
attention_grad: Any = nn.scaled_dot_product_attention_grad


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Array], dict[str, Any], dict[str, Any]]:
    n, served, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows, columns, e, f = (draw(st.integers(1, most)) for most in (5, 6, 3, 3))
    heads = served * shared
    seed = draw(st.integers(0, 99))
    arrays = [
        numbers((n, heads, rows, e), seed=seed),
        numbers((n, served, columns, e), seed=seed + 1),
        numbers((n, served, columns, f), seed=seed + 2),
    ]
    is_causal, is_lower = draw(st.booleans()), draw(st.booleans())
    left, right = draw(st.integers(-1, 3)), draw(st.integers(-1, 3))
    rng = np.random.default_rng(seed)
    mask = draw(st.sampled_from([None, "bool", "float"]))
    if mask is not None:
        shape = draw(
            st.sampled_from([(columns,), (rows, columns), (heads, 1, columns), (n, 1, rows, columns)])
        )
        mask = rng.random(shape) < 0.7 if mask == "bool" else rng.normal(size=shape)
    scale = draw(st.sampled_from([None, 0.3, -1.5]))
    lengths = draw(st.booleans())
    query_lengths = rng.integers(0, rows + 1, n) if lengths else None
    key_lengths = rng.integers(0, columns + 1, n).astype(np.int32) if lengths else None
    options = {
        "attn_mask": mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": True,
        "causal_alignment": "lower_right" if is_lower else "upper_left",
        "window_size": (left, right),
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
    }
    formula = {
        "mask": mask,
        "scale": scale,
        "left": left,
        "right": 0 if is_causal else right,
        "is_lower_right": is_lower,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
    }
    return arrays, options, formula


def slope_at(function: Any, x: Array, place: tuple[int, ...], grad: Array) -> float:
    moved = np.zeros(x.shape)
    moved[place] = 1e-5
    return float(((function(x + moved) - function(x - moved)) * grad).sum() / 2e-5)


@given(problem=problems())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_options(problem: tuple[list[Array], dict[str, Any], dict[str, Any]]) -> None:
    (query, key, value), options, formula = problem
    expected, logs = attended(query, key, value, **formula)
    grad = numbers(expected.shape, seed=8)

    async def main() -> None:
        async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
            ref = await device.put(query)
            alone = await attention(ref, key, value, **options)
            check(await alone.to_host(), expected, terms=12)
            made = await attention(ref, key, value, **options, return_lse=True)
            np.testing.assert_array_equal(await made.output.to_host(), await alone.to_host())
            check(await made.logsumexp.to_host(), logs, terms=12)
            found = await attention_grad(grad, ref, key, value, made.output, made.logsumexp, **options)
            gradients = [await one.to_host() for one in found]
            # One element of each: by differences of the formula.
            for number, (array, gradient) in enumerate(zip((query, key, value), gradients, strict=True)):
                assert gradient.shape == array.shape
                place = tuple(extent // 2 for extent in array.shape)

                def moved(x: Array, number: int = number) -> Array:
                    given = [query, key, value]
                    given[number] = x
                    return attended(*given, **formula)[0]

                assert abs(slope_at(moved, array, place, grad) - gradient[place]) < 1e-7

    trio.run(main)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_each_dtype(device: ta.Device, dtype: str) -> None:
    query, key, value = (
        numbers((2, 4, 7, 8), dtype),
        numbers((2, 2, 9, 8), dtype, 1),
        numbers((2, 2, 9, 5), dtype, 2),
    )
    expected, logs = attended(query, key, value, right=0)
    ref = await device.put(query)
    made = await attention(ref, key, value, None, 0.0, True, None, True, return_lse=True)
    check(await made.output.to_host(), expected, dtype, terms=9)
    check(await made.logsumexp.to_host(), logs, "float64" if dtype == "float64" else "float32", terms=9)
    out = await device.zeros((2, 4, 7, 10), dtype)
    await attention(ref, key, value, is_causal=True, enable_gqa=True, out=out[..., ::2])
    check(await out[..., ::2].to_host(), expected, dtype, terms=9)
    # Fewer axes: only heads, and only one head.
    own = await attention(ref[0], key[0], value[0], is_causal=True, enable_gqa=True)
    check(await own.to_host(), expected[0], dtype, terms=9)
    own = await attention(ref[0, 0], key[0, 0], value[0, 0], is_causal=True, return_lse=True)
    check(await own.output.to_host(), expected[0, 0], dtype, terms=9)
    grad = numbers(expected.shape, dtype, 3)
    options = {"is_causal": True, "enable_gqa": True}
    found = await attention_grad(grad, ref, key, value, made.output, made.logsumexp, **options)
    exact = [await device.put(one.astype(float)) for one in (query, key, value)]
    wide = await attention(*exact, **options, return_lse=True)
    right = await attention_grad(grad.astype(float), *exact, wide.output, wide.logsumexp, **options)
    for one, other in zip(found, right, strict=True):
        check(await one.to_host(), await other.to_host(), dtype, terms=9)
    alone = await attention_grad(
        grad[0, 0], ref[0, 0], key[0, 0], value[0, 0], own.output, own.logsumexp, is_causal=True
    )
    check(await alone.query.to_host(), (await right[0].to_host())[0, 0], dtype, terms=9)


async def test_pieces_make_the_same(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = numbers((2, 4, 9, 3)), numbers((2, 2, 11, 3), seed=1), numbers((2, 2, 11, 4), seed=2)
    mask = np.random.default_rng(3).normal(size=(4, 9, 11))
    options: dict[str, Any] = {"attn_mask": mask, "window_size": (3, 2), "enable_gqa": True}
    expected, _ = attended(query, key, value, mask=mask, left=3, right=2)
    grad = numbers(expected.shape, seed=4)
    async with system.open_device(BACKEND, options=INLINE) as device:
        gradients: list[list[Array]] = []
        for piece in (1, 50, 1 << 20):
            module = "cuda.libraries._attention" if BACKEND == "cuda" else "cpu.libraries.dnn"
            monkeypatch.setattr(f"trio_accel.backends.{module}._CHUNK_SCORES", piece)
            ref = await device.put(query)
            made = await attention(ref, key, value, **options, return_lse=True)
            check(await made.output.to_host(), expected, terms=11)
            found = await attention_grad(grad, ref, key, value, made.output, made.logsumexp, **options)
            gradients.append([await one.to_host() for one in found])
        for one, two, three in zip(*gradients, strict=True):
            check(one, three, terms=11)
            check(two, three, terms=11)


@pytest.mark.parametrize("lead", [(3, 2), (5, 2, 2), (2, 3, 4, 2)])
async def test_many_small_heads_match_each_head_alone(device: ta.Device, lead: tuple[int, ...]) -> None:
    query, key, value = (numbers((*lead, *shape), seed=n) for n, shape in enumerate([(4, 3), (6, 3), (6, 5)]))
    # A value that no query of its head weighs may be anything, and others must not see it.
    value[(-1,) * len(lead)][4] = np.inf
    mask = np.arange(6) != 4
    grad = numbers((*lead, 4, 5), seed=5)
    on = await device.put(query)
    made = await attention(on, key, value, mask, return_lse=True)
    slopes = await attention_grad(grad, on, key, value, made.output, made.logsumexp, mask)
    for place in np.ndindex(*lead):
        arrays = [await device.put(one[place]) for one in (query, key, value)]
        one = await attention(*arrays, mask, return_lse=True)
        check(await made.output[place].to_host(), await one.output.to_host())
        check(await made.logsumexp[place].to_host(), await one.logsumexp.to_host())
        alone = await attention_grad(grad[place], *arrays, one.output, one.logsumexp, mask)
        for mine, its in zip(slopes, alone, strict=True):
            check(await mine[place].to_host(), await its.to_host())


async def test_rows_that_see_no_key_are_zeros(device: ta.Device) -> None:
    query, key = numbers((1, 1, 3, 2)), numbers((1, 1, 4, 2), seed=1)
    for mask in (
        np.array([[True] * 4, [False] * 4, [True] * 4]),
        np.array([[0.0] * 4, [-np.inf] * 4, [0.0] * 4]),
    ):
        made = await attention(await device.put(query), key, key, mask, return_lse=True)
        rows, logs = (await made.output.to_host())[0, 0], (await made.logsumexp.to_host())[0, 0]
        assert not rows[1].any()
        assert np.isneginf(logs[1])
        assert np.isfinite(logs[[0, 2]]).all()
        grad = await device.put(np.ones((1, 1, 3, 2)))
        found = await attention_grad(grad, query, key, key, made.output, made.logsumexp, mask)
        gradient = (await found.query.to_host())[0, 0]
        assert not gradient[1].any()
        assert np.isfinite(gradient).all()
    none = await attention(await device.put(query), key[:, :, :0], key[:, :, :0])
    np.testing.assert_array_equal(await none.to_host(), np.zeros((1, 1, 3, 2)))


async def test_elements_outside_lengths_are_not_read(device: ta.Device) -> None:
    query, key = numbers((2, 1, 3, 2)), numbers((2, 1, 5, 2), seed=1)
    lengths = np.array([2, 5], np.int32)
    expected, _ = attended(query, key, key, key_lengths=lengths)
    key[0, 0, 2:] = np.nan
    made = await attention(await device.put(query), key, key, key_lengths=lengths)
    check(await made.to_host(), expected, terms=5)
    mask = np.arange(5) < lengths[:, None, None, None]
    check(await (await attention(await device.put(query), key, key, mask)).to_host(), expected, terms=5)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_hidden_keys_may_hold_anything(device: ta.Device, dtype: str) -> None:
    await check_hidden_keys(device, dtype)
    await check_hidden_blocks(device, dtype)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
async def test_keys_in_blocks(device: ta.Device, dtype: str) -> None:
    blocks, size, lengths = 7, 4, np.array([9, 4, 0])
    query = numbers((3, 4, 2, 3), dtype)
    keys, values = numbers((blocks, 2, size, 3), dtype, 1), numbers((blocks, 2, size, 5), dtype, 2)
    # Elements after the lengths may be anything.
    table = np.array([[6, 0, 3], [2, -9, 99], [77, 77, 77]])
    # A program that stores heads after the positions of a block passes a view.
    kept = await device.put(np.ascontiguousarray(keys.swapaxes(1, 2)))
    for is_causal, window in ((True, (-1, -1)), (False, (-1, -1)), (True, (3, -1))):
        made = await nn.paged_attention(
            await device.put(query),
            kept.transpose(0, 2, 1, 3),
            values,
            table,
            lengths,
            is_causal,
            window_size=window,
        )
        found = await made.to_host()
        for n, length in enumerate(lengths):
            used = table[n][: -(-int(length) // size)]
            key, value = (
                cache[used].swapaxes(0, 1).reshape(2, -1, cache.shape[-1])[:, :length]
                for cache in (keys, values)
            )
            expected, _ = attended(
                query[n : n + 1],
                key[None],
                value[None],
                left=window[0],
                right=0 if is_causal else -1,
                is_lower_right=True,
            )
            check(found[n : n + 1], expected, dtype, terms=9)


async def test_integers_on_the_device_are_checked_before_use(device: ta.Device) -> None:
    query, key = await device.put(numbers((2, 2, 3, 4))), numbers((2, 2, 5, 4), seed=1)
    for argument, most in (("query_lengths", 3), ("key_lengths", 5)):
        for wrong in (-1, most + 1):
            lengths = await device.put(np.array([0, wrong]))
            with pytest.raises(
                ta.OutOfRangeError, match=f"{argument}: {wrong} is not a length of an axis of {most}"
            ):
                await attention(query, key, key, **{argument: lengths})
    caches, table = numbers((4, 2, 5, 4), seed=2), np.array([[0, 1], [2, 4]])
    with pytest.raises(ta.OutOfRangeError, match="block_table: there is no block 4 of 4") as caught:
        await nn.paged_attention(query, caches, caches, table, np.array([10, 6]))
    assert (caught.value.index, caught.value.length, caught.value.library) == (4, 4, "dnn")
    await nn.paged_attention(query, caches, caches, table, np.array([10, 5]))
    with pytest.raises(ta.OutOfRangeError, match="key_lengths: 11 is not a length of an axis of 10"):
        await nn.paged_attention(query, caches, caches, table, np.array([11, 5]))
    # The device continues.
    assert (await attention(query, key, key)).dtype == NUMPYS["float64"]
