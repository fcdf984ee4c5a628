"""RotaryScaling: how rotary embeddings are stretched to longer contexts."""

from __future__ import annotations

import ctypes
from typing import Optional, Sequence

from . import _abi, _library
from ._library import Library, Object


class RotaryScaling(Object):
    """The argument `scaling` of quern.ops.rotary_embedding. ops/rope/rotary_scaling.h has the equations.

    kind: "linear" (w / factor), "dynamic_ntk", "llama3", "yarn" or "longrope"; "none". factor: how much longer.
    original: the context length of training, for all but linear. target: that to serve, for dynamic_ntk and
    longrope. low_freq and high_freq: of llama3. beta_fast, beta_slow, truncate, attention_factor, mscale and
    mscale_all_dim: of yarn; 0 for both mscales: not given. short_factors and long_factors: of longrope,
    rot_dim / 2 numbers each. Wrong numbers are refused where an operator is made with them.
    """

    def __init__(
        self,
        kind: str,
        *,
        factor: float = 1.0,
        original: int = 0,
        target: int = 0,
        low_freq: float = 1.0,
        high_freq: float = 4.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float = 1.0,
        mscale: float = 0.0,
        mscale_all_dim: float = 0.0,
        short_factors: Sequence[float] = (),
        long_factors: Sequence[float] = (),
        library: Optional[Library] = None,
    ):
        library = library or _library.library()
        options = _abi.RotaryScalingOptions(ctypes.sizeof(_abi.RotaryScalingOptions), _library.text("kind", kind))
        for name, number in (
            ("factor", factor),
            ("low_freq", low_freq),
            ("high_freq", high_freq),
            ("beta_fast", beta_fast),
            ("beta_slow", beta_slow),
            ("attention_factor", attention_factor),
        ):
            if not number:  # 0 in C is the default, and no number that an operator takes
                raise ValueError(f"{name}={number}; need another number than 0")
            setattr(options, name, number)
        options.mscale, options.mscale_all_dim = mscale, mscale_all_dim
        options.untruncated = not truncate
        options.original = _library.whole("original", original)
        options.target = _library.whole("target", target)
        if len(short_factors) != len(long_factors):
            raise ValueError(
                f"short_factors and long_factors have {len(short_factors)} and {len(long_factors)} numbers; "
                "need as many of each"
            )
        listed = [(ctypes.c_double * len(f))(*f) for f in (short_factors, long_factors)]
        doubles = ctypes.POINTER(ctypes.c_double)
        options.short_factors, options.long_factors = (ctypes.cast(f, doubles) for f in listed)
        options.num_factors = len(short_factors)
        super().__init__(library, library._create(library._c.quern_rotary_scaling_create, ctypes.byref(options)))
