"""DLPack capsules in and out, by ctypes alone.

A capsule holds a DLManagedTensor, named "dltensor", or a
DLManagedTensorVersioned, named "dltensor_versioned", which says whether its
memory is read-only. Both are structs of dlpack.h 1.1. A capsule that nobody
consumes frees what is behind it when it is dropped, so a borrower keeps the
capsule and nothing else.
"""

import atexit
import ctypes

from . import _abi

_PLAIN = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_VERSION = (1, 1)
_READ_ONLY = 1
_COPIED = 2

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _abi.Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _abi.Tensor),
    ]


def _function(name, result, *parameters):
    # Prototypes of this module's own: ctypes.pythonapi is shared by all.
    return ctypes.PYFUNCTYPE(result, *parameters)((name, ctypes.pythonapi))


_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_new = _function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
# A destructor is given a capsule whose count of references is already 0, which
# py_object would raise and lower again.
_is_valid_raw = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_raw = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


def borrow(name, x):
    """The tensor behind x.__dlpack__(): (_abi.Tensor, read_only, capsule). The tensor lives as long as the capsule."""
    device = getattr(x, "__dlpack_device__", None)
    if device is not None:
        device_type = int(device()[0])
        if device_type != _abi.CPU:
            raise ValueError(f"{name} has device_type={device_type}; need {_abi.CPU}, the CPU")
    try:
        capsule = x.__dlpack__(max_version=_VERSION)
    except TypeError:  # a producer of before DLPack 1.0
        capsule = x.__dlpack__()
    if _is_valid(capsule, _VERSIONED):
        managed = _Versioned.from_address(_pointer(capsule, _VERSIONED))
        if managed.major != _VERSION[0]:
            raise ValueError(f"{name} has DLPack version {managed.major}.{managed.minor}; need {_VERSION[0]}.x")
        return managed.tensor, bool(managed.flags & _READ_ONLY), capsule
    if _is_valid(capsule, _PLAIN):
        return _Managed.from_address(_pointer(capsule, _PLAIN)).tensor, False, capsule
    raise TypeError(f"{name}.__dlpack__() returned {capsule!r}; need a capsule with a tensor that nobody has taken")


# What consumers of our capsules still use, by the address of the managed tensor.
_lent = {}


# Capsules and tensors may outlive this module. So the two callbacks are never
# freed, and read none of its variables, which are None by then.


@_Deleter
def _release(address, _lent=_lent):
    _lent.pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule, _lent=_lent, _names=(_PLAIN, _VERSIONED), _is_valid=_is_valid_raw, _pointer=_pointer_raw):
    # A consumer renames the capsule and calls the deleter itself.
    for name in _names:
        if _is_valid(capsule, name):
            _lent.pop(_pointer(capsule, name), None)


_keep_forever = _function("Py_IncRef", None, ctypes.py_object)
_keep_forever(_release)
_keep_forever(_drop)
_drop_address = ctypes.cast(_drop, ctypes.c_void_p)
# May be called when there is no interpreter any more, and does nothing.
_nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, _Deleter)


@atexit.register
def _leave():
    """Leaves what is lent to its consumers, who may end after the interpreter."""
    for entry in list(_lent.values()):
        _keep_forever(entry)
        entry[0].deleter = _nothing


def lend(owner, meta, address, read_only, max_version=None, copied=False):
    """A capsule of the tensor at `address`. Keeps `owner` until its consumer is done."""
    versioned = max_version is not None and max_version[0] >= 1
    if read_only and not versioned:
        raise BufferError("quern: the tensor is read-only; need a consumer that takes DLPack 1.0, or a copy")
    managed = (_Versioned if versioned else _Managed)()
    fill(managed.tensor, meta, address)
    managed.deleter = _release
    if versioned:
        managed.major, managed.minor = _VERSION
        managed.flags = (_READ_ONLY if read_only else 0) | (_COPIED if copied else 0)
    key = ctypes.addressof(managed)
    _lent[key] = (managed, owner)
    try:
        return _new(key, _VERSIONED if versioned else _PLAIN, _drop_address)
    except BaseException:
        del _lent[key]
        raise


def fill(tensor, meta, address=None):
    """Writes a tensor of this shape. Its arrays live as long as `tensor`."""
    tensor.data = address
    tensor.device.device_type = _abi.CPU
    tensor.ndim = len(meta.shape)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = meta.code, meta.bits, meta.lanes
    dims = ctypes.c_int64 * max(1, len(meta.shape))
    tensor.shape = dims(*meta.shape)
    if meta.strides is not None:
        tensor.strides = dims(*meta.strides)
