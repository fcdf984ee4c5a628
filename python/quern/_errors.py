"""What a refused call raises: quern.Error, and the type that Python would raise.

It is a RuntimeError, too, because PyTorch's operators raise that for what they refuse.
"""

from . import _abi


class Error(RuntimeError):
    """A refused call. `status` is the code of c/quern.h; the text is the library's sentence."""

    status = _abi.INTERNAL


class InvalidArgumentError(Error, ValueError):
    """What was given is wrong."""

    status = _abi.INVALID_ARGUMENT


class NotFoundError(Error, LookupError):
    """There is no such operator, provider or file."""

    status = _abi.NOT_FOUND


class ModelNotFoundError(NotFoundError, FileNotFoundError):
    """There is no such model's file."""


class PermissionDeniedError(Error, PermissionError):
    """The system does not let a file be read."""

    status = _abi.PERMISSION_DENIED


class CancelledError(Error, RuntimeError):
    """A function of the caller has given up; what it raised is raised in its place."""

    status = _abi.CANCELLED


class DataLossError(Error, EOFError):
    """A file ends too early, or its weights are damaged."""

    status = _abi.DATA_LOSS


class ResourceExhaustedError(Error, MemoryError):
    """There is not enough memory, or not enough threads."""

    status = _abi.RESOURCE_EXHAUSTED


class FailedPreconditionError(Error, RuntimeError):
    """The object is in use by another call, or was not prepared."""

    status = _abi.FAILED_PRECONDITION


class UnimplementedError(Error, NotImplementedError):
    """What was asked for is legal, but there is no kernel for it."""

    status = _abi.UNIMPLEMENTED


class InternalError(Error, RuntimeError):
    """A bug in the library."""


_TYPES = {
    error.status: error
    for error in (
        InvalidArgumentError,
        NotFoundError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        UnimplementedError,
        DataLossError,
        CancelledError,
    )
}


def text_of(function, *arguments):
    """The whole text that a function of the header writes for an object."""
    size = function(*arguments, None, 0)
    while True:
        text = _abi.ctypes.create_string_buffer(size + 1)
        now = function(*arguments, text, size + 1)
        if now <= size:
            return text.value.decode("utf-8", "replace")
        size = now


def of(status, message):
    """The exception of a status other than OK."""
    return _TYPES.get(status, InternalError)(message)


def check(c, status, handle):
    """Raises what `status` says, with the sentence of the object."""
    if status != _abi.OK:
        raise of(status, text_of(c.quern_message, handle))
