"""The wheel: its name, files and hashes, and that its package runs from where it is unpacked."""

import base64
import csv
import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

import make_wheel
import quern
from quern import _abi

_PYTHON = pathlib.Path(__file__).parents[1]
_NAME = r"quern-(?P<version>[0-9.]+(dev0)?)-py3-none-(manylinux_2_(?P<glibc>\d+)|linux)_(x86_64|aarch64)\.whl"
_OLD = ["GLIBC_2.4", "GLIBC_2.17", "GLIBCXX_3.4", "CXXABI_1.3.7", "GCC_3.0"]


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        (cls.path,) = (_PYTHON / "wheel").iterdir()
        cls.archive = zipfile.ZipFile(cls.path)
        cls.version = _abi.VERSION.replace("-dev", ".dev0")
        cls.info = f"quern-{cls.version}.dist-info"

    @classmethod
    def tearDownClass(cls):
        cls.archive.close()

    def text(self, name):
        return self.archive.read(f"{self.info}/{name}").decode()

    def test_its_name_says_for_which_systems_it_is(self):
        match = re.fullmatch(_NAME, self.path.name)
        self.assertEqual(match["version"], self.version)
        tag = self.path.name[: -len(".whl")].split("-", 2)[2]
        self.assertIn(f"\nTag: {tag}\n", self.text("WHEEL"))
        # It was linked on this machine, which must be one of them.
        if match["glibc"]:
            self.assertLessEqual(int(match["glibc"]), int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1]))

    def test_it_has_the_whole_package_and_the_licences(self):
        names = set(self.archive.namelist())
        modules = {f"quern/{p.name}" for p in (_PYTHON / "quern").iterdir() if p.suffix in (".py", ".pyi")}
        wanted = modules | {"quern/py.typed", "quern/libquern.so"}
        wanted |= {f"{self.info}/{name}" for name in ("METADATA", "RECORD", "WHEEL")}
        wanted |= {f"{self.info}/licenses/{name}" for name in ("LICENSE", "abseil.md", "highway.md", "unicode.md")}
        self.assertEqual(names, wanted)
        self.assertIn("Apache License", self.text("licenses/LICENSE"))
        self.assertIn("Unicode, Inc.", self.text("licenses/unicode.md"))
        self.assertIn(f"\nVersion: {self.version}\n", self.text("METADATA"))

    def test_the_record_has_the_hash_of_every_file(self):
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(self.text("RECORD")))}
        self.assertEqual(set(rows), set(self.archive.namelist()))
        self.assertEqual(rows.pop(f"{self.info}/RECORD"), ["", ""])
        for name, (digest, size) in rows.items():
            data = self.archive.read(name)
            have = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            self.assertEqual((digest, size), (f"sha256={have}", str(len(data))), name)

    def test_its_bytes_depend_on_its_files_alone(self):
        self.assertEqual({entry.date_time for entry in self.archive.infolist()}, {(1980, 1, 1, 0, 0, 0)})
        data = {name: self.archive.read(name) for name in self.archive.namelist()}
        package = {name.split("/")[1]: data[name] for name in data if name.startswith("quern/")}
        licenses = {name.split("/")[2]: data[name] for name in data if "/licenses/" in name}
        with tempfile.TemporaryDirectory() as folder:
            path = make_wheel.write(folder, dict(reversed(package.items())), dict(reversed(licenses.items())))
            self.assertEqual(os.path.basename(path), self.path.name)
            self.assertEqual(pathlib.Path(path).read_bytes(), self.path.read_bytes())

    def test_its_package_runs_where_it_is_unpacked(self):
        with tempfile.TemporaryDirectory() as folder:
            self.archive.extractall(folder)
            code = "import quern; print(quern.library().path); print(quern.__version__)"
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QUERN"))}
            got = subprocess.run(
                [sys.executable, "-B", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
            )
            want = [os.path.join(folder, "quern", "libquern.so"), _abi.VERSION]
            self.assertEqual(got.stdout.split(), want, got.stderr)


class PlatformTest(unittest.TestCase):
    def test_what_the_library_needs_is_read(self):
        libraries, versions = make_wheel.needs(pathlib.Path(quern.find_library()).read_bytes())
        self.assertIn("libstdc++.so.6", libraries)
        self.assertIn("libc.so.6", libraries)
        self.assertTrue({v.split("_")[0] for v in versions} >= {"GLIBC", "GLIBCXX"}, versions)
        self.assertRaisesRegex(ValueError, "no ELF file", make_wheel.needs, b"MZ" + bytes(100))

    def test_the_platform_is_the_oldest_with_all_of_it(self):
        system = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"]
        for versions, libraries, platform in (
            ([], system, "manylinux_2_17_x86_64"),
            (_OLD, system, "manylinux_2_17_x86_64"),
            (_OLD + ["GLIBC_2.34"], system, "manylinux_2_34_x86_64"),
            (_OLD + ["GLIBC_2.29", "GLIBCXX_3.4.30"], system, "manylinux_2_35_x86_64"),
            (_OLD + ["GLIBCXX_3.4.22"], system, "manylinux_2_24_x86_64"),
            (_OLD + ["CXXABI_1.3.12"], system, "manylinux_2_31_x86_64"),
            (_OLD + ["GLIBCXX_3.4.99"], system, "linux_x86_64"),
            (_OLD + ["GLIBC_PRIVATE"], system, "linux_x86_64"),
            (_OLD + ["GCC_12.0.0"], system, "linux_x86_64"),
            (_OLD + ["OMP_1.0"], system, "linux_x86_64"),
            (_OLD, system + ["libgomp.so.1"], "linux_x86_64"),
        ):
            with self.subTest(versions=versions, libraries=libraries):
                self.assertEqual(make_wheel.platform_of(62, libraries, versions), platform)
        self.assertEqual(make_wheel.platform_of(183, [], []), "manylinux_2_17_aarch64")
        self.assertRaisesRegex(ValueError, "machine 3", make_wheel.platform_of, 3, [], [])


if __name__ == "__main__":
    unittest.main()
