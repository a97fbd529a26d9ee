"""MXFP4 for torch: a straight-through quantizer and the bytes on disk.

Groups of 32 along the last axis; a code is a sign and one of eight e2m1 sizes, a scale is a
power of two. The packer writes exactly the values that the quantizer trains with.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP = 32


def mxfp4_scale_exponents(weight: Tensor) -> Tensor:
    """Per group of 32 inputs, the smallest power of two that keeps the largest value within 6."""
    amax = weight.detach().unflatten(-1, (-1, MXFP4_GROUP)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / 6.0)
    exact = mantissa == 0.5
    return torch.where(amax > 0, exponent - exact.to(exponent.dtype), -127).clamp(-127, 127)


def mxfp4_round(scaled: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code, for |scaled| <= 6."""
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(scaled / step) * step


def mxfp4_values(weight: Tensor) -> Tensor:
    """The value that each weight has after MXFP4, groups along the last axis."""
    scale = torch.exp2(mxfp4_scale_exponents(weight).float()).unsqueeze(-1)
    groups = weight.unflatten(-1, (-1, MXFP4_GROUP))
    return (mxfp4_round(groups / scale) * scale).flatten(-2)


def mxfp4_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weight_packed, weight_scale) as on disk: low nibble first, scale byte = exponent + 127."""
    exponents = mxfp4_scale_exponents(weight)
    groups = weight.unflatten(-1, (-1, MXFP4_GROUP)) / torch.exp2(exponents.float()).unsqueeze(-1)
    values = mxfp4_round(groups).flatten(-2)
    codes = torch.searchsorted(torch.tensor(E2M1), values.abs()).to(torch.uint8)
    codes = codes | (torch.signbit(values) & (values != 0)).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def straight_through_mxfp4(weight: Tensor) -> Tensor:
    return weight + (mxfp4_values(weight.detach()) - weight.detach())
