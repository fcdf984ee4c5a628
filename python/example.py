"""A norm, a linear layer and attention over a cache: what README.md shows, with its results checked."""

import numpy as np

import quern


def main():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64), np.float32)
    w = rng.standard_normal(64, np.float32)
    b = rng.standard_normal((96, 64), np.float32)

    # README: operators and layers
    y = quern.ops.rms_norm(x, w, eps=1e-5)  # a new array
    quern.ops.silu(y, out=y)  # or in the caller's

    layer = quern.Linear.from_numpy(b)  # b[n, k], packed
    with quern.Executor(2) as executor:  # threads; without one, the calling thread
        z = layer(y, executor=executor)

    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(z, normed / (1 + np.exp(-normed)) @ b.T, atol=1e-3)

    # README: attention
    cache = quern.KvCache(num_pages=64, page_size=16, kv_heads=2, head_dim=16, num_layers=1)
    schedule = cache.schedule(q_heads=4)
    # Two sequences, of 3 and 1 new tokens; the second one has 20 already.
    schedule.build(q_lens=[3, 1], kv_lens=[3, 21], pages=[[0], [5, 9]])

    query = rng.standard_normal((4, 4, 16), np.float32)
    key, value = rng.standard_normal((2, 4, 2, 16), np.float32)
    out = quern.attention(query, cache, schedule, key=key, value=value, layer=0)

    # The first token of the first sequence sees itself alone; the cache is bf16.
    np.testing.assert_allclose(out[0], np.repeat(value[0], 2, axis=0), rtol=2.0**-7)

    # README: bf16
    half = quern.ops.convert(x, "bf16")  # a quern.Tensor: NumPy has no bf16
    bits = half.bits()  # uint16, on the same memory
    same = quern.view(bits, "bf16")  # and back
    wide = quern.ops.convert(same, "f32").numpy()
    np.testing.assert_allclose(wide, x, rtol=2.0**-8)
    print("the results are as expected")


if __name__ == "__main__":
    main()
