"""quern/_abi.py has the structs, functions and numbers of the headers in c."""

import ctypes
import pathlib
import re
import unittest

from quern import _abi, _abi_model, _errors

_ROOT = pathlib.Path(__file__).parents[2]
_HEADERS = ("quern_tensor.h", "quern.h", "quern_named.h", "quern_model.h")
_C = "\n".join((_ROOT / "c" / name).read_text() for name in _HEADERS)
_STRUCTS = {**_abi.STRUCTS, **_abi_model.STRUCTS}
_FUNCTIONS = {**_abi.FUNCTIONS, **_abi_model.FUNCTIONS}
_CODE = re.sub(r"/\*.*?\*/", "", _C, flags=re.S)

_BASIC = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "quern_status": ctypes.c_int32,
    # The functions within structs that Python passes.
    "void (*progress)": _abi_model.Progress,
    "int32_t (*cancelled)": _abi_model.Cancelled,
}


def _python_type(declared):
    """The ctypes type of "const int64_t*"; None where any pointer to objects will do."""
    if declared in _BASIC:
        return _BASIC[declared]
    name = declared.replace("const", "").replace(" ", "")
    if name == "char*":
        return ctypes.c_char_p
    if name == "void*":
        return ctypes.c_void_p
    if name.endswith("*"):
        inner = name[:-1]
        base = _BASIC.get(inner) or _STRUCTS.get(inner)
        return ctypes.POINTER(base) if base else None
    return _BASIC.get(name) or _STRUCTS.get(name)


def _fields(body):
    for line in body.split(";"):
        function = re.match(r"\s*(\w+ \(\*(\w+)\))\(", line)
        if function:
            yield function[2], function[1]
            continue
        match = re.match(r"\s*((?:const )?\w+\*?)\s+(.+)$", line.strip(), re.S)
        if match:
            for name in match[2].split(","):
                yield name.strip(), match[1]


class AbiTest(unittest.TestCase):
    def test_has_every_struct_that_it_passes(self):
        found = dict(re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", _CODE, re.S))
        self.assertEqual(set(found) - {"quern_executor_functions"}, set(_STRUCTS))
        for name, struct in _STRUCTS.items():
            if name == "quern_argument":
                continue  # has a union, see below
            wanted = [(field, _python_type(declared)) for field, declared in _fields(found[name])]
            self.assertEqual([(f[0], f[1]) for f in struct._fields_], wanted, name)

    def test_has_the_layouts_that_the_header_promises(self):
        tensor, argument, operand = _abi.Tensor, _abi.Argument, _abi.Operand
        offsets = [getattr(tensor, name).offset for name, _ in tensor._fields_]
        self.assertEqual(offsets, [0, 8, 16, 20, 24, 32, 40])
        self.assertEqual(ctypes.sizeof(tensor), 48)
        self.assertEqual((argument.type.offset, argument.value.offset, ctypes.sizeof(argument)), (8, 16, 24))
        self.assertEqual((operand.tensor.offset, operand.flags.offset, ctypes.sizeof(operand)), (8, 16, 24))

    def test_has_every_function(self):
        functions = re.findall(r"QUERN_API\s+((?:const )?\w+\*?)\s+(\w+)\((.*?)\);", _CODE, re.S)
        found = {name: (result, parameters) for result, name, parameters in functions}
        self.assertEqual(set(found), set(_FUNCTIONS) | set(_abi.NOT_CALLED))
        for name, (result, *parameters) in _FUNCTIONS.items():
            declared = [] if found[name][1].strip() == "void" else found[name][1].split(",")
            self.assertEqual(len(parameters), len(declared), name)
            self.assertIs(result, _python_type(found[name][0]), name)
            for have, text in zip(parameters, declared):
                want = _python_type(re.sub(r"\w+$", "", text.strip()).strip())
                self.assertEqual(ctypes.sizeof(have), ctypes.sizeof(want or ctypes.c_void_p), f"{name}: {text}")

    def test_is_of_the_release_of_the_sources(self):
        module = (_ROOT / "MODULE.bazel").read_text()
        self.assertEqual(re.search(r'name = "quern",\n    version = "(.+)"', module)[1], _abi.VERSION)

    def test_has_the_numbers(self):
        numbers = dict(re.findall(r"\bQUERN_(\w+) = (\d+)", _CODE))
        numbers.update(re.findall(r"#define QUERN_(\w+) \(?(-?\d+)", _CODE))
        for module in (_abi, _abi_model):
            for name in dir(module):
                if name.isupper() and isinstance(getattr(module, name), int):
                    self.assertEqual(str(getattr(module, name)), numbers[name], name)
        statuses = re.search(r"QUERN_OK = 0,(.*?)};", _CODE, re.S)[1]
        for name, number in re.findall(r"QUERN_(\w+) = (\d+)", statuses):
            self.assertEqual(_errors.of(int(number), "").status, int(number), name)


if __name__ == "__main__":
    unittest.main()
