"""Calls on PyTorch's tensors, and their fake ones: dtypes and shapes without data.

A call describes its tensors by data_ptr, shape and stride, which is faster than
__dlpack__, and takes bf16 and fp8 like every other dtype. What was made for one
kind of tensors is kept as quern/_call.py keeps it.
"""

from __future__ import annotations

import os

import torch

from . import _call, _errors, _library, _tensor

_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
# An older PyTorch has no fp8.
_DTYPES = {name: getattr(torch, theirs) for name, theirs in _NAMES.items() if hasattr(torch, theirs)}
_CODES = {dtype: _tensor.code_of(name) + (1,) for name, dtype in _DTYPES.items()}
_CODES[torch.bool] = (6, 8, 1)
_OF_CODE = {code[:2]: dtype for dtype, code in _CODES.items()}
# c10::ScalarType, as which a schema's ScalarType arrives in Python.
_SCALAR_TYPES = {0: "u8", 1: "i8", 3: "i32", 4: "i64", 5: "f16", 6: "f32", 15: "bf16", 23: "f8e5m2", 24: "f8e4m3"}
_MOST = 256


def name_of_dtype(dtype) -> str:
    """"bf16" for torch.bfloat16, for its number in c10::ScalarType, or for "bf16"."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, int):
        name = _SCALAR_TYPES.get(dtype)
    else:
        name = next((n for n, d in _DTYPES.items() if d is dtype), None)
    if name is None:
        raise TypeError(f"dtype={dtype}; need one of {', '.join(str(d) for d in _DTYPES.values())}")
    return name


def dtype_of(dtype) -> torch.dtype:
    """torch.bfloat16 for whatever name_of_dtype takes."""
    return _DTYPES[name_of_dtype(dtype)]


class _Default:
    """The threads of calls: a pool as large as PyTorch's, made by the first call that needs it."""

    def __init__(self):
        self.executor = None
        self.made = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self):
        self.executor, self.made = None, False

    def get(self, library):
        if not self.made:
            workers = min(torch.get_num_threads(), 127)
            self.executor = _library.Executor(workers, library=library) if workers > 1 else None
            self.made = True
        return self.executor

    def set(self, executor):
        self.executor, self.made = executor, True


default = _Default()


def _view(name, x):
    """A quern.Tensor with the dtype and shape of a PyTorch tensor, which may have no memory."""
    code = _CODES.get(x.dtype)
    if code is None:
        raise TypeError(f"{name} has dtype {x.dtype}; need one of {', '.join(str(d) for d in _CODES)}")
    strides = None if x.is_contiguous() else tuple(int(s) for s in x.stride())
    return _tensor.Tensor(_tensor.Meta(*code, tuple(int(n) for n in x.shape), strides), 0, None)


