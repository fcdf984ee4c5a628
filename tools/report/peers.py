#!/usr/bin/env python3
"""Times x[m, k] times weights[n, k] transposed, 4096 x 4096, by NumPy and PyTorch, where Python has them.

usage: peers.py --threads=N --m=1,4,16

One JSON object a line. Weights are rotated over four matrices, more than the last-level cache holds; the time is
the median of 15 runs after two. PyTorch's bf16 products are oneDNN's.
"""

import json
import statistics
import sys
import time

N = K = 4096
SETS, RUNS = 4, 15


def median_us(call):
    """The median time of call(i), where i counts the runs."""
    times = []
    for i in range(RUNS + 2):
        begin = time.perf_counter()
        call(i)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[2:])


def tell(peer, version, dtype, m, call):
    row = {"peer": peer, "version": version, "op": "linear", "dtype": dtype, "m": m, "flops": 2 * m * N * K,
           "median_us": round(median_us(call), 1)}
    print(json.dumps(row), flush=True)


def numpy_rows(rows):
    import numpy as np
    weights = [np.full((N, K), 0.01 * (s + 1), np.float32) for s in range(SETS)]
    blas = {"/".join(line.split()[-1].split("/")[-2:]) for line in open("/proc/self/maps") if "libblas" in line}
    version = f"NumPy {np.__version__} on {', '.join(sorted(blas)) or 'its own loops'}"
    for m in rows:
        x, out = np.ones((m, K), np.float32), np.empty((m, N), np.float32)
        tell("numpy", version, "f32", m, lambda i: np.matmul(x, weights[i % SETS].T, out=out))


def torch_rows(rows, threads):
    import torch
    torch.set_num_threads(threads)
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        weights = [torch.full((N, K), 0.01 * (s + 1), dtype=dtype) for s in range(SETS)]
        for m in rows:
            x = torch.ones((m, K), dtype=dtype)
            with torch.no_grad():
                tell("torch", f"PyTorch {torch.__version__}", name, m,
                     lambda i: torch.nn.functional.linear(x, weights[i % SETS]))


def main(args):
    given = dict(arg[2:].split("=", 1) for arg in args)
    rows = [int(m) for m in given["m"].split(",")]
    for measure in (lambda: numpy_rows(rows), lambda: torch_rows(rows, int(given["threads"]))):
        try:
            measure()
        except ImportError as error:
            print(f"peers.py: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
