"""Cases of gradients: matrices, transforms, filters and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from gradient_cases import IMAGE, Case, X, numbers

import trio_accel as ta

a: Any = ta.arrays
l: Any = ta.linalg  # noqa: E741
x_: Any = ta.fft
i_: Any = ta.ndimage

SHIFT = np.diag([5.0, 6.0, 7.0, 8.0])
FIRST = np.array([9.0, 0.0, 0.0, 0.0])
BAND = np.array([[0.0], [9.0], [0.0], [0.0]])
BANDS = [np.array([[0.0], [0.0], [9.0]]), np.array([[9.0], [0.0], [0.0]])]
NORMS = (None, "ortho", "forward")
NORM_ORDERS = (1, 2, 3, np.inf, -np.inf)
MODES = ("reflect", "mirror", "nearest", "wrap", "constant")
WEIGHTS = np.array([0.5, -1.0, 2.0, 0.3, 0.7])

CROSS = np.array([[False, True, False], [True, True, True], [False, True, False]])
PLACES = numbers((2, 7), 5, -0.6, 5.3)


def parts(z: Any) -> Any:
    """The real and imaginary parts of complex numbers, mixed by weights."""
    return a.real(z * (0.7 - 1.3j)) if z.dtype.kind == "complex" else z


CASES_OF_LIBRARIES: dict[str, Case | list[Case]] = {
    # Matrices.
    "linalg.solve": [
        Case(lambda x, b: l.solve(x + SHIFT, b), ((4, 4), (4, 2))),
        Case(lambda x, b: l.solve(x + SHIFT, b), ((4, 4), (4,))),
        Case(lambda x, b: l.solve(x + SHIFT, b), ((2, 4, 4), (2, 4, 3))),
    ],
    "linalg.solve_tridiagonal": [
        Case(lambda d, b: l.solve_tridiagonal(d * 0.3, d + 5.0, d * 0.2, b), ((5,), (5, 2))),
        Case(lambda d, b: l.solve_tridiagonal(d * 0.3, d + 5.0, d * 0.2, b), ((5,), (5,))),
    ],
    "linalg.inv": Case(lambda x: l.inv(x + SHIFT), ((2, 4, 4),)),
    "linalg.det": Case(lambda x: l.det(x + SHIFT), ((2, 4, 4),)),
    "linalg.cholesky": [
        Case(lambda x: l.cholesky(x @ x.mT + SHIFT), ((4, 4),)),
        Case(lambda x: l.cholesky(x @ x.mT + SHIFT, upper=True), ((2, 4, 4),)),
    ],
    "linalg.expm": Case(l.expm, ((3, 3),)),
    "linalg.pinv": [Case(l.pinv, ((5, 3),)), Case(l.pinv, ((3, 5),))],
    "linalg.matrix_power": [Case(lambda x, k=k: l.matrix_power(x + SHIFT, k), ((4, 4),)) for k in (3, -2, 1)],
    "linalg.svdvals": Case(l.svdvals, ((2, 4, 3),)),
    "linalg.eigvalsh": [
        Case(lambda x: l.eigvalsh(x + x.mT), ((4, 4),)),
        Case(lambda x, y: l.eigvalsh(x + x.mT, b=y @ y.mT + SHIFT), ((2, 4, 4), (2, 4, 4))),
    ],
    "linalg.eigvals": [
        Case(lambda x: parts(l.eigvals(x)), ((5, 5),)),
        Case(lambda x: parts(l.eigvals(x[0] + 1j * x[1]) ** 2), ((2, 3, 4, 4),)),
    ],
    "linalg.solve_triangular": [
        *[
            Case(lambda x, b, k=k, low=low, one=one: l.solve_triangular(x + SHIFT, b, k, low, one),
                 ((2, 4, 4), (4, 2)))
            for k, low, one in ((0, False, False), (1, True, False), ("C", True, True), ("T", False, True))
        ],
        *[
            Case(lambda x, b, k=k: parts(
                l.solve_triangular(x[0] + 1j * x[1] + SHIFT, b[0] + 1j * b[1], k, True)),
                 ((2, 4, 4), (2, 4)))
            for k in "NTC"
        ],
    ],
    "linalg.cho_solve": [
        *[
            Case(lambda x, b, low=low: l.cho_solve((l.cholesky(x @ x.mT + SHIFT, upper=not low), low), b),
                 ((2, 4, 4), (4, 3)))
            for low in (True, False)
        ],
        Case(lambda x, b: parts(l.cho_solve((x[0] + 1j * x[1] + SHIFT, False), b[0] + 1j * b[1])),
             ((2, 4, 4), (2, 4))),
    ],
    "linalg.einsum": [
        Case(lambda x, y: l.einsum("ij,jk->ki", x, y), ((3, 4), (4, 2))),
        Case(lambda x, y: l.einsum("bij,j->b", x, y), ((2, 3, 4), (4,))),
        Case(lambda x, y: l.einsum("...ij,jk->...ki", x, y), ((2, 2, 3, 4), (4, 2))),
        Case(lambda x, y: l.einsum("...i,...i", x, y), ((2, 1, 3), (4, 3))),
        Case(lambda x, y: l.einsum("a...,b...->ab...", x, y), ((2, 3), (2, 4, 1))),
        Case(lambda x, y: l.einsum("ij,jk->ik", x, y), ((3, 1), (4, 2))),
        Case(lambda x, y: l.einsum("ij,ij->", x, y), ((3, 1), (3, 4))),
        Case(lambda x, y: l.einsum("ij,kj->k", x, y), ((3, 4), (2, 1))),
        Case(lambda x: l.einsum("ii", x), ((3, 3),)), Case(lambda x: l.einsum("ii->i", x), ((3, 3),)),
        Case(lambda x, y: l.einsum("iij,jki->k", x, y), ((3, 3, 2), (2, 4, 3))),
        Case(lambda x: l.einsum("ij->j", x)), Case(lambda x, y: l.einsum("ij,kj", x, y), (X, (2, 4))),
    ],
    "tensor.einsum": Case(lambda x, y: ta.tensor.einsum("ij,jk->ki", x, y), ((3, 4), (4, 2))),
    "tensor.contract": Case(lambda x, y: ta.tensor.contract("ij,jk->ki", x, y, alpha=2.0), ((3, 4), (4, 2))),
    "tensor.permute": Case(lambda x: ta.tensor.permute("ij->ji", x, alpha=2.0)),
    "tensor.reduce": Case(lambda x: ta.tensor.reduce("ij->j", x)),
    "linalg.tensordot": [
        Case(lambda x, y: l.tensordot(x, y, axes=1), ((3, 4), (4, 2))),
        Case(lambda x, y: l.tensordot(x, y, axes=((0, 2), (1, 0))), ((3, 4, 2), (2, 3, 5))),
        Case(lambda x, y: l.tensordot(x, y, axes=0), ((3,), (2,))),
    ],
    "linalg.kron": Case(l.kron, ((2, 3), (3, 2))),
    "linalg.cross": [Case(l.cross, ((4, 3), (4, 3))), Case(lambda x, y: l.cross(x, y, axis=0), ((3, 2),
        (3, 1)))],
    "linalg.outer": Case(l.outer, ((3,), (4,))),
    "linalg.trace": [Case(l.trace), Case(lambda x: l.trace(x, offset=1), ((2, 3, 4),))],
    "linalg.vecdot": Case(lambda x, y: l.vecdot(x, y, axis=0), (X, X)),
    "linalg.vector_norm": [
        Case(l.vector_norm),
        *[Case(lambda x, k=k: l.vector_norm(x, axis=1, ord=k, keepdims=True)) for k in NORM_ORDERS],
    ],
    "linalg.matrix_norm": [
        Case(lambda x, k=k: l.matrix_norm(x, ord=k), ((2, 3, 4),))
        for k in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
    ],
    "linalg.sqrtm": Case(lambda x: parts(l.sqrtm(x @ x.mT + SHIFT)), ((4, 4),)),
    "linalg.cond": [Case(lambda x, p=p: l.cond(x + SHIFT, p), ((2, 4, 4),)) for p in (None, -2, 1, "fro")],
    "linalg.multi_dot": [
        Case(lambda *xs: l.multi_dot(xs), ((3, 4), (4, 2), (2, 5))),
        Case(lambda *xs: l.multi_dot(xs), ((4,), (4, 2), (2,))),
    ],
    "linalg.solve_toeplitz": [
        Case(lambda c, b: l.solve_toeplitz(c + FIRST, b), ((4,), (4, 2))),
        Case(lambda c, r, b: l.solve_toeplitz((c + FIRST, r), b), ((4,), (4,), (4,))),
    ],
    "linalg.solve_banded": [
        Case(lambda ab, b: l.solve_banded((2, 1), ab + BAND, b), ((4, 6), (6, 2))),
        Case(lambda ab, b: l.solve_banded((0, 1), ab + BAND[:2], b), ((2, 6), (6,))),
    ],
    "linalg.solveh_banded": [
        Case(lambda ab, b, k=k: l.solveh_banded(ab + BANDS[k], b, bool(k)), ((3, 6), (6, 2)))
        for k in (0, 1)
    ],
    "linalg.dot": Case(l.dot, ((4,), (4,))),
    "linalg.asum": Case(l.asum, ((4,),)),
    "linalg.nrm2": Case(l.nrm2, ((4,),)),
    # Transforms.
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name], norm=norm: parts(f(x, norm=norm))) for norm in NORMS
        ] + [Case(lambda x, f=x_.__dict__[name], k=k: parts(f(x, k, 0))) for k in (2, 5)]
        for name in ("fft", "ifft", "rfft", "ihfft")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name], norm=norm: parts(f(x + 1j * y, norm=norm)), (X, X))
            for norm in NORMS
        ] + [Case(lambda x, y, f=x_.__dict__[name], k=k: parts(f(x + 1j * y, k, 0)),
            (X, X)) for k in (3, 4, 8)]
        for name in ("irfft", "hfft")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name]: parts(f(x)), ((2, 3, 4),)),
            Case(lambda x, f=x_.__dict__[name]: parts(f(x, (2, 5), (2, 0), "ortho")), ((2, 3, 4),)),
        ]
        for name in ("fftn", "ifftn", "fft2", "ifft2", "rfftn", "rfft2")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name]: parts(f(x + 1j * y)), ((2, 3, 4), (2, 3, 4))),
            Case(lambda x, y, f=x_.__dict__[name]: parts(f(x + 1j * y, (2, 5), (2, 0), "ortho")),
                (IMAGE, IMAGE)),
        ]
        for name in ("irfftn", "irfft2")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name], kind=kind, norm=norm: f(x, kind, norm=norm))
            for kind in (2, 3) for norm in NORMS
        ] + [Case(lambda x, f=x_.__dict__[name]: f(x, 2, 5, 0))]
        for name in ("dct", "idct", "dst", "idst")
    },
    **{
        f"fft.{name}": Case(lambda x, f=x_.__dict__[name]: f(x, 2, norm="forward"), ((2, 3, 4),))
        for name in ("dctn", "idctn", "dstn", "idstn")
    },
    **{
        f"fft.hfft{k}": [
            Case(lambda x, y, f=x_.__dict__[f"hfft{k}"]: f(x + 1j * y), ((2, 3, 4), (2, 3, 4))),
            Case(lambda x, y, f=x_.__dict__[f"hfft{k}"]: f(x + 1j * y, (2, 5), (2, 0), "ortho"),
                (IMAGE, IMAGE)),
        ]
        for k in ("2", "n")
    },
    **{
        f"fft.ihfft{k}": [
            Case(lambda x, f=x_.__dict__[f"ihfft{k}"]: parts(f(x)), ((2, 3, 4),)),
            Case(lambda x, f=x_.__dict__[f"ihfft{k}"]: parts(f(x, (2, 5), (2, 0), "forward")), ((2, 3, 4),)),
        ]
        for k in ("2", "n")
    },
    "fft.hilbert": [Case(lambda x: parts(x_.hilbert(x))), Case(lambda x: parts(x_.hilbert(x, 5, axis=0)))],
    "fft.czt": [
        Case(lambda x: parts(x_.czt(x))),
        Case(lambda x, y: parts(x_.czt(x + 1j * y, 5, 0.9 + 0.1j, 1.1j, axis=0)), (X, X)),
    ],
    "fft.zoom_fft": [
        Case(lambda x: parts(x_.zoom_fft(x, 0.4))),
        Case(lambda x: parts(x_.zoom_fft(x, [0.2, 0.7], 6, fs=3, endpoint=True, axis=0))),
    ],
    "fft.fftshift": [Case(x_.fftshift, ((3, 5),)), Case(lambda x: x_.fftshift(x, axes=1), ((3, 5),))],
    "fft.ifftshift": Case(x_.ifftshift, ((3, 5),)),
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name], mode=mode: f(x, y, mode), shapes)
            for mode in ("full", "same", "valid") for shapes in (((7,), (3,)), ((5, 6), (2, 3)))
        ] + [
            Case(lambda x, y, f=x_.__dict__[name], mode=mode: f(x, y, mode, axes=-1), ((2, 5), (1, 3)))
            for mode in ("full", "same", "valid") if name in ("fftconvolve", "oaconvolve")
        ]
        for name in ("convolve", "correlate", "fftconvolve", "oaconvolve")
    },
    # Filters.
    **{
        f"ndimage.{name}1d": [
            Case(lambda x, f=i_.__dict__[f"{name}1d"], mode=mode, k=k, o=o: f(
                x, WEIGHTS[:k], axis=1, mode=mode, origin=o),
                 ((3, 6),))
            for mode in MODES for k, o in ((3, 0), (4, 0), (5, 1))
        ]
        for name in ("correlate", "convolve")
    },
    **{
        f"ndimage.{name}": [
            Case(lambda x, f=i_.__dict__[name], mode=mode: f(x, np.outer(WEIGHTS[:3], WEIGHTS[:2]),
                mode=mode),
                 ((5, 6),))
            for mode in MODES
        ] + [
            Case(lambda x, f=i_.__dict__[name]: f(x, np.outer(WEIGHTS[:3], WEIGHTS[:2]), axes=(2, 0),
                origin=(0, 1)), ((4, 2, 5),))
        ]
        for name in ("correlate", "convolve")
    },
    "ndimage.gaussian_filter": [
        Case(lambda x: i_.gaussian_filter(x, 1.0), ((6, 7),)),
        Case(lambda x: i_.gaussian_filter(x, [0.7, 0.0], order=[1, 0], mode=["wrap", "nearest"]), ((6, 7),)),
    ],
    "ndimage.gaussian_filter1d": Case(lambda x: i_.gaussian_filter1d(x, 0.8, axis=0, mode="mirror"),
        ((6, 2),)),
    "ndimage.gaussian_laplace": Case(lambda x: i_.gaussian_laplace(x, 0.8), ((6, 7),)),
    "ndimage.laplace": Case(lambda x: i_.laplace(x, mode="wrap"), ((6, 7),)),
    **{
        f"ndimage.{name}_filter1d": [
            Case(lambda x, f=i_.__dict__[f"{name}_filter1d"], m=mode: f(x, 3, axis=0, mode=m), ((6, 2),))
            for mode in MODES
        ]
        for name in ("maximum", "minimum")
    },
    **{
        f"ndimage.{name}_filter": [
            Case(lambda x, f=i_.__dict__[f"{name}_filter"]: f(x, (3, 2), mode=["wrap", "nearest"]),
                ((5, 6),)),
            Case(lambda x, f=i_.__dict__[f"{name}_filter"]: f(x, footprint=CROSS, origin=1), ((5, 6),)),
        ]
        for name in ("maximum", "minimum", "median")
    },
    # Weights are functions of differences rounded to bins, and the gradient belongs to exact differences.
    "ndimage.bilateral_filter": [
        *[
            Case(lambda x, mode=mode: i_.bilateral_filter(x, 3, 0.7, 0.8, 10**13, mode, 0.3), ((5, 6),), -1.0)
            for mode in ("constant", "edge", "symmetric", "reflect", "wrap")
        ],
        Case(lambda x: i_.bilateral_filter(x, bins=10**13), ((4, 5),), 0.2),
        # The window is wider than the image.
        Case(lambda x: i_.bilateral_filter(x, bins=10**13, mode="symmetric"), ((2, 3),), 0.2),
        Case(lambda x: i_.bilateral_filter(x, sigma_color=0.5, bins=10**13), ((7, 6),), -2.0, -0.5),
    ],
    "ndimage.rank_filter": [Case(lambda x, k=k: i_.rank_filter(x, k, 3), ((5, 6),)) for k in (1, -3)],
    "ndimage.percentile_filter": [
        Case(lambda x, k=k: i_.percentile_filter(x, k, footprint=CROSS, mode="mirror"), ((5, 6),))
        for k in (0, 30, -20, 100)
    ],
    "ndimage.zoom": [
        Case(lambda x, k=k, mode=mode: i_.zoom(x, (1.7, 0.6), order=k, mode=mode), ((5, 6),))
        for k, mode in ((0, "constant"), (1, "nearest"), (3, "mirror"), (3, "reflect"))
    ] + [Case(lambda x: i_.zoom(x, 1.5, mode="grid-constant", grid_mode=True, cval=2.0), ((5, 6),))],
    "ndimage.shift": [
        Case(lambda x, k=k, mode=mode: i_.shift(x, (0.4, -1.3), order=k, mode=mode, cval=3.0), ((5, 6),))
        for k in (1, 3) for mode in MODES
    ],
    "ndimage.spline_filter": [
        Case(lambda x, k=k, mode=mode: i_.spline_filter(x, k, mode=mode), ((5, 6),))
        for k, mode in ((2, "mirror"), (3, "reflect"), (5, "wrap"))
    ],
    "ndimage.spline_filter1d": [Case(lambda x, k=k: i_.spline_filter1d(x, k, 0), ((5, 2),)) for k in (1, 3)],
    "ndimage.map_coordinates": [
        Case(lambda x, k=k, mode=mode: i_.map_coordinates(x, PLACES, order=k, mode=mode, cval=3.0), ((5, 6),))
        for k in (0, 1) for mode in ("constant", "nearest")
    ] + [Case(lambda x, at: i_.map_coordinates(x, 2.1 + at, order=1), ((5, 6), (2, 7)))],
    "ndimage.affine_transform": [
        Case(lambda x: i_.affine_transform(x, [[0.9, 0.2], [-0.1, 1.1]], (0.3, 0.1), order=1), ((5, 6),)),
        Case(lambda x: i_.affine_transform(x, [0.5, 1.2], 0.25, (4, 3), order=1, mode="nearest"), ((5, 6),)),
        Case(lambda x: i_.affine_transform(x, [[1.0, 0.1, 0.3], [0.2, 1.0, 0.1]], order=0), ((5, 6),)),
    ],
    "ndimage.rotate": [
        Case(lambda x: i_.rotate(x, 30.0, order=1), ((5, 6),)),
        Case(lambda x: i_.rotate(x, -50.0, (2, 0), False, order=1, mode="nearest"), ((4, 2, 5),)),
        Case(lambda x: i_.rotate(x, 90.0, order=0, cval=2.0), ((3, 4),)),
    ],
    "ndimage.sobel": Case(lambda x: i_.sobel(x, axis=0), ((6, 7),)),
    "ndimage.prewitt": Case(lambda x: i_.prewitt(x, mode="constant"), ((6, 7),)),
    "ndimage.uniform_filter": Case(lambda x: i_.uniform_filter(x, (3, 4)), ((6, 7),)),
    "ndimage.uniform_filter1d": Case(lambda x: i_.uniform_filter1d(x, 4, axis=0), ((6, 2),)),
    "signal.resample": [
        Case(lambda x, k=k, axis=axis: ta.signal.resample(x, k, axis=axis), ((6, 5),))
        for k, axis in ((4, 0), (9, 0), (8, 0), (6, 0), (4, 1))
    ],
    "signal.lfilter": Case(lambda x: ta.signal.lfilter([1.0, 0.5], [1.0, -0.3, 0.2], x, axis=0), ((6, 2),)),
    "signal.sosfilt": Case(lambda x: ta.signal.sosfilt([[1.0, 0.5, 0.2, 1.0, -0.3, 0.1]], x), ((2, 6),)),
}  # fmt: skip
