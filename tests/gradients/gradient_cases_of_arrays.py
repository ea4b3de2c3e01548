"""Cases of gradients: reductions, shapes, parts, scans and orders of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from gradient_cases import LABELS, ROWS, Case, X, Y

import trio_accel as ta

a: Any = ta.arrays
KNOTS = np.linspace(-2.0, 2.0, 9)
NANS = np.array([[True, False, False, False], [False, False, True, False], [False] * 4])

CASES_OF_ARRAYS: dict[str, Case | list[Case]] = {
    # Reductions.
    **{
        f"arrays.{name}": [
            Case(getattr(a, name)), Case(lambda x, f=a.__dict__[name]: f(x, axis=0)),
            Case(lambda x, f=a.__dict__[name]: f(x, axis=(0, -1), keepdims=True), ((2, 3, 4),)),
        ]
        for name in ("max", "min", "nanmax", "nanmin", "prod", "ptp")
    },
    **{
        f"arrays.{name}": [
            Case(lambda x, f=a.__dict__[name]: f(a.where(NANS, np.nan, x), axis=0)),
            Case(lambda x, f=a.__dict__[name]: f(a.where(NANS, np.nan, x), axis=-1, keepdims=True)),
        ]
        for name in ("nansum", "nanmean", "nanprod", "nanvar", "nanstd")
    },
    **{
        f"arrays.{name}": [
            Case(getattr(a, name)), Case(lambda x, f=a.__dict__[name]: f(x, axis=0, correction=1)),
            Case(lambda x, f=a.__dict__[name]: f(x, axis=-1, keepdims=True)),
        ]
        for name in ("var", "std")
    },
    "arrays.zscore": Case(lambda x: a.zscore(x, axis=1, correction=1)),
    "arrays.skew": Case(lambda x: a.skew(x, axis=1)),
    "arrays.kurtosis": Case(lambda x: a.kurtosis(x, axis=0, keepdims=True)),
    "arrays.cosine_similarity": Case(lambda x, y: a.cosine_similarity(x, y, axis=0), (X, X)),
    "arrays.average": [
        Case(a.average), Case(lambda x, w: a.average(x, axis=1, weights=w), (X, X), 0.5),
        Case(lambda x, w: a.average(x, axis=0, weights=w), (X, (3,)), 0.5),
    ],
    "arrays.cov": [Case(a.cov), Case(lambda x: a.cov(x, correction=0), ((5,),))],
    "arrays.corrcoef": Case(a.corrcoef),
    "arrays.median": [Case(a.median), Case(lambda x: a.median(x, axis=0, keepdims=True))],
    "arrays.quantile": [
        Case(lambda x: a.quantile(x, 0.3, axis=1)), Case(lambda x: a.quantile(x, [0.1, 0.9])),
    ],
    "arrays.nanmedian": [
        Case(lambda x: a.nanmedian(a.where(NANS, np.nan, x))),
        Case(lambda x: a.nanmedian(a.where(NANS, np.nan, x), axis=0, keepdims=True)),
    ],
    "arrays.nanquantile": [
        Case(lambda x: a.nanquantile(a.where(NANS, np.nan, x), 0.3, axis=1)),
        Case(lambda x: a.nanquantile(a.where(NANS, np.nan, x), [0.0, 0.9, 1.0], axis=(1, 0))),
        Case(lambda x: a.nanquantile(x, 0.6, axis=0, keepdims=True), ((3, 2, 3),)),
    ],
    "arrays.nanpercentile": Case(lambda x: a.nanpercentile(a.where(NANS, np.nan, x), [25.0, 60.0], axis=1)),
    "arrays.percentile": Case(lambda x: a.percentile(x, 30.0, axis=(0, 1), keepdims=True)),
    # Complex numbers.
    "arrays.abs": [Case(a.abs), Case(lambda x: a.abs(x[0] + 1j * x[1]), ((2, 3, 4),))],
    "arrays.imag": [
        Case(lambda x: a.imag((x[0] + 1j * x[1]) ** 2), ((2, 3, 4),)), Case(lambda x: a.imag(x) + x),
    ],
    "arrays.angle": [
        Case(lambda x: a.angle(x[0] + 1j * x[1]), ((2, 3, 4),)), Case(lambda x: a.angle(x) + x),
    ],
    # Other shapes and parts.
    "AccelRef.transpose": Case(lambda x: x.transpose((2, 0, 1)), ((2, 3, 4),)),
    "arrays.clip": [
        Case(lambda x: a.clip(x, -1, 1)), Case(a.clip, (X, (4,), (3, 1))),
        Case(lambda x: a.clip(x, max=0.5)),
    ],
    "arrays.diag": [Case(lambda x: a.diag(x, k=1), ((3,),)), Case(lambda x: a.diag(x, k=-1), ((2, 3),))],
    **{
        f"{room}.diagonal": [
            Case(f), Case(lambda x, f=f: f(x, offset=2)), Case(lambda x, f=f: f(x, offset=-1), ((2, 4, 3),)),
        ]
        for room, f in (("arrays", a.diagonal), ("linalg", ta.linalg.diagonal))
    },
    "linalg.matrix_transpose": Case(ta.linalg.matrix_transpose, ((2, 3, 4),)),
    "arrays.flip": [Case(a.flip), Case(lambda x: a.flip(x, axis=1))],
    "arrays.rot90": [Case(a.rot90), Case(lambda x: a.rot90(x, 3, axes=(2, 0)), ((2, 3, 4),))],
    "arrays.roll": [
        Case(lambda x: a.roll(x, 2)), Case(lambda x: a.roll(x, (1, -2), axis=(0, 1))),
        Case(lambda x: a.roll(x, 1, axis=-1)),
    ],
    "arrays.tile": [Case(lambda x: a.tile(x, 2)), Case(lambda x: a.tile(x, (2, 1, 3))),
                    Case(lambda x: a.tile(x, (2,)), ((2, 3, 4),))],
    "arrays.repeat": [Case(lambda x: a.repeat(x, 2)), Case(lambda x: a.repeat(x, 3, axis=0))],
    "arrays.sliding_window_view": [
        Case(lambda x: a.sliding_window_view(x, (2, 3))), Case(lambda x: a.sliding_window_view(x, 2, axis=1)),
    ],
    "arrays.pad": [
        Case(lambda x: a.pad(x, 1)), Case(lambda x: a.pad(x, [(1, 2), (0, 3)], constant_values=2.0)),
        *[Case(lambda x, mode=mode: a.pad(x, [(1, 2), (0, 3)], mode=mode))
          for mode in ("edge", "reflect", "symmetric", "wrap")],
        Case(lambda x: a.pad(x, [(2, 3)], mode="wrap"), ((3,),)),
        Case(lambda x: a.pad(x, [(2, 0)], mode="edge"), ((1,),)),
    ],
    "arrays.tril": Case(lambda x: a.tril(x, k=-1)),
    "arrays.triu": Case(lambda x: a.triu(x, k=1), ((2, 3, 4),)),
    # Scans, orders and elements.
    "arrays.cumulative_sum": [
        Case(a.cumulative_sum, ((5,),)), Case(lambda x: a.cumulative_sum(x, axis=0, include_initial=True)),
    ],
    "arrays.cumulative_prod": [Case(a.cumulative_prod, ((5,),)),
        Case(lambda x: a.cumulative_prod(x, axis=0))],
    "arrays.cumulative_max": Case(lambda x: a.cumulative_max(x, axis=1)),
    "arrays.cumulative_min": Case(a.cumulative_min, ((7,),)),
    "arrays.cumulative_logsumexp": [
        Case(a.cumulative_logsumexp, ((5,),)), Case(lambda x: a.cumulative_logsumexp(x, axis=0)),
    ],
    "arrays.sort": [Case(a.sort), Case(lambda x: a.sort(x, axis=0, descending=True))],
    "arrays.take": [
        Case(lambda x: a.take(x, np.array([2, 0, 0, -1]), axis=1)), Case(lambda x: a.take(x, LABELS),
            ((4,),)),
        Case(lambda x: a.take(x, ROWS, axis=0), ((5, 3),)),
    ],
    "arrays.take_along_axis": [
        Case(lambda x: a.take_along_axis(x, np.array([[3, 0], [1, 1], [0, 2]]), axis=1)),
        Case(lambda x: a.take_along_axis(x, np.array([[3, 0], [1, 1]]), axis=1), ((1, 4),)),
    ],
    "arrays.gather_nd": Case(lambda x: a.gather_nd(x, (np.array([0, 2, 0]), np.array([1, 1, 1])))),
    "arrays.segmented_reduce": Case(
        lambda x: a.segmented_reduce(x, np.array([0, 2, 2, 5])), ((5,),)
    ),
    "arrays.diff": [
        Case(a.diff), Case(lambda x, y: a.diff(x, axis=0, n=2, prepend=y), (X, (1, 4))),
    ],
    "arrays.trapezoid": [
        Case(lambda y: a.trapezoid(y, dx=0.5)), Case(lambda y, x: a.trapezoid(y, x, axis=0), (X, (3,))),
    ],
    "arrays.nan_to_num": Case(lambda x: a.nan_to_num(a.where(NANS, np.nan, x))),
    "arrays.polyval": Case(a.polyval, ((4,), (3, 2))),
    "arrays.vander": [Case(a.vander, ((3,),)), Case(lambda x: a.vander(x, 4, increasing=True), ((3,),))],
    "arrays.select": Case(
        lambda x, y, z: a.select([Y > 0.7, Y > 0.4], [x, y], z), (X, (4,), (3, 1))
    ),
    "arrays.interp": [
        Case(lambda x: a.interp(x, KNOTS, np.cos(KNOTS)), (X,), -1.9),
        Case(lambda x, xp, fp: a.interp(x, a.cumulative_sum(a.exp(xp)), fp), ((7,), (5,), (5,)), 0.1, 2.0),
        Case(lambda x, fp: a.interp(x, KNOTS[:5] + 0.5, fp, left=3.0, right=-1.0), (X, (5,))),
    ],
    "arrays.gradient": [
        Case(lambda x: a.gradient(x, 0.5, axis=1)), Case(a.gradient, ((6,),)),
        Case(lambda x: a.multiply(*a.gradient(x, 0.5))),
        Case(lambda x, at: a.gradient(x, a.cumulative_sum(a.exp(at)), axis=0), ((5, 2), (5,))),
    ],
    "arrays.linear_recurrence": [
        Case(lambda x, b: a.linear_recurrence(x, b, axis=1), (X, X)),
        Case(lambda x, b, i: a.linear_recurrence(x, b, axis=0, initial=i), ((3, 1), X, (1, 4))),
        Case(lambda b: a.linear_recurrence(0.7, b, initial=0.3), ((6,),)),
    ],
    "arrays.scan": [
        Case(lambda x: a.scan("a * b", x, axis=1)), Case(lambda x: a.scan("a + b + a * b", x), ((7,),)),
        Case(lambda x: a.scan("hypot(a, b)", x, axis=0)),
    ],
    "arrays.unwrap": Case(lambda x: a.unwrap(x * 3.0)),
}  # fmt: skip
