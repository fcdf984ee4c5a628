"""Finds libquern.so and loads it."""

import ctypes
import os

from . import _abi, _abi_model

_VARIABLE = "QUERN_LIBRARY"
_NAME = "libquern.so"


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
    return c
