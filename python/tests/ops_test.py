"""Operators by name on NumPy arrays: results, what is written, what is refused."""

import ctypes
import gc
import mmap
import os
import threading
import unittest
import weakref

import numpy as np

import quern
from quern import _call, ops


def norm(x, w, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def in_read_only_memory(array):
    """The array on a page that no one can write."""
    page = mmap.mmap(-1, array.nbytes)
    page.write(array.tobytes())
    page.flush()
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 1):
        raise OSError(ctypes.get_errno(), "mprotect")
    frozen = np.frombuffer(page, array.dtype).reshape(array.shape)
    frozen.flags.writeable = False
    return frozen


class ResultTest(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(7)

    def test_exact_where_the_arithmetic_is(self):
        # The root of the mean square is 3, with eps 0.
        x = np.tile(np.array([3, -3], np.float32), 8).reshape(1, 16)
        y = ops.rms_norm(x, np.full(16, 2, np.float32), eps=0.0)
        np.testing.assert_array_equal(y, np.sign(x) * 2)
        self.assertIs(type(y), np.ndarray)
        self.assertEqual(y.dtype, np.float32)

    def test_every_remainder_of_rows_and_columns(self):
        for rows in (1, 2, 5):
            for hidden in (1, 3, 15, 16, 17, 33, 67):
                x = self.rng.standard_normal((rows, hidden), np.float32)
                w = self.rng.standard_normal(hidden, np.float32)
                want = norm(x, w, 1e-5)
                # Two products and one root, each rounded to f32, after a sum of squares in f32.
                bound = np.abs(want) * (hidden + 8) * 2.0**-24 + 1e-30
                self.assertTrue((np.abs(ops.rms_norm(x, w, eps=1e-5) - want) <= bound).all(), (rows, hidden))

    def test_default_and_given_numbers_differ(self):
        x = np.full((1, 4), 1e-3, np.float32)
        np.testing.assert_allclose(ops.rms_norm(x), norm(x, 1, 1e-6), rtol=1e-6)
        np.testing.assert_allclose(ops.rms_norm(x, eps=1e-2), norm(x, 1, 1e-2), rtol=1e-6)
        np.testing.assert_allclose(ops.rms_norm(x), norm(x, 1, 1e-6), rtol=1e-6)

    def test_out_is_written_in_place_and_returned(self):
        x = self.rng.standard_normal((3, 8), np.float32)
        wide = np.full((3, 12), np.nan, np.float32)
        out = wide[:, 2:10]
        self.assertIs(ops.rms_norm(x, out=out), out)
        np.testing.assert_array_equal(out, ops.rms_norm(x))
        self.assertTrue(np.isnan(wide[:, :2]).all() and np.isnan(wide[:, 10:]).all())

    def test_strided_rows_are_read_in_place(self):
        wide = self.rng.standard_normal((3, 24), np.float32)
        np.testing.assert_array_equal(ops.rms_norm(wide[:, 4:20]), ops.rms_norm(wide[:, 4:20].copy()))
        np.testing.assert_array_equal(ops.rms_norm(wide[::2, :8]), ops.rms_norm(wide[::2, :8].copy()))

    def test_a_written_argument_changes_and_a_read_one_does_not(self):
        x = in_read_only_memory(self.rng.standard_normal((2, 16), np.float32))
        residual = self.rng.standard_normal((2, 16), np.float32)
        total = x + residual
        y = ops.add_rms_norm(x, residual)
        np.testing.assert_array_equal(residual, total)
        np.testing.assert_array_equal(y, ops.rms_norm(total))
        z, r = x.copy(), np.zeros_like(x)
        self.assertIsNone(ops.fused_add_rms_norm(z, r))
        np.testing.assert_array_equal(r, x)
        np.testing.assert_array_equal(z, ops.rms_norm(x))

    def test_several_results_and_some_of_them_given(self):
        x = self.rng.standard_normal((3, 32), np.float32)
        codes, scales = ops.quant_int8(x)
        self.assertEqual((codes.dtype, codes.shape, scales.dtype), (np.int8, (3, 32), np.float32))
        self.assertTrue((np.abs(codes * scales.reshape(3, 1) - x) <= scales.reshape(3, 1) * 0.5001).all())
        for out in ((None, np.zeros_like(scales)), (np.zeros_like(codes), None)):
            got = ops.quant_int8(x, out=out)
            np.testing.assert_array_equal(got[0], codes)
            np.testing.assert_array_equal(got[1], scales)
            for have, given in zip(got, out):
                self.assertTrue(given is None or have is given)
        with self.assertRaisesRegex(ValueError, "out has 1 tensors; need 2"):
            ops.quant_int8(x, out=(codes,))

    def test_out_dtype_follows_out(self):
        x = self.rng.standard_normal((3, 16), np.float32)
        bits = ops.convert(x, "bf16")
        wide = np.empty((3, 16), np.float32)
        self.assertIs(ops.rms_norm(bits, out=wide), wide)
        np.testing.assert_array_equal(wide, ops.rms_norm(bits, out_dtype="f32").numpy())
        layer = quern.Linear.from_numpy(self.rng.standard_normal((4, 16), np.float32))
        wide = np.empty((3, 4), np.float32)
        np.testing.assert_array_equal(layer(bits, out=wide), layer(bits, out_dtype="f32").numpy())
        with self.assertRaisesRegex(ValueError, "out is bf16; need f32"):
            ops.rms_norm(bits, out=quern.empty((3, 16), "bf16"), out_dtype="f32")

    def test_a_name_of_no_operator_is_refused_with_those_that_are_like_it(self):
        with self.assertRaisesRegex(AttributeError, "no operator 'rmsnorm'; did you mean rms_norm"):
            ops.rmsnorm
        with self.assertRaisesRegex(quern.NotFoundError, "did you mean rms_norm") as refused:
            quern.library().op("rms_nrm")
        self.assertIsInstance(refused.exception, RuntimeError)

    def test_results_that_numpy_has_are_indexed(self):
        logits = ops.convert(np.array([[3, 1, 2]], np.float32), "bf16")
        weights, ids = ops.topk_softmax(logits, topk=2)
        self.assertEqual((ids[0].tolist(), [int(i) for i in ids[0]]), ([0, 2], [0, 2]))
        self.assertGreater(weights[0, 0], weights[0, 1])
        with self.assertRaisesRegex((TypeError, IndexError), "ml_dtypes|out of bounds"):
            logits[7]

    def test_tokens_of_no_sequence_are_zeros_in_a_new_result(self):
        # Old memory is likely to be what was freed just before.
        def spoil():
            for _ in range(4):
                np.full((8, 32), np.nan, np.float32)

        x = self.rng.standard_normal((8, 32), np.float32)
        weight = self.rng.standard_normal((32, 4), np.float32)
        start = np.array([2, 5], np.int32)
        slots = np.array([0], np.int32)
        heads = x.reshape(8, 2, 16)
        gates = np.full((8, 2), 0.5, np.float32)
        bc = x[:, :8].reshape(8, 1, 8).copy()
        calls = {
            "causal_conv1d_fn": lambda x: ops.causal_conv1d_fn(
                x, weight, conv_states=np.zeros((1, 3, 32), np.float32), cache_indices=slots, query_start_loc=start
            ),
            "chunk_gated_delta_rule": lambda x: ops.chunk_gated_delta_rule(
                heads, heads, heads, -gates, gates, np.zeros((1, 2, 16, 16), np.float32), slots, start
            ),
            "selective_state_update": lambda x: ops.selective_state_update(
                np.zeros((1, 2, 16, 8), np.float32), heads, gates, -gates[0], bc, bc, state_batch_indices=slots,
                query_start_loc=start,
            ),
        }
        for name, call in calls.items():
            with self.subTest(name):
                spoil()
                y = np.asarray(call(x)).reshape(8, -1)
                self.assertTrue((y[:2] == 0).all() and (y[5:] == 0).all(), y)
                self.assertTrue((y[2:5] != 0).any(axis=1).all(), y)
                self.assertFalse(np.isnan(y).any())

    def test_scaled_rotation(self):
        q = self.rng.standard_normal((4, 2, 16), np.float32)
        positions = np.array([0, 3, 17, 40])

        def rotated(positions, **more):
            x = q.copy()
            ops.rotary_embedding(positions, x, max_position=128, **more)
            return x

        # (2 p) (w / 2) is p w exactly.
        scaling = quern.RotaryScaling("linear", factor=2.0)
        np.testing.assert_array_equal(rotated(2 * positions, scaling=scaling), rotated(positions))
        # Llama 3 of original context 32, by the formulas of rotary_scaling.h.
        w = 10000.0 ** (-np.arange(8) / 8)
        length = 2 * np.pi / w
        t = np.clip((32 / length - 1) / (4 - 1), 0, 1)
        angle = positions[:, None] * ((1 - t) * w / 8 + t * w)
        a, b = q[..., :8].astype(np.float64), q[..., 8:].astype(np.float64)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        want = np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
        have = rotated(positions, scaling=quern.RotaryScaling("llama3", factor=8.0, original=32))
        np.testing.assert_allclose(have, want, atol=2e-6)
        # YaRN with the range of gpt-oss, which ends within pairs, and with whole pairs.
        for truncate in (False, True):
            low, high = (16 * np.log(64 / (2 * np.pi * r)) / (2 * np.log(10000.0)) for r in (4.0, 1.0))
            if truncate:
                low, high = np.floor(low), np.ceil(high)
            ramp = np.clip((np.arange(8) - max(low, 0)) / (high - max(low, 0)), 0, 1)
            angle = positions[:, None] * (w * (1 - ramp) + w / 4 * ramp)
            cos, sin = (f(angle)[:, None] * (0.1 * np.log(4) + 1) for f in (np.cos, np.sin))
            yarn = quern.RotaryScaling("yarn", factor=4.0, original=64, beta_fast=4.0, truncate=truncate)
            want = np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
            np.testing.assert_allclose(rotated(positions, scaling=yarn), want, atol=2e-6)
        factors = [2.0] * 8
        long = quern.RotaryScaling("longrope", original=64, target=32, short_factors=factors, long_factors=factors)
        np.testing.assert_array_equal(rotated(2 * positions, scaling=long), rotated(positions))
        self.assertIn("llama3, factor 8", repr(quern.RotaryScaling("llama3", factor=8.0, original=32)))
        for call, words in (
            (lambda: quern.RotaryScaling("yam"), 'kind="yam"; need one of none, linear, dynamic_ntk'),
            (lambda: quern.RotaryScaling("linear", factor=0), "factor=0; need another number"),
            (lambda: quern.RotaryScaling("longrope", short_factors=[1.0]), "have 1 and 0 numbers"),
            (lambda: rotated(positions, scaling=quern.RotaryScaling("yarn", factor=4.0)), "original=0"),
            (lambda: rotated(positions, scaling={"type": "yarn"}), "need a quern.RotaryScaling"),
        ):
            with self.assertRaisesRegex((ValueError, TypeError), words):
                call()

    @unittest.skipUnless(os.path.exists("/proc/self/statm"), "memory is read from /proc")
    def test_rotations_of_any_number_of_tokens_share_a_table(self):
        def megabytes():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE >> 20

        before = megabytes()
        for n in range(1, 17):  # a table takes 32 MiB
            q, k = np.ones((n, 2, 64), np.float32), np.ones((n, 1, 64), np.float32)
            ops.rotary_embedding(np.arange(n), q, k, max_position=1 << 17)
            ops.mrope(
                np.zeros((3, n), np.int64), q, k, max_position=1 << 17, section_t=8, section_h=12, section_w=12
            )
        self.assertLess(megabytes() - before, 200)

    def test_empty_rows(self):
        self.assertEqual(ops.rms_norm(np.zeros((0, 8), np.float32)).shape, (0, 8))

    def test_a_subclass_gives_arrays_whatever_was_called_before(self):
        class Named(np.ndarray):
            pass

        for rows, kinds in ((5, (Named, quern.from_dlpack)), (6, (quern.from_dlpack, Named))):
            x = np.ones((rows, 3), np.float32)
            for kind in kinds:
                given, want = (x.view(Named), np.ndarray) if kind is Named else (kind(x), quern.Tensor)
                self.assertIs(type(ops.silu(given)), want)

    def test_an_operator_that_packs_uses_the_weight_of_the_call(self):
        x = np.eye(4, dtype=np.float32)
        for _ in range(2):
            w = self.rng.integers(-4, 5, (3, 4)).astype(np.float32)
            np.testing.assert_array_equal(ops.replicated_linear(x, w), w.T)
        # None is kept: threads that share one would prepare it at once.
        self.assertEqual(_call.function_of(quern.library(), "replicated_linear").cache, {})

    def test_bits_do_not_depend_on_the_executor(self):
        x = self.rng.standard_normal((64, 256), np.float32)
        with quern.Executor(2) as executor:
            np.testing.assert_array_equal(ops.rms_norm(x, executor=executor), ops.rms_norm(x))

    def test_providers_agree(self):
        x = self.rng.standard_normal((2, 64), np.float32)
        np.testing.assert_allclose(ops.silu(x), ops.silu(x, provider="reference"), rtol=1e-5, atol=1e-6)

    def test_functions_of_another_library_have_its_policy(self):
        x = self.rng.standard_normal((2, 64), np.float32)
        silu = quern.Library(policy="none").function("silu")
        np.testing.assert_array_equal(silu(x), ops.silu(x, provider="reference"))

    def test_threads_that_call_at_once(self):
        inputs = [np.full((4, 64), i + 1, np.float32) for i in range(4)]
        wrong = []

        def work(x):
            for _ in range(200):
                if not (ops.silu(x) == ops.silu(x)).all() or abs(ops.rms_norm(x, eps=0.0) - 1).max() > 1e-6:
                    wrong.append(x)

        threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_a_call_within_a_call_has_operands_of_its_own(self):
        function = _call.function_of(quern.library(), "silu")
        x, y, within = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32), []
        execute, want = function.execute, ops.silu(x)

        def interrupted(*arguments):
            # Where another thread may run.
            if not within:
                within.append(True)
                ops.silu(y)
            return execute(*arguments)

        function.execute = interrupted
        try:
            np.testing.assert_array_equal(ops.silu(x), want)
        finally:
            function.execute = execute

    def test_kept_operators_are_bounded(self):
        function = _call.function_of(quern.library(), "silu")
        for rows in range(1, _call._MOST + 20):
            ops.silu(np.zeros((rows, 1), np.float32))
        self.assertLessEqual(len(function.cache), _call._MOST)

    def test_arrays_are_not_kept(self):
        x = np.zeros((2, 2), np.float32)
        y = ops.silu(x)
        seen = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        self.assertEqual([ref() for ref in seen], [None, None])


