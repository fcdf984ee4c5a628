"""Quern: CPU kernels of an LLM inference engine, on NumPy arrays and DLPack tensors.

    import numpy as np, quern
    y = quern.ops.rms_norm(x, w, eps=1e-5)     # every operator by name
    layer = quern.Linear.from_numpy(weight)    # packed weights
    z = layer(y)

README.md has the rest. Needs no compiler: ctypes calls libquern.so.
"""

from . import ops
from ._abi import VERSION as __version__
from ._attention import KvCache, Schedule, attention
from ._errors import (
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnimplementedError,
)
from ._library import Executor, Library, Op, library
from ._linear import Linear
from ._load import find as find_library
from ._tensor import Tensor, empty, from_dlpack, view

__all__ = [
    "__version__",
    "Error",
    "Executor",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "KvCache",
    "Library",
    "Linear",
    "NotFoundError",
    "Op",
    "ResourceExhaustedError",
    "Schedule",
    "Tensor",
    "UnimplementedError",
    "attention",
    "empty",
    "find_library",
    "from_dlpack",
    "library",
    "ops",
    "view",
]
