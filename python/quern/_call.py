"""Operators by name: Python functions made from the schemas.

A call finds an operator that was made for the same dtypes, shapes, strides and
numbers, fills in the addresses, and executes it. Operators are made by the
first call of their kind, and the newest _MOST of them are kept: by the
function, or by the last of the call's objects, so that they live no longer than
that object.

An operator that must be prepared (it packs its weights, or reads lengths) is
made and prepared by every call, because a kept one would go on with the
tensors of an earlier call. quern.Library.op makes one that is kept.
"""

from __future__ import annotations

import ctypes
import keyword
import textwrap

from . import _abi, _dlpack, _errors, _library, _tensor

_MOST = 256

_ndarray = _tensor.ndarray
_empty = None if _ndarray is None else _tensor.numpy.empty
_zeros = None if _ndarray is None else _tensor.numpy.zeros
_READ_ONLY = _abi.READ_ONLY
_byte_of = ctypes.c_char.from_buffer
_addressof = ctypes.addressof


def _address(array):
    """The address of a NumPy array."""
    try:
        # 0.15 us instead of 0.5 us (NumPy 1.24), for writable C-contiguous arrays.
        return _addressof(_byte_of(array))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data


class _Frame:
    """The operands of one call. A call takes one, and gives it back for the next."""

    __slots__ = ("operands", "each", "tensors", "address", "count")

    def __init__(self, bound):
        count = len(bound.metas)
        self.operands = (_abi.Operand * max(1, count))()
        self.each = list(self.operands)
        self.tensors = []
        self.count = count
        self.address = ctypes.addressof(self.operands)
        for operand, (name, meta, is_input) in zip(self.each, bound.metas):
            tensor = _abi.Tensor()
            _dlpack.fill(tensor, meta)
            operand.name = name
            operand.tensor = ctypes.pointer(tensor)
            operand.flags = _abi.READ_ONLY if is_input else 0
            self.tensors.append(tensor)


class _Bound:
    """An operator, and how its operands are laid out for tensors of one kind."""

    __slots__ = (
        "op", "handle", "metas", "new", "zeroed", "rows", "bytes", "frames", "steps", "unprepared", "library",
    )

    def __init__(self, function, tensors, scalars, outs, provider):
        schema = function.schema
        arguments = dict(zip(function.tensor_names, tensors))
        arguments.update(zip(function.other_names, scalars))
        if arguments.get("out_dtype") == "" and schema.returns == 1 and outs[0] is not None:
            arguments["out_dtype"] = _tensor.meta_of("out", outs[0]).dtype
        # Tokens of no sequence are not written, and would be old memory in a new result.
        self.zeroed = any(arguments.get(name) is not None for name in ("query_start_loc", "seq_lens"))
        self.library = function.library
        self.op = _library.Op(self.library, schema, arguments, provider, cached=True)
        self.handle = self.op._handle
        returned = self.op.returned
        # The shape of each result and NumPy's dtype; or its Meta and None, for a quern.Tensor.
        self.new = [_tensor.kind_of_result(tensors, meta) for meta in returned]
        self.metas = []
        for parameter, x in zip(schema.tensors, tensors):
            if x is not None:
                meta = _tensor.meta_of(parameter.name, x)
                self.metas.append((parameter.name.encode(), meta, not parameter.written))
        for name, result, out in zip(schema.outs, returned, outs):
            meta = result if out is None else _tensor.meta_of(name, out)
            self.metas.append((name.encode(), meta, False))
        self.rows = self.op.rows
        self.bytes = {}
        self.frames = []
        # A schedule's step changes, and the bytes with it.
        self.steps = any(p.kind.endswith("Step") or p.kind == "SchedulerMetadata" for p in schema.objects)
        try:
            self.op.workspace_bytes(self.rows)
            self.unprepared = function.fills
        except _errors.FailedPreconditionError:
            self.unprepared = True

    def size(self, workers, executor):
        """The bytes of a workspace, asked once for each number of workers."""
        size = self.op.workspace_bytes(self.rows, executor)
        if not self.steps:
            self.bytes[workers] = size
        return size

    def prepare(self, frame, executor_handle):
        c = self.library._c
        _errors.check(c, c.quern_op_prepare(self.handle, frame.address, frame.count, executor_handle), self.handle)


