"""Library, Executor and Op: the objects of c/quern.h, each with the life of a Python object."""

from __future__ import annotations

import ctypes
import difflib
import os
import threading
import weakref
from types import MappingProxyType
from typing import Any, Iterable, Mapping, Optional, Tuple

from . import _abi, _dlpack, _errors, _load, _schema, _tensor


def text(name: str, value: Optional[str]) -> Optional[bytes]:
    """A text for C; None stays None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; need a text")
    if "\0" in value:
        raise ValueError(f"{name}={value!r} holds a null character")
    return value.encode()


def near(name: str, known: Iterable[str]) -> str:
    """A question that names what is spelled like `name`, or nothing."""
    found = difflib.get_close_matches(name, list(known), 3, 0.6)
    return f"did you mean {' or '.join(found)}? " if found else ""


def whole(name: str, value: Any) -> int:
    """A whole number of 64 bits, which ctypes would cut off without a word."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; need a whole number")
    value = value.__index__()
    if not -(2**63) <= value < 2**63:
        raise OverflowError(f"{name}={value}; need 64 bits with a sign")
    return value


class _NotCopied:
    """A copy would have the same handle, and use it after the first of both has destroyed it."""

    def __reduce__(self):
        raise TypeError(f"a quern.{type(self).__name__} cannot be copied or pickled; need to make another")


class Object(_NotCopied):
    """An object of the library. Destroyed with its last reference, and at the latest with the process."""

    def __init__(self, library: Library, handle: int, *kept: Any):
        self._library = library
        self._handle = handle
        # The finalizer keeps the library, which destroys all objects in it, and
        # memory that the object reads.
        self._finalizer = weakref.finalize(self, _destroy, library._c, handle, library, kept)
        # When the interpreter ends, an array on the object's memory may still be read.
        self._finalizer.atexit = False

    @property
    def library(self) -> Library:
        return self._library

    def explain(self) -> str:
        """What the object is: kernels, instruction set, sizes."""
        return _errors.text_of(self._library._c.quern_explain, self._handle)

    def __repr__(self) -> str:
        return f"<quern.{type(self).__name__}: {self.explain()}>"


def _destroy(c, handle, library, kept):
    c.quern_destroy(handle)


class Library(_NotCopied):
    """All operators. Two libraries share nothing; quern.library() is the one that quern.ops uses.

    policy: which operators run their fast implementations: "all", "none,+rms_norm".
    path: that of libquern.so; None: quern.find_library().
    """

    def __init__(self, policy: Optional[str] = None, path: Optional[str] = None):
        self.path = _load.find() if path is None else path
        self._c = c = _load.load(self.path)
        options = _abi.LibraryOptions(ctypes.sizeof(_abi.LibraryOptions), text("policy", policy))
        handle = ctypes.c_void_p()
        message = ctypes.create_string_buffer(4096)
        status = c.quern_library_create(ctypes.byref(options), ctypes.byref(handle), message, len(message))
        if status != _abi.OK:
            raise _errors.of(status, message.value.decode("utf-8", "replace"))
        self._handle = handle.value
        self._functions: dict = {}  # of _call.py, by name
        weakref.finalize(self, c.quern_destroy, handle.value).atexit = False
        lines = _errors.text_of(c.quern_ops, self._handle).splitlines()
        self.schemas: Mapping[str, _schema.Schema] = MappingProxyType({s.name: s for s in map(_schema.parse, lines)})

    @property
    def version(self) -> str:
        """The version of the sources."""
        return self._c.quern_version().decode()

    def explain(self) -> str:
        return _errors.text_of(self._c.quern_explain, self._handle)

    def __repr__(self) -> str:
        return f"<quern.Library: {self.explain()}>"

    def schema(self, name: str) -> _schema.Schema:
        """The schema of an operator; NotFoundError names one that does not exist."""
        try:
            return self.schemas[name]
        except KeyError:
            raise _errors.NotFoundError(
                f'no operator "{name}"; {near(name, self.schemas)}need one of Library.schemas'
            ) from None

    def doc(self, name: str) -> str:
        """The equation of an operator, and the shapes and dtypes of its tensors. help(quern.ops.NAME) has it."""
        self.schema(name)
        return _errors.text_of(self._c.quern_op_doc, self._handle, name.encode())

    def executor(self, workers: int = 0) -> Executor:
        """A pool of `workers` threads, the calling one among them; 0: one on each core."""
        return Executor(workers, library=self)

    def op(self, name: str, *, provider: Optional[str] = None, **arguments: Any) -> Op:
        """Makes an operator for these arguments, by the names of its schema.

        Tensors give their dtype and shape and are not read; None is left out.
        """
        return Op(self, self.schema(name), arguments, provider)

    def function(self, name: str) -> Any:
        """An operator by name, as those of quern.ops are."""
        from . import _call  # imports this module

        return _call.make(self, self.schema(name))

    def _create(self, function, *arguments) -> int:
        handle = ctypes.c_void_p()
        status = function(self._handle, *arguments, ctypes.byref(handle))
        _errors.check(self._c, status, self._handle)
        return handle.value


