"""Weights of models: safetensors files, read straight into arrays of a device, and written from them."""

from ._files import Contents, TensorInfo, WeightsError, inspect
from ._transfers import Weights, load, save

__all__ = ["Contents", "TensorInfo", "Weights", "WeightsError", "inspect", "load", "save"]