class Function:
    """What the Python function of one operator calls."""

    def __init__(self, library, schema):
        others = [p for p in schema.parameters if p.kind != "Tensor"]
        objects = [i for i, p in enumerate(others) if p.is_object]
        self.library, self.schema = library, schema
        self.execute = library._c.quern_op_execute
        self.tensor_names = tuple(p.name for p in schema.tensors)
        self.other_names = tuple(p.name for p in others)
        self.written = tuple(p.written for p in schema.tensors)
        self.last_object = objects[-1] if objects else None
        # Operators whose Prepare fills an object, of which operators were perhaps made.
        self.fills = _library.fills(schema)
        self.cache = {}

    def _cache_of(self, scalars):
        """The cache that a call uses, and what of its scalars is part of the key."""
        at = self.last_object
        last = scalars[at]
        if last is None:
            return self.cache, scalars
        if not isinstance(last, _library.Object):
            raise TypeError(
                f"{self.schema.name}: {self.other_names[at]} is of type {type(last).__name__}; "
                f"need a quern.{_library.class_of(self.schema.objects[-1].kind)}"
            )
        caches = last.__dict__.setdefault("_cache", {})
        # Without the object itself, which would otherwise wait for the garbage collector.
        return caches.setdefault(self.schema.name, {}), scalars[:at] + (None,) + scalars[at + 1 :]

    def forget(self, scalars):
        _library.forget(scalars[self.last_object])

    def _bind(self, cache, key, tensors, scalars, outs, provider):
        bound = _Bound(self, tensors, scalars, outs, provider)
        if key is not None and not bound.unprepared:
            while len(cache) >= _MOST:
                try:
                    del cache[next(iter(cache))]
                except (KeyError, StopIteration, RuntimeError):
                    pass  # another thread was first
            cache[key] = bound
        return bound

    def __call__(self, tensors, scalars, outs, executor, provider):
        # Written out without helpers, because each of their calls costs 0.1 us.
        kinds, addresses, written, keep = [], [], [], []
        for x, is_written in zip(tensors, self.written):
            if type(x) is _ndarray:
                kinds.append((x.dtype, x.shape, x.strides))
                addresses.append(_address(x))
                if is_written:
                    written.append((len(addresses) - 1, x.flags.writeable))
            elif x is None:
                kinds.append(None)
            else:
                name = self.tensor_names[len(kinds)]
                meta, address, writable, kept = _tensor.describe(name, x)
                # A subclass of NumPy's array gives arrays, and others give a quern.Tensor.
                kinds.append((meta, _ndarray is not None and isinstance(x, _ndarray)))
                addresses.append(address)
                keep.append(kept)
                if is_written:
                    written.append((len(addresses) - 1, writable))
        given = []
        for out in outs:
            if out is None:
                kinds.append(None)
                given.append(None)
            elif type(out) is _ndarray:
                kinds.append((out.dtype, out.shape, out.strides))
                given.append((_address(out), out.flags.writeable))
            else:
                name = self.schema.outs[len(given)]
                meta, address, writable, kept = _tensor.describe(name, out)
                kinds.append(meta)
                given.append((address, writable))
                keep.append(kept)
        cache, part = (self.cache, scalars) if self.last_object is None else self._cache_of(scalars)
        key = (tuple(kinds), part, provider)
        try:
            bound = cache.get(key)
        except TypeError:  # a number that cannot be a key, which the operator refuses
            key = bound = None
        if bound is None:
            bound = self._bind(cache, key, tensors, scalars, outs, provider)
        results = []
        for place, out, (shape, dtype) in zip(given, outs, bound.new):
            if place is not None:
                written.append((len(addresses), place[1]))
                addresses.append(place[0])
            elif dtype is None:
                out = _tensor.Tensor.new(shape)
                addresses.append(out._address)
                if bound.zeroed:
                    out._clear()
            else:
                out = _zeros(shape, dtype) if bound.zeroed else _empty(shape, dtype)
                addresses.append(_address(out))
            results.append(out)
        try:
            frame = bound.frames.pop()
        except IndexError:
            frame = _Frame(bound)
        for tensor, address in zip(frame.tensors, addresses):
            tensor.data = address
        for i, writable in written:
            frame.each[i].flags = 0 if writable else _READ_ONLY
        handle = workers = None
        if executor is not None:
            handle, workers = _library.handle_of(executor, self.library), executor._workers
        if bound.unprepared:
            bound.prepare(frame, handle)
            if self.fills:
                self.forget(scalars)
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


