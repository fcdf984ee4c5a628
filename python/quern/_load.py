"""Finds libquern.so, loads it, and caps its instruction set."""

import ctypes
import os
from typing import Optional

from . import _abi, _abi_model, _errors

_VARIABLE = "QUERN_LIBRARY"
_NAME = "libquern.so"
# The cap that the environment asked for when the package was imported, and the
# libraries that are loaded, which share it.
_MAX_ISA = "QUERN_MAX_ISA"
_max_isa = os.environ.get(_MAX_ISA) or None
_loaded: list = []


def find(environment=None):
    """The path of libquern.so: $QUERN_LIBRARY, or the file beside this package's modules."""
    environment = os.environ if environment is None else environment
    given = environment.get(_VARIABLE)
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), _NAME)
    path = given or beside
    if os.path.isfile(path):
        return path
    if given:
        raise OSError(f"quern: {_VARIABLE}={given!r} is no file; need the path of {_NAME}")
    raise OSError(f"quern: there is no {beside}; need it there, or its path in {_VARIABLE}")


def load(path):
    """Loads the library at `path`. Refuses one of another release.

    Symbols stay local to the library, so another copy of Quern in this process does no harm.
    """
    c = ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_LOCAL)
    try:
        c.quern_abi_version.restype = ctypes.c_int32
        version = c.quern_abi_version()
        if version != _abi.ABI_VERSION:
            raise OSError(f"quern: {path} has version {version} of the C interface; need {_abi.ABI_VERSION}")
        _abi.declare(c, _abi.FUNCTIONS)
        _abi.declare(c, _abi_model.FUNCTIONS)
        release = c.quern_version().decode()
        if release != _abi.VERSION:
            raise OSError(f"quern: {path} is of release {release}; need {_abi.VERSION}, that of the package")
    except AttributeError as missing:
        raise OSError(f"quern: {path} is no Quern library of this version: {missing}") from None
    if _max_isa is not None:
        try:
            _cap(c, _max_isa)
        except _errors.Error as refused:
            raise type(refused)(f"{_MAX_ISA} in the environment: {refused}") from None
    if all(c._handle != other._handle for other in _loaded):
        _loaded.append(c)
    return c


def _cap(c, isa):
    message = ctypes.create_string_buffer(1024)
    status = c.quern_set_max_isa(None if isa is None else isa.encode(), message, len(message))
    if status != _abi.OK:
        raise _errors.of(status, message.value.decode("utf-8", "replace"))


def set_max_isa(isa: Optional[str]) -> None:
    """Caps the instruction set of whatever this process makes from now on: "AVX2", "AVX2_VNNI", "AVX3_ZEN4".

    So what happened on one CPU can be repeated on a better one. None lifts the cap. Better than this CPU's
    changes nothing. The environment's QUERN_MAX_ISA, which is read by `import quern`, does the same. What
    was made before keeps its kernels, those of the calls of quern.ops as well. Call it before anything else,
    and while no other thread is in the library.
    """
    global _max_isa
    if isa is not None and (not isinstance(isa, str) or "\0" in isa or not isa):
        raise ValueError(f"isa={isa!r}; need the name of an instruction set, or None")
    if not _loaded:
        # Refuses a wrong name now, not when the library is loaded.
        load(find())
    for c in _loaded:
        _cap(c, isa)
    _max_isa = isa
