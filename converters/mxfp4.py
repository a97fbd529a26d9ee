"""MXFP4: two E2M1 codes a byte, low nibble first, one E8M0 scale byte for 32 inputs.

Moonshot's bytes are MLX's bytes: only shape and dtype are seen differently. `decode` is the naive
oracle for tests and reports; nothing converts through it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 32
NAN_SCALE = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = np.array(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))


def mlx_shape(packed: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of packed bytes `[…, in/2]` seen as MLX's 32-bit words `[…, in/8]`."""
    return (*packed[:-1], packed[-1] // 4)


def decode(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Exact values `[…, in]` of bytes `[…, in/2]` and scales `[…, in/32]`.

    Scale 255 is no number in the standard and decodes to NaN.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    powers = np.ldexp(1.0, scales.astype(np.int32) - 127)
    powers[scales == NAN_SCALE] = np.nan
    values: NDArray[np.float64] = _CODES[codes] * np.repeat(powers, GROUP, axis=-1)
    return values


def count_nan_scales(scales: bytes | memoryview) -> int:
    """How many scale bytes are 255."""
    return int(np.count_nonzero(np.frombuffer(scales, np.uint8) == NAN_SCALE))
