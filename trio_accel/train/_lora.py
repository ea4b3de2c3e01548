"""Low-rank adapters of linear layers (LoRA; Hu et al., 2021) for modules of PyTorch.

`torch` is imported by the module of the model, not here.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..actors import fits, is_number, must_be_whole, named_options, validator
from ._layout import FlatLayout, base_of, checksum_of
from ._mesh import torch_of_model
from ._torch_parts import matches, on_host

__all__ = ["AdapterError", "Lora"]

_PARTS = ("lora_A", "lora_B")


class AdapterError(Exception):
    """The file of an adapter is damaged, or belongs to another model, rank or scale."""


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("files of adapters need safetensors: pip install safetensors") from error


@named_options
@attrs.frozen
class Lora:
    """Adapters of linear layers: ``output + alpha / rank * B(A(input))``, where only A and B are trained.

    Attributes:
        targets: Names of layers, such as ``"layers.*.q_proj"``, where ``*`` and ``?`` match no dot.
        rank: Rows of A, and columns of B.
        alpha: The factor of the adapter, times the rank.
    """

    targets: Sequence[str] = attrs.field(
        validator=validator(
            "be names of layers", lambda value: bool(value) and fits(Sequence[str], value), TypeError
        )
    )
    rank: int = attrs.field(default=8, kw_only=True, validator=must_be_whole(1))
    alpha: float = attrs.field(
        default=16.0,
        kw_only=True,
        validator=validator("be a number", lambda value: is_number(value, -1e30, 1e30)),
    )

    def add(self, model: Any) -> Any:
        """Add adapters to a model, freeze its own parameters, and return it.

        A begins with random numbers and B with zeros, so the outputs stay the same at first.

        Args:
            model: A `torch.nn.Module`.

        Raises:
            ValueError: A name matches no layer, or a layer is not a `torch.nn.Linear` or already has an
                adapter.
        """
        nn = torch_of_model().nn
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        layers = dict(model.named_modules())
        for target in self.targets:
            names = [name for name in layers if matches(target, name)]
            if not names:
                raise ValueError(f"Lora: {target!r} matches no layer of the model")
            for name in names:
                layer = layers[name]
                if not isinstance(layer, nn.Linear) or hasattr(layer, _PARTS[0]):
                    raise ValueError(
                        f"Lora: {name!r} must be a Linear layer without an adapter, got {layer!r}"
                    )
                like = {"device": layer.weight.device, "dtype": layer.weight.dtype, "bias": False}
                layer.lora_A = nn.Linear(layer.in_features, self.rank, **like)
                layer.lora_B = nn.Linear(self.rank, layer.out_features, **like)
                nn.init.kaiming_uniform_(layer.lora_A.weight, a=math.sqrt(5))
                nn.init.zeros_(layer.lora_B.weight)
                layer.register_forward_hook(self._added)
        return model

    def _added(self, layer: Any, inputs: Sequence[Any], output: Any) -> Any:
        return output + layer.lora_B(layer.lora_A(inputs[0])) * (self.alpha / self.rank)

    def save(
        self, path: str | os.PathLike[str], parameters: Mapping[str, npt.NDArray[Any]], *, base: int = 0
    ) -> None:
        """Write an adapter as a safetensors file, which appears when it is complete.

        Args:
            path: The file.
            parameters: A and B of each layer by name, as `Trainer.parameters` returns them.
            base: The checksum of the frozen parameters, `Trainer.base`; 0 for no check by `put`.

        Raises:
            ImportError: The package safetensors is not installed.
            AdapterError: The parameters do not belong to an adapter of this rank.
        """
        arrays = {name: np.ascontiguousarray(array) for name, array in parameters.items()}
        self._check(arrays, "parameters")
        settings: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "targets": [*self.targets]}
        settings |= {"base": base, "checksum": self.base_of(arrays)}
        data: bytes = _safetensors("safetensors.numpy").save(
            arrays, {"format": "pt", "lora": json.dumps(settings)}
        )
        path = Path(path)
        beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str], *, base: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Read the arrays of an adapter that `save` has written.

        Args:
            path: The file.
            base: The checksum of the model's frozen parameters; 0 for no check.

        Raises:
            ImportError: The package safetensors is not installed.
            FileNotFoundError: The file does not exist.
            AdapterError: The file is damaged, or belongs to another rank, scale or model.
        """
        safetensors = _safetensors("safetensors")
        arrays: dict[str, npt.NDArray[Any]] = {}
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata: dict[str, str] = file.metadata() or {}
                settings: Any = json.loads(metadata.get("lora", "{}"))
                arrays |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (safetensors.SafetensorError, ValueError, RecursionError) as error:
            raise AdapterError(f"adapter {path} cannot be read: {error}") from error
        if not fits(dict[str, object], settings):
            settings = {}
        for name, expected in (("rank", self.rank), ("alpha", self.alpha)):
            if settings.get(name) != expected:
                raise AdapterError(
                    f"adapter {path} has the {name} {settings.get(name)!r}, and {expected!r} is wanted"
                )
        if base and settings.get("base") not in (0, base):
            raise AdapterError(f"adapter {path} is of another model: the parameters that it adapts differ")
        self._check(arrays, f"adapter {path}")
        # Earlier versions wrote files without a checksum.
        if settings.get("checksum", checksum := self.base_of(arrays)) != checksum:
            raise AdapterError(f"adapter {path} is damaged: its numbers have another checksum")
        return arrays

    def put(self, model: Any, path: str | os.PathLike[str]) -> None:
        """Read an adapter into a model that `add` has changed.

        Raises:
            AdapterError: See `load`; or the model has other layers or shapes.
        """
        torch, named = torch_of_model(), dict(model.named_parameters())
        frozen = {name: on_host(tensor) for name, tensor in named.items() if not tensor.requires_grad}
        arrays = self.load(path, base=self.base_of(frozen))
        adapter = {name: tensor for name, tensor in named.items() if name.split(".")[-2] in _PARTS}
        layout = FlatLayout([*adapter], [tensor.shape for tensor in adapter.values()])
        if difference := layout.difference({name: array.shape for name, array in arrays.items()}):
            raise AdapterError(f"adapter {path} is of another model: {difference}")
        with torch.no_grad():
            for name, parameter in adapter.items():
                parameter.copy_(torch.from_numpy(arrays[name]))

    @staticmethod
    def base_of(parameters: Mapping[str, Any]) -> int:
        """Return the checksum of a model's frozen parameters, by their names: the `base` of an adapter."""
        return base_of({f"0 {name}": checksum_of(name, array) for name, array in parameters.items()})

    def changes(self, parameters: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the change of the weights by an adapter, by name: arrays of shape (outputs, inputs).

        Args:
            parameters: The arrays of an adapter, from `load`.
        """
        self._check(parameters, "parameters")
        layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in parameters)
        return {
            f"{layer}.weight": parameters[f"{layer}.lora_B.weight"]
            @ parameters[f"{layer}.lora_A.weight"]
            * (self.alpha / self.rank)
            for layer in layers
        }

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]], source: str) -> None:
        for name, array in arrays.items():
            layer, _, part = name.removesuffix(".weight").rpartition(".")
            counterpart = f"{layer}.{_PARTS[part == _PARTS[0]]}.weight"
            rank = array.shape[part == _PARTS[1]] if array.ndim == 2 else None
            if part not in _PARTS or counterpart not in arrays or rank != self.rank:
                raise AdapterError(
                    f"{source}: {name!r} of shape {array.shape} is not part of an adapter of rank {self.rank}"
                )
        if not arrays:
            raise AdapterError(f"{source}: the file contains no arrays")