class HandlerTest(unittest.TestCase):
    def test_a_handler_that_an_operator_fills_anew_serves_the_next_call(self):
        handler, a, c = quern.OneDnnHandler(), np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
        b = np.eye(4, dtype=np.float32)
        pack = quern.library().op("create_onednn_mm", b=b, handler=handler)
        for by in (1, 5, -2):
            pack.prepare(b=by * b)
            ops.onednn_mm(c, a, handler=handler)
            np.testing.assert_array_equal(c, by * a)
        ops.create_onednn_mm(3 * b, handler)
        ops.onednn_mm(c, a, handler=handler)
        np.testing.assert_array_equal(c, 3 * a)


class RefusalTest(unittest.TestCase):
    def test_wrong_arguments_raise_a_fitting_exception(self):
        f32 = np.zeros((2, 8), np.float32)
        frozen = in_read_only_memory(f32)
        cases = [
            (TypeError, "x is of type list", lambda: ops.silu([1.0])),
            (TypeError, "x has dtype float64; need one of", lambda: ops.silu(f32.astype(np.float64))),
            (TypeError, "x has dtype >f4", lambda: ops.silu(f32.astype(">f4"))),
            (TypeError, "x is a masked array", lambda: ops.silu(np.ma.masked_array(f32))),
            (TypeError, "eps='a' is of type str; need a value of float", lambda: ops.rms_norm(f32, eps="a")),
            (TypeError, r"eps=\[1\] is of type list", lambda: ops.rms_norm(f32, eps=[1])),
            (TypeError, "var_hidden_size=1.5 is of type float", lambda: ops.rms_norm(f32, var_hidden_size=1.5)),
            (TypeError, "unexpected keyword argument", lambda: ops.rms_norm(f32, epsilon=1)),
            (TypeError, "missing 1 required", lambda: ops.rms_norm()),
            (TypeError, "executor is of type int", lambda: ops.silu(f32, executor=2)),
            (TypeError, "weights is of type ndarray; need a quern.Linear", lambda: ops.linear(f32, f32)),
            (OverflowError, "need 64 bits", lambda: ops.rms_norm(f32, var_hidden_size=2**63)),
            (ValueError, "null character", lambda: ops.rms_norm(f32, out_dtype="b\0f")),
            (ValueError, "weight", lambda: ops.rms_norm(f32, np.zeros(7, np.float32))),
            (ValueError, "ndim=0; need 1 to 5", lambda: ops.silu(np.array(1, np.float32))),
            (ValueError, r"strides\[0\]=-8; need 0 or more", lambda: ops.silu(f32[::-1])),
            (ValueError, "out is read-only", lambda: ops.silu(f32, out=frozen)),
            (ValueError, "residual is read-only", lambda: ops.add_rms_norm(f32, frozen)),
            (ValueError, "out is f16; need f32", lambda: ops.silu(f32, out=f32.astype(np.float16))),
            (ValueError, "", lambda: ops.silu(f32, out=np.zeros((2, 9), np.float32))),
            (LookupError, 'no provider "z"', lambda: ops.silu(f32, provider="z")),
            (LookupError, 'no operator "nope"', lambda: quern.library().op("nope")),
            (AttributeError, "no operator 'nope'", lambda: ops.nope),
            (NotImplementedError, "", lambda: ops.silu(f32.astype(np.int32))),
        ]
        for error, words, call in cases:
            with self.subTest(words):
                self.assertRaisesRegex(error, words, call)
        self.assertTrue((frozen == 0).all())

    def test_a_refusal_has_the_status_of_the_interface(self):
        with self.assertRaises(quern.Error) as caught:
            ops.rms_norm(np.zeros((2, 8), np.float32), np.zeros(7, np.float32))
        self.assertIsInstance(caught.exception, quern.InvalidArgumentError)
        self.assertEqual(caught.exception.status, 3)

    def test_the_call_after_a_refusal_succeeds(self):
        x = np.ones((2, 8), np.float32)
        frozen = np.zeros_like(x)
        frozen.flags.writeable = False
        for _ in range(3):
            self.assertRaises(ValueError, ops.silu, x, out=frozen)
            np.testing.assert_array_equal(ops.silu(x, out=np.zeros_like(x)), ops.silu(x))

    def test_objects_of_another_library_and_closed_ones(self):
        x = np.ones((2, 8), np.float32)
        other = quern.Library(policy="none")
        self.assertRaisesRegex(ValueError, "another quern.Library", ops.silu, x, executor=other.executor(1))
        executor = quern.Executor(2)
        executor.close()
        executor.close()
        self.assertRaisesRegex(ValueError, "executor is closed", ops.silu, x, executor=executor)
        self.assertIn("closed", repr(executor))
        for workers in (-1, 128):
            self.assertRaisesRegex(ValueError, "need 0 to 127", quern.Executor, workers)
        self.assertRaises(ValueError, quern.Library, policy="none,rms_norm")


