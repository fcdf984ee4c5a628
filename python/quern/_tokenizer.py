"""Tokenizer: text to tokens and back, and what a model's file may be."""

from __future__ import annotations

import array
import ctypes
import os
from typing import Any, Iterable, List, Optional, Union

from . import _abi_model, _errors, _library, _linear
from ._library import Library, Object


# How many there are at first; more are asked for where they do not suffice.
_TOKENS_OF_A_BYTE = 1
_BYTES_OF_A_TOKEN = 16


def ints(name: str, tokens: Iterable[int]) -> Any:
    """int32 in C's memory. OverflowError and TypeError where one is none."""
    try:
        # An array would take bytes for its memory.
        values = array.array("i", None if isinstance(tokens, (bytes, bytearray)) else tokens)
    except TypeError:
        raise TypeError(f"{name} are {tokens!r}; need whole numbers") from None
    except OverflowError:
        raise OverflowError(f"{name} has a number that needs more than 32 bits; need tokens") from None
    return (ctypes.c_int32 * len(values)).from_buffer(values) if values else (ctypes.c_int32 * 0)()


def create(library: Library, function: Any, options: Any, source: Any, *arguments: Any) -> int:
    """Makes an object of a GGUF file, which is a path, or holds the bytes of one."""
    if isinstance(source, (str, os.PathLike)):
        options.path = path_of("path", source)
    elif _linear.is_buffer(source):
        buffer = _linear.Buffer(source)
        options.bytes, options.num_bytes = buffer.address, buffer.size
    else:
        raise TypeError(f"a model's file is of type {type(source).__name__}; need a path, or bytes of a whole file")
    try:
        return library._create(function, ctypes.byref(options), *arguments)
    except _errors.NotFoundError as missing:
        raise _errors.ModelNotFoundError(str(missing)) from None


def path_of(name: str, path: Any) -> Optional[bytes]:
    """A path for C; None stays None."""
    if path is None:
        return None
    path = os.fsencode(path)
    if b"\0" in path:
        raise ValueError(f"{name}={path!r} holds a null character")
    return path


class Tokenizer(Object):
    """Text to tokens and back, by the vocabulary of a GGUF file. Threads may share it.

    source: the path of a file, or the bytes of one. Model.tokenizer is the one of a model.
    """

    def __init__(self, source: Union[str, os.PathLike, Any], *, library: Optional[Library] = None):
        library = library or _library.library()
        options = _abi_model.TokenizerOptions(size=ctypes.sizeof(_abi_model.TokenizerOptions))
        super().__init__(library, create(library, library._c.quern_tokenizer_create, options, source))
        info = _abi_model.TokenizerInfo(size=ctypes.sizeof(_abi_model.TokenizerInfo))
        self._check(library._c.quern_tokenizer_get_info(self._handle, ctypes.byref(info)))
        self.vocab: int = info.vocab
        #: The token that begins a text; None: there is none.
        self.bos: Optional[int] = info.bos if info.bos >= 0 else None
        #: The token that ends a text; is_end knows others.
        self.eos: int = info.eos
        #: Whether the model expects bos before a text, which encode then adds.
        self.adds_bos = bool(info.adds_bos)

    def _check(self, status: int) -> None:
        _errors.check(self._library._c, status, self._handle)

    def encode(self, text: Union[str, bytes], *, bos: bool = True, specials: bool = False) -> List[int]:
        """The tokens of a text.

        bos: the first token of a text comes first, where the model expects one; a text that begins with it
        gets no second one. specials: the text of a
        control token, "<|im_end|>", becomes that token; otherwise what a user wrote commands nothing.
        """
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"text is of type {type(text).__name__}; need str or bytes")
        data = text.encode() if isinstance(text, str) else text
        flags = (_abi_model.ENCODE_BOS if bos else 0) | (_abi_model.ENCODE_SPECIALS if specials else 0)
        capacity, count = _TOKENS_OF_A_BYTE * len(data) + 8, ctypes.c_size_t()
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            self._check(
                self._library._c.quern_tokenizer_encode(
                    self._handle, data, len(data), flags, tokens, capacity, ctypes.byref(count)
                )
            )
            if count.value <= capacity:
                return tokens[: count.value]
            capacity = count.value

    def decode_bytes(self, tokens: Iterable[int], *, continues: bool = False) -> bytes:
        """The bytes of tokens. Control tokens, and numbers that are no token, give nothing.

        continues: the tokens follow others, so a leading space is kept. Each token's bytes, one after the
        other, are then the whole text; one token may end within a character.
        """
        tokens = ints("tokens", tokens)
        flags = _abi_model.DECODE_CONTINUES if continues else 0
        capacity, count = _BYTES_OF_A_TOKEN * len(tokens) + 1, ctypes.c_size_t()
        while True:
            text = ctypes.create_string_buffer(capacity)
            self._check(
                self._library._c.quern_tokenizer_decode(
                    self._handle, tokens, len(tokens), flags, text, capacity, ctypes.byref(count)
                )
            )
            if count.value < capacity:
                return text.raw[: count.value]
            capacity = count.value + 1

    def decode(self, tokens: Iterable[int], *, continues: bool = False) -> str:
        """The text of tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens, continues=continues).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether a text, or the turn of a speaker, ends with this token."""
        end = ctypes.c_int32()
        (token,) = ints("token", [token])
        self._check(self._library._c.quern_tokenizer_is_end(self._handle, token, ctypes.byref(end)))
        return bool(end.value)
