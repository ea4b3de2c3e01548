"""Contractions of two tensors, against `numpy.einsum` in float64 and complex128."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import TOLERANCES, Array, check, values, wide

import trio_accel as ta

EXTENTS = {"a": 3, "b": 2, "c": 5, "d": 4, "e": 3, "f": 2, "g": 7, "i": 6, "j": 5, "k": 9, "l": 1}

# Products of matrices, each with its transposes; batches first, in the middle and last; several axes in one
# group, in the same and in another order; columns and rows of one; and the cases of TCCG (P. Springer and P.
# Bientinesi, "Design of a high-performance GEMM-like tensor-tensor multiplication", 2018) in small.
EQUATIONS = [
    *("ik,kj->ij", "ik,kj->ji", "ki,kj->ij", "ik,jk->ij", "ki,jk->ji"),
    *("bik,bkj->bij", "bik,bkj->ibj", "ikb,kjb->ijb", "ibk,bjk->bji", "bik,kj->bij", "ik,bkj->bij"),
    *(
        "i,ij->j",
        "ij,j->i",
        "ij,ij->",
        "i,j->ij",
        "i,i->i",
        "bi,bi->b",
        ",i->i",
        ",->",
        "l,lj->j",
        "kl,kj->lj",
    ),
    *("abcd,dbea->ec", "abc,acd->db", "abcd,ea->ebcd", "abcde,ecbfa->fd", "abcdef,dega->gfbc", "abc,cbd->ad"),
    *("abcdef,fbad->ce", "abgd,cbge->adce"),
]


def operands(subscripts: str, dtype: str = "float64", extents: dict[str, int] = EXTENTS) -> list[Array]:
    """Tensors that fit subscripts, and a tensor with the shape of the result."""
    inputs, _, output = subscripts.partition("->")
    terms = [*inputs.split(","), output]
    return [values(tuple(extents[x] for x in term), dtype, seed) for seed, term in enumerate(terms)]


def added(subscripts: str, extents: dict[str, int] = EXTENTS) -> int:
    inputs, _, output = subscripts.partition("->")
    return math.prod(extents[letter] for letter in {*inputs} - {*output, ","})


@pytest.mark.parametrize("part", range(4))
async def test_contract(device: ta.Device, part: int) -> None:
    for subscripts, dtype in itertools.product(EQUATIONS[part::4], ("float64", "complex64")):
        a, b, c = operands(subscripts, dtype)
        ra, rc = await device.put(a), await device.put(c)
        product = np.einsum(subscripts, wide(a), wide(b))
        count = added(subscripts)
        await check(await ta.tensor.contract(subscripts, ra, b), product, count)
        alpha, beta = (1.5, -0.5) if dtype == "float64" else (1.5 - 1j, 0.25j)
        result = await ta.tensor.contract(subscripts, ra, b, rc, alpha=alpha, beta=beta)
        await check(result, alpha * product + beta * wide(c), count + 1)
        await check(rc, wide(c))
        same = await ta.tensor.contract(subscripts, ra, b, rc, alpha=alpha, beta=beta, out=rc)
        assert same is rc
        await check(rc, alpha * product + beta * wide(c), count + 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_dtypes(device: ta.Device, dtype: str) -> None:
    for subscripts in ("aic,cja->ji", "bik,bkj->bij", "ij,ij->i", "ij,ij->ji"):
        a, b, c = operands(subscripts, dtype)
        ra, rc = await device.put(a), await device.put(c)
        result = await ta.tensor.contract(subscripts, ra, b, rc, alpha=2, beta=-1)
        assert result.dtype is ta.DType(dtype)
        expected = 2 * np.einsum(subscripts, wide(a), wide(b)) - wide(c)
        await check(result, expected, added(subscripts) + 1)


async def test_low_precision_is_added_in_float32(device: ta.Device) -> None:
    """One after the other in float16, ones come to 2048 and stay there."""
    x = await device.put(np.ones((2, 4096, 2), np.float16))
    y = np.ones((4096, 3), np.float16)
    result = await ta.tensor.contract("akb,kc->bca", x, y)
    assert (await result.to_host() == 4096).all()


async def test_views_are_read_and_written_in_place(device: ta.Device) -> None:
    a, b = values((8, 6, 10), seed=1), values((10, 3, 12), seed=2)
    ra, rb = await device.put(a), await device.put(b)
    out = await device.zeros((9, 6, 8), "float64")
    into = out[::3, ::-2, 1:7:2]
    result = await ta.tensor.contract("abk,kc->cba", ra[1:4, ::-2], rb[:, :, 1], out=into)
    expected = np.einsum("abk,kc->cba", a[1:4, ::-2], b[:, :, 1])
    await check(result, expected, 10)
    whole = np.zeros((9, 6, 8))
    whole[::3, ::-2, 1:7:2] = expected
    await check(out, whole, 10)
    twice = await ta.tensor.contract("abk,kc->cba", ra[1:4, ::-2], rb[:, :, 1], into, beta=1.0, out=into)
    await check(twice, 2 * expected, 10)


async def test_ellipsis_means_a_batch(device: ta.Device) -> None:
    a, b = values((2, 3, 4, 5), seed=1), values((2, 3, 5, 2), seed=2)
    result = await ta.tensor.contract("...ik,...kj->...ji", await device.put(a), b)
    await check(result, np.einsum("...ik,...kj->...ji", a, b), 5)


@pytest.mark.parametrize("empty", ["i", "k", "b"])
async def test_empty_tensors(device: ta.Device, empty: str) -> None:
    extents = {**EXTENTS, empty: 0}
    for subscripts in ("bik,kjb->jbi", "bk,bk->b", "bi,ib->ib"):
        a, b, c = operands(subscripts, "complex64", extents)
        ra, rc = await device.put(a), await device.put(c)
        for beta in (0, 2 - 1j):
            result = await ta.tensor.contract(subscripts, ra, b, rc, beta=beta)
            await check(result, np.einsum(subscripts, wide(a), wide(b)) + beta * wide(c), 2)


async def test_unread_elements_may_hold_anything(device: ta.Device) -> None:
    for subscripts in ("ik,kj->ij", "ik,ki->i", "ik,ki->ik", "aik,kja->ji"):
        a, b, c = operands(subscripts)
        nothing = await device.put(np.full_like(c, np.nan))
        result = await ta.tensor.contract(subscripts, await device.put(a), b, nothing, out=nothing)
        await check(result, np.einsum(subscripts, a, b), 9)


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, dict[str, int], list[tuple[int, ...]]]:
    """A text, elements along its letters, and orders in which the axes of its tensors lie in memory."""
    letters = "abcdefg"[: draw(st.integers(1, 7))]
    extents = {letter: draw(st.sampled_from([1, 2, 3, 4])) for letter in letters}
    places = [draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)])) for _ in letters]
    terms = [
        "".join(draw(st.permutations([x for x, of in zip(letters, places, strict=True) if n in of])))
        for n in range(3)
    ]
    orders = [tuple(draw(st.permutations(range(len(term))))) for term in terms]
    return f"{terms[0]},{terms[1]}->{terms[2]}", extents, orders


@given(contractions())
@settings(max_examples=12 if IS_STAND_IN else 40, deadline=None)
def test_any_contraction(case: tuple[str, dict[str, int], list[tuple[int, ...]]]) -> None:
    subscripts, extents, orders = case
    lying = [
        array.transpose(order).copy(order="C").transpose(np.argsort(order))
        for array, order in zip(operands(subscripts, extents=extents), orders, strict=True)
    ]

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            refs: list[Any] = []
            for array, order in zip(lying, orders, strict=True):
                there = await device.put(array.transpose(order).copy(order="C"))
                refs.append(ta.arrays.permute_dims(there, tuple(map(int, np.argsort(order)))))
            a, b, c = refs
            expected = 2 * np.einsum(subscripts, lying[0], lying[1]) - lying[2]
            result = await ta.tensor.contract(subscripts, a, b, c, alpha=2, beta=-1, out=c)
            await check(result, expected, added(subscripts, extents) + 1)

    trio.run(main)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "told"),
    [
        ("ij,jk", [(2, 3)] * 2, "contract: b of shape|Contract: b of shape"),
        ("ij->ij", [(2, 3)] * 2, "have 1 terms, got 2 operands"),
        ("ij,jk->ik", [(2, 3), (4, 5)], r"b of shape \(4, 5\) has 4 elements"),
        ("ijk,jk->i", [(2, 3), (3, 3)], "does not fit"),
        ("i?,jk->i", [(2, 3), (3, 3)], "'[?]' is not a letter"),
        ("ii,ij->ij", [(2, 2), (2, 3)], "'i' is twice in the term 'ii'"),
        ("ij,jk->i", [(2, 3), (3, 4)], "'k' is in one term alone"),
        ("ij,jk->ikl", [(2, 3), (3, 4)], "letters behind ->"),
        ("ij,jk->ii", [(2, 3), (3, 4)], "letters behind ->"),
        ("ij,jk->ik", [(2, 1), (3, 4)], "'j' has one element in one array and 3 in the other"),
    ],
    ids=str,
)
async def test_refused_subscripts(
    device: ta.Device, subscripts: str, shapes: list[tuple[int, ...]], told: str
) -> None:
    a, b = [await device.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=told) as refused:
        await ta.tensor.contract(subscripts, a, b)
    assert str(refused.value).startswith("tensor.contract: ")
    with pytest.raises(ValueError, match=told):
        device.submit(ta.tensor.Contract(subscripts, a, b))


async def test_refused_arguments(device: ta.Device) -> None:
    a, b, c = [await device.zeros(shape) for shape in ((2, 3), (3, 4), (2, 4))]
    contract, wrong = ta.tensor.contract, await device.zeros((4, 2))
    for subscripts, x, y in (("ij,jk->ik", a, b), ("ij,ij->ij", a, a), ("ij,ij->i", a, a)):
        with pytest.raises(ValueError, match="beta must be 0 without c"):
            await contract(subscripts, x, y, beta=1)
        with pytest.raises(ValueError, match="c must have shape"):
            await contract(subscripts, x, y, wrong, beta=1)
        with pytest.raises(ValueError, match="out must have shape"):
            await contract(subscripts, x, y, out=wrong)
        with pytest.raises(TypeError, match=r"complex|alpha"):
            await contract(subscripts, x, y, alpha=1j)
    with pytest.raises(ValueError, match="out must not share memory with a"):
        await contract("ij,jk->ik", a, await device.zeros((3, 3)), out=a)
    both = await device.zeros((3, 4))
    with pytest.raises(ValueError, match="out must not share memory with c"):
        await contract("ij,jk->ik", a, b, both[:2], beta=1.0, out=both[1:])
    with pytest.raises(TypeError, match="float32"):
        await contract("ij,jk->ik", a, await device.zeros((3, 4), "float32"))
    with pytest.raises(TypeError, match=r"share a dtype, got a float64, b float32; write b\.astype"):
        device.submit(ta.tensor.Contract("ij,jk->ik", a, np.zeros((3, 4), np.float32)))
    with pytest.raises(
        TypeError, match=r"share a dtype, got a float64, b float64, c float32; write c\.astype"
    ):
        device.submit(ta.tensor.Contract("ij,jk->ik", a, b, np.zeros((2, 4), np.float32), beta=1.0))
    with pytest.raises(TypeError, match="floating or complex dtype, got int32"):
        await contract("ij,jk->ik", np.zeros((2, 3), np.int32), await device.zeros((3, 4), "int32"))
    with pytest.raises(TypeError, match="b must be an AccelRef or a NumPy array, got list"):
        await contract("ij,j->i", a, [1.0, 2.0, 3.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no operand is on a device"):
        await contract("ij,j->i", np.zeros((2, 3)), np.zeros(3))
    with pytest.raises(TypeError, match="subscripts must be a text"):
        await contract(None, a, b)  # type: ignore[arg-type]
    assert c.shape == (2, 4)


@pytest.mark.skipif(BACKEND not in ("cpu", "cuda"), reason="needs graphs")
async def test_a_contraction_is_a_step_of_a_graph(device: ta.Device) -> None:
    a, b = values((3, 4, 2), seed=1), values((2, 5, 3), seed=2)
    rb = await device.put(b)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await ta.tensor.contract("iak,kbi->ab", x, rb, alpha=2)

    graph = await ta.graphs.capture(device, step, await device.put(a))
    for factor in range(1, 5):
        result = await graph(await device.put(factor * a))
        await check(result, 2 * factor * np.einsum("iak,kbi->ab", a, b), 6)


@pytest.mark.skipif(BACKEND != "cuda" or IS_STAND_IN, reason="asks the library itself")
@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_cutensor_computes_layouts_that_would_be_copied(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    try:
        pathfinder.load_nvidia_dynamic_lib("cutensor")
    except pathfinder.DynamicLibNotFoundError as error:
        pytest.skip(f"cuTENSOR is not installed: {error}")
    cutensor = pytest.importorskip("nvmath.bindings.cutensor")
    executed: list[tuple[int, ...]] = []
    contract = cutensor.contract

    def counted(*arguments: int) -> None:
        contract(*arguments)
        executed.append(arguments)

    monkeypatch.setattr(cutensor, "contract", counted)
    async with system.open_device(BACKEND, options=INLINE) as device:
        for subscripts in ("abcd,dbea->ec", "abc,acd->db", "abcdef,dega->gfbc"):
            a, b, c = operands(subscripts, dtype, dict.fromkeys("abcdefg", 8))
            ra, rb, rc = await device.put(a), await device.put(b), await device.put(c)
            product = np.einsum(subscripts, wide(a), wide(b), optimize=True)
            # The first one may be executed in a capture too, to have its kernel loaded.
            await ta.tensor.contract(subscripts, ra, rb)
            before = len(executed)
            await check(await ta.tensor.contract(subscripts, ra, rb), product, 512)
            assert len(executed) == before + 1, f"{subscripts} went another way"
            result = await ta.tensor.contract(subscripts, ra, rb, rc, alpha=2, beta=-0.5)
            await check(result, 2 * product - 0.5 * wide(c), 512)
