"""Quern: CPU kernels of an LLM inference engine, on NumPy arrays and DLPack tensors.

    import numpy as np, quern
    y = quern.ops.rms_norm(x, w, eps=1e-5)     # every operator by name
    layer = quern.Linear.from_numpy(weight)    # packed weights
    z = layer(y)
    for piece in quern.Model("model.gguf").generate("In the beginning"):
        print(piece, end="", flush=True)

README.md has the rest. Needs no compiler: ctypes calls libquern.so.
"""

from . import ops
from ._abi import VERSION as __version__
from ._attention import KvCache, Schedule, attention
from ._errors import (
    CancelledError,
    DataLossError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ModelNotFoundError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnimplementedError,
)
from ._generate import Generation
from ._library import Executor, Library, Op, library
from ._linear import Linear
from ._load import find as find_library
from ._load import set_max_isa
from ._model import Model, ModelState
from ._named import ExpertWeights, OneDnnHandler, SchedulerMetadata
from ._rope import RotaryScaling
from ._sampler import Sampler, Sampling
from ._tensor import Tensor, empty, from_dlpack, view
from ._tokenizer import Tokenizer

__all__ = [
    "__version__",
    "CancelledError",
    "DataLossError",
    "Error",
    "Executor",
    "ExpertWeights",
    "FailedPreconditionError",
    "Generation",
    "InternalError",
    "InvalidArgumentError",
    "KvCache",
    "Library",
    "Linear",
    "Model",
    "ModelNotFoundError",
    "ModelState",
    "NotFoundError",
    "OneDnnHandler",
    "Op",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "RotaryScaling",
    "Sampler",
    "Sampling",
    "Schedule",
    "SchedulerMetadata",
    "Tensor",
    "Tokenizer",
    "UnimplementedError",
    "attention",
    "empty",
    "find_library",
    "from_dlpack",
    "library",
    "ops",
    "set_max_isa",
    "view",
]