_default = None
_lock = threading.Lock()


def library() -> Library:
    """The library of quern.ops, loaded by the first call."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = Library()
    return _default


class Executor(Object):
    """A pool of threads, which any number of calls may share: they take turns."""

    def __init__(self, workers: int = 0, *, library: Optional[Library] = None):
        library = library or globals()["library"]()
        if not 0 <= whole("workers", workers) <= 127:
            raise ValueError(f"workers={workers}; need 0 to 127")
        super().__init__(library, library._create(library._c.quern_executor_create_pool, workers))
        self._workers = int(self.explain().split()[0])
        self._forked = False
        _executors.add(self)

    @property
    def workers(self) -> int:
        return self._workers

    @property
    def forked(self) -> bool:
        """Whether the threads are those of a parent process. Calls refuse such an executor."""
        return self._forked

    def close(self) -> None:
        """Ends the threads now. Calls that are running end first; later ones are refused."""
        self._handle = None
        self._finalizer()

    def explain(self) -> str:
        if self._handle is None:
            return "of a parent process" if self._forked else "closed"
        return super().explain()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_executors: weakref.WeakSet = weakref.WeakSet()


def _after_fork() -> None:
    """Parts with executors, because the child has none of their threads and must not wait for them."""
    global _lock
    _lock = threading.Lock()  # which another thread of the parent may hold for ever
    for executor in list(_executors):
        executor._finalizer.detach()
        executor._handle, executor._forked = None, True
    _executors.clear()


os.register_at_fork(after_in_child=_after_fork)


def handle_of(executor: Optional[Executor], library: Library) -> Optional[int]:
    """The handle of an executor; None stands for the calling thread."""
    if executor is None:
        return None
    if not isinstance(executor, Executor):
        raise TypeError(f"executor is of type {type(executor).__name__}; need a quern.Executor or None")
    check_library("executor", executor, library)
    handle = executor._handle
    if handle is None:  # would otherwise stand for the calling thread
        if executor.forked:
            raise _errors.FailedPreconditionError(
                "the executor was made before a fork, in the parent process; need one of this process"
            )
        raise ValueError("the executor is closed; need an open one")
    return handle


def check_library(name: str, given: Object, library: Library) -> None:
    if given._library is not library:
        raise ValueError(f"{name} is of another quern.Library; need objects of one")


def class_of(kind: str) -> str:
    """The class of the objects that schemas call `kind`, which is mostly that."""
    return {"LinearWeights": "Linear", "KvLayout": "KvCache", "AttentionStep": "Schedule"}.get(kind, kind)


_WRONG = "{op}: {name}={value!r} is of type {type}; need {need}"


def _scalar(op: str, parameter: _schema.Parameter, value: Any):
    kind = parameter.kind
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        text(f"{op}: {parameter.name}", value)
        return value
    if kind == "int" and hasattr(value, "__index__") and not isinstance(value, bool):
        return whole(f"{op}: {parameter.name}", value)
    if kind == "float" and hasattr(value, "__float__") and not isinstance(value, bool):
        return float(value)
    raise TypeError(
        _WRONG.format(op=op, name=parameter.name, value=value, type=type(value).__name__, need=f"a value of {kind}")
    )


_SCALAR_TYPES = {
    "int": (_abi.ARGUMENT_INT, "integer", int),
    "bool": (_abi.ARGUMENT_BOOL, "integer", int),
    "float": (_abi.ARGUMENT_FLOAT, "real", float),
    "str": (_abi.ARGUMENT_TEXT, "text", str.encode),
}


def _argument(library: Library, op: str, parameter: _schema.Parameter, value: Any, keep: list) -> _abi.Argument:
    argument = _abi.Argument(parameter.name.encode())
    if parameter.kind == "Tensor":
        argument.type = _abi.ARGUMENT_TENSOR
        tensor = _abi.Tensor()
        _dlpack.fill(tensor, _tensor.meta_of(parameter.name, value))
        keep.append(tensor)
        argument.value.tensor = ctypes.pointer(tensor)
    elif parameter.is_object:
        argument.type = _abi.ARGUMENT_OBJECT
        if not isinstance(value, Object):
            raise TypeError(
                _WRONG.format(
                    op=op, name=parameter.name, value=value, type=type(value).__name__,
                    need=f"a quern.{class_of(parameter.kind)}",
                )
            )
        check_library(parameter.name, value, library)
        argument.value.object = value._handle
        keep.append(value)
    else:
        argument.type, field, convert = _SCALAR_TYPES[parameter.kind]
        setattr(argument.value, field, convert(_scalar(op, parameter, value)))
    keep.append(argument)
    return argument


class Op(Object):
    """An operator made for the dtypes and shapes of its arguments; Library.op makes one.

    Any number of threads may execute it at once; prepare() must be alone.
    """

    def __init__(
        self,
        library: Library,
        schema: _schema.Schema,
        arguments: Mapping[str, Any],
        provider: Optional[str] = None,
        *,
        cached: bool = False,
    ):
        self.schema = schema
        keep: list = []
        made_of = []
        known = {p.name: p for p in schema.parameters}
        for name, value in arguments.items():
            if name not in known:
                raise TypeError(f"{schema.name}: has no parameter {name}; need {', '.join(known)}")
            if value is not None:
                made_of.append(_argument(library, schema.name, known[name], value, keep))
        options = _abi.OpOptions(ctypes.sizeof(_abi.OpOptions), text("provider", provider))
        listed = (_abi.Argument * max(1, len(made_of)))(*made_of)
        handle = library._create(
            library._c.quern_op_create, schema.name.encode(), ctypes.byref(options), listed, len(made_of)
        )
        # Weights that have adopted bytes are read as long as the operator lives. A
        # cached operator lives in the cache of such an object.
        objects = [kept for kept in keep if isinstance(kept, Object)]
        super().__init__(library, handle, [] if cached else objects)
        self._filled = objects if fills(schema) and not cached else []

    def _check(self, status: int) -> None:
        _errors.check(self._library._c, status, self._handle)

    @property
    def returned(self) -> Tuple[_tensor.Meta, ...]:
        """Dtype and shape of each tensor that is returned, for the rows that the operator was made with."""
        metas = []
        for index in range(self.schema.returns):
            tensor = _abi.Tensor()
            self._check(self._library._c.quern_op_returned(self._handle, index, ctypes.byref(tensor)))
            dtype, shape = tensor.dtype, tuple(tensor.shape[: tensor.ndim])
            metas.append(_tensor.Meta(dtype.code, dtype.bits, dtype.lanes, shape, None))
        return tuple(metas)

    def _rows(self, operands=None, count: int = 0) -> int:
        rows = ctypes.c_int64()
        self._check(self._library._c.quern_op_rows(self._handle, operands, count, ctypes.byref(rows)))
        return rows.value

    @property
    def rows(self) -> int:
        """The rows of the tensors that the operator was made with, as workspace_bytes counts them."""
        return self._rows()

    def workspace_bytes(self, max_rows: int, executor: Optional[Executor] = None) -> int:
        """Bytes that an execution needs for up to max_rows rows, which `rows` counts."""
        size = ctypes.c_int64()
        executor_handle = handle_of(executor, self._library)
        self._check(
            self._library._c.quern_op_workspace_bytes(
                self._handle, whole("max_rows", max_rows), executor_handle, ctypes.byref(size)
            )
        )
        return size.value

    def _operands(self, tensors: Mapping[str, Any]):
        inputs = {p.name for p in self.schema.tensors if not p.written}
        operands = (_abi.Operand * max(1, len(tensors)))()
        keep = [operands]
        for operand, (name, value) in zip(operands, tensors.items()):
            operand.name = name.encode()
            if value is None:
                continue
            tensor = _tensor.CTensor(name, value)
            operand.tensor = ctypes.pointer(tensor.c)
            operand.flags = 0 if tensor.writable and name not in inputs else _abi.READ_ONLY
            keep.append(tensor)
        return ctypes.addressof(operands), len(tensors), keep

    def prepare(self, *, executor: Optional[Executor] = None, **tensors: Any) -> None:
        """Gives an operator that packs its weights those weights. Others do nothing."""
        operands, count, keep = self._operands(tensors)
        executor_handle = handle_of(executor, self._library)
        try:
            self._check(self._library._c.quern_op_prepare(self._handle, operands, count, executor_handle))
        finally:
            for filled in self._filled:
                forget(filled)
        del keep

    def execute(self, *, executor: Optional[Executor] = None, workspace: Any = None, **tensors: Any) -> None:
        """Runs the operator on tensors by the names of the schema; results are `out`, or `out0`, `out1`.

        workspace: a writable array of bytes that begins at a multiple of 64. Without it, the
        workspace is this thread's own, which grows to what is needed and is kept.
        """
        operands, count, keep = self._operands(tensors)
        executor_handle = handle_of(executor, self._library)
        if workspace is None:
            size = self.workspace_bytes(self._rows(operands, count), executor)
            memory = _tensor.scratch(size)
            address = memory.address
            keep.append(memory)
        else:
            meta, address, writable, kept = _tensor.describe("workspace", workspace)
            if not writable or meta.strides is not None and meta.strides != meta.dense_strides:
                raise ValueError("workspace is read-only or has gaps; need dense bytes that may be written")
            size = meta.dense_bytes
            keep.append(kept)
        self._check(
            self._library._c.quern_op_execute(self._handle, operands, count, address, size, executor_handle)
        )
        del keep


def fills(schema: _schema.Schema) -> bool:
    """Whether prepare() of an operator fills its object, of which other operators were perhaps made."""
    return schema.name.startswith("create_onednn_") or schema.name.endswith("get_scheduler_metadata")


def forget(filled: Object) -> None:
    """Operators that quern.ops has made with an older filling of the object are not used again."""
    filled.__dict__.pop("_cache", None)
