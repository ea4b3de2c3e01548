"""Weights of models: safetensors files, read straight into arrays of a device, and written from them."""

from ._header import TensorInfo, WeightsError
from ._inspect import Contents, inspect
from ._load import load
from ._save import save
from ._weights import Weights

__all__ = ["Contents", "TensorInfo", "Weights", "WeightsError", "inspect", "load", "save"]
