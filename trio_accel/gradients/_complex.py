"""The rules that hold for complex numbers, as the tests have found.

`tests/gradients/test_complex.py` holds each against differences in both halves of the complex plane. A rule
that is missing here refuses complex numbers, because a missing conjugate is a wrong gradient without an
error. Gradients derived from an expression or a body need no entry.
"""

from __future__ import annotations

__all__ = ["COMPLEX"]

_NAMES = {
    "AccelRef": "T __getitem__ at.add at.multiply at.set copy mT reshape transpose",
    "arrays": (
        "broadcast_arrays broadcast_to concat cosine_similarity cumulative_prod cumulative_sum "
        "diagonal expand_dims flip layer_norm linear_recurrence matrix_transpose mean meshgrid "
        "moveaxis nanprod nanstd pad permute_dims prod reshape rms_norm roll rot90 scan "
        "segmented_reduce sliding_window_view split squeeze stack std sum swapaxes take unstack "
        "var"
    ),
    "fft": (
        "czt fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 "
        "irfftn rfft rfft2 rfftn zoom_fft"
    ),
    "linalg": (
        "asum cho_solve cond det diagonal dot eig eigh eigvals einsum expm hessenberg inv ldl "
        "lstsq lu lu_solve matmul matrix_norm matrix_transpose nrm2 pinv polar qr schur slogdet solve "
        "solve_banded solve_toeplitz solve_triangular solve_tridiagonal sqrtm svd svdvals "
        "vector_norm"
    ),
    "ndimage": "convolve convolve1d correlate correlate1d spline_filter spline_filter1d",
    "nn": "embedding embedding_grad normalize pairwise_distance",
    "signal": "lfilter sosfilt",
    "sparse": "spmm spmv",
    "tensor": "einsum",
}
COMPLEX: frozenset[str] = frozenset(
    f"{room}.{name}" for room, names in _NAMES.items() for name in names.split()
)
"""The names of the functions."""
