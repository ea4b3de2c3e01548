"""What kernels check before anything is enqueued."""

from __future__ import annotations

from functools import partial

from ...base import checks

__all__ = ["check_dtype", "check_same_dtype", "check_shapes"]

check_dtype = partial(checks.check_dtype, "cpu")
check_same_dtype = partial(checks.check_same_dtype, "cpu")
check_shapes = partial(checks.check_shapes, "cpu")
