"""Sums of products by their axes, and products without sums, against NumPy in wider types."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

TOLERANCE = {"float64": 1e-12, "complex128": 1e-12, "float32": 1e-5, "complex64": 1e-5, "float16": 2e-2}
WHOLE = ["int8", "int64", "uint32"]


def values(shape: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=shape)
    if dtype.startswith("complex"):
        drawn = drawn + 1j * generator.normal(size=shape)
    scale = 1 if dtype in TOLERANCE else 5
    return np.asarray(np.abs(drawn) * scale if dtype.startswith("uint") else drawn * scale).astype(dtype)


async def check(result: ta.AccelRef, expected: Any) -> None:
    """Hold a result against NumPy's, of the same dtype."""
    host = await result.to_host()
    assert (host.shape, host.dtype) == (np.shape(expected), np.asarray(expected).dtype)
    tolerance = TOLERANCE.get(host.dtype.name, 0)
    scale = max(1, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(host, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [*TOLERANCE, *WHOLE])
@pytest.mark.parametrize(
    ("first", "second"),
    [((0,), (0,)), ((1,), (1,)), ((1025,), (1025,)), ((3, 4), (4,)), ((2, 1, 5), (3, 5)), ((2, 0), (1, 0))],
    ids=str,
)
async def test_vecdot(device: ta.Device, dtype: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    x, y = values(first, dtype, 1), values(second, dtype, 2)
    wide = {"float16": "float64"}.get(dtype, dtype)
    expected = np.asarray(np.linalg.vecdot(x.astype(wide), y.astype(wide))).astype(dtype)
    await check(await linalg.vecdot(await device.put(x), y), expected)


async def test_vecdot_along_another_axis(device: ta.Device) -> None:
    x, y = values((3, 4, 2), seed=1), values((3, 1, 2), seed=2)
    await check(
        await linalg.vecdot(await device.put(x), await device.put(y), axis=-3),
        np.sum(x * y, axis=-3),
    )
    out = await device.zeros((4, 2))
    assert await linalg.vecdot(await device.put(x), y, axis=0, out=out) is out
    await check(out, np.sum(x * y, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8"])
@pytest.mark.parametrize("sizes", [(0, 3), (1, 1), (31, 257)], ids=str)
async def test_outer(device: ta.Device, dtype: str, sizes: tuple[int, int]) -> None:
    x, y = values(sizes[:1], dtype, 1), values(sizes[1:], dtype, 2)
    await check(await linalg.outer(x, await device.put(y)), np.linalg.outer(x, y))
    out = await device.zeros(sizes[::-1], dtype)
    await linalg.outer(await device.put(x), y, out=out.T)
    await check(out, np.linalg.outer(y, x))


@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize(
    ("first", "second"), [((), (2,)), ((0, 2), (3,)), ((2, 3), (4, 5)), ((2,), (3, 1, 2))], ids=str
)
async def test_kron(device: ta.Device, dtype: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a, b = values(first, dtype, 1), values(second, dtype, 2)
    await check(await linalg.kron(await device.put(a), b), np.kron(a, b))


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int64"])
@pytest.mark.parametrize(
    ("first", "second", "axis"),
    [
        ((3,), (3,), -1),
        ((5, 3), (3,), -1),
        ((3, 1), (3, 4), -2),
        ((2, 3, 1), (1, 3, 4), 1),
        ((0, 3), (3,), -1),
    ],
    ids=str,
)
async def test_cross(
    device: ta.Device, dtype: str, first: tuple[int, ...], second: tuple[int, ...], axis: int
) -> None:
    x, y = values(first, dtype, 1), values(second, dtype, 2)
    await check(await linalg.cross(await device.put(x), y, axis=axis), np.cross(x, y, axis=axis))


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (3, 5), (5, 3), (2, 4, 4), (2, 0, 3)], ids=str)
async def test_diagonal_and_trace(device: ta.Device, shape: tuple[int, ...]) -> None:
    x = values(shape)
    ref = await device.put(x)
    turned = await device.put(np.ascontiguousarray(np.swapaxes(x, -1, -2)))
    for offset in range(-6, 7):
        expected = np.linalg.diagonal(x, offset=offset)
        await check(linalg.diagonal(ref, offset=offset), expected)
        view = linalg.diagonal(linalg.matrix_transpose(turned), offset=offset)
        await check(view, expected)
        await check(await linalg.trace(ref, offset=offset), np.linalg.trace(x, offset=offset))


async def test_a_diagonal_is_a_view(device: ta.Device) -> None:
    ref = await device.zeros((2, 3))
    await linalg.diagonal(ref, offset=1).fill(2)
    assert (await ref.to_host()).tolist() == [[0, 2, 0], [0, 0, 2]]
    assert linalg.matrix_transpose(ref).shape == (3, 2)


async def test_a_trace_has_a_dtype(device: ta.Device) -> None:
    ref = await device.put(np.full((3, 3), 100, np.int8))
    await check(await linalg.trace(ref), np.int64(300))
    assert await (await linalg.trace(ref, dtype="float32")).item() == 300.0


@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ((2, 3, 4), (3, 4, 5), 2),
        ((2, 3), (4,), 0),
        ((3, 4), (3, 4), 2),
        ((2, 3, 4), (4, 5, 2), ([2, 0], [0, 2])),
        ((2, 3, 4), (5, 3), ([-2], [1])),
        ((2, 0), (0, 3), 1),
        ((0, 2), (2, 3), 1),
        ((), (), 0),
        ((2, 1, 3), (3, 1, 2), ([0, 1, 2], [2, 1, 0])),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int64"])
async def test_tensordot(
    device: ta.Device, dtype: str, first: tuple[int, ...], second: tuple[int, ...], axes: Any
) -> None:
    x, y = values(first, dtype, 1), values(second, dtype, 2)
    await check(await linalg.tensordot(await device.put(x), y, axes=axes), np.tensordot(x, y, axes=axes))


EINSUMS = [
    "i->", "i->i", "ij->ji", "ii->i", "ii->", "iij->j", "iji->ij", "ij->j", "...i->...", "i...->...",
    "i,i->", "i,j->ij", "i,j->ji", "ij,ij->ij", "ij,ij->i", "ij,jk->ik", "ij,jk", "ji,jk->ki",
    "bij,bjk->bik", "bij,bjk->ibk", "ijk,kl->ijl", "ijk,ljk->il", "ij,j->i", "ijk,k->j", "ij,k->",
    "ii,i->i", "...ij,...jk->...ik", "ij,jk,kl->il", "ij,jk,kl,lm->mi", "i,j,k->kji", "ij,ij,ij->ij",
    "ij,ik,il->jkl", "ab,bc,ca->", "i,i,i->", ",ij->ij", " i j , j k -> i k ",
]  # fmt: skip


def operands_of(subscripts: str, dtype: str, extent: int | None = None) -> list[Array]:
    """Arrays that fit a text, of 2 to 5 elements along each letter."""
    inputs = subscripts.replace(" ", "").partition("->")[0]
    found: list[Array] = []
    for seed, term in enumerate(inputs.split(",")):
        letters = term.replace("...", "Z")
        found.append(
            values(tuple(extent if extent is not None else 2 + ord(x) % 4 for x in letters), dtype, seed)
        )
    return found


@pytest.mark.parametrize("subscripts", EINSUMS)
async def test_einsum(device: ta.Device, subscripts: str) -> None:
    for dtype in ("complex128", "int64"):
        arrays = operands_of(subscripts, dtype)
        refs = [await device.put(array) for array in arrays]
        await check(await linalg.einsum(subscripts, *refs), np.einsum(subscripts, *arrays))


@pytest.mark.parametrize("extent", [0, 1])
async def test_einsum_of_empty_and_single_axes(device: ta.Device, extent: int) -> None:
    for subscripts in ("ij,jk->ik", "ij,ij->i", "bij,bjk->bik", "ij,jk,kl->il", "ii->i", "ij->"):
        arrays = operands_of(subscripts, "float64", extent)
        refs = [await device.put(array) for array in arrays]
        await check(await linalg.einsum(subscripts, *refs), np.einsum(subscripts, *arrays))


async def test_einsum_broadcasts_one_element(device: ta.Device) -> None:
    x, y, z = values((1, 4), seed=1), values((3, 4), seed=2), values((2, 1, 4), seed=3)
    rx, ry = await device.put(x), await device.put(y)
    await check(await linalg.einsum("ij,ij->ij", rx, ry), np.einsum("ij,ij->ij", x, y))
    await check(await linalg.einsum("...i,...i->...", rx, z), np.einsum("...i,...i->...", x, z))
    await check(await linalg.einsum("...i,ji,...i", rx, y, z), np.einsum("...i,ji,...i", x, y, z))


async def test_einsum_reads_strides(device: ta.Device) -> None:
    x, y = values((6, 5, 4), seed=1), values((4, 7), seed=2)
    rx, ry = await device.put(x), await device.put(y)
    result = await linalg.einsum("ijk,kl->lij", rx[::-2, 1::2], ry[:, ::3])
    await check(result, np.einsum("ijk,kl->lij", x[::-2, 1::2], y[:, ::3]))


async def test_a_permutation_is_a_view(device: ta.Device) -> None:
    ref = await device.zeros((2, 2))
    view = await linalg.einsum("ii->i", ref)
    await view.fill(1)
    assert (await ref.to_host()).tolist() == [[1, 0], [0, 1]]


@st.composite
def sums(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """A text of up to four terms, and shapes."""
    sizes = {letter: draw(st.sampled_from([0, 1, 2, 3])) for letter in "abcde"}
    terms = draw(st.lists(st.text("abcde", max_size=3), min_size=1, max_size=4))
    used = sorted(set("".join(terms)))
    output = draw(st.permutations(used).map("".join)) if used else ""
    output = output[: draw(st.integers(0, len(used)))]
    return f"{','.join(terms)}->{output}", [tuple(sizes[letter] for letter in term) for term in terms]


@given(sums())
@settings(max_examples=25, deadline=None)
def test_any_einsum(case: tuple[str, list[tuple[int, ...]]]) -> None:
    subscripts, shapes = case
    arrays = [values(shape, "float64", seed) for seed, shape in enumerate(shapes)]

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            refs = [await device.put(array) for array in arrays]
            await check(await linalg.einsum(subscripts, *refs), np.einsum(subscripts, *arrays))

    trio.run(main)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "told"),
    [
        ("ij,jk->ik", [(2, 3)], "2 terms, got 1 operands"),
        ("ij,jk->ik", [(2, 3), (4, 5)], r"operands\[1\] .* has 4 elements .* where others have 3"),
        ("ij->i", [(2, 3, 4)], r"term 'ij' does not fit operands\[0\] of shape \(2, 3, 4\)"),
        ("ijk->i", [(2, 3)], "does not fit"),
        ("i1->i", [(2, 3)], "'1' is not a letter"),
        ("i.j->i", [(2, 3)], "'.' is not a letter"),
        ("......i->i", [(2, 3)], "'.' is not a letter"),
        ("ij->ii", [(2, 3)], "letters behind ->"),
        ("ij->k", [(2, 3)], "letters behind ->"),
        ("...i->i", [(2, 3)], "behind -> there is no"),
        ("ii->i", [(2, 3)], "has 3 elements"),
        ("ij->i->j", [(2, 3)], "not a letter"),
    ],
    ids=str,
)
async def test_einsum_refuses(
    device: ta.Device, subscripts: str, shapes: list[tuple[int, ...]], told: str
) -> None:
    refs = [await device.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=told) as refused:
        await linalg.einsum(subscripts, *refs)
    assert "einsum" in str(refused.value)


async def test_einsum_takes_a_text_and_arrays(device: ta.Device) -> None:
    ref = await device.zeros((2, 2))
    with pytest.raises(TypeError, match="einsum: subscripts must be a text"):
        await linalg.einsum([0, 1], ref)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"einsum: operands\[1\] must be .*, got list"):
        await linalg.einsum("ij,j->i", ref, [1.0, 2.0])  # type: ignore[arg-type]
    letters = string.ascii_letters
    with pytest.raises(ValueError, match="more than 52 axes"):
        await linalg.einsum(f"...{letters},->...", await device.zeros((1,) * 53), ref)


async def test_others_refuse(device: ta.Device) -> None:
    ref = await device.zeros((2, 3))
    other = await device.zeros((2, 1))
    with pytest.raises(ValueError, match="vecdot: the vectors must have the same length"):
        await linalg.vecdot(ref, other)
    with pytest.raises(ValueError, match=r"vecdot: axis 2 is not there in an array of shape \(2, 3\)"):
        await linalg.vecdot(ref, ref, axis=2)
    with pytest.raises(ValueError, match="outer: x1 must be a vector"):
        await linalg.outer(ref, ref)
    with pytest.raises(ValueError, match="cross: axis 0 must have three elements"):
        await linalg.cross(ref, ref, axis=0)
    with pytest.raises(ValueError, match="tensordot: axes must be from 0 to 2, got 3"):
        await linalg.tensordot(ref, ref, axes=3)
    with pytest.raises(ValueError, match=r"tensordot: shapes .* differ along axes"):
        await linalg.tensordot(ref, other, axes=([0, 1], [0, 1]))
    with pytest.raises(ValueError, match=r"tensordot: axes .* repeated axis"):
        await linalg.tensordot(ref, ref, axes=([0, 0], [0, 1]))
    with pytest.raises(np.linalg.LinAlgError, match="diagonal: x must have shape"):
        linalg.diagonal(ref[0])
    with pytest.raises(np.linalg.LinAlgError, match="matrix_transpose: x must have shape"):
        linalg.matrix_transpose(ref[0])


async def test_nothing_is_left_of_a_chain_that_fails(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the error, which holds the frames, is there."""
    made: list[ta.AccelRef] = []
    multiply = linalg.matmul

    async def fails_at_the_second(a: Any, b: Any) -> ta.AccelRef:
        if made:
            raise ta.LibraryError("full", library="blas", code="full")
        made.append(await multiply(a, b))
        return made[0]

    monkeypatch.setattr("trio_accel.linalg._contractions.matmul", fails_at_the_second)
    refs = [await device.zeros((3, 3)) for _ in range(3)]
    with pytest.raises(ta.LibraryError, match="full"):
        await linalg.einsum("ij,jk,kl->il", *refs)
    assert [ref.block.is_released for ref in (*made, *refs)] == [True, False, False, False]
