"""Linear: a layer on packed weights of any format."""

from __future__ import annotations

import ctypes
from typing import Any, Mapping, Optional, Sequence

from . import _abi, _call, _errors, _library, _tensor
from ._library import Executor, Library, Object

# Codes that share one element of the source's columns and rows.
_PACKED = {"awq": (1, 8), "gptq": (8, 1), "gptq_v2": (8, 1)}
_TRANSPOSED = ("kn", "awq", "gptq", "gptq_v2")
_TENSORS = ("codes", "scales", "zeros", "g_idx", "bias")


def _extents(layout: str, shape) -> tuple:
    """(n, k) of codes of this shape; k is None where the layout does not say."""
    if len(shape) != 2:
        raise ValueError(f"the weight has shape {tuple(shape)}; need two dimensions")
    if layout in _TRANSPOSED:
        k_codes, n_codes = _PACKED.get(layout, (1, 1))
        return shape[1] * n_codes, shape[0] * k_codes
    if layout == "nk":
        return shape[0], shape[1]
    if layout == "blocks":
        return shape[0], None
    raise ValueError(f'layout="{layout}"; need nk, blocks or one of {", ".join(_TRANSPOSED)}')


class Linear(Object):
    """y = act(x * b + bias) + residual, where b[k, n] are packed weights.

    gemm/linear_weights.h lists formats and layouts, and the dtypes and shapes
    of codes, scales and zeros that go with them. A Linear is the argument
    `weights` of quern.ops.linear and of the mixers, too. Threads may share it.
    """

    @classmethod
    def from_numpy(
        cls,
        weight: Any,
        bias: Any = None,
        *,
        layout: str = "nk",
        format: Optional[str] = None,
        scales: Any = None,
        zeros: Any = None,
        g_idx: Any = None,
        n: Optional[int] = None,
        k: Optional[int] = None,
        group_size: int = 0,
        block_format: Optional[str] = None,
        block_n: int = 0,
        gated: bool = False,
        executor: Optional[Executor] = None,
        library: Optional[Library] = None,
    ) -> Linear:
        """Packs a weight[n, k], or in another layout, and a bias f32[n]. Copies; nothing is kept.

        Arrays may be of NumPy or have __dlpack__. format: "bf16", "i8_channel", "i4_group", ..; None: that
        of the floats of weight. n, k: only for a layout that does not say. group_size 0: 128; -1: all k.
        """
        source = dict(layout=layout, codes=weight, scales=scales, zeros=zeros, g_idx=g_idx, bias=bias, block_n=block_n)
        return cls.from_sources(
            [source], n=n, k=k, format=format, group_size=group_size, block_format=block_format, gated=gated,
            executor=executor, library=library,
        )

    @classmethod
    def from_sources(
        cls,
        sources: Sequence[Mapping[str, Any]],
        *,
        n: Optional[int] = None,
        k: Optional[int] = None,
        format: Optional[str] = None,
        group_size: int = 0,
        block_format: Optional[str] = None,
        gated: bool = False,
        executor: Optional[Executor] = None,
        library: Optional[Library] = None,
    ) -> Linear:
        """Packs several weights, stacked along n: query, key and value, or gate and up.

        A source is a mapping of codes and, where they exist, layout, scales, zeros, g_idx, bias and block_n.
        All have one layout.
        """
        library = library or _library.library()
        if not sources:
            raise ValueError("sources is empty; need one or more")
        packed = (_abi.LinearSource * len(sources))()
        keep: list = []
        columns = 0
        for to, source in zip(packed, sources):
            layout = _source(to, source, keep)
            rows, depth = _extents(layout, _tensor.meta_of("codes", source["codes"]).shape)
            columns += rows
            k = depth if k is None else k
        if k is None:
            raise ValueError(f"layout={layout!r} does not say k; need k")
        options = _abi.LinearWeightsOptions(
            ctypes.sizeof(_abi.LinearWeightsOptions),
            columns if n is None else _library.whole("n", n),
            _library.whole("k", k),
            _library.text("format", format),
            _library.whole("group_size", group_size),
            _library.text("block_format", block_format),
            int(bool(gated)),
            0,
        )
        handle = library._create(
            library._c.quern_linear_weights_pack, ctypes.byref(options), packed, len(packed),
            ctypes.sizeof(_abi.LinearSource), _library.handle_of(executor, library),
        )
        del keep
        return cls(library, handle)

    @classmethod
    def from_bytes(cls, data: Any, *, library: Optional[Library] = None) -> Linear:
        """Weights in the packed form that tobytes() returned. Copies, unless data begins at a multiple of 64.

        data is bytes, a memoryview, an mmap, or an array of bytes. It must not change while it is in use.
        """
        library = library or _library.library()
        if isinstance(data, _tensor.Tensor) or not is_buffer(data):
            meta, address, _, keep = _tensor.describe("data", data)
            size = meta.dense_bytes
            if meta.strides is not None and meta.strides != meta.dense_strides:
                raise ValueError("data has gaps; need dense bytes")
        else:
            keep = Buffer(data)
            address, size = keep.address, keep.size
        if address % _abi.ALIGNMENT:
            memory = _tensor._Memory(size)
            ctypes.memmove(memory.address, address, size)
            keep, address = memory, memory.address
        handle = library._create(library._c.quern_linear_weights_adopt, address, size)
        return cls(library, handle, keep)

    @property
    def packed(self) -> _tensor.Tensor:
        """The packed form: u8[bytes], read-only, on the memory of these weights."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self._library._c.quern_linear_weights_bytes(self._handle, ctypes.byref(data), ctypes.byref(size))
        _errors.check(self._library._c, status, self._handle)
        code, bits = _tensor.code_of("u8")
        return _tensor.Tensor(_tensor.Meta(code, bits, 1, (size.value,), None), data.value or 0, self, True)

    def tobytes(self) -> bytes:
        """A copy of the packed form, which describes itself, for a file."""
        packed = self.packed
        return ctypes.string_at(packed._address, packed.shape[0])

    def __call__(
        self,
        x: Any,
        *,
        residual: Any = None,
        activation: str = "none",
        activations: str = "exact",
        out_dtype: str = "",
        out: Any = None,
        executor: Optional[Executor] = None,
    ) -> Any:
        """y[rows, n] for x[rows, k]. A residual is added to in place, and is what is returned."""
        if residual is not None:
            if out is not None and out is not residual:
                raise ValueError("out is given beside residual; need one of them, because the residual is the result")
            out = residual
        function = _call.function_of(self._library, "linear")
        return function((x, residual), (self, activation, out_dtype, activations), (out,), executor, None)


def _source(to: _abi.LinearSource, source: Mapping[str, Any], keep: list) -> str:
    unknown = set(source) - set(_TENSORS) - {"layout", "block_n"}
    if unknown:
        raise TypeError(f"a source has {', '.join(sorted(unknown))}; need layout, block_n, {', '.join(_TENSORS)}")
    if source.get("codes") is None:
        raise ValueError("a source has no codes; need the weight")
    layout = source.get("layout") or "nk"
    to.layout = _library.text("layout", layout)
    to.block_n = _library.whole("block_n", source.get("block_n") or 0)
    for name in _TENSORS:
        if source.get(name) is not None:
            tensor = _tensor.CTensor(name, source[name])
            keep.append(tensor)
            setattr(to, name, ctypes.pointer(tensor.c))
    return layout


def is_buffer(data: Any) -> bool:
    try:
        memoryview(data)
        return True
    except TypeError:
        return False


class Buffer:
    """The address of an object with Python's buffer protocol, writable or not; keeps it."""

    _get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
        ("PyObject_GetBuffer", ctypes.pythonapi)
    )
    _release = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))

    def __init__(self, data):
        # A Py_buffer: buf at 0, obj at 8, len at 16; 80 bytes.
        self._view = ctypes.create_string_buffer(128)
        # Flags 0 (PyBUF_SIMPLE) ask for dense bytes and raise BufferError otherwise.
        self._get(data, self._view, 0)
        self.address = ctypes.c_void_p.from_buffer(self._view, 0).value or 0
        self.size = ctypes.c_ssize_t.from_buffer(self._view, 16).value

    def __del__(self):
        self._release(self._view)
