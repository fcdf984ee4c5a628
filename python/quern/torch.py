"""Quern's operators in PyTorch: torch.ops.quern.rms_norm(x, w, 1e-5), after `import quern.torch`.

    import torch, quern.torch
    y = torch.ops.quern.rms_norm(x, w, eps=1e-5)

Each operator of quern.ops that needs no object that Python lacks is defined from its schema, with an
implementation for the CPU and a fake one for meta and fake tensors, so that torch.compile passes it through.
Objects of quern are numbers there: handle(weights) is what the parameter `weights` of torch.ops.quern.linear
takes. register() defines an operator of one's own. Works with PyTorch 1.13 and 2.6, which were tested, and by
their documentation with what lies between. Quern has no derivatives: a call that autograd would record is
refused. docs/pytorch.md shows how to give an operator of one's own a derivative.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import typing
import weakref
from typing import Any, Callable, List, Optional, Sequence

import torch

from . import _attention, _library, _linear, _named, _rope, _tensor, _torch_call
from ._torch_call import Caller

__all__ = ["Linear", "attention", "handle", "names", "object_of", "register", "release", "set_executor"]

# The objects that an operator can be made with, by the name in schemas.
_OBJECTS = {
    "LinearWeights": _linear.Linear,
    "KvLayout": _attention.KvCache,
    "AttentionStep": _attention.Schedule,
    "OneDnnHandler": _named.OneDnnHandler,
    "SchedulerMetadata": _named.SchedulerMetadata,
    "ExpertWeights": _named.ExpertWeights,
    "RotaryScaling": _rope.RotaryScaling,
}
# A weak reference to the object of each number, and the objects that handle() keeps.
_handles: dict = {}
_kept: dict = {}
_numbers = itertools.count(1)


def _number_of(given: _library.Object, name: str) -> int:
    """The number of an object under which it says `name`; a new one at first. Does not keep the object."""
    number = given.__dict__.get(name)
    if number is None:
        number = given.__dict__[name] = next(_numbers)
        _handles[number] = weakref.ref(given, lambda _: _handles.pop(number, None))
    return number


def handle(given: _library.Object) -> int:
    """A number for an object of quern, which torch.ops.quern takes in its place. Keeps it until release()."""
    if not isinstance(given, tuple(_OBJECTS.values())):
        raise TypeError(f"the object is of type {type(given).__name__}; need one that an operator takes")
    number = _number_of(given, "_torch_handle")
    _kept[number] = given
    return number


def _own_handle(given: _library.Object) -> int:
    """The number of an object that its user keeps: the object is freed with its user. release() cannot take it."""
    return _number_of(given, "_torch_own_handle")


def release(number: int) -> None:
    """Forgets the object of a handle, which is refused from now on."""
    if number not in _kept:
        raise _no_handle(number)
    _kept.pop(number).__dict__.pop("_torch_handle", None)
    _handles.pop(number, None)


def _no_handle(number):
    return ValueError(f"{number} is no handle, or was released; need one that quern.torch.handle returned")


def object_of(number: int) -> Any:
    """The object of a handle."""
    found = _handles.get(number)
    given = None if found is None else found()
    if given is None:
        raise _no_handle(number)
    return given


def set_executor(executor: Optional[_library.Executor]) -> None:
    """The threads of all calls; None: the calling thread. At first a pool of torch.get_num_threads()."""
    if executor is not None:
        _library.handle_of(executor, _library.library())
    _torch_call.default.set(executor)


def refuse_gradient(name: str, arguments: Sequence[Any]) -> None:
    """Refuses tensors that need a gradient, which the result would not have."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name}: a tensor of shape {tuple(x.shape)} requires a gradient, and Quern has no derivatives; need "
                "torch.no_grad() or torch.inference_mode() around the call, detached tensors, or a "
                "torch.autograd.Function around it, which docs/pytorch.md shows"
            )


# ---- Definitions ------------------------------------------------------------------------------------------


def _parameters(schema):
    """The parameters that PyTorch's schema has: optional objects that Python lacks are left out, others
    make the result None."""
    kept = []
    for p in schema.parameters:
        if p.is_object and p.kind not in _OBJECTS:
            if p.required:
                return None
            continue
        kept.append(p)
    return kept


def _number(value):
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the default {value} has no form in PyTorch's schemas")
    return repr(value)


def _declared(p, at):
    kind = "int" if p.is_object else p.kind
    # linear's residual is copied, because PyTorch has no result that is an argument and may be absent.
    if p.written and not (p.name == "residual" and p.optional):
        kind = f"Tensor(a{at}!)"
    if p.optional:
        return f"{kind}? {p.name}=None"
    if p.default is None:
        return f"{kind} {p.name}"
    return f"{kind} {p.name}={json.dumps(p.default) if p.kind == 'str' else _number(p.default)}"


