# The part of TensorRT 10 that examples/tensorrt_engine.py calls, as documented.
from enum import Enum
from typing import ClassVar

class DataType(Enum):
    FLOAT = 0

float32: DataType

class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2

class ILogger:
    class Severity(Enum):
        WARNING = 2

class Logger(ILogger):
    WARNING: ClassVar[ILogger.Severity]
    def __init__(self, min_severity: ILogger.Severity = ...) -> None: ...

class IExecutionContext:
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def get_tensor_shape(self, name: str) -> tuple[int, ...]: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...

class ICudaEngine:
    num_io_tensors: int
    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> TensorIOMode: ...
    def get_tensor_dtype(self, name: str) -> DataType: ...
    def create_execution_context(self) -> IExecutionContext | None: ...

class Runtime:
    def __init__(self, logger: ILogger) -> None: ...
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...
