"""Random numbers on a device: a generator, its messages, and the actor that serves them."""

from ._generator import Generator
from ._messages import Bits, Exponential, Integers, Lognormal, Normal, RngActor, Uniform

__all__ = [
    "Bits", "Exponential", "Generator", "Integers", "Lognormal", "Normal", "RngActor", "Uniform",
]  # fmt: skip