def schema_of(schema) -> Optional[str]:
    """PyTorch's schema of one of ours; None where it needs an object that Python lacks.

    From the first required parameter after an optional one on, parameters are by name only, as in quern.ops.
    """
    kept = _parameters(schema)
    if kept is None:
        return None
    parts, optional_seen, starred = [], False, False
    for at, p in enumerate(kept):
        if p.required and optional_seen and not starred:
            parts.append("*")
            starred = True
        optional_seen = optional_seen or not p.required
        parts.append(_declared(p, at))
    returns = {0: "()", 1: "Tensor"}.get(schema.returns, f"({', '.join(['Tensor'] * schema.returns)})")
    return f"{schema.name}({', '.join(parts)}) -> {returns}"


def _functions(caller):
    """The implementation and the fake of an operator: Python functions with the parameters of its schema."""
    schema = caller.schema
    kept = _parameters(schema)
    signature, optional_seen, starred = [], False, False
    for p in kept:
        if p.required and optional_seen and not starred:
            signature.append("*")
            starred = True
        optional_seen = optional_seen or not p.required
        default = p.default if p.default is not None else None
        signature.append(p.name if p.required else f"{p.name}={default!r}")

    def value(p):
        if p not in kept:
            return "None"
        if not p.is_object:
            return p.name
        get = f"_object({p.name})"
        return f"(None if {p.name} is None else {get})" if p.optional else get

    tensors = "".join(f"{p.name}, " for p in schema.tensors)
    scalars = "".join(f"{value(p)}, " for p in schema.parameters if p.kind != "Tensor")
    call, fake = caller, caller.fake
    if schema.name == "linear":
        call = _linear_call(caller)
    made = []
    for function in (call, fake):
        # Not a kernel of the key Autograd, which costs one more dispatch and keeps
        # others from registering theirs. What autograd calls has no gradients enabled.
        source = (
            f"def {schema.name}({', '.join(signature)}):\n"
            f"    if _enabled(): _refuse('quern::{schema.name}', ({tensors}))\n"
            f"    return _call(({tensors}), ({scalars}))\n"
        )
        space = {
            "_call": function, "_object": object_of, "_enabled": torch.is_grad_enabled, "_refuse": refuse_gradient,
        }
        exec(compile(source, f"<torch.ops.quern.{schema.name}>", "exec"), space)
        made.append(space[schema.name])
    return made


def _linear_call(caller):
    def call(tensors, scalars):
        x, residual = tensors
        if residual is None:
            return caller(tensors, scalars)
        out = residual.clone(memory_format=torch.contiguous_format)
        return caller((x, out), scalars, (out,))

    return call


def _open(namespace):
    """A library of operators; PyTorch 1.13 lets only one define a namespace."""
    try:
        return torch.library.Library(namespace, "FRAGMENT")
    except ValueError:
        return torch.library.Library(namespace, "DEF")


_HAS_TAGS = "tags" in inspect.signature(torch.library.Library.define).parameters
# What torch.compile may rely on: the schema is right, and strides must not be changed.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_fixed_stride_order")
    if hasattr(getattr(torch, "Tag", None), name)
)


def _define(lib, schema, tags=()):
    if _HAS_TAGS:
        lib.define(schema, tags=tuple(tags))
    else:
        lib.define(schema)


def _set_fake(lib, namespace, name, fake):
    """Fake tensors are PyTorch 2's; before 2.4 and in 1.13, a fake is a kernel of meta tensors."""
    if hasattr(torch.library, "register_fake"):
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=lib)
    else:
        lib.impl(name, fake, "Meta")
        if not hasattr(torch, "compile"):  # 1.13 does not pass on from there by itself
            lib.impl(name, fake, "AutogradMeta")


_library_of: dict = {}


def library_of(namespace: str):
    """The torch.library.Library in which register() and this package define operators of a namespace."""
    lib = _library_of.get(namespace)
    if lib is None:
        lib = _library_of[namespace] = _open(namespace)
    return lib


_ANNOTATIONS = {
    torch.Tensor: "Tensor",
    Optional[torch.Tensor]: "Tensor?",
    List[torch.Tensor]: "Tensor[]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    Optional[int]: "int?",
    Optional[float]: "float?",
    List[int]: "int[]",
}