class Caller:
    """One operator on PyTorch's tensors."""

    def __init__(self, library, schema):
        self.library, self.schema = library, schema
        self.function = function = _call.function_of(library, schema.name)
        self.execute = library._c.quern_op_execute
        self.names = function.tensor_names
        self.written = tuple(i for i, p in enumerate(schema.tensors) if p.written)
        self.none = (None,) * schema.returns
        self.fakes = {}

    def _refuse(self, name, x):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{self.schema.name}: {name} is of type {type(x).__name__}; need a torch.Tensor")
        raise ValueError(f"{self.schema.name}: {name} is on device {x.device}; need the CPU")

    def _bind(self, cache, key, tensors, scalars, outs):
        views = [None if x is None else _view(n, x) for n, x in zip(self.names, tensors)]
        given = [None if x is None else _view(n, x) for n, x in zip(self.schema.outs, outs)]
        bound = self.function._bind(cache, None, views, scalars, given, None)
        bound.new = [(shape.shape, _OF_CODE.get(shape[:2])) for shape, _ in bound.new]
        if not bound.unprepared:
            while len(cache) >= _MOST:
                try:
                    del cache[next(iter(cache))]
                except (KeyError, StopIteration, RuntimeError):
                    pass  # another thread was first
            cache[key] = bound
        return bound

    def __call__(self, tensors, scalars, outs=None):
        """The result, a tuple of several, or None. outs: tensors for results; None: new ones."""
        # Written out without helpers, because each of their calls costs 0.1 us.
        outs = self.none if outs is None else outs
        kinds, addresses = [torch.Tensor], []
        for i, x in enumerate(tensors):
            if x is None:
                kinds.append(None)
            elif isinstance(x, torch.Tensor) and x.is_cpu:
                kinds.append((x.dtype, x.shape, x.stride()))
                addresses.append(x.data_ptr())
            else:
                self._refuse(self.names[i], x)
        for i, x in enumerate(outs):
            if x is None:
                kinds.append(None)
            elif isinstance(x, torch.Tensor) and x.is_cpu:
                kinds.append((x.dtype, x.shape, x.stride()))
            else:
                self._refuse(self.schema.outs[i], x)
        function = self.function
        cache, part = (function.cache, scalars) if function.last_object is None else function._cache_of(scalars)
        key = (tuple(kinds), part)
        bound = cache.get(key)
        if bound is None:
            bound = self._bind(cache, key, tensors, scalars, outs)
        results = []
        for out, (shape, dtype) in zip(outs, bound.new):
            if out is None:
                out = (torch.zeros if bound.zeroed else torch.empty)(shape, dtype=dtype)
            results.append(out)
            addresses.append(out.data_ptr())
        try:
            frame = bound.frames.pop()
        except IndexError:
            frame = _call._Frame(bound)
        for tensor, address in zip(frame.tensors, addresses):
            tensor.data = address
        executor = default.executor if default.made else default.get(self.library)
        handle = workers = None
        if executor is not None:
            handle, workers = _library.handle_of(executor, self.library), executor._workers
        if bound.unprepared:
            bound.prepare(frame, handle)
            if function.fills:
                function.forget(scalars)
        size = bound.bytes.get(workers)
        if size is None:
            size = bound.size(workers, executor)
        memory = _tensor.scratch(size) if size else None
        workspace = memory.address if size else None
        status = self.execute(bound.handle, frame.address, frame.count, workspace, size, handle)
        if status:
            _errors.check(self.library._c, status, bound.handle)
        bound.frames.append(frame)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def metas(self, tensors, scalars):
        """(shape, dtype) of each result. Refuses what the operator refuses when it is made."""
        views = [None if x is None else _view(n, x) for n, x in zip(self.names, tensors)]
        arguments = dict(zip(self.names, views))
        arguments.update(zip(self.function.other_names, scalars))
        op = _library.Op(self.library, self.schema, arguments)
        return [(meta.shape, _OF_CODE[meta[:2]]) for meta in op.returned]

    def fake(self, tensors, scalars):
        """Like a call, but reads and writes nothing: the results have no data, or are fake."""
        devices = {x.device for x in tensors if x is not None}
        if len(devices) > 1:
            raise ValueError(f"{self.schema.name}: tensors are on devices {sorted(map(str, devices))}; need one")
        if not self.schema.returns:
            self.metas(tensors, scalars)
            return None
        like = next(x for x in tensors if x is not None)
        dynamic = [n for x in tensors if x is not None for n in x.shape if not isinstance(n, int)]
        found = _dynamic(self, tensors, scalars, dynamic) if dynamic else self.metas(tensors, scalars)
        results = [like.new_empty(shape, dtype=dtype) for shape, dtype in found]
        return results[0] if len(results) == 1 else tuple(results)


class _Shape:
    """What metas() reads of a tensor: a dense one of another shape."""

    def __init__(self, x, shape):
        self.dtype, self.shape = x.dtype, shape

    def is_contiguous(self):
        return True


def _dynamic(caller, tensors, scalars, dynamic):
    """The results' shapes where extents are symbols, in the same symbols.

    The shape function is asked twice for each symbol, of its own value and of twice that. A result's extent
    that grows with it is that multiple of the symbol; one that stays does not depend on it. Strides are
    taken for dense ones. Where the answers are no multiple, or the second one is refused, the symbol
    becomes a number, and torch.compile compiles once more for each.
    """
    symbols = {str(n): n for n in dynamic}
    hints = {text: _hint(n) for text, n in symbols.items()}

    # A symbol that becomes a number below has another text then.
    extents = [None if x is None else [n if isinstance(n, int) else str(n) for n in x.shape] for x in tensors]

    def ask(values):
        shapes = [
            None if x is None else _Shape(x, [values.get(n, n) for n in shape]) for x, shape in zip(tensors, extents)
        ]
        return caller.metas(shapes, scalars)

    base = ask(hints)
    found = [list(shape) for shape, _ in base]
    for text, symbol in symbols.items():
        try:
            other = ask({**hints, text: 2 * hints[text]})
        except _errors.Error:
            int(symbol)
            continue
        for shape, (before, _), (after, _) in zip(found, base, other):
            for d, (a, b) in enumerate(zip(before, after)):
                if a != b and b == 2 * a and a % hints[text] == 0:
                    shape[d] = symbol * (a // hints[text])
                elif a != b and 2 * a == b and hints[text] % a == 0:
                    shape[d] = symbol // (hints[text] // a)
                elif a != b:
                    int(symbol)
    return [(shape, dtype) for shape, (_, dtype) in zip(found, base)]


def _hint(symbol):
    """A symbol's value, without making it a number. Symbols without one, of unbacked sizes, stand for 64."""
    from torch.fx.experimental.symbolic_shapes import hint_int

    return hint_int(symbol, fallback=64)
