"""Weights of models: safetensors files, read straight into arrays of a device, and written from them."""

from ._files import Contents, inspect
from ._header import TensorInfo, WeightsError
from ._load import Weights, load
from ._save import save

__all__ = ["Contents", "TensorInfo", "Weights", "WeightsError", "inspect", "load", "save"]
