"""Reads the schemas of operators, a line each, as ops/registry/op_schema.h defines them."""

import ast
import re
from typing import NamedTuple, Optional, Tuple, Union

_LINE = re.compile(r"\s*([a-z_][a-z0-9_]*)\((.*)\)\s*->\s*(.+?)\s*$")
_TENSOR = re.compile(r"Tensor(\(a\d+!\))?(\?)?$")
_OTHER = re.compile(r"([A-Za-z][A-Za-z0-9]*)(\?)?$")
_SCALARS = ("int", "float", "bool", "str")
_SPECIAL = {"True": True, "False": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class Parameter(NamedTuple):
    """One parameter of an operator."""

    name: str
    kind: str  # "Tensor", "int", "float", "bool", "str", or the type of an object
    optional: bool  # may be None
    written: bool  # a tensor that the operator writes
    default: Union[None, int, float, bool, str]

    @property
    def required(self):
        return not self.optional and self.default is None

    @property
    def is_object(self):
        return self.kind != "Tensor" and self.kind not in _SCALARS


class Schema(NamedTuple):
    """What an operator takes and returns."""

    name: str
    parameters: Tuple[Parameter, ...]
    returns: int  # the number of tensors
    text: str

    @property
    def tensors(self):
        return tuple(p for p in self.parameters if p.kind == "Tensor")

    @property
    def objects(self):
        return tuple(p for p in self.parameters if p.is_object)

    @property
    def outs(self):
        """The names of the returned tensors among the operands."""
        return ("out",) if self.returns == 1 else tuple(f"out{i}" for i in range(self.returns))


def _split(text):
    """Splits at commas outside of texts in quotes."""
    parts, part, quoted, escaped = [], "", False, False
    for c in text:
        if quoted:
            quoted = escaped or c != '"'
            escaped = c == "\\" and not escaped
        elif c == '"':
            quoted = True
        elif c == ",":
            parts.append(part)
            part = ""
            continue
        part += c
    return [p.strip() for p in parts + [part] if p.strip()]


def _default(kind, text):
    value = _SPECIAL[text] if text in _SPECIAL else ast.literal_eval(text)
    return float(value) if kind == "float" else value


def _parameter(text):
    declared, equals, default = text.partition("=")
    kind, name = declared.split()
    tensor = _TENSOR.match(kind)
    if tensor:
        return Parameter(name, "Tensor", bool(tensor[2]), bool(tensor[1]), None)
    base, optional = _OTHER.match(kind).groups()
    return Parameter(name, base, bool(optional), False, _default(base, default) if equals else None)


def parse(line) -> Schema:
    """Reads one line; ValueError quotes a line that is no schema."""
    match = _LINE.match(line)
    try:
        name, parameters, returns = match.groups()
        if returns == "Tensor":
            count = 1
        else:
            count = len(_split(returns[1:-1]))
        return Schema(name, tuple(map(_parameter, _split(parameters))), count, line.strip())
    except (AttributeError, ValueError, SyntaxError, KeyError):
        raise ValueError(f"quern: {line!r} is no schema of an operator") from None
