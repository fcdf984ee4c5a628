"""SGLang's packed weights, plain again, and as Quern's packed weights.

convert_weight_packed cuts a weight [.., n, k] into blocks of 32 columns (the last may have 16):

    bf16, f16, f8e4m3   [k / 2][cols][2]
    i8                  [k / 4][32][4], and behind it 32 sums of columns as i32
    u8, MXFP4           [k / 2][16][2] bytes: column c in the low half, c + 16 in the high one

convert_scale_packed puts MXFP4's scales [.., n, groups] into [n / 32][groups][32], and
convert_weight_packed_scale_zp packs 4-bit codes with zero points (ops/registry/sglang/products/product_ops.h).
"""

from __future__ import annotations

from typing import Optional

import torch

from ._linear import Linear

_COLS = 32
# SGLang's CPUQuantMethod, the argument moe_comp_method.
PLAIN, INT8, FP8, INT4, MXFP4 = range(5)
METHODS = ("plain", "int8", "fp8", "int4", "mxfp4")
AWQ, GPTQ = range(2)


def _columns(block: torch.Tensor, cols: int, k: int, v: int) -> torch.Tensor:
    """[blocks][k / v][cols][v] as [blocks * cols, k]."""
    return block.reshape(-1, k // v, cols, v).permute(0, 2, 1, 3).reshape(-1, k)


def plain(packed: torch.Tensor) -> torch.Tensor:
    """The floats or int8 codes [n, k] that convert_weight_packed was given."""
    n, width = packed.shape
    if packed.dtype is torch.int8:
        k = width - 4
        blocks = packed.reshape(-1, _COLS * width)[:, : _COLS * k]
        return _columns(blocks, _COLS, k, 4)
    # Eight-bit floats have few operators; their bytes have all.
    elements = packed.reshape(-1)
    elements = elements.view(torch.uint8) if packed.element_size() == 1 else elements
    whole = n // _COLS * _COLS * width
    parts = [_columns(elements[:whole], _COLS, width, 2)]
    if n % _COLS:
        parts.append(_columns(elements[whole:], n % _COLS, width, 2))
    return torch.cat(parts).view(packed.dtype)


def _halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The low four bits of bytes, then the high ones, stacked along a new dimension."""
    return torch.stack((x & 15, x >> 4), dim)


def plain_mxfp4(packed: torch.Tensor, scales: torch.Tensor, is_vnni: bool) -> tuple:
    """(codes u8[n, k], exponents u8[n, k / 32])."""
    n, half = packed.shape
    if not is_vnni:
        return _halves(packed, 2).reshape(n, 2 * half), scales
    # [blocks][k / 2][16][2], of which a byte has columns c and c + 16.
    codes = _halves(packed.reshape(-1, half, _COLS // 2, 2), 1)
    codes = codes.permute(0, 1, 3, 2, 4).reshape(n, 2 * half)
    return codes, scales.reshape(n // _COLS, -1, _COLS).transpose(1, 2).reshape(n, -1)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """i32 words of eight codes each, along the last dimension, the first in the lowest bits."""
    bytes_ = codes[..., 0::2] | codes[..., 1::2] << 4
    return bytes_.contiguous().view(torch.int32)


def plain_int4(weight: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> tuple:
    """(codes u8[n, k], zeros u8[groups, n], scales f32[groups, n]) of what convert_weight_packed_scale_zp made of one matrix."""
    blocks, depth, width = weight.shape
    block = (width - 4 * _COLS) // 16
    quads = weight[..., : 16 * block].reshape(blocks, depth, block // 4, 2, 8, 4)
    codes = _halves(quads, 4).permute(0, 3, 4, 5, 1, 2, 6).reshape(blocks * _COLS, depth * block)
    groups = [x.transpose(0, 1).reshape(x.shape[1], -1) for x in (zeros, scales)]
    return codes, groups[0].to(torch.uint8), groups[1]


def _mxfp4_blocks(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """GGUF's blocks of 32: the exponent, and 16 bytes of codes i and i + 16."""
    n, groups = exponents.shape
    halves = codes.reshape(n, groups, 2, 16)
    blocks = torch.cat((exponents.unsqueeze(-1), halves[:, :, 0] | halves[:, :, 1] << 4), -1)
    return blocks.reshape(n, -1)


def linear(
    weight: torch.Tensor,
    scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    *,
    method: int = PLAIN,
    zero: Optional[torch.Tensor] = None,
    block_size=None,
    is_vnni: bool = False,
    gated: bool = False,
    interleaved: bool = False,
) -> Linear:
    """One matrix by SGLang's arguments. gated: gate over up, or, with `interleaved`, row by row in turn."""
    if scale is None and method != PLAIN:
        raise ValueError(f"weights in {METHODS[method]} have no scales; need them")
    given: dict = {}
    options: dict = {"gated": gated}
    if method == MXFP4:
        codes, exponents = plain_mxfp4(weight, scale, is_vnni)
        given["codes"] = _mxfp4_blocks(codes, exponents)
        given["layout"] = "blocks"
        options.update(format="blocks", block_format="MXFP4", k=codes.shape[1])
    elif method == INT4:
        codes, zeros, given["scales"] = plain_int4(weight, zero, scale)
        options.update(format="i4_group", group_size=codes.shape[1] // zeros.shape[0])
        given["codes"], given["zeros"] = codes, zeros
        if int(zeros.max()) > 15:
            # GPTQ counts zero points from 1, and its layout alone has one of 16.
            given.update(layout="gptq", codes=_words(codes).t(), zeros=_words(zeros - 1))
    else:
        given["codes"] = plain(weight) if is_vnni else weight
        if method == INT8:
            given["scales"] = scale.reshape(-1).float()
            options.update(format="i8_channel")
        elif method == FP8:
            given["scales"] = scale.float()
            given["block_n"] = block_size[0]
            options.update(format="e4m3_block", group_size=block_size[1])
    if bias is not None:
        given["bias"] = bias.float()
    sources = [_every_second(given, first) for first in (0, 1)] if interleaved else [given]
    return Linear.from_sources([_dense(source) for source in sources], **options)


def _dense(source: dict) -> dict:
    return {name: x.detach().contiguous() if isinstance(x, torch.Tensor) else x for name, x in source.items()}


def _every_second(source: dict, first: int) -> dict:
    """Rows first, first + 2 and so on of a weight and what goes with it."""
    rows = dict(source)
    rows["codes"] = source["codes"][first::2]
    for name in ("bias", "scales", "zeros"):
        x = source.get(name)
        if x is None:
            continue
        if name == "scales" and "block_n" in source:
            # A block of block_n rows has half as many of each kind.
            if source["block_n"] % 2:
                raise ValueError(f"block_size[0]={source['block_n']}; need an even number with interleaved weights")
            rows["block_n"] = source["block_n"] // 2
        elif x.dim() == 2:
            rows[name] = x[:, first::2]
        else:
            rows[name] = x[first::2]
    return rows
