"""Puts implementations under the names that other projects gave to operators.

An operator that exists, because the project's own library was loaded, keeps its
schema and gets another kernel for the CPU. One that does not exist is defined.
Arguments are passed by their names in the schema, because schemas change between
versions: an implementation that lacks a name is not installed.
"""

from __future__ import annotations

import inspect
import warnings

import torch

from . import torch as quern_torch

# Names that a project spelled in several ways.
_ALIASES = {"result": "out", "casual": "causal", "sheduler_metadata": "scheduler_metadata", "handler_ptr": "handler"}
_installed: dict = {}
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
    known = set(inspect.signature(function).parameters)
    names = [_ALIASES.get(a.name, a.name) for a in schema.arguments]
    unknown = [name for name in names if name not in known]
    if unknown:
        return None, f"its arguments {', '.join(unknown)} are not known here"
    missing = [
        name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty and name not in names
    ]
    if missing:
        return None, f"it lacks the arguments {', '.join(missing)}"
    if list(known) == names and not any(a.kwarg_only for a in schema.arguments):
        return function, None
    defaults = {n: a.default_value for n, a in zip(names, schema.arguments) if a.has_default_value()}

    def kernel(*args, **kwargs):
        given = dict(defaults)
        given.update(zip(names, args))
        given.update((_ALIASES.get(name, name), value) for name, value in kwargs.items())
        return function(**given)

    return kernel, None


def install(namespace, operators):
    """Installs {schema: (function, fake)}; returns {name: "defined", "replaced", or why it was left out}.

    A second call changes nothing. A fake is set where an operator is defined here.
    """
    done = _installed.setdefault(namespace, {})
    for schema, (function, fake) in operators.items():
        name = schema.partition("(")[0]
        if done.get(name) in ("defined", "replaced"):
            continue
        existing = _existing(namespace, name)
        if existing is None:
            try:
                lib = quern_torch.library_of(namespace)
            except RuntimeError:
                done[name] = f"left out: {NO_FRAGMENTS}"
                continue
            quern_torch._define(lib, schema, quern_torch._TAGS)
            existing = _existing(namespace, name)
            done[name] = "defined"
        else:
            lib = _replacing(namespace)
            done[name] = "replaced"
            fake = None
        kernel, why = _by_name(function, existing)
        if kernel is None:
            done[name] = f"left out: {why}"
            continue
        # Operators without tensors have no dispatch key but this one.
        key = "CPU" if any("Tensor" in str(a.type) for a in existing.arguments) else "CompositeExplicitAutograd"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid.*")
            lib.impl(name, kernel, key)
        if fake is not None:
            quern_torch._set_fake(lib, namespace, name, fake)
    return dict(done)
