#!/usr/bin/env python3
"""Times x[m, k] times weights[n, k] transposed, 4096 x 4096, by NumPy, PyTorch and Eigen, where the machine has them.

usage: peers.py --threads=N --m=1,4,16 [--perf=PROGRAM]

One JSON object a line; a library that is missing is named on standard error. Weights are rotated over four matrices,
more than the last-level cache holds; the time is the median of 15 runs after two. With tools/perf as PROGRAM a row
has the rate of DRAM before and after it. NumPy multiplies f32 by the BLAS
that it finds, which is asked for its kernels if it is OpenBLAS. PyTorch's bf16 products are oneDNN's. Eigen's are
compiled here (eigen_peer.cc), by CXX or g++, c++ or clang++, with Debian's headers or those that Bazel has fetched.
"""

import ctypes
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
import dram  # noqa: E402

N = K = 4096
SETS, RUNS = 4, 15
HERE = pathlib.Path(__file__).resolve().parent
FLAGS = ("-O3", "-march=native", "-DNDEBUG", "-fopenmp")


class Missing(Exception):
    """A library or a compiler is not there."""


def median_us(call):
    """The median time of call(i), where i counts the runs."""
    times = []
    for i in range(RUNS + 2):
        begin = time.perf_counter()
        call(i)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[2:])


def tell(rate, peer, version, dtype, m, call):
    row = {"peer": peer, "version": version, "op": "linear", "dtype": dtype, "m": m, "flops": 2 * m * N * K,
           "median_us": round(median_us(call), 1)}
    print(json.dumps(dict(row, **rate.beside())), flush=True)


def blas_name():
    """The BLAS that this process has loaded: its folder and file, and of OpenBLAS its version and kernels."""
    with open("/proc/self/maps") as maps:
        found = sorted({line.split()[-1] for line in maps if "blas" in line.split()[-1].split("/")[-1]})
    # Debian's NumPy calls libblas.so.3, whichever library that is; wheels bring a libopenblas of their own.
    found = [path for path in found if path.split("/")[-1].startswith("libblas")] or found
    if not found:
        return "its own loops"
    name = "/".join(found[0].split("/")[-2:])
    library = ctypes.CDLL(found[0])
    for prefix, suffix in (("", ""), ("", "64_"), ("scipy_", "64_")):
        core = getattr(library, f"{prefix}openblas_get_corename{suffix}", None)
        config = getattr(library, f"{prefix}openblas_get_config{suffix}", None)
        if core and config:
            core.restype = config.restype = ctypes.c_char_p
            version = " ".join(config().decode().split()[:2])
            return f"{name} ({version}, {core().decode()} kernels)"
    return name


def numpy_rows(rate, rows):
    import numpy as np
    weights = [np.full((N, K), 0.01 * (s + 1), np.float32) for s in range(SETS)]
    version = f"NumPy {np.__version__} on {blas_name()}"
    for m in rows:
        x, out = np.ones((m, K), np.float32), np.empty((m, N), np.float32)
        tell(rate, "numpy", version, "f32", m, lambda i: np.matmul(x, weights[i % SETS].T, out=out))


def torch_rows(rate, rows, threads):
    import torch
    torch.set_num_threads(threads)
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        weights = [torch.full((N, K), 0.01 * (s + 1), dtype=dtype) for s in range(SETS)]
        for m in rows:
            x = torch.ones((m, K), dtype=dtype)
            with torch.no_grad():
                tell(rate, "torch", f"PyTorch {torch.__version__}", name, m,
                     lambda i: torch.nn.functional.linear(x, weights[i % SETS]))


def eigen_headers(root, installed=("/usr/include/eigen3", "/usr/local/include/eigen3")):
    """The folder that has Eigen/Core, installed or fetched by the Bazel of the workspace `root`; or None."""
    folders = [*map(pathlib.Path, installed), *sorted(root.glob("bazel-*/external/eigen"))]
    return next((folder for folder in folders if (folder / "Eigen/Core").exists()), None)


def eigen_rows(rate, rows, threads):
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if compiler is None:
        raise Missing(f"no Eigen: no C++ compiler, {' or '.join(names)}")
    headers = eigen_headers(HERE.parents[1])
    if headers is None:
        raise Missing("no Eigen: no headers; install libeigen3-dev or build anything that Bazel fetches them for")
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "eigen_peer")
        done = subprocess.run([compiler, "-std=c++17", "-w", *FLAGS, "-isystem", headers, HERE / "eigen_peer.cc", "-o",
                               program], capture_output=True, text=True)
        if done.returncode != 0:
            raise Missing(f"no Eigen: {compiler} does not compile it: {done.stderr.strip().splitlines()[-1:]}")
        for m in rows:
            done = subprocess.run([program, str(threads), str(m)], stdout=subprocess.PIPE, text=True)
            beside = rate.beside()
            for line in done.stdout.splitlines():
                row = json.loads(line)
                row["version"] += " " + " ".join(FLAGS)
                print(json.dumps(dict(row, **beside)), flush=True)
            if done.returncode != 0:
                raise Missing(f"no more of Eigen: eigen_peer ended with code {done.returncode}")


def main(args):
    try:
        given = dict(arg[2:].split("=", 1) for arg in args)
        rows, threads = [int(m) for m in given["m"].split(",")], int(given["threads"])
    except (KeyError, ValueError):
        print(f"peers.py: {' '.join(args)}\n{__doc__}", file=sys.stderr)
        sys.exit(2)
    # OpenBLAS reads these when it is loaded. Its own choice of kernels is what is measured.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    rate = dram.DramRate(given.get("perf"), threads)
    for measure in (lambda: numpy_rows(rate, rows), lambda: torch_rows(rate, rows, threads),
                    lambda: eigen_rows(rate, rows, threads)):
        try:
            measure()
        except (ImportError, Missing) as error:
            print(f"peers.py: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
