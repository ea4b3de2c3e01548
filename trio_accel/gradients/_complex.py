"""The rules that hold for complex numbers, as the tests have found.

`tests/gradients/test_complex.py` holds each against differences in both halves of the complex plane. A rule
that is missing here refuses complex numbers, because a missing conjugate is a wrong gradient without an
error. Gradients derived from an expression need no entry.
"""

from __future__ import annotations

__all__ = ["COMPLEX"]

_NAMES = {
    "AccelRef": "T __getitem__ copy mT reshape transpose",
    "arrays": (
        "average broadcast_arrays broadcast_to concat cosine_similarity cov cumulative_prod "
        "cumulative_sum diag diagonal diff expand_dims flip gather_nd gradient layer_norm "
        "linear_recurrence matrix_transpose mean meshgrid moveaxis nan_to_num nanprod nanstd pad "
        "permute_dims polyval prod repeat reshape rms_norm roll rot90 scan segmented_reduce select "
        "sliding_window_view split squeeze stack std sum swapaxes take take_along_axis tile trapezoid "
        "tril triu unstack vander var"
    ),
    "fft": (
        "convolve correlate czt dct dctn dst dstn fft fft2 fftconvolve fftn fftshift hfft hfft2 hfftn "
        "hilbert idct idctn idst idstn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft irfft2 "
        "irfftn oaconvolve rfft rfft2 rfftn zoom_fft"
    ),
    "linalg": (
        "asum cho_solve cond cross det diagonal dot eig eigh eigvals einsum expm hessenberg inv kron ldl "
        "lstsq lu lu_solve matmul matrix_norm matrix_power matrix_transpose multi_dot nrm2 outer pinv "
        "polar qr schur slogdet solve solve_banded solve_toeplitz solve_triangular solve_tridiagonal "
        "sqrtm svd svdvals tensordot trace vecdot vector_norm"
    ),
    "ndimage": (
        "affine_transform convolve convolve1d correlate correlate1d gaussian_filter gaussian_filter1d "
        "gaussian_laplace laplace map_coordinates prewitt rotate shift sobel spline_filter "
        "spline_filter1d uniform_filter uniform_filter1d zoom"
    ),
    "nn": (
        "conv_bias_grad dropout_grad embedding embedding_grad normalize pairwise_distance triplet_margin_loss"
    ),
    "signal": "lfilter resample sosfilt stft welch",
    "sparse": "spmm spmv",
    "tensor": "contract einsum permute reduce",
}
COMPLEX: frozenset[str] = frozenset(
    f"{room}.{name}" for room, names in _NAMES.items() for name in names.split()
)
"""The names of the functions."""
