"""Puts implementations under the names that other projects gave to operators.

An operator that exists, because the project's own library was loaded, keeps its
schema and gets another kernel for the CPU. One that does not exist is defined.
Arguments are passed by their names in the schema, because schemas change between
versions: an implementation that lacks a name is not installed.

Operators that hand each other something that only one implementation can read, a
handler or the pages of a cache, are a family. A family is installed whole or not
at all: with half of one, our handler would reach the other library's kernel.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from typing import Callable, Iterable, NamedTuple, Optional

import torch

from . import torch as quern_torch


class Operator(NamedTuple):
    """One operator by another project's name."""

    schema: str  # what is defined where the project's library is not loaded
    function: Callable  # called with the arguments by their names
    fake: Optional[Callable]
    family: Optional[str] = None  # None: the operator shares nothing with others
    # Whether it packs parameters when a model is loaded, so that no gradient is lost.
    loads: bool = False

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def nothing(*_, **__):
    """The fake of an operator that returns nothing."""


# Names that a project spelled in several ways.
_ALIASES = {
    "casual": "causal",
    "handler_ptr": "handler",
    "handler_tensor": "handler",
    "result": "out",
    "sheduler_metadata": "scheduler_metadata",
    "sliding_window_size": "sliding_window",
    "v_cahce": "v_cache",
}
_installed: dict = {}
_log = logging.getLogger("quern")
NO_FRAGMENTS = "this PyTorch lets one library alone define operators of a namespace"

_replacements: dict = {}


def _replacing(namespace):
    """The library of kernels for operators that someone else defined."""
    lib = _replacements.get(namespace)
    if lib is None:
        lib = _replacements[namespace] = torch.library.Library(namespace, "IMPL")
    return lib


def _existing(namespace, name):
    """The schema of an operator that PyTorch has; None if there is none."""
    for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
        if schema.overload_name == "":
            return schema
    return None


def _by_name(function, schema):
    """A kernel with the schema's arguments, in its order, that calls function by name."""
    known = list(inspect.signature(function).parameters)
    names = [_ALIASES.get(a.name, a.name) for a in schema.arguments]
    unknown = [name for name in names if name not in known]
    if unknown:
        return None, f"its arguments {', '.join(unknown)} are not known here"
    missing = [
        name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty and name not in names
    ]
    if missing:
        return None, f"it lacks the arguments {', '.join(missing)}"
    # PyTorch does not pass arguments that have the schema's default.
    defaults = {n: a.default_value for n, a in zip(names, schema.arguments) if a.has_default_value()}
    if known == names and not defaults and not any(a.kwarg_only for a in schema.arguments):
        return function, None

    def kernel(*args, **kwargs):
        given = dict(defaults)
        given.update(zip(names, args))
        given.update((_ALIASES.get(name, name), value) for name, value in kwargs.items())
        return function(**given)

    return kernel, None


def _without_gradient(name, kernel):
    """The kernel, which refuses tensors whose gradient would be lost. Its views have none, so it is asked first."""

    @functools.wraps(kernel)
    def checked(*args, **kwargs):
        if torch.is_grad_enabled():
            quern_torch.refuse_gradient(name, (*args, *kwargs.values()))
        return kernel(*args, **kwargs)

    return checked


def _plan(namespace, operator):
    """(existing schema or None, its kernel or None, why it cannot be installed) of one operator."""
    existing = _existing(namespace, operator.name)
    if existing is None:
        try:
            quern_torch.library_of(namespace)
        except RuntimeError:
            return None, None, NO_FRAGMENTS
        return None, None, None
    return (existing, *_by_name(operator.function, existing))


def _put(namespace, operator, existing, kernel):
    """Installs one operator; returns "defined" or "replaced"."""
    name = operator.name
    if existing is None:
        lib, became = quern_torch.library_of(namespace), "defined"
        quern_torch._define(lib, operator.schema, quern_torch._TAGS)
        existing = _existing(namespace, name)
        kernel, _ = _by_name(operator.function, existing)
    else:
        lib, became = _replacing(namespace), "replaced"
    # Operators without tensors have no dispatch key but this one.
    key = "CPU" if any("Tensor" in str(a.type) for a in existing.arguments) else "CompositeExplicitAutograd"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid.*")
        lib.impl(name, kernel if operator.loads else _without_gradient(f"{namespace}::{name}", kernel), key)
    if became == "defined" and operator.fake is not None:
        quern_torch._set_fake(lib, namespace, name, operator.fake)
    return became


def install(namespace: str, operators: Iterable[Operator]) -> dict:
    """Installs operators; returns {name: "defined", "replaced", or why it was left out}.

    Warns, by the logger "quern", of operators of the project that were left out. A second call changes
    nothing, except that it tries again what was left out. A fake is set where an operator is defined here.
    """
    operators = list(operators)
    done = _installed.setdefault(namespace, {})
    planned = {o.name: _plan(namespace, o) for o in operators if done.get(o.name) not in ("defined", "replaced")}
    # Why a family cannot be installed: a schema that is not known says more than this PyTorch's limit.
    broken: dict = {}
    for operator in operators:
        why = planned[operator.name][2] if operator.name in planned else None
        if why is not None and operator.family is not None:
            if why != NO_FRAGMENTS or operator.family not in broken:
                broken[operator.family] = f"{operator.name}: {why}"
    left_out = {}
    for operator in operators:
        if operator.name not in planned:
            continue
        existing, kernel, why = planned[operator.name]
        if why in (None, NO_FRAGMENTS) and operator.family in broken:
            why = f"{operator.family} is installed whole or not at all, and {broken[operator.family]}"
        if why is None:
            done[operator.name] = _put(namespace, operator, existing, kernel)
            continue
        if done.get(operator.name) != f"left out: {why}":
            left_out[operator.name] = why
        done[operator.name] = f"left out: {why}"
    for name, why in left_out.items():
        _log.warning("quern: torch.ops.%s.%s is left out: %s", namespace, name, why)
    return dict(done)
