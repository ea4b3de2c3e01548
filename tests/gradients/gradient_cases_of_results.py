"""Cases of gradients: functions with several results, of which some are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradient_cases import Case
from gradient_cases_of_libraries import SHIFT

import trio_accel as ta

a: Any = ta.arrays
la: Any = ta.linalg
SHAPES = ((4, 4), (5, 3), (3, 5), (2, 5, 3))
OF_SVD: dict[str, Callable[..., list[Any]]] = {
    "u": lambda u, s, vh: [u * u],
    "s": lambda u, s, vh: [s],
    "vh": lambda u, s, vh: [vh * vh],
    "all": lambda u, s, vh: [u * u, s, vh * vh, u @ vh],
}


def joined(parts: Any) -> Any:
    return a.concat(list(parts), axis=None)


def real(z: Any) -> Any:
    return a.real(z * (0.7 - 1.3j))


def complex_matrix(x: Any) -> Any:
    return x[0] + 1j * x[1]


def _eigh(x: Any) -> Any:
    w, v = la.eigh(x + x.mT)
    return joined([w, v * v, (v * a.expand_dims(a.exp(w * 0.1), axis=-2)) @ v.mT])


def _svd(x: Any, kind: str) -> Any:
    return joined(OF_SVD[kind](*la.svd(x, full_matrices=False)))


def _slogdet(x: Any) -> Any:
    sign, logarithm = la.slogdet(x + SHIFT)
    return joined([sign, logarithm * sign])


def _eig(x: Any) -> Any:
    w, v = la.eig(x)
    return joined([real(w * w), a.abs(v) ** 2])


def _of_complex(x: Any) -> Any:
    """All factorizations of complex matrices."""
    z = complex_matrix(x)
    w, v = la.eigh(z + a.conj(z).mT)
    u, s, vh = la.svd(z, full_matrices=False)
    sign, logarithm = la.slogdet(z)
    values, vectors = la.eig(z)
    made = [w, a.abs(v) ** 2, a.abs(u) ** 2, s, a.abs(vh) ** 2, *map(real, la.qr(z)), real(u @ vh)]
    return joined([*made, real(sign), logarithm, real(values * values), a.abs(vectors) ** 2])


def symmetric(x: Any) -> Any:
    return x + a.conj(x).mT


def definite(x: Any) -> Any:
    return x @ a.conj(x).mT + (0j if x.dtype.kind == "complex" else 0.0) + SHIFT


def _lu(x: Any) -> Any:
    return la.lu(x)[0]


def _solved(x: Any, b: Any, trans: int) -> Any:
    """Solve by a call with both results, and by these one by one."""
    factors, pivots = la.lu(x)
    return la.lu_solve(la.lu(x), b, trans) * la.lu_solve((factors, pivots), b, trans)


def _ldl(x: Any, *how: bool) -> Any:
    outer, blocks, _ = la.ldl(x, *how)
    return joined([real(outer), real(blocks)] if x.dtype.kind == "complex" else [outer, blocks])


def _generalised(x: Any, y: Any, uplo: str = "L") -> Any:
    values, vectors = la.eigh(symmetric(x), uplo, b=definite(y))
    return joined([values, a.abs(vectors) ** 2])


def _lstsq(x: Any, b: Any) -> Any:
    solution, residuals, _, values = la.lstsq(x, b)
    return joined([real(solution) if solution.dtype.kind == "complex" else solution, residuals, values])


def _schur(x: Any, output: str = "real") -> Any:
    """Values independent of phases, and of the column order within a block."""
    form, z = la.schur(x, output)
    values = la.diagonal(form)
    parts = [a.sum(a.abs(form) ** 4, axis=(-2, -1)), a.sum(a.abs(z) ** 4, axis=-1)]
    return joined([real(values) if values.dtype.kind == "complex" else values, *parts])


def _hessenberg(x: Any) -> Any:
    form, q = la.hessenberg(x, True)
    return joined([form, q]) if form.dtype.kind == "float" else joined([a.abs(form) ** 2, a.abs(q) ** 2])


def _full(x: Any) -> Any:
    """The unique part of the full matrices."""
    u, s, vh = la.svd(x)
    return joined([s, (vh if x.shape[-2] > x.shape[-1] else u) ** 2])


def _top_k(x: Any) -> Any:
    values, places = a.top_k(x, 2, axis=0, largest=False)
    return values * a.exp(values) + a.take_along_axis(x, places, axis=0)


CASES_OF_RESULTS: dict[str, Case | list[Case]] = {
    "arrays.broadcast_arrays": Case(lambda x, y: a.multiply(*a.broadcast_arrays(x, y)), ((3, 4), (3, 1))),
    "arrays.meshgrid": [
        Case(lambda x, y, z: joined(list(a.meshgrid(x, y * y, z))[1:]), ((2,), (3,), (4,))),
        Case(lambda x, y: joined(a.meshgrid(x, y * x, indexing="ij")), ((3,), (3,))),
        Case(lambda x, y: a.multiply(*a.meshgrid(x, y)), ((2,), (3,))),
    ],
    "arrays.split": Case(lambda x: joined([one * one for one in list(a.split(x, [1, 3], 1))[1:]])),
    "arrays.unstack": [
        Case(lambda x: a.multiply(*list(a.unstack(x, axis=1))[:2])), Case(lambda x: a.unstack(x)[1] ** 2),
    ],
    "arrays.top_k": [Case(lambda x: a.top_k(x, 3)[0]), Case(_top_k)],
    "linalg.eigh": [
        Case(_eigh, ((4, 4),)), Case(_eigh, ((2, 4, 4),)), Case(_of_complex, ((2, 4, 4),)),
        Case(lambda x: la.eigh(x + x.mT)[0] ** 3, ((4, 4),)),
        Case(lambda x: la.eigh(x + x.mT)[1] ** 2, ((4, 4),)),
        *[Case(_generalised, (shape, shape)) for shape in ((4, 4), (2, 4, 4))],
        Case(lambda x, y: _generalised(x, y, "U"), ((4, 4), (4, 4))),
        Case(lambda x, y: _generalised(complex_matrix(x), complex_matrix(y)), ((2, 4, 4), (2, 4, 4))),
        Case(lambda x, y: la.eigh(symmetric(x), b=definite(y))[0] ** 3, ((4, 4), (4, 4))),
    ],
    "linalg.svd": [
        *[Case(lambda x, kind=kind: _svd(x, kind), (shape,)) for shape in SHAPES for kind in OF_SVD],
        Case(lambda x: la.svd(x)[1] ** 2, ((5, 3),)),
        Case(lambda x: la.svd(x, compute_uv=False) ** 2, ((3, 5),)),
        Case(lambda x: joined(OF_SVD["all"](*la.svd(x))), ((4, 4),)),
        *[Case(_full, (shape,)) for shape in ((5, 3), (3, 5), (2, 5, 3))],
    ],
    "linalg.qr": [
        *[Case(lambda x: joined(la.qr(x)), (shape,)) for shape in SHAPES],
        *[Case(lambda x, k=k: la.qr(x)[k], ((5, 3),)) for k in (0, 1)],
        *[Case(lambda x: la.qr(x, "r"), (shape,)) for shape in SHAPES],
        Case(lambda x: joined(la.qr(x, "complete")), ((3, 5),)),
        Case(lambda x: la.qr(x, mode="complete")[1], ((5, 3),)),
    ],
    "linalg.slogdet": [
        Case(_slogdet, ((2, 4, 4),)), Case(lambda x: la.slogdet(x + SHIFT)[1], ((4, 4),)),
        Case(lambda x: la.slogdet(x + SHIFT)[0] * a.sum(x), ((4, 4),)),
    ],
    "linalg.eig": Case(_eig, ((4, 4),)),
    "linalg.lu": [
        *[Case(_lu, (shape,)) for shape in (*SHAPES, (2, 3, 5))],
        Case(lambda x: real(_lu(complex_matrix(x))), ((2, 4, 4),)),
    ],
    "linalg.lu_solve": [
        *[Case(lambda x, b, k=k: _solved(x, b, k), ((2, 4, 4), (4, 2))) for k in (0, 1, 2)],
        *[Case(lambda x, b, k=k: _solved(x, b, k), ((4, 4), (4,))) for k in (0, 1, 2)],
        *[
            Case(lambda x, b, k=k: real(_solved(complex_matrix(x), complex_matrix(b), k)),
                 ((2, 4, 4), (2, 4, 3)))
            for k in (0, 1, 2)
        ],
    ],
    "linalg.ldl": [
        *[
            Case(lambda x, k=k, f=f: _ldl(f(x), k), (shape,))
            for shape in ((5, 5), (2, 4, 4)) for k in (True, False) for f in (symmetric,)
        ],
        Case(lambda x: la.ldl(symmetric(x))[0], ((4, 4),)),
        Case(lambda x: la.ldl(symmetric(x))[1], ((4, 4),)),
        *[Case(lambda x, k=k: _ldl(symmetric(complex_matrix(x)), k), ((2, 4, 4),)) for k in (True, False)],
        *[
            Case(lambda x, k=k: _ldl(complex_matrix(x) + complex_matrix(x).mT, k, False), ((2, 4, 4),))
            for k in (True, False)
        ],
    ],
    "linalg.lstsq": [
        *[Case(_lstsq, (shape, (shape[0], 2))) for shape in ((5, 3), (3, 5), (4, 4))],
        *[Case(lambda x, b, k=k: la.lstsq(x, b)[k], ((5, 3), (5,))) for k in (0, 1, 3)],
        Case(lambda x, b: _lstsq(complex_matrix(x), complex_matrix(b)), ((2, 5, 3), (2, 5))),
        # Of rank 1.
        Case(lambda x, b: la.lstsq(x @ a.ones_like(x).mT, b)[0], ((5, 1), (5,))),
    ],
    "linalg.schur": [
        *[Case(_schur, (shape,)) for shape in ((5, 5), (6, 6), (3, 4, 4))],
        Case(lambda x: la.schur(symmetric(x))[0], ((4, 4),)),
        Case(lambda x: a.sum(la.schur(x)[1] ** 4, axis=-1), ((2, 5, 5),)),
        Case(lambda x: _schur(x, "complex"), ((2, 4, 4),)),
        Case(lambda x: _schur(complex_matrix(x)), ((2, 2, 4, 4),)),
    ],
    "linalg.hessenberg": [
        *[Case(_hessenberg, (shape,)) for shape in ((6, 6), (2, 4, 4), (2, 3, 3), (2, 2))],
        Case(la.hessenberg, ((5, 5),)), Case(lambda x: la.hessenberg(x, True)[1], ((5, 5),)),
        Case(lambda x: la.hessenberg(x, True)[1], ((2, 2),)),
        Case(lambda x: _hessenberg(complex_matrix(x)), ((2, 2, 4, 4),)),
        Case(lambda x: real(la.diagonal(la.hessenberg(complex_matrix(x)))), ((2, 4, 4),)),
    ],
    "linalg.polar": [
        *[
            Case(lambda x, side=side: joined(la.polar(x, side)), (shape,))
            for shape in SHAPES for side in ("right", "left")
        ],
        *[Case(lambda x, k=k: la.polar(x)[k], ((5, 3),)) for k in (0, 1)],
        *[
            Case(lambda x, side=side: joined(map(real, la.polar(complex_matrix(x), side))), ((2, 3, 4),))
            for side in ("right", "left")
        ],
    ],
    "signal.stft": [
        Case(lambda x: real(ta.signal.stft(x, nperseg=6, axis=0)[2]), ((13, 2),)),
        Case(lambda x: real(ta.signal.stft(x, window="boxcar", nperseg=5, noverlap=1, nfft=8)[-1]), ((9,),)),
    ],
    "signal.welch": [
        Case(lambda x: ta.signal.welch(x, nperseg=6, axis=0)[1], ((15, 2),)),
        Case(lambda x: ta.signal.welch(x, 2.0, nperseg=5, nfft=8, detrend=False, scaling="spectrum")[1],
             ((9,),)),
    ],
}  # fmt: skip
