# What the CUDA backend uses of nvmath-python's cuSOLVER.

from enum import IntEnum

class Status(IntEnum):
    SUCCESS = 0

class cuSOLVERError(Exception):
    status: Status
