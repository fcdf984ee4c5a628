"""Tensors of the caller, described without a copy, and quern.Tensor, for dtypes that NumPy lacks."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from . import _abi, _dlpack

try:
    import numpy
except ImportError:  # DLPack serves alone
    numpy = None

ndarray = None if numpy is None else numpy.ndarray


class Meta(NamedTuple):
    """Dtype, shape and strides of a tensor. Strides are in elements; None: dense."""

    code: int
    bits: int
    lanes: int
    shape: Tuple[int, ...]
    strides: Optional[Tuple[int, ...]]

    @property
    def dtype(self) -> str:
        return _NAME_OF.get((self.code, self.bits, self.lanes), f"type code {self.code}, {self.bits} bits")

    @property
    def dense_strides(self):
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= max(1, extent)
        return tuple(reversed(strides))

    @property
    def dense_bytes(self) -> int:
        size = self.bits // 8
        for extent in self.shape:
            size *= extent
        return size


# DLPack's code and bits, and NumPy's name or that of ml_dtypes, which has the
# last three.
DTYPES = {
    "f32": (2, 32, "float32"),
    "f16": (2, 16, "float16"),
    "i8": (0, 8, "int8"),
    "i32": (0, 32, "int32"),
    "i64": (0, 64, "int64"),
    "u8": (1, 8, "uint8"),
    "bf16": (4, 16, "bfloat16"),
    "f8e4m3": (10, 8, "float8_e4m3fn"),
    "f8e5m2": (12, 8, "float8_e5m2"),
}
_BEYOND_NUMPY = ("bf16", "f8e4m3", "f8e5m2")
_NAME_OF = {(code, bits, 1): name for name, (code, bits, _) in DTYPES.items()}
_BY_NUMPY_NAME = {name: (code, bits, 1) for code, bits, name in DTYPES.values()}
_BY_NUMPY_NAME["bool"] = (6, 8, 1)
_NAME_OF[(6, 8, 1)] = "u8"


def code_of(dtype: str) -> Tuple[int, int]:
    """DLPack's code and bits of "bf16"."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; need one of {', '.join(DTYPES)}")
    return DTYPES[dtype][:2]


