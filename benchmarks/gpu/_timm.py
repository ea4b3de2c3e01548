"""A user's own model: resnet18 of `timm`, with random weights. The class knows nothing of devices."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_accel.programs import Array, method

__all__ = ["Timm", "random_weights"]

torch: Any = import_module("torch")  # both without types, as they are no dependencies
timm: Any = import_module("timm")


def _new_model() -> Any:
    return timm.create_model("resnet18", pretrained=False)


def random_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a new model by name, the same ones each time."""
    torch.manual_seed(0)
    state: Mapping[str, Any] = _new_model().state_dict()
    return {name: weight.numpy() for name, weight in state.items() if weight.dtype == torch.float32}


class Timm:
    """A resnet18, whose weights are tensors over the arrays that it gets.

    Args:
        weights: Arrays by name, as `random_weights` returns them.

    Raises:
        RuntimeError: A weight is missing.
    """

    def __init__(self, weights: Mapping[str, Array]) -> None:
        with torch.device("meta"):
            self._model = _new_model().eval()
        state = {name: torch.from_dlpack(weight) for name, weight in weights.items()}
        self._device: Any = next(iter(state.values())).device
        self._model.load_state_dict(state, assign=True, strict=False)
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta and buffer.is_floating_point():
                raise RuntimeError(f"the weights have no {name}")

    def warm_up(self) -> None:
        """Have cuDNN load its kernels before a request waits."""
        with torch.inference_mode():
            self._model(torch.zeros((8, 3, 224, 224), device=self._device))

    @method(out=lambda images, places: ((images.shape[0], 1000), "float32"))
    def classify(self, images: Array, places: Array) -> Array:
        """Return the scores of images.

        Args:
            images: Of shape (images, 3, height, width), float32.
            places: The order of the images, int64. It is not checked: a place that there is not is a failed
                assertion in a kernel.
        """
        with torch.inference_mode():
            scores: Array = self._model(torch.from_dlpack(images)[torch.from_dlpack(places)])
            return scores
