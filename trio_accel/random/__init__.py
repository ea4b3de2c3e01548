"""Random numbers on a device: a generator, its messages, and the actor that serves them."""

from ._actor import RngActor
from ._generator import Generator
from ._messages import Bits, Normal, Uniform

__all__ = ["Bits", "Generator", "Normal", "RngActor", "Uniform"]
