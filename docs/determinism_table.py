"""The table of functions that are not deterministic, made of what `benchmarks.gpu.replays` has recorded.

`docs/determinism.json` has what `python -m benchmarks.gpu.replays twice --json FILE` has written on a GPU.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "determinism.json"
_COLUMNS = 116
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("arrays.put", "arrays.put_along_axis"), "of indices that occur twice, any value may be the last"
    ),
    **dict.fromkeys(
        ("arrays.scatter", "arrays.scatter_nd"),
        "of indices that occur twice, any value may be the last, and sums are atomic",
    ),
    **dict.fromkeys(
        ("nn.conv_transpose1d", "nn.conv_transpose3d"), "by cuDNN, which chooses the order of its sums"
    ),
    **dict.fromkeys(("nn.embedding_grad", "nn.max_pool_grad"), "sums are atomic"),
    "sparse.spmm": "by cuSPARSE, which chooses the order of its sums",
}
"""The cause for each function: why its bits differ from one replay to the next."""


def record() -> Any:
    """Return the record that the benchmark has written: JSON, as its module describes it."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def tables() -> Iterator[str]:
    """The functions that are not deterministic, as paragraphs of Markdown."""
    found = record()
    count = len(found["determined"]) + len(found["varying"])
    yield "\n".join(
        textwrap.wrap(
            f"{found['date']}, {found['hardware']}: each of {count} functions was recorded with small and "
            "with larger arrays, and replayed on the same GPU. "
            f"{len(found['determined'])} had the same bits each time. The others:",
            _COLUMNS,
        )
    )
    rows = [
        f"| `{name}` | {', '.join(seen['dtypes'])} | {REASONS[name]} |"
        for name, seen in found["varying"].items()
    ]
    yield "\n".join(["| function | dtypes that differed | reason |", "|---|---|---|", *rows])
