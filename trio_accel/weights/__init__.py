"""Weights of models: safetensors files, read straight into arrays of a device, and written from them."""

from .._names import export as _export
from ._files import *
from ._transfers import *

_export(__name__)
