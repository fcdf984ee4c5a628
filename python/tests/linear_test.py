"""Linear layers: formats, packed bytes, residuals, what is refused."""

import gc
import unittest
import weakref

import numpy as np

import quern
from quern import _tensor, ops


def integers(rng, *shape):
    """Small whole numbers, whose products and sums are exact."""
    return rng.integers(-4, 5, shape).astype(np.float32)


class LinearTest(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(11)

    def test_exact_for_whole_numbers_in_every_remainder(self):
        for m in (1, 2, 17):
            for n in (1, 15, 48, 67):
                for k in (1, 16, 33):
                    x, w, b = integers(self.rng, m, k), integers(self.rng, n, k), integers(self.rng, n)
                    np.testing.assert_array_equal(quern.Linear.from_numpy(w, b)(x), x @ w.T + b, f"{m} {n} {k}")

    def test_layouts_and_formats(self):
        x, w = integers(self.rng, 3, 64), integers(self.rng, 32, 64)
        layer = quern.Linear.from_numpy
        np.testing.assert_array_equal(layer(w.T.copy(), layout="kn")(x), x @ w.T)
        np.testing.assert_array_equal(layer(w.astype(np.float16))(x), x @ w.T)
        bf16 = quern.view((w.view(np.uint32) >> 16).astype(np.uint16), "bf16")
        self.assertIn("bf16", layer(bf16).explain())
        np.testing.assert_array_equal(layer(bf16)(x), x @ w.T)

    def test_int4_in_groups(self):
        codes = self.rng.integers(0, 16, (16, 64)).astype(np.uint8)
        scales = np.full((2, 16), 0.5, np.float32)
        x = integers(self.rng, 2, 64)
        layer = quern.Linear.from_numpy(codes, format="i4_group", scales=scales, group_size=32)
        np.testing.assert_array_equal(layer(x), x @ ((codes.astype(np.float32) - 8) * 0.5).T)
        # The same numbers as AutoGPTQ stores them: eight k to a word, zeros less one.
        words = np.zeros((8, 16), np.uint32)
        zeros = np.full((2, 2), 0x77777777, np.uint32).view(np.int32)
        for i in range(8):
            words |= codes.T[i::8].astype(np.uint32) << (4 * i)
        gptq = quern.Linear.from_numpy(
            words.view(np.int32), layout="gptq", format="i4_group", scales=scales, zeros=zeros, group_size=32
        )
        np.testing.assert_array_equal(gptq(x), layer(x))

    def test_q8_0_as_blocks_and_as_int8_in_groups(self):
        codes = self.rng.integers(-127, 128, (16, 2, 32)).astype(np.int8)
        blocks = np.zeros((16, 2, 34), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        blocks[..., 2:] = codes.view(np.uint8)
        x = integers(self.rng, 2, 64)
        want = x @ (codes.reshape(16, 64) * np.float32(0.5)).T
        blocks = blocks.reshape(16, 68)
        scales = np.full((2, 16), 0.5, np.float16)
        layer = quern.Linear.from_numpy(codes.reshape(16, 64), format="i8_group", scales=scales, group_size=32)
        np.testing.assert_array_equal(layer(x), want)
        layer = quern.Linear.from_numpy(blocks, layout="blocks", format="blocks", block_format="Q8_0", k=64)
        np.testing.assert_array_equal(layer(x), want)

    def test_sources_are_stacked_along_n(self):
        x, a, b = integers(self.rng, 3, 16), integers(self.rng, 16, 16), integers(self.rng, 32, 16)
        layer = quern.Linear.from_sources([{"codes": a}, {"codes": b}])
        np.testing.assert_array_equal(layer(x), x @ np.concatenate([a, b]).T)
        gated = quern.Linear.from_sources([{"codes": a}, {"codes": a}], gated=True)
        want = ops.silu_and_mul(x @ np.concatenate([a, a]).T)
        np.testing.assert_allclose(gated(x, activation="silu_and_mul"), want, rtol=1e-5, atol=1e-5)

    def test_a_residual_is_added_to_in_place(self):
        x, w, r = integers(self.rng, 3, 16), integers(self.rng, 8, 16), integers(self.rng, 3, 8)
        layer, want = quern.Linear.from_numpy(w), x @ w.T + r
        self.assertIs(layer(x, residual=r), r)
        np.testing.assert_array_equal(r, want)
        with self.assertRaisesRegex(ValueError, "the residual is the result"):
            layer(x, residual=r, out=r.copy())

    def test_packed_bytes_make_the_same_layer(self):
        x, w = integers(self.rng, 3, 16), integers(self.rng, 8, 16)
        layer = quern.Linear.from_numpy(w)
        data = layer.tobytes()
        self.assertEqual(layer.packed.shape, (len(data),))
        self.assertTrue(layer.packed.read_only)
        unaligned = bytearray(b"x" + data)
        for form in (data, memoryview(data), memoryview(unaligned)[1:], np.frombuffer(data, np.uint8), layer.packed):
            np.testing.assert_array_equal(quern.Linear.from_bytes(form)(x), x @ w.T)
        copied = quern.Linear.from_bytes(memoryview(unaligned)[1:])
        self.assertIsInstance(copied._finalizer.peek()[2][-1][0], _tensor._Memory)
        self.assertRaises(ValueError, quern.Linear.from_bytes, data[:40])
        self.assertRaises(ValueError, quern.Linear.from_bytes, b"")

    def test_adopted_memory_lives_as_long_as_what_reads_it(self):
        x, w = integers(self.rng, 3, 16), integers(self.rng, 8, 16)
        packed = quern.Linear.from_numpy(w).packed
        owner = weakref.ref(packed)
        layer = quern.Linear.from_bytes(packed)
        op = quern.library().op("linear", x=x, weights=layer)
        del packed, layer
        gc.collect()
        self.assertIsNotNone(owner())
        out = np.zeros((3, 8), np.float32)
        op.execute(x=x, out=out)
        np.testing.assert_array_equal(out, x @ w.T)
        del op
        gc.collect()
        self.assertIsNone(owner())

    def test_a_layer_is_freed_with_its_last_reference(self):
        layer = quern.Linear.from_numpy(np.ones((8, 16), np.float32))
        layer(np.ones((1, 16), np.float32))
        seen = weakref.ref(layer)
        gc.disable()
        try:
            del layer
            self.assertIsNone(seen())
        finally:
            gc.enable()

    def test_bits_do_not_depend_on_workers_or_the_name(self):
        x = self.rng.standard_normal((33, 64), np.float32)
        layer = quern.Linear.from_numpy(self.rng.standard_normal((96, 64), np.float32))
        with quern.Executor(2) as executor:
            np.testing.assert_array_equal(layer(x, executor=executor), layer(x))
        np.testing.assert_array_equal(ops.linear(x, layer), layer(x))

    def test_refusals(self):
        w = np.zeros((8, 16), np.float32)
        layer = quern.Linear.from_numpy
        mixed = {"codes": w.T.copy(), "layout": "kn"}
        cases = [
            (ValueError, "need two dimensions", lambda: layer(w[0])),
            (ValueError, 'format="i3"', lambda: layer(w, format="i3")),
            (ValueError, 'layout="mn"', lambda: layer(w, layout="mn", k=16)),
            (ValueError, "does not say k; need k", lambda: layer(w.view(np.uint8), layout="blocks")),
            (ValueError, "", lambda: layer(w, np.zeros(7, np.float32))),
            (ValueError, "need nk, as", lambda: quern.Linear.from_sources([{"codes": w}, mixed])),
            (OverflowError, "n=18446744073709551624", lambda: layer(w, n=2**64 + 8)),
            (ValueError, "sources is empty", lambda: quern.Linear.from_sources([])),
            (ValueError, "a source has no codes", lambda: quern.Linear.from_sources([{}])),
            (TypeError, "a source has weight; need", lambda: quern.Linear.from_sources([{"weight": w}])),
            (TypeError, "dtype float64", lambda: layer(w.astype(np.float64))),
            (ValueError, r"x is .*, 15\]; need \[.., 16\]", lambda: layer(w)(w[:, :15])),
            (ValueError, "activation", lambda: layer(w)(w, activation="sin")),
        ]
        for error, words, call in cases:
            with self.subTest(words):
                self.assertRaisesRegex(error, words, call)


if __name__ == "__main__":
    unittest.main()