class OpTest(unittest.TestCase):
    def test_a_made_operator_is_explained_and_executed(self):
        x = np.ones((4, 8), np.float32)
        op = quern.library().op("rms_norm", x=x, weight=None, eps=0.0)
        self.assertIn("rms_norm of simd", op.explain())
        self.assertEqual([(m.dtype, m.shape) for m in op.returned], [("f32", (4, 8))])
        out = np.full((3, 8), np.nan, np.float32)
        op.execute(x=x[:3], out=out)
        np.testing.assert_array_equal(out, x[:3])
        self.assertRaisesRegex(ValueError, "out is missing", op.execute, x=x)
        self.assertRaisesRegex(ValueError, "has no tensor z", op.execute, x=x, out=out, z=x)
        self.assertRaisesRegex(TypeError, "has no parameter y", quern.library().op, "rms_norm", y=x)

    def test_an_operator_that_packs_is_prepared_once(self):
        x, w = np.eye(4, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
        out = np.zeros((4, 3), np.float32)
        op = quern.library().op("replicated_linear", x=x, weight=w)
        with self.assertRaisesRegex(RuntimeError, "need a call of Prepare"):
            op.execute(x=x, weight=w, out=out)
        op.prepare(x=x, weight=w, out=out)
        op.execute(x=x, weight=w, out=out)
        np.testing.assert_array_equal(out, w.T)
        out[:] = 0
        size = op.workspace_bytes(4)
        op.execute(x=x, weight=w, out=out, workspace=quern.empty((size,), "u8"))
        np.testing.assert_array_equal(out, w.T)
        if size > 0:
            with self.assertRaisesRegex(ValueError, "workspace"):
                op.execute(x=x, weight=w, out=out, workspace=quern.empty((size - 1,), "u8"))


if __name__ == "__main__":
    unittest.main()