def function_of(library, name):
    """The Function of an operator; there is one for each library."""
    functions = library._functions
    function = functions.get(name)
    if function is None:
        function = functions[name] = Function(library, library.schema(name))
    return function


def _signature(schema):
    """The parameters of the Python function, in source form, and their annotations for stubs.

    From the first required parameter after an optional one on, parameters are by name only.
    """
    parts, optional_seen, starred = [], False, False
    for p in schema.parameters:
        if p.required and optional_seen and not starred:
            parts.append(("*", None))
            starred = True
        optional_seen = optional_seen or not p.required
        kind = {"Tensor": "Array"}.get(p.kind, p.kind)
        if p.optional:
            parts.append((f"{p.name}=None", f"Optional[{kind}]"))
        elif p.default is not None:
            parts.append((f"{p.name}={_literal(p.default)}", kind))
        else:
            parts.append((p.name, kind))
    if not starred:
        parts.append(("*", None))
    if schema.returns == 1:
        parts.append(("out=None", "Optional[Array]"))
    elif schema.returns:
        parts.append((f"out={(None,) * schema.returns}", f"Tuple[{', '.join(['Optional[Array]'] * schema.returns)}]"))
    parts.append(("executor=None", "Optional[Executor]"))
    parts.append(("provider=None", "Optional[str]"))
    return parts


def _literal(value):
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


def _kind_sentence(p):
    what = f"tensor{', written' if p.written else ''}" if p.kind == "Tensor" else p.kind
    if p.optional:
        return f"{p.name}: {what}; may be None"
    return f"{p.name}: {what}" + ("" if p.default is None else f"; {p.default!r} if left out")


def docstring(schema, doc) -> str:
    """The schema, what the library says of the operator, and what each parameter is."""
    lines = [schema.text, ""]
    for line in doc.splitlines():
        lines += textwrap.wrap(line, 100)
    lines.append("")
    lines += [_kind_sentence(p) for p in schema.parameters]
    if schema.returns == 1:
        lines += ["out: tensor for the result; None: a new one is returned"]
    elif schema.returns:
        lines += [f"out: {schema.returns} tensors for the results; None: a new one is returned in its place"]
    lines += [
        "executor: threads; None: the calling thread",
        'provider: "simd", "reference"; None: as the library\'s policy says',
    ]
    return "\n".join(lines)


def make(library, schema):
    """The Python function of an operator."""
    names = [p.name for p in schema.parameters]
    reserved = {"_function", "executor", "provider"} | ({"out"} if schema.returns else set())
    if any(keyword.iskeyword(name) or name in reserved for name in names):
        raise ValueError(f"quern: {schema.name} has a parameter whose name Python or quern.ops uses: {names}")

    function = function_of(library, schema.name)

    def listed(wanted):
        return "".join(f"{name}, " for name in wanted)

    outs = {0: "()", 1: "(out,)"}.get(schema.returns, f"_outs(out, {schema.returns})")
    source = (
        f"def {schema.name}({', '.join(part for part, _ in _signature(schema))}):\n"
        f"    return _function(({listed(function.tensor_names)}), ({listed(function.other_names)}), "
        f"{outs}, executor, provider)\n"
    )
    space = {"_function": function, "_outs": _outs}
    exec(compile(source, f"<quern.ops.{schema.name}>", "exec"), space)
    made = space[schema.name]
    made.__doc__ = docstring(schema, library.doc(schema.name))
    made.__module__ = "quern.ops"
    return made


def _outs(out, count):
    outs = (None,) * count if out is None else tuple(out)
    if len(outs) != count:
        raise ValueError(f"out has {len(outs)} tensors; need {count}, or None in the place of each")
    return outs
