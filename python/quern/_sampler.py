"""Sampler: the next token of each row of logits."""

from __future__ import annotations

import ctypes
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from . import _abi, _abi_model, _errors, _library, _tensor
from ._library import Executor, Library, Object


class Sampling(NamedTuple):
    """How one row is sampled; ops/sampling/sampler.h has the equation."""

    temperature: float = 0.0  # 0: the largest logit
    top_k: int = 0  # the number of candidates; 0: all
    top_p: float = 1.0  # their share of the probability, in (0, 1]
    seed: int = 0  # names a stream of draws
    step: int = 0  # the number of the draw in it, such as the sequence's length
    min_p: float = 0.0  # the least weight, as a share of the largest, in [0, 1]
    top_n_sigma: float = 0.0  # logits within so many standard deviations of the largest; 0: all
    typical_p: float = 1.0  # the share of the tokens nearest to the entropy, in (0, 1]


_MOST_FLOAT = 3.4e38


def _unsigned(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; need a whole number")
    value = value.__index__()
    if not 0 <= value < 2**64:
        raise OverflowError(f"{name}={value}; need 64 bits without a sign")
    return value


def to_c(sampling: Sampling) -> Tuple[_abi_model.Sampling, _abi_model.SamplingFilters]:
    # Before a float of C could become infinite, and a 0 that C takes for "not given".
    if not 0 <= sampling.temperature <= _MOST_FLOAT:
        raise ValueError(f"temperature={sampling.temperature}; need a number of 0 or more")
    for name in ("top_p", "typical_p"):
        if not 0 < getattr(sampling, name) <= 1:
            raise ValueError(f"{name}={getattr(sampling, name)}; need more than 0, and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p={sampling.min_p}; need 0 to 1")
    if not 0 <= sampling.top_n_sigma <= _MOST_FLOAT:
        raise ValueError(f"top_n_sigma={sampling.top_n_sigma}; need a number of 0 or more")
    if _library.whole("top_k", sampling.top_k) < 0:
        raise ValueError(f"top_k={sampling.top_k}; need 0 or more")
    return (
        _abi_model.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k.__index__(),
            seed=_unsigned("seed", sampling.seed),
            step=_unsigned("step", sampling.step),
        ),
        _abi_model.SamplingFilters(
            size=ctypes.sizeof(_abi_model.SamplingFilters),
            min_p=sampling.min_p,
            top_n_sigma=sampling.top_n_sigma,
            typical_p=sampling.typical_p,
        ),
    )


class Sampler(Object):
    """Samples tokens from logits f32[rows, vocab]. One call at a time: another thread's is refused."""

    def __init__(self, vocab: int, *, library: Optional[Library] = None):
        library = library or _library.library()
        super().__init__(library, library._create(library._c.quern_sampler_create, _library.whole("vocab", vocab)))

    def sample(
        self, logits: Any, rows: Sequence[Sampling], *, executor: Optional[Executor] = None
    ) -> List[Optional[int]]:
        """The token of each row of logits, by its own Sampling; None for a row without a number to choose."""
        tensor = _tensor.CTensor("logits", logits)
        tokens = self.sample_c(tensor.c, [to_c(row) for row in rows], executor)
        return [None if token == _abi_model.NO_TOKEN else token for token in tokens]

    def sample_c(self, logits: _abi.Tensor, rows: Sequence[Tuple], executor: Optional[Executor]) -> Any:
        """As sample, of and to C's types; rows are what to_c returns."""
        tokens = (ctypes.c_int32 * len(rows))()
        c = self._library._c
        status = c.quern_sampler_sample_filtered(
            self._handle,
            ctypes.byref(logits),
            (_abi_model.Sampling * len(rows))(*(row for row, _ in rows)),
            (_abi_model.SamplingFilters * len(rows))(*(filters for _, filters in rows)),
            len(rows),
            tokens,
            _library.handle_of(executor, self._library),
        )
        _errors.check(c, status, self._handle)
        return tokens
