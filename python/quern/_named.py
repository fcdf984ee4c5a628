"""The objects of c/quern_named.h, which operators of vLLM's and SGLang's names take."""

from __future__ import annotations

import ctypes
from typing import Optional, Sequence

from . import _library
from ._library import Library, Object
from ._linear import Linear


class OneDnnHandler(Object):
    """The argument `handler` of onednn_mm. quern.ops.create_onednn_mm(b, handler) packs weights into it."""

    def __init__(self, *, library: Optional[Library] = None):
        library = library or _library.library()
        super().__init__(library, library._create(library._c.quern_onednn_handler_create))


class SchedulerMetadata(Object):
    """The argument `scheduler_metadata` of cpu_attention_with_kv_cache.

    quern.ops.cpu_attn_get_scheduler_metadata builds a step's schedule in it.
    """

    def __init__(self, *, library: Optional[Library] = None):
        library = library or _library.library()
        super().__init__(library, library._create(library._c.quern_scheduler_metadata_create))


class ExpertWeights(Object):
    """The argument `experts` of fused_experts_cpu and its like: two Linear for each expert.

    gate_up[e] has n = 2 * inter, packed with gated=True, or n = inter; down[e] has k = inter.
    """

    def __init__(self, gate_up: Sequence[Linear], down: Sequence[Linear], *, library: Optional[Library] = None):
        library = library or _library.library()
        if len(gate_up) != len(down):
            raise ValueError(f"gate_up and down have {len(gate_up)} and {len(down)} experts; need the same number")
        for name, given in (("gate_up", gate_up), ("down", down)):
            for weights in given:
                if not isinstance(weights, Linear):
                    raise TypeError(f"{name} holds an object of type {type(weights).__name__}; need quern.Linear")
                _library.check_library(name, weights, library)
        handles = ctypes.c_void_p * max(1, len(gate_up))
        arrays = [handles(*(weights._handle for weights in given)) for given in (gate_up, down)]
        handle = library._create(library._c.quern_expert_weights_create, *arrays, len(gate_up))
        # Weights that have adopted bytes need them.
        super().__init__(library, handle, *gate_up, *down)
