"""How the library is found, and what is said where it is not."""

import ctypes.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import quern
from quern import _abi, _load

_PACKAGE = pathlib.Path(quern.__file__).parent


class LoadTest(unittest.TestCase):
    def test_the_variable_comes_first(self):
        path = quern.find_library()
        self.assertEqual(_load.find({"QUERN_LIBRARY": path}), path)
        with self.assertRaisesRegex(OSError, "QUERN_LIBRARY='no/such.so' is no file"):
            _load.find({"QUERN_LIBRARY": "no/such.so"})

    def test_a_package_finds_the_library_beside_it(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "quern"
            shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            code = "import quern; print(quern.library().path)"
            environment = {k: v for k, v in os.environ.items() if k != "QUERN_LIBRARY"}
            environment["PYTHONPATH"] = folder + os.pathsep + environment.get("PYTHONPATH", "")

            def run():
                return subprocess.run(
                    [sys.executable, "-B", "-c", code], env=environment, cwd=folder, capture_output=True, text=True
                )

            missing = run()
            self.assertNotEqual(missing.returncode, 0)
            self.assertIn("need it there, or its path in QUERN_LIBRARY", missing.stderr)
            os.symlink(os.path.realpath(quern.find_library()), copy / "libquern.so")
            found = run()
            self.assertEqual(found.stdout.strip(), str(copy / "libquern.so"), found.stderr)

    def test_another_library_is_refused(self):
        libc = ctypes.util.find_library("c")
        self.assertRaisesRegex(OSError, "is no Quern library", _load.load, libc)

    def test_a_library_of_another_release_is_refused(self):
        path, release = quern.find_library(), _abi.VERSION
        _abi.VERSION = "0.1.7"
        try:
            with self.assertRaisesRegex(OSError, f"is of release {release}; need 0.1.7"):
                _load.load(path)
        finally:
            _abi.VERSION = release

    def test_the_instruction_set_can_be_capped(self):
        script = """
import numpy as np, quern
x = np.ones((2, 64), np.float32)
def target():
    return quern.library().op("rms_norm", x=x).explain().split()[-1]
print(target())
quern.set_max_isa("avx2")
print(target(), quern.ops.rms_norm(x, eps=0.0).sum())
try:
    quern.set_max_isa("AVX9")
except ValueError as error:
    print(str(error).split(";")[0])
quern.set_max_isa(None)
print(target())
"""

        def run(**environment):
            said = subprocess.run(
                [sys.executable, "-B", "-c", script], env={**os.environ, **environment}, capture_output=True, text=True
            )
            return said.stdout.splitlines(), said.stderr

        (best, capped, refused, lifted), _ = run()
        self.assertEqual((capped, lifted), ("AVX2 128.0", best))
        self.assertEqual(refused, 'max_isa: isa="AVX9" is no instruction set')
        self.assertEqual(run(QUERN_MAX_ISA="AVX2")[0], ["AVX2", "AVX2 128.0", refused, best])
        self.assertEqual(run(QUERN_MAX_ISA="AVX3_SPR")[0][0], best)
        lines, error = run(QUERN_MAX_ISA="AVX9")
        self.assertEqual(lines, [])
        self.assertIn('QUERN_MAX_ISA in the environment: max_isa: isa="AVX9" is no instruction set', error)

    def test_a_library_says_what_it_is(self):
        library = quern.library()
        self.assertIs(library, quern.library())
        self.assertIn(library.version, repr(library))
        self.assertIn(f"{len(library.schemas)} operators", library.explain())
        self.assertIn("reference", quern.Library(policy="none").op("silu", x=quern.empty((1, 8), "f32")).explain())


if __name__ == "__main__":
    unittest.main()
