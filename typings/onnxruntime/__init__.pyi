# What an example uses of ONNX Runtime, which has no types.

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class SessionOptions:
    def add_session_config_entry(self, key: str, value: str) -> None: ...

class IOBinding:
    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: npt.DTypeLike,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None: ...
    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: npt.DTypeLike | None = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None: ...

class InferenceSession:
    def __init__(
        self,
        path_or_bytes: str | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[str, str]]] | None = None,
    ) -> None: ...
    def get_providers(self) -> list[str]: ...
    def io_binding(self) -> IOBinding: ...
    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, npt.NDArray[np.generic]]
    ) -> list[npt.NDArray[Any]]: ...
    def run_with_iobinding(self, iobinding: IOBinding) -> None: ...
