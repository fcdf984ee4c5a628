"""Writes the wheel of the package quern.

    make_wheel.py FOLDER [--license=NAME=FILE ..] FILE..

FILEs are those of the package: modules, stubs, py.typed and libquern.so. FOLDER gets one file,
quern-VERSION-py3-none-PLATFORM.whl, whose bytes depend on the FILEs alone. PLATFORM is what
libquern.so needs, by its ELF headers:

    manylinux_2_N_ARCH   every distribution with glibc 2.N or later (PEP 600), where the library
                         needs no other library than theirs, and no newer symbols
    linux_ARCH           otherwise: the machine that linked it, and those like it
"""

import base64
import hashlib
import os
import re
import struct
import sys
import zipfile

_LIBRARY = "libquern.so"
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+$|ld-linux[-\w]*\.so\.\d+$")
_MACHINES = {62: "x86_64", 183: "aarch64"}

# N of the first glibc 2.N that all distributions ship with a libstdc++ that has
# these versions of GLIBCXX and CXXABI.
_CXX = (
    (17, (3, 4, 19), (1, 3, 7)),
    (24, (3, 4, 22), (1, 3, 10)),
    (28, (3, 4, 24), (1, 3, 11)),
    (31, (3, 4, 28), (1, 3, 12)),
    (34, (3, 4, 29), (1, 3, 13)),
    (35, (3, 4, 30), (1, 3, 13)),
    (39, (3, 4, 33), (1, 3, 15)),
)
# As old as manylinux_2_17, which is the oldest that is told apart here.
_GCC = (4, 8)

_METADATA = """\
Metadata-Version: 2.1
Name: quern
Version: {version}
Summary: CPU kernels of an LLM inference engine, on NumPy arrays and DLPack tensors
License: Apache-2.0; licenses/unicode.md for the table of characters
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: Implementation :: CPython
Requires-Python: >=3.8
Requires-Dist: numpy
"""


def _sections(elf):
    """The sections of a little-endian ELF file of 64 bits: (type, offset, size, link)."""
    if elf[:6] != b"\x7fELF\2\1":
        raise ValueError(f"{_LIBRARY} is no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    for i in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", elf, table + i * size)
        yield kind, offset, length, link


def _text(elf, start):
    return elf[start : elf.index(b"\0", start)].decode()


def needs(elf):
    """(names of libraries, names of symbol versions) that a shared library needs."""
    sections = list(_sections(elf))
    libraries, versions = [], []
    for kind, offset, length, link in sections:
        if kind not in (6, 0x6FFFFFFE):  # SHT_DYNAMIC, SHT_GNU_verneed
            continue
        strings = sections[link][1]
        if kind == 6:
            for tag, value in struct.iter_unpack("<QQ", elf[offset : offset + length]):
                if tag == 1:  # DT_NEEDED
                    libraries.append(_text(elf, strings + value))
            continue
        more = 1
        while more:
            _, count, _, aux, more = struct.unpack_from("<HHIII", elf, offset)
            at = offset + aux
            for _ in range(count):
                _, _, _, name, step = struct.unpack_from("<IHHII", elf, at)
                versions.append(_text(elf, strings + name))
                at += step
            offset += more
    return libraries, versions


def platform_of(machine, libraries, versions):
    """The platform of a wheel whose library is for this machine of ELF and has these needs."""
    arch = _MACHINES.get(machine)
    if arch is None:
        raise ValueError(f"{_LIBRARY} is for ELF machine {machine}; need one of {_MACHINES}")
    plain = f"linux_{arch}"
    if not all(map(_SYSTEM.match, libraries)):
        return plain
    glibc = 17
    for text in versions:
        name, _, number = text.partition("_")
        if not re.match(r"\d+(\.\d+)*$", number):
            return plain
        number = tuple(map(int, number.split(".")))
        if name == "GLIBC":
            glibc = max(glibc, number[1])
        elif name in ("GLIBCXX", "CXXABI"):
            enough = [least for least, *most in _CXX if number <= most[name == "CXXABI"]]
            if not enough:
                return plain
            glibc = max(glibc, enough[0])
        elif name != "GCC" or number > _GCC:
            return plain
    return f"manylinux_2_{glibc}_{arch}"


def _platform(elf):
    return platform_of(struct.unpack_from("<H", elf, 18)[0], *needs(elf))


def _version(module):
    """The version as PEP 440 spells it: 0.4.0-dev, sources between two releases, is 0.4.0.dev0."""
    number, dev = re.search(r'^VERSION = "([0-9.]+)(-dev)?"$', module.decode(), re.M).groups()
    return number + (".dev0" if dev else "")


def write(folder, package, licenses):
    """Writes the wheel of {name: bytes}, both without folders, and returns its path."""
    version, platform = _version(package["_abi.py"]), _platform(package[_LIBRARY])
    info = f"quern-{version}.dist-info"
    files = {f"quern/{name}": data for name, data in package.items()}
    files.update({f"{info}/licenses/{name}": data for name, data in licenses.items()})
    files[f"{info}/METADATA"] = _METADATA.format(version=version).encode()
    tag = f"py3-none-{platform}"
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: make_wheel\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    record = f"{info}/RECORD"
    lines = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name])}\n")
    files[record] = ("".join(lines) + f"{record},,\n").encode()
    path = os.path.join(folder, f"quern-{version}-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        # What describes the wheel comes last, as PEP 427 asks.
        for name in sorted(files, key=lambda name: (name.startswith(info), name)):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return path


def _read(path):
    with open(path, "rb") as file:
        return file.read()


def main(folder, *arguments):
    package, licenses = {}, {}
    for argument in arguments:
        if argument.startswith("--license="):
            _, name, path = argument.split("=", 2)
            licenses[name] = _read(path)
        else:
            package[os.path.basename(argument)] = _read(argument)
    os.makedirs(folder, exist_ok=True)
    write(folder, package, licenses)


if __name__ == "__main__":
    main(*sys.argv[1:])