def infer_schema(function: Callable, mutates_args: Sequence[str] = ()) -> str:
    """The schema of a Python function, from its annotations: "(Tensor x, Tensor(a1!) y) -> Tensor"."""
    if hasattr(torch.library, "infer_schema"):
        return torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
    hints = typing.get_type_hints(function)
    parts = []
    known = inspect.signature(function).parameters
    for name in mutates_args:
        if name not in known:
            raise ValueError(f"mutates_args has {name!r}; need parameters of {function.__name__}: {', '.join(known)}")
    for at, (name, p) in enumerate(known.items()):
        kind = _ANNOTATIONS.get(hints.get(name))
        if kind is None:
            raise ValueError(f"parameter {name} has type {hints.get(name)}; need one of {list(_ANNOTATIONS.values())}")
        if name in mutates_args:
            if not kind.startswith("Tensor"):
                raise ValueError(f"mutates_args has {name!r}, of type {kind}; need a tensor")
            kind = kind.replace("Tensor", f"Tensor(a{at}!)", 1)
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if p.default is p.empty:
            parts.append(f"{kind} {name}")
        else:
            default = json.dumps(p.default) if isinstance(p.default, str) else repr(p.default)
            parts.append(f"{kind} {name}={default}")
    result = hints.get("return", type(None))
    if result is type(None):
        returns = "()"
    elif typing.get_origin(result) is tuple:
        returns = f"({', '.join(_ANNOTATIONS[r] for r in typing.get_args(result))})"
    else:
        returns = _ANNOTATIONS[result]
    return f"({', '.join(parts)}) -> {returns}"


def register(
    op_name: str,
    op_func: Callable,
    mutates_args: Optional[Sequence[str]] = None,
    fake_impl: Optional[Callable] = None,
    target_lib: Any = None,
    dispatch_key: str = "CPU",
    tags: Sequence[Any] = (),
):
    """Defines an operator of one's own, as vLLM's direct_register_custom_op does, and returns it.

    The schema is inferred from op_func's annotations; mutates_args are the parameters that it writes.
    fake_impl has the same parameters and makes results of the same dtypes and shapes without data.
    target_lib None: the namespace "quern". The operator lives as long as its library.
    """
    lib = library_of("quern") if target_lib is None else target_lib
    _define(lib, op_name + infer_schema(op_func, mutates_args or ()), tags)
    lib.impl(op_name, op_func, dispatch_key)
    if fake_impl is not None:
        _set_fake(lib, lib.ns, op_name, fake_impl)
    return getattr(getattr(torch.ops, lib.ns), op_name)


_callers: dict = {}


def caller_of(name: str) -> Caller:
    """What calls an operator of quern.ops on PyTorch's tensors, past PyTorch's dispatcher."""
    caller = _callers.get(name)
    if caller is None:
        library = _library.library()
        caller = _callers[name] = Caller(library, library.schema(name))
    return caller


def _register_all():
    lib = library_of("quern")
    defined = []
    for schema in _library.library().schemas.values():
        text = schema_of(schema)
        if text is None:
            continue
        implementation, fake = _functions(caller_of(schema.name))
        _define(lib, text, _TAGS)
        lib.impl(schema.name, implementation, "CPU")
        _set_fake(lib, "quern", schema.name, fake)
        defined.append(schema.name)
    return tuple(sorted(defined))


# The operators that torch.ops.quern has.
names = _register_all()


# ---- A layer, and attention -------------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """A linear layer on packed weights: y = act(x @ weight.T + bias). Takes rows of any leading shape.

    Keeps its weights, which are freed with the last module and the last variable that have them.
    """

    def __init__(self, weights: _linear.Linear, activation: str = "none", activations: str = "exact"):
        super().__init__()
        self.weights, self.activation, self.activations = weights, activation, activations
        self._handle = _own_handle(weights)

    @classmethod
    def from_linear(cls, layer: torch.nn.Linear, **options) -> Linear:
        """Packs the weight and bias of a torch.nn.Linear, which may then go."""
        weight = layer.weight.detach()
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(_linear.Linear.from_numpy(weight, bias), **options)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.quern.linear(rows, self._handle, None, self.activation, "", self.activations)
        return y.reshape(x.shape[:-1] + y.shape[-1:])


def attention(
    query, cache, schedule, *, key=None, value=None, layer=0, scale=0.0, alibi_slopes=None, sinks=None, soft_cap=0.0,
    lse=None,
):
    """quern.attention on PyTorch's tensors, through torch.ops.quern.write_kv and paged_attention."""
    if (key is None) != (value is None):
        raise ValueError("only one of key and value is given; need both, or neither")
    pages = _pages(cache, layer)
    layout = _own_handle(cache)
    if key is not None:
        torch.ops.quern.write_kv(key, value, torch.from_dlpack(schedule.slots), pages, layout)
    return torch.ops.quern.paged_attention(
        query, pages, alibi_slopes, sinks, lse, layout=layout, step=_own_handle(schedule), scale=scale,
        window_left=schedule.window_left, window_right=schedule.window_right, soft_cap=soft_cap,
    )


def _pages(cache, layer):
    """The pages of a layer as a tensor, which is made once. It does not keep the cache, which keeps it."""
    made = cache.__dict__.setdefault("_torch_pages", {})
    if layer not in made:
        pages = cache.pages(layer)
        made[layer] = torch.from_dlpack(_tensor.Tensor(pages._meta, pages._address, None))
    return made[layer]
