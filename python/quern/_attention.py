"""KvCache, Schedule and attention."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from . import _abi, _call, _errors, _library, _tensor
from ._library import Executor, Library, Object

# What the library takes for a page that is not there.
_NO_PAGE = -1


class KvCache(Object):
    """Keys and values in pages, for all layers. A new cache's elements are unspecified.

    dtype: "bf16", "f16", "f32", "i8", "f8e4m3" or "f8e5m2". form, the order of elements in a page: "plain";
    "paired", which attention reads fastest, where page_size is a multiple of 16; "latent", for latents of MLA;
    None: paired where it can be. scaling: "per_token_head", a scale for each token and head, which i8 needs and
    fp8 may have; "per_block", for latents in f8e4m3; None: no scales. cache/kv_layout.h says more.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        dtype: str = "bf16",
        v_head_dim: int = 0,
        form: Optional[str] = None,
        scaling: Optional[str] = None,
        library: Optional[Library] = None,
    ):
        library = library or _library.library()
        options = _abi.KvCacheOptions(ctypes.sizeof(_abi.KvCacheOptions))
        for name, given in (("dtype", dtype), ("form", form), ("scaling", scaling)):
            setattr(options, name, _library.text(name, given))
        for name, given in (
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("v_head_dim", v_head_dim),
            ("page_size", page_size),
            ("num_pages", num_pages),
            ("num_layers", num_layers),
        ):
            setattr(options, name, _library.whole(name, given))
        super().__init__(library, library._create(library._c.quern_kv_cache_create, ctypes.byref(options)))
        self.page_size, self.num_pages, self.num_layers = page_size, num_pages, num_layers
        self._layers = [self._layer(layer) for layer in range(num_layers)]

    def _layer(self, layer):
        tensor = _abi.Tensor()
        c = self._library._c
        _errors.check(c, c.quern_kv_cache_pages(self._handle, layer, ctypes.byref(tensor)), self._handle)
        code, bits = _tensor.code_of("u8")
        meta = _tensor.Meta(code, bits, 1, tuple(tensor.shape[: tensor.ndim]), None)
        return meta, tensor.data

    def pages(self, layer: int = 0) -> _tensor.Tensor:
        """u8[num_pages, bytes of a page] of one layer, on the memory of the cache; `cache` of operators."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer={layer}; need 0 to {self.num_layers - 1}")
        meta, address = self._layers[layer]
        return _tensor.Tensor(meta, address, self)

    def schedule(
        self,
        q_heads: int,
        *,
        window_left: int = -1,
        window_right: int = -1,
        max_sequences: int = 0,
        max_kv_len: int = 0,
    ) -> Schedule:
        """A schedule for layers with these query heads and windows; -1: no window."""
        return Schedule(self, q_heads, window_left, window_right, max_sequences, max_kv_len)


class Schedule(Object):
    """How one step of attention is divided among workers. KvCache.schedule makes one; build() is called
    before each step, and is refused while a call uses the schedule."""

    def __init__(self, cache: KvCache, q_heads, window_left, window_right, max_sequences, max_kv_len):
        library = cache.library
        options = _abi.ScheduleOptions(ctypes.sizeof(_abi.ScheduleOptions))
        for name, given in (
            ("q_heads", q_heads),
            ("window_left", window_left),
            ("window_right", window_right),
            ("max_sequences", max_sequences),
            ("max_kv_len", max_kv_len),
        ):
            setattr(options, name, _library.whole(name, given))
        handle = library._create(library._c.quern_schedule_create, cache._handle, ctypes.byref(options))
        super().__init__(library, handle)
        self.cache, self.window_left, self.window_right = cache, window_left, window_right
        self._slots = None

    def build(self, q_lens: Any, kv_lens: Any, pages: Any, *, executor: Optional[Executor] = None) -> None:
        """Sets the step: sequence s has kv_lens[s] tokens, the last q_lens[s] of them new.

        pages[s] lists the pages of sequence s, as many as its tokens need: lists of ints, or an array of
        two dimensions. executor: the one of the calls that follow.
        """
        q_lens, kv_lens = _ints(q_lens, "q_lens"), _ints(kv_lens, "kv_lens")
        if len(q_lens) != len(kv_lens) or len(q_lens) != len(pages):
            raise ValueError(
                f"q_lens, kv_lens and pages have {len(q_lens)}, {len(kv_lens)} and {len(pages)} sequences; "
                "need the same number"
            )
        rows = [_ints(row, "pages") for row in pages]
        stride = max(map(len, rows), default=0)
        for s, (row, tokens) in enumerate(zip(rows, kv_lens)):
            need = -(-tokens // self.cache.page_size)
            if len(row) < need:
                raise ValueError(f"sequence {s} has {len(row)} pages; need {need} for its {tokens} tokens")
        table = [page for row in rows for page in row + [_NO_PAGE] * (stride - len(row))]
        tokens = sum(q_lens)
        if any(length < 0 for length in q_lens):
            raise ValueError(f"q_lens={q_lens}; need 0 or more")
        handle = _library.handle_of(executor, self._library)
        slots = _tensor.empty((tokens,), "i64")
        c_longs = ctypes.POINTER(ctypes.c_int64)
        step = _abi.Step(
            size=ctypes.sizeof(_abi.Step),
            num_sequences=len(q_lens),
            q_lens=(ctypes.c_int64 * len(q_lens))(*q_lens),
            kv_lens=(ctypes.c_int64 * len(kv_lens))(*kv_lens),
            pages=(ctypes.c_int32 * len(table))(*table),
            pages_stride=stride,
            slots=ctypes.cast(slots._address, c_longs),
            num_slots=tokens,
            workers=0 if handle is None else executor.workers,
        )
        c = self._library._c
        status = c.quern_schedule_build(self._handle, ctypes.byref(step))
        # A step that another call refuses leaves the schedule, and its slots, as they are.
        if status != _abi.FAILED_PRECONDITION:
            self._slots = slots if status == _abi.OK else None
        _errors.check(c, status, self._handle)

    @property
    def slots(self) -> _tensor.Tensor:
        """i64[new tokens]: where quern.ops.write_kv writes each new token of the step."""
        if self._slots is None:
            raise ValueError("the schedule has no step; need Schedule.build before")
        return self._slots


def _ints(values: Any, name: str) -> list:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in values:
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} holds {value!r}; need whole numbers")
        if not -(2**31) <= value < 2**31:
            raise OverflowError(f"{name} holds {value}; need numbers below 2^31")
    return [value.__index__() for value in values]


def attention(
    query: Any,
    cache: KvCache,
    schedule: Schedule,
    *,
    key: Any = None,
    value: Any = None,
    layer: int = 0,
    scale: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    soft_cap: float = 0.0,
    lse: Any = None,
    out: Any = None,
    out_dtype: str = "",
    executor: Optional[Executor] = None,
) -> Any:
    """Causal attention of the step's new tokens to all tokens of their sequences.

    out[i, h] = sum over t of softmax(scale * q[i, h] . k[t, g]) * v[t, g],  g = h / (q_heads / kv_heads)

    query[tokens, q_heads, head_dim]; tokens is the sum of the step's q_lens, sequence by sequence. key and
    value[tokens, kv_heads, head_dim] of the new tokens are written to the cache first; None: they are in it.
    scale 0: 1 / sqrt(head_dim). alibi_slopes and sinks are f32[q_heads]. lse f32[tokens, q_heads] is written, if
    it is given: the logarithm of the sum of exp(logits). quern.ops.merge_states makes one attention of two with it.
    attention/paged_attention.h has all equations, and says what is rounded.
    """
    if not isinstance(cache, KvCache) or not isinstance(schedule, Schedule):
        raise TypeError(
            f"cache and schedule are of types {type(cache).__name__} and {type(schedule).__name__}; "
            "need a quern.KvCache and a quern.Schedule"
        )
    if schedule.cache is not cache:
        raise ValueError("the schedule is of another cache; need one that cache.schedule made")
    if (key is None) != (value is None):
        raise ValueError("only one of key and value is given; need both, or neither")
    library = cache.library
    pages = cache.pages(layer)
    if key is not None:
        _call.function_of(library, "write_kv")((key, value, schedule.slots, pages), (cache,), (), executor, None)
    return _call.function_of(library, "paged_attention")(
        (query, pages, alibi_slopes, sinks, lse),
        (cache, schedule, scale, schedule.window_left, schedule.window_right, soft_cap, out_dtype),
        (out,),
        executor,
        None,
    )
