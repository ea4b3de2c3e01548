"""The table of the page "From NumPy": calls of NumPy and PyTorch, and ours.

``python docs/crosswalk.py`` writes it into the page. `tests/docs/test_crosswalk.py` computes each row both
ways.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["PAGE", "ROWS", "page"]

PAGE = Path(__file__).parent / "guide" / "from_numpy.md"
_TABLE = re.compile(r"<!-- table: (?P<title>.+?) -->\n.*?<!-- end of table -->", re.DOTALL)

ROWS: dict[str, list[tuple[str, str, str]]] = {
    "Arrays": [
        ("np.asarray(host)", "torch.from_numpy(host).cuda()", "await device.put(host)"),
        ("np.asarray(x)", "x.cpu().numpy()", "await x.to_host()"),
        ("x.sum().item()", "x.sum().item()", "await ta.arrays.sum(x).item()"),
        ("x.astype('float64')", "x.to(torch.float64)", "await x.cast('float64')"),
        ("x.copy()", "x.clone()", "await x.copy()"),
        ("np.zeros((2, 3), 'float32')", "torch.zeros(2, 3)", "await device.zeros((2, 3), 'float32')"),
        ("np.full((2, 3), 7.0)", "torch.full((2, 3), 7.0)", "await ta.arrays.full(device, (2, 3), 7.0)"),
        ("np.arange(2, 20, 3)", "torch.arange(2, 20, 3)", "await ta.arrays.arange(device, 2, 20, 3)"),
        ("np.linspace(0, 1, 5)", "torch.linspace(0, 1, 5)", "await ta.arrays.linspace(device, 0, 1, 5)"),
        ("np.eye(3)", "torch.eye(3)", "await ta.arrays.eye(device, 3)"),
        ("np.ones_like(x)", "torch.ones_like(x)", "await ta.arrays.ones_like(x)"),
    ],
    "Each element": [
        ("x - 2 * y", "x - 2 * y", "await (x - 2 * y)"),
        ("np.sqrt(np.abs(x))", "x.abs().sqrt()", "await ta.arrays.sqrt(abs(x))"),
        ("np.exp(x, out=y)", "torch.exp(x, out=y)", "await ta.arrays.exp(x, out=y)"),
        ("np.where(x > 0, x, y)", "torch.where(x > 0, x, y)", "await ta.arrays.where(x > 0, x, y)"),
        ("np.clip(x, -1, 1)", "x.clamp(-1, 1)", "await ta.arrays.clip(x, -1, 1)"),
        ("np.maximum(x, 0)", "x.clamp(min=0)", "await ta.arrays.maximum(x, 0)"),
        ("m & ~(x > y)", "m & ~(x > y)", "await (m & ~(x > y))"),
        ("scipy.special.erf(x)", "x.erf()", "await ta.arrays.erf(x)"),
        ("scipy.special.gammaln(x)", "x.lgamma()", "await ta.arrays.gammaln(x)"),
        ("scipy.special.expit(x)", "x.sigmoid()", "await ta.arrays.expit(x)"),
        ("np.select([m], [x], 0)", "torch.where(m, x, 0)", "await ta.arrays.select([m], [x], 0)"),
    ],
    "Along axes": [
        ("x.sum(axis=1)", "x.sum(1)", "await ta.arrays.sum(x, axis=1)"),
        (
            "x.mean(axis=0, keepdims=True)",
            "x.mean(0, keepdim=True)",
            "await ta.arrays.mean(x, axis=0, keepdims=True)",
        ),
        ("x.std(axis=1, ddof=1)", "x.std(1)", "await ta.arrays.std(x, axis=1, correction=1)"),
        ("x.max()", "x.max()", "await ta.arrays.max(x)"),
        ("x.argmax(axis=1)", "x.argmax(1)", "await ta.arrays.argmax(x, axis=1)"),
        ("m.any(axis=0)", "m.any(0)", "await ta.arrays.any(m, axis=0)"),
        ("np.median(x, axis=1)", "x.quantile(0.5, 1)", "await ta.arrays.median(x, axis=1)"),
        ("np.cumsum(x, axis=1)", "x.cumsum(1)", "await ta.arrays.cumulative_sum(x, axis=1)"),
        (
            "np.maximum.accumulate(x, axis=1)",
            "x.cummax(1).values",
            "await ta.arrays.cumulative_max(x, axis=1)",
        ),
        (
            "np.logaddexp.accumulate(x, axis=1)",
            "x.logcumsumexp(1)",
            "await ta.arrays.cumulative_logsumexp(x, axis=1)",
        ),
        ("scipy.special.logsumexp(x, axis=1)", "x.logsumexp(1)", "await ta.arrays.logsumexp(x, axis=1)"),
        ("scipy.special.softmax(x, axis=-1)", "x.softmax(-1)", "await ta.arrays.softmax(x, axis=-1)"),
        (
            "np.linalg.norm(x, axis=1)",
            "torch.linalg.vector_norm(x, dim=1)",
            "await ta.linalg.vector_norm(x, axis=1)",
        ),
    ],
    "Parts and shapes": [
        ("x[1:3] = 0", "x[1:3] = 0", "await x[1:3].assign(0)"),
        ("x[:, 2] = y[:, 0]", "x[:, 2] = y[:, 0]", "await x[:, 2].assign(y[:, 0])"),
        ("y = x.copy(); y[1:3] = 0", "y = x.clone(); y[1:3] = 0", "y = await x.at[1:3].set(0)"),
        ("t.transpose(2, 0, 1)", "t.permute(2, 0, 1)", "t.transpose((2, 0, 1))"),
        ("np.rot90(x)", "x.rot90()", "ta.arrays.rot90(x)"),
        ("x.swapaxes(0, 1)", "x.swapaxes(0, 1)", "ta.arrays.swapaxes(x, 0, 1)"),
        ("np.flip(x, 1)", "x.flip(1)", "ta.arrays.flip(x, axis=1)"),
        ("np.broadcast_to(v, (4, 6))", "v.expand(4, 6)", "ta.arrays.broadcast_to(v, (4, 6))"),
        (
            "np.lib.stride_tricks.sliding_window_view(v, 3)",
            "v.unfold(0, 3, 1)",
            "ta.arrays.sliding_window_view(v, 3)",
        ),
        ("x[:, i]", "x[:, i]", "await ta.arrays.take(x, i, axis=1)"),
        (
            "np.take_along_axis(x, k, 1)",
            "x.take_along_dim(k, 1)",
            "await ta.arrays.take_along_axis(x, k, axis=1)",
        ),
        ("x[m]", "x[m]", "await ta.arrays.compress(m, x)"),
        ("np.nonzero(m)[0]", "m.nonzero()[:, 0]", "(await ta.arrays.nonzero(m))[0]"),
        ("np.concatenate([x, y], axis=1)", "torch.cat([x, y], 1)", "await ta.arrays.concat([x, y], axis=1)"),
        ("np.repeat(x, 3, axis=0)", "x.repeat_interleave(3, 0)", "await ta.arrays.repeat(x, 3, axis=0)"),
        ("np.pad(v, (1, 2))", "F.pad(v, (1, 2))", "await ta.arrays.pad(v, (1, 2))"),
    ],
    "Order, sets, counts": [
        ("np.sort(x, axis=1)", "x.sort(1).values", "await ta.arrays.sort(x, axis=1)"),
        ("np.sort(v)[::-1][:3]", "v.topk(3).values", "(await ta.arrays.top_k(v, 3)).values"),
        ("np.unique(n)", "n.unique()", "await ta.arrays.unique_values(n)"),
        (
            "np.unique(n, return_counts=True)[1]",
            "n.unique(return_counts=True)[1]",
            "(await ta.arrays.unique_counts(n)).counts",
        ),
        (
            "np.digitize(v, np.sort(v))",
            "torch.bucketize(v, v.sort().values, right=True)",
            "await ta.arrays.digitize(v, ta.arrays.sort(v))",
        ),
        (
            "np.histogram(v, 4, (-1, 1))[0]",
            "v.histc(4, -1, 1)",
            "(await ta.arrays.histogram(v, 4, range=(-1.0, 1.0))).counts",
        ),
        (
            "len(scipy.spatial.cKDTree(y[:, :3]).query_pairs(2.0))",
            "(torch.pdist(y[:, :3]) <= 2).sum()",
            "(await ta.spatial.neighbours(y[:, :3], 2.0))[1].size // 2",
        ),
    ],
    "Linear algebra": [
        ("a @ a.T", "a @ a.T", "await (a @ a.T)"),
        ("np.linalg.solve(a, b)", "torch.linalg.solve(a, b)", "await ta.linalg.solve(a, b)"),
        ("np.linalg.eigh(a)[0]", "torch.linalg.eigh(a)[0]", "(await ta.linalg.eigh(a))[0]"),
        ("np.linalg.svd(a)[1]", "torch.linalg.svd(a)[1]", "(await ta.linalg.svd(a))[1]"),
        ("np.linalg.norm(a)", "torch.linalg.matrix_norm(a)", "await ta.linalg.matrix_norm(a)"),
    ],
    "Transforms": [
        ("np.fft.rfft(v)", "torch.fft.rfft(v)", "await ta.fft.rfft(v)"),
        ("np.fft.ifft(z)", "torch.fft.ifft(z)", "await ta.fft.ifft(z)"),
        (
            "scipy.signal.lfilter([1], [1, -0.5], x)",
            "torchaudio.functional.lfilter(x, a, b)",
            "await ta.signal.lfilter([1], [1, -0.5], x)",
        ),
        ("scipy.signal.resample(v, 9)", "none", "await ta.signal.resample(v, 9)"),
    ],
    "Images": [
        (
            "scipy.ndimage.gaussian_filter(x, 1.0)",
            "torchvision: gaussian_blur(x, 9, 1.0)",
            "await ta.ndimage.gaussian_filter(x, 1.0)",
        ),
        (
            "scipy.ndimage.maximum_filter(x, 3)",
            "F.max_pool2d(x[None], 3, 1, 1)",
            "await ta.ndimage.maximum_filter(x, 3)",
        ),
        (
            "scipy.ndimage.zoom(x, 2, order=1)",
            "F.interpolate(x[None, None], scale_factor=2, mode='bilinear', align_corners=True)",
            "await ta.ndimage.zoom(x, 2, order=1)",
        ),
        (
            "scipy.ndimage.label(x > 0)[0]",
            "none",
            "(await ta.ndimage.label(ta.arrays.greater(x, 0))).labels",
        ),
    ],
}
"""By the titles of the tables: NumPy's call, PyTorch's, and ours."""


def page(text: str) -> str:
    """Return a page with its tables made anew."""
    return _TABLE.sub(lambda found: _table(found["title"]), text)


def _table(title: str) -> str:
    rows = ["| NumPy, CuPy | PyTorch | trio_accel |", "|---|---|---|"]
    rows += [f"| {' | '.join(_code(cell) for cell in row)} |" for row in ROWS[title]]
    return "\n".join((f"<!-- table: {title} -->", *rows, "<!-- end of table -->"))


def _code(cell: str) -> str:
    return f"`{cell}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
