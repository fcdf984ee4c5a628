"""What a call through PyTorch costs: the smallest rms_norm by each way, and attention over many keys.

    python3 -m torch_cost [--keys=4096] [--runs=200]

Prints microseconds. Of the norm it is the least of 15 runs, because other work on the machine only adds; of
attention the median and the least, to compare with `tools/perf attention` on the same numbers.
"""

import argparse
import time
import timeit

import torch

import quern
import quern.torch


def norm():
    x, w = torch.tensor([3.0, -3.0] * 8).reshape(1, 16), torch.full((16,), 2.0)
    by_name = torch.ops.quern.rms_norm
    direct = quern.torch.caller_of("rms_norm")
    cases = {
        "torch.ops.quern.rms_norm": lambda: by_name(x, w, 1e-6),
        "quern.ops.rms_norm, by __dlpack__": lambda: quern.ops.rms_norm(x, w, eps=1e-6),
        "quern.torch.caller_of, without PyTorch's dispatcher": lambda: direct((x, w), (1e-6, 0, "")),
        "torch.nn.functional.layer_norm, for comparison": lambda: torch.nn.functional.layer_norm(x, (16,), w),
        "a call of an empty function": lambda: None,
    }
    for name, call in cases.items():
        result = call()
        if isinstance(result, torch.Tensor) and "layer_norm" not in name:
            torch.testing.assert_close(result, x / 3 * 2)
        least = min(timeit.repeat(call, number=1000, repeat=15)) / 1000
        print(f"{least * 1e6:9.2f} us  {name}")


def attention(keys, runs, q_heads, kv_heads, head_dim, page_size, threads):
    """One new token of one sequence, in bf16, over a cache that it does not write."""
    executor = quern.Executor(threads) if threads > 1 else None
    quern.torch.set_executor(executor)
    pages = -(-keys // page_size)
    cache = quern.KvCache(pages, page_size, kv_heads, head_dim)
    schedule = cache.schedule(q_heads)
    k, v = torch.randn(2, keys, kv_heads, head_dim).bfloat16()
    table = [list(range(pages))]
    schedule.build([keys], [keys], table, executor=executor)
    quern.torch.attention(torch.zeros(keys, q_heads, head_dim).bfloat16(), cache, schedule, key=k, value=v)
    schedule.build([1], [keys], table, executor=executor)
    q = torch.randn(1, q_heads, head_dim).bfloat16()
    out = quern.torch.attention(q, cache, schedule)

    wide = [t.float().repeat_interleave(q_heads // kv_heads, 1) for t in (k, v)]
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide[0]) * head_dim**-0.5
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1])
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.01)

    times = []
    for _ in range(runs):
        start = time.perf_counter()
        quern.torch.attention(q, cache, schedule)
        times.append(time.perf_counter() - start)
    times.sort()
    print(
        f"{times[len(times) // 2] * 1e6:9.1f} us, least {times[0] * 1e6:.1f}  attention, kv_len={keys}, "
        f"q_heads={q_heads}, kv_heads={kv_heads}, head_dim={head_dim}, page_size={page_size}, threads={threads}"
    )
    quern.torch.set_executor(None)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (
        ("keys", 4096), ("runs", 20), ("q_heads", 32), ("kv_heads", 8), ("head_dim", 128), ("page_size", 16),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    quern.torch.set_executor(None)
    norm()
    attention(**vars(options))


if __name__ == "__main__":
    main()
