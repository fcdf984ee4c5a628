"""What happens to tensors, objects and threads when a process ends, forks, or sends them to another."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import unittest

import numpy as np

import quern

_MODEL = pathlib.Path(__file__).parents[2] / "models" / "quern_kjv_4m" / "quern-kjv-4m.bf16.gguf"
_BEGIN = f"""import builtins, gc, os, signal, sys, numpy as np, quern
model_path = {str(_MODEL)!r}

# The status of a child that calls child(). One that hangs is ended by SIGALRM.
def forked(child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        child()
        sys.exit(0)
    return os.waitpid(pid, 0)[1]

"""


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


class ForkTest(unittest.TestCase):
    """A child has none of its parent's threads."""

    def child(self, call):
        """What call() returns in a child, as text; the parent waits for the child."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, str(call()).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return said

    def test_refuses_the_executors_of_the_parent(self):
        x = np.ones((64, 4096), np.float32)
        executor = quern.Executor(2)
        want = quern.ops.silu(x, executor=executor)

        def call():
            try:
                quern.ops.silu(x, executor=executor)
            except RuntimeError as error:
                refused = str(error)
            with quern.Executor(2) as own:
                return refused, (quern.ops.silu(x, executor=own) == want).all(), (quern.ops.silu(x) == want).all()

        said = self.child(call)
        self.assertIn("a fork", said)
        self.assertIn("True, True", said)
        # The parent goes on.
        np.testing.assert_array_equal(quern.ops.silu(x, executor=executor), want)

    def test_a_child_of_a_process_with_a_model(self):
        script = """
model = quern.Model(model_path)  # with threads of its own
given = quern.Executor(3)
other = quern.Model(model_path, executor=given)
x = np.ones((64, 4096), np.float32)

def text(model, **more):
    return "".join(model.generate("In the beginning", max_tokens=8, temperature=0, **more))

want, y = text(model), quern.ops.silu(x, executor=given)
state = model.state(2)
sequence = state.begin()
state.forward([(sequence, [1, 2])])

def refused_or(call, want):
    try:
        assert call() == want
    except quern.FailedPreconditionError as refused:
        assert "a fork" in str(refused), refused

def child():
    refused_or(lambda: text(model), want)
    refused_or(lambda: text(other), want)
    refused_or(lambda: (quern.ops.silu(x, executor=given) == y).all(), True)
    refused_or(lambda: state.forward([(sequence, [3])]).shape, (1, model.vocab))
    assert (quern.ops.silu(x) == y).all()
    with quern.Executor(2) as own:
        assert text(other, executor=own) == want
    given.close()

for _ in range(3):
    assert forked(child) == 0
assert text(model) == want and text(other) == want
"""
        self.assertEqual(run(script), (0, ""))

    def test_a_child_that_destroys_what_its_parent_made(self):
        script = """
x = np.ones((64, 4096), np.float32)
held = [quern.Library()]
held.append(held[0].executor(3))
held.append(quern.Model(model_path, library=held[0]))
"".join(held[2].generate("In the beginning", max_tokens=2))
held[0].function("silu")(x, executor=held[1])

def child():
    held.clear()
    gc.collect()

for _ in range(3):
    status = forked(child)
    assert status == 0, f"the child has status {status}"
held[0].function("silu")(x, executor=held[1])
"""
        self.assertEqual(run(script), (0, ""))

    def test_a_child_ends_by_itself(self):
        script = """
executor = quern.Executor(3)
x = np.ones((64, 4096), np.float32)
for _ in range(8):
    quern.ops.silu(x, executor=executor)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
        self.assertEqual(run(script), (0, ""))


class SignalTest(unittest.TestCase):
    """Signals to the process reach threads of the program, whose handlers expect them."""

    def test_workers_block_signals(self):
        script = """
def blocked(task):
    with open(f"/proc/self/task/{task}/status") as status:
        (line,) = (line for line in status if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)

before = set(os.listdir("/proc/self/task"))
executor = quern.Executor(3)
quern.ops.silu(np.ones((64, 4096), np.float32), executor=executor)
workers = set(os.listdir("/proc/self/task")) - before
assert len(workers) >= 2, workers
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    for worker in workers:
        assert blocked(worker) >> (number - 1) & 1, f"worker {worker} does not block {number!r}"
    assert not blocked(os.getpid()) >> (number - 1) & 1
"""
        self.assertEqual(run(script), (0, ""))

    def test_an_interrupt_ends_a_computation(self):
        # Each token is a call, and Python runs its handlers between calls.
        script = """
model = quern.Model(model_path, executor=quern.Executor(2))
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    while True:
        "".join(model.generate("In the beginning", max_tokens=100))
except KeyboardInterrupt:
    sys.exit(3)
"""
        self.assertEqual(run(script), (3, ""))


class CopyTest(unittest.TestCase):
    """A pickled address would be read where there is no such memory."""

    def test_tensors_are_copied_with_their_elements(self):
        dense = quern.ops.convert(np.arange(12, dtype=np.float32).reshape(3, 4), "bf16")
        gaps = quern.view(np.arange(24, dtype=np.uint16).reshape(4, 6)[::2, :3], "bf16")
        empty = quern.empty((0, 3), "f8e4m3")
        for tensor in (dense, gaps, empty):
            for made in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
                self.assertEqual((made.dtype, made.shape), (tensor.dtype, tensor.shape))
                np.testing.assert_array_equal(made.bits(), tensor.bits())
                self.assertFalse(np.shares_memory(made.bits(), tensor.bits()))

    def test_another_process_reads_what_was_pickled(self):
        tensor = quern.ops.convert(np.arange(4096, dtype=np.float32), "f32")
        data = pickle.dumps(quern.from_dlpack(tensor))
        script = f"import pickle; print(pickle.loads(bytes.fromhex({data.hex()!r})).numpy().sum())"
        self.assertEqual(run(script), (0, "8386560.0\n"))

    def test_objects_are_refused(self):
        layer = quern.Linear.from_numpy(np.ones((4, 8), np.float32))
        for given in (layer, quern.Executor(1), quern.library()):
            for function in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, type(given).__name__):
                    function(given)


if __name__ == "__main__":
    unittest.main()