def _numpy_meta(name, x) -> Meta:
    code = _BY_NUMPY_NAME.get(x.dtype.name)
    if code is None or not x.dtype.isnative:
        need = ", ".join(n for n in _BY_NUMPY_NAME)
        raise TypeError(f"{name} has dtype {x.dtype}; need one of {need}, in this machine's order of bytes")
    size = x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        raise ValueError(f"{name} has strides {x.strides} bytes; need multiples of {size}, the size of an element")
    strides = None if x.flags.c_contiguous else tuple(stride // size for stride in x.strides)
    return Meta(*code, x.shape, strides)


def meta_of(name, x) -> Meta:
    """Dtype and shape of x: an array, a quern.Tensor, or an object with __dlpack__."""
    if isinstance(x, Tensor):
        return x._meta
    if ndarray is not None and isinstance(x, ndarray):
        return _numpy_meta(name, x)
    return describe(name, x)[0]


def describe(name, x):
    """(meta, address, writable, keep): keep must live as long as the address is used."""
    if isinstance(x, Tensor):
        return x._meta, x._address, not x.read_only, x
    if ndarray is not None and isinstance(x, ndarray):
        if isinstance(x, numpy.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be ignored; need a plain array")
        return _numpy_meta(name, x), x.ctypes.data, x.flags.writeable, x
    if hasattr(x, "__dlpack__"):
        float8 = _float8_of_torch(x)
        if float8 is not None:
            meta, address, writable, keep = describe(name, float8[0])
            code, bits = code_of(float8[1])
            return meta._replace(code=code, bits=bits), address, writable, keep
        tensor, read_only, capsule = _dlpack.borrow(name, x)
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        dtype = tensor.dtype
        meta = Meta(dtype.code, dtype.bits, dtype.lanes, shape, strides)
        return meta, (tensor.data or 0) + tensor.byte_offset, not read_only, capsule
    raise TypeError(
        f"{name} is of type {type(x).__name__}; need a NumPy array, a quern.Tensor, or an object with __dlpack__"
    )


def _float8_of_torch(x):
    """(u8 view, dtype) of a PyTorch tensor of 8-bit floats, which PyTorch's DLPack refuses; None for others."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    for name in ("f8e4m3", "f8e5m2"):
        if x.dtype is getattr(torch, DTYPES[name][2], None):
            return x.view(torch.uint8), name
    return None


class CTensor:
    """A quern_tensor in ctypes and what it points to."""

    __slots__ = ("c", "meta", "writable", "_keep")

    def __init__(self, name, x):
        self.meta, address, self.writable, self._keep = describe(name, x)
        self.c = _abi.Tensor()
        _dlpack.fill(self.c, self.meta, address)


class _Memory:
    """Bytes that begin at a multiple of 64."""

    __slots__ = ("address", "_bytes")

    def __init__(self, size):
        # Not zeroed: an anonymous array of ctypes would be.
        if numpy is not None:
            self._bytes = numpy.empty(size + _abi.ALIGNMENT, numpy.uint8)
            start = self._bytes.ctypes.data
        else:
            self._bytes = ctypes.create_string_buffer(size + _abi.ALIGNMENT)
            start = ctypes.addressof(self._bytes)
        self.address = -(-start // _abi.ALIGNMENT) * _abi.ALIGNMENT


class _Interface:
    """What NumPy makes a view of; keeps the owner of the memory."""

    def __init__(self, owner, interface):
        self._owner = owner
        self.__array_interface__ = interface


class Tensor:
    """A tensor on the CPU, of any dtype of the library. Serves NumPy and, by DLPack, every framework.

    Made by quern.empty, quern.view and quern.from_dlpack, and by operators whose result NumPy has no
    dtype for or whose first tensor is not a NumPy array.
    """

    __slots__ = ("_meta", "_address", "_owner", "read_only", "__weakref__")

    def __init__(self, meta: Meta, address: int, owner: Any, read_only: bool = False):
        self._meta, self._address, self._owner, self.read_only = meta, address, owner, read_only

    @classmethod
    def new(cls, meta: Meta) -> Tensor:
        """A dense tensor of this dtype and shape, with unspecified elements."""
        memory = _Memory(meta.dense_bytes)
        return cls(meta, memory.address, memory)

    def _clear(self) -> None:
        """Sets all bytes of a dense tensor to 0."""
        ctypes.memset(self._address, 0, self._meta.dense_bytes)

    @property
    def dtype(self) -> str:
        """The name of the element type: "bf16"."""
        return self._meta.dtype

    @property
    def shape(self) -> Tuple[int, ...]:
        return self._meta.shape

    @property
    def strides(self) -> Tuple[int, ...]:
        """In elements."""
        return self._meta.dense_strides if self._meta.strides is None else self._meta.strides

    def _view(self, typestr):
        size = self._meta.bits // 8
        interface = {
            "version": 3,
            "shape": self.shape,
            "typestr": typestr,
            "strides": tuple(stride * size for stride in self.strides),
            "data": (self._address, self.read_only),
        }
        return numpy.asarray(_Interface(self, interface))

    def bits(self):
        """The elements' bits as unsigned integers: a NumPy array on the same memory."""
        _need_numpy("bits")
        return self._view(f"<u{self._meta.bits // 8}")

    def numpy(self):
        """A NumPy array on the same memory. bf16 and fp8 need the package ml_dtypes; bits() does not."""
        _need_numpy("numpy")
        if self.dtype not in _BEYOND_NUMPY:
            return self._view(numpy.dtype(DTYPES[self.dtype][2]).str)
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"quern: NumPy has no {self.dtype} without the package ml_dtypes; bits() views it as integers"
            ) from None
        return self.bits().view(getattr(ml_dtypes, DTYPES[self.dtype][2]))

    def __getitem__(self, key):
        """What numpy() has there: a view, or a number."""
        return self.numpy()[key]

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"quern: {self.dtype} as {dtype} needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream is not None:
            raise BufferError(f"quern: stream={stream}; need None, because the tensor is on the CPU")
        if dl_device is not None and int(dl_device[0]) != _abi.CPU:
            raise BufferError(f"quern: dl_device={dl_device}; need {(_abi.CPU, 0)}, the CPU")
        if not copy:
            return _dlpack.lend(self, self._meta, self._address, self.read_only, max_version)
        other = empty(self.shape, self.dtype)
        if 0 not in self.shape:
            other.bits()[...] = self.bits()
        return _dlpack.lend(other, other._meta, other._address, False, max_version, copied=True)

    def __dlpack_device__(self):
        return (_abi.CPU, 0)

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a quern.Tensor without dimensions")
        return self.shape[0]

    def __reduce__(self):
        # copy, deepcopy and pickle: elements instead of an address, which another process does not have.
        return _with_elements, (self.dtype, self.shape, self._elements())

    def _elements(self) -> bytes:
        size = self._meta.bits * self._meta.lanes // 8
        if 0 in self.shape:
            return b""
        if self._meta.strides is None or self._meta.strides == self._meta.dense_strides:
            for extent in self.shape:
                size *= extent
            return ctypes.string_at(self._address, size)
        return self.bits().tobytes()

    def __repr__(self):
        return f"<quern.Tensor {self.dtype}{list(self.shape)}{', read-only' if self.read_only else ''}>"


def _need_numpy(method):
    if numpy is None:
        raise ImportError(f"quern.Tensor.{method} needs NumPy, which is not installed")


def empty(shape: Sequence[int], dtype: str) -> Tensor:
    """A dense tensor with unspecified elements, at a multiple of 64 bytes."""
    code, bits = code_of(dtype)
    for extent in shape:
        if isinstance(extent, bool) or not hasattr(extent, "__index__"):
            raise TypeError(f"shape={shape} holds {extent!r}; need whole numbers")
    shape = tuple(extent.__index__() for extent in shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape={shape}; need extents of 0 or more")
    return Tensor.new(Meta(code, bits, 1, shape, None))


def _with_elements(dtype: str, shape: Tuple[int, ...], elements: bytes) -> Tensor:
    tensor = empty(shape, dtype)
    ctypes.memmove(tensor._address, elements, len(elements))
    return tensor


def view(x: Any, dtype: str) -> Tensor:
    """The memory of x as elements of another type of the same size: uint16 as "bf16", uint8 as "f8e4m3".

    Read-only where x is. x is a NumPy array of unsigned integers or of a dtype of the library, or an object
    with __dlpack__.
    """
    code, bits = code_of(dtype)
    if ndarray is not None and isinstance(x, ndarray) and x.dtype.kind == "u" and x.dtype.isnative:
        # NumPy's uint16 is no dtype of the library, but serves here.
        x = x.view(f"i{x.dtype.itemsize}") if x.dtype.itemsize != 2 else x.view("f2")
    meta, address, writable, keep = describe("x", x)
    if meta.bits * meta.lanes != bits:
        raise ValueError(f"x has elements of {meta.bits * meta.lanes} bits; need {bits}, as {dtype} has")
    return Tensor(Meta(code, bits, 1, meta.shape, meta.strides), address, keep, not writable)


def from_dlpack(x: Any) -> Tensor:
    """A tensor on the memory of x, which is anything that quern takes."""
    meta, address, writable, keep = describe("x", x)
    if meta.dtype not in DTYPES:
        raise TypeError(f"x has DLPack's {meta.dtype}, {meta.lanes} lanes; need one of {', '.join(DTYPES)}")
    return Tensor(meta, address, keep, not writable)


def kind_of_result(tensors, meta: Meta):
    """What a result is: (shape, dtype) of a NumPy array where the first tensor is one, if NumPy has the
    dtype; otherwise (meta, None), for a quern.Tensor.

    bf16 and fp8 are arrays of ml_dtypes where one of the tensors is.
    """
    given = [x for x in tensors if x is not None]
    if given and ndarray is not None and isinstance(given[0], ndarray):
        dtype = NUMPY_DTYPES.get(meta[:2])
        if dtype is None:
            name = DTYPES[meta.dtype][2]
            dtype = next((x.dtype for x in given if isinstance(x, ndarray) and x.dtype.name == name), None)
        if dtype is not None:
            return meta.shape, dtype
    return meta, None


NUMPY_DTYPES = (
    {}
    if numpy is None
    else {(c, b): numpy.dtype(n) for name, (c, b, n) in DTYPES.items() if name not in _BEYOND_NUMPY}
)


class _Scratch(threading.local):
    memory = None
    size = -1


_scratch = _Scratch()


def scratch(size: int) -> _Memory:
    """The workspace of this thread, which grows and is kept.

    The caller keeps what is returned until its call is done, because a finalizer or a handler of a signal
    may run another operator in between, whose workspace takes the place of this one.
    """
    if size > _scratch.size:
        _scratch.memory, _scratch.size = None, -1
        _scratch.memory = _Memory(size)
        _scratch.size = size
    return _scratch.memory
