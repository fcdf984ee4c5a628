"""What happens to tensors, objects and threads when a process ends."""

import subprocess
import sys
import unittest

import numpy as np

import quern

_BEGIN = "import builtins, os, sys, numpy as np, quern\n"


def run(script):
    """(status, what was written) of a Python process of its own."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", _BEGIN + script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    return done.returncode, done.stdout.decode()


class ExitTest(unittest.TestCase):
    """What outlives the modules of the package is freed, or left, without a crash."""

    def test_a_tensor_that_numpy_has(self):
        self.assertEqual(run("builtins.kept = np.from_dlpack(quern.empty((1000,), 'f32'))"), (0, ""))

    def test_a_capsule_that_nobody_took(self):
        for version in ("", "max_version=(1, 0)"):
            self.assertEqual(run(f"builtins.kept = quern.empty((1000,), 'f32').__dlpack__({version})"), (0, ""))

    def test_a_view_of_an_object_is_read_late(self):
        script = """
class Late:
    def __init__(self):
        cache = quern.KvCache(64, 16, 2, 64)
        self.view = cache.pages().numpy()
        self.view[:] = 7
    def __del__(self):
        os.write(1, b"%d" % self.view[63, -1])
builtins.kept = Late()
"""
        self.assertEqual(run(script), (0, "7"))

    def test_objects_of_every_kind(self):
        script = """
builtins.kept = [quern.Linear.from_numpy(np.ones((4, 8), np.float32)), quern.Executor(2), quern.Sampler(8)]
quern.ops.silu(np.ones((64, 4096), np.float32), executor=builtins.kept[1])
builtins.kept.append(quern.KvCache(4, 16, 2, 16).schedule(4))
"""
        self.assertEqual(run(script), (0, ""))


if __name__ == "__main__":
    unittest.main()
