# What the CUDA backend uses of cuda.core's utilities.

from typing import Any

import numpy as np

from . import Buffer

class StridedMemoryView:
    @property
    def ptr(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...
    @property
    def dtype(self) -> np.dtype[Any] | None: ...
    @property
    def device_id(self) -> int: ...
    @property
    def is_device_accessible(self) -> bool: ...
    @classmethod
    def from_any_interface(cls, obj: object, stream_ptr: int | None = ...) -> StridedMemoryView: ...
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
