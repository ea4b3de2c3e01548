# What the CUDA backend uses of cuda.core's utilities.

from typing import Any

import numpy as np

from . import Buffer

class StridedMemoryView:
    @classmethod
    def from_buffer(
        cls,
        buffer: Buffer,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = ...,
        *,
        itemsize: int | None = ...,
        dtype: np.dtype[Any] | None = ...,
        is_readonly: bool = ...,
    ) -> StridedMemoryView: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = ...,
        max_version: tuple[int, int] | None = ...,
        dl_device: tuple[int, int] | None = ...,
        copy: bool | None = ...,
    ) -> object: ...
