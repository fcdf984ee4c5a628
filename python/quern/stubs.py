"""Writes the type stubs of quern.ops from the schemas: python3 -m quern.stubs > python/quern/ops.pyi"""

from . import _call, _library

_HEAD = '''# Generated from the schemas: python3 -m quern.stubs > python/quern/ops.pyi
from typing import Any, Optional, Tuple

from . import Executor, ExpertWeights, KvCache, Linear, OneDnnHandler, RotaryScaling, Schedule, SchedulerMetadata

# A NumPy array, a quern.Tensor, or an object with __dlpack__.
Array = Any
LinearWeights = Linear
KvLayout = KvCache
AttentionStep = Schedule
'''
_KNOWN = (
    "LinearWeights", "KvLayout", "AttentionStep", "ExpertWeights", "OneDnnHandler", "RotaryScaling",
    "SchedulerMetadata",
)


def _function(schema):
    parts = []
    for part, kind in _call._signature(schema):
        name, equals, default = part.partition("=")
        if kind is None:
            parts.append(part)
        else:
            parts.append(f"{name}: {kind} = {default}" if equals else f"{name}: {kind}")
    returned = {0: "None", 1: "Array"}.get(schema.returns, f"Tuple[{', '.join(['Array'] * schema.returns)}]")
    return f"def {schema.name}({', '.join(parts)}) -> {returned}: ..."


def text(schemas) -> str:
    """The stubs of these operators, by name."""
    schemas = sorted(schemas, key=lambda s: s.name)
    objects = sorted({p.kind for s in schemas for p in s.objects} - set(_KNOWN))
    # Objects that the C interface does not have; their operators take None only.
    lines = [_HEAD + "".join(f"{kind} = Any\n" for kind in objects)]
    return "\n".join(lines + [_function(s) for s in schemas]) + "\n"


if __name__ == "__main__":
    print(text(_library.library().schemas.values()), end="")
