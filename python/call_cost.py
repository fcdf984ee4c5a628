"""What a call from Python costs: the smallest rms_norm, 16 elements, by each way to call it.

    python3 python/call_cost.py

Prints microseconds: the least of 15 runs, because other work on the machine only adds.
"""

import timeit

import numpy as np

import quern


class Framework:
    """Has __dlpack__ only, as a framework's tensor."""

    def __init__(self, array):
        self.tensor = quern.from_dlpack(array)
        self.__dlpack__ = self.tensor.__dlpack__


def main():
    x = np.tile(np.array([3, -3], np.float32), 8).reshape(1, 16)
    w = np.full(16, 2, np.float32)
    out = np.zeros_like(x)
    tensors = quern.from_dlpack(x), quern.from_dlpack(w)
    foreign = Framework(x), Framework(w)
    rms_norm = quern.ops.rms_norm
    op = quern.library().op("rms_norm", x=x, weight=w)
    pool = quern.Executor(2)
    cases = {
        "by name, out allocated": lambda: rms_norm(x, w, eps=1e-6),
        "by name, out given": lambda: rms_norm(x, w, eps=1e-6, out=out),
        "by name, on a pool of 2": lambda: rms_norm(x, w, eps=1e-6, out=out, executor=pool),
        "by name, quern.Tensor": lambda: rms_norm(*tensors, eps=1e-6),
        "by name, __dlpack__ made by quern": lambda: rms_norm(*foreign, eps=1e-6, out=out),
        "Op.execute": lambda: op.execute(x=x, weight=w, out=out),
        "a call of an empty function": lambda: None,
    }
    for name, call in cases.items():
        result = call()
        if result is not None and type(result) is np.ndarray:
            np.testing.assert_allclose(result, x / 3 * 2, rtol=1e-6)
        count = 2000
        least = min(timeit.repeat(call, number=count, repeat=15)) / count
        print(f"{least * 1e6:8.2f} us  {name}")


if __name__ == "__main__":
    main()
