# What the CUDA backend uses of cuda.core's utilities.

class FileStreamProgramCache:
    def __init__(self) -> None: ...
