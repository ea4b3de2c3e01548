"""Files of adapters with changed bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trio_accel import train

safetensors = pytest.importorskip("safetensors.numpy")
LORA = train.Lora(["up"], rank=2)
ARRAYS = {
    "up.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "up.lora_B.weight": np.arange(8, dtype=np.float32).reshape(4, 2),
}


def test_each_changed_number_is_found(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    LORA.save(path, ARRAYS)
    content = path.read_bytes()
    assert LORA.load(path).keys() == ARRAYS.keys()
    for at in range(len(content) - 56, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(train.AdapterError, match="is damaged: its numbers have another checksum"):
            LORA.load(path)


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    settings = {"rank": 2, "alpha": 16.0, "targets": ["up"], "base": 0}
    path.write_bytes(safetensors.save(ARRAYS, {"format": "pt", "lora": json.dumps(settings)}))
    for name, array in LORA.load(path).items():
        np.testing.assert_array_equal(array, ARRAYS[name])
