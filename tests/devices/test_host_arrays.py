"""Host arrays that the device hands out."""

from __future__ import annotations

import numpy as np
import pytest

import trio_accel as ta


@pytest.mark.parametrize("shape", [0, 5, (), (3, 0, 2), (200, 150)])
@pytest.mark.parametrize("dtype", [ta.DType.float64, "complex64", ta.DType.bfloat16, np.int8])
async def test_they_travel_both_ways(device: ta.Device, shape: object, dtype: object) -> None:
    host = device.host_empty(shape, dtype)  # type: ignore[arg-type]
    assert host.dtype == ta.DType.of(dtype).dtype  # type: ignore[arg-type]
    assert host.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert host.flags.writeable
    assert host.flags.c_contiguous
    host[...] = np.arange(host.size).reshape(host.shape).astype(np.int8).astype(host.dtype)
    back = device.host_empty(shape, dtype)  # type: ignore[arg-type]
    assert await (await device.put(host)).to_host(out=back) is back
    assert back.tobytes() == host.tobytes()


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (-1, ValueError, "host_empty: shape must hold sizes of at least 0, got -1"),
        ((2, True), ValueError, r"host_empty: shape must hold sizes of at least 0, got \(2, True\)"),
        (2.0, TypeError, "shape must be a size or a sequence of sizes, got 2.0"),
        ((2.0,), TypeError, "'float' object cannot be interpreted as an integer"),
    ],
)
async def test_what_is_no_shape_is_refused(
    device: ta.Device, shape: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        device.host_empty(shape)  # type: ignore[arg-type]


async def test_what_is_no_dtype_is_refused(device: ta.Device) -> None:
    with pytest.raises(TypeError, match="datetime64"):
        device.host_empty(3, "datetime64[s]")
