"""torch.ops.quern: results, what is written, what is refused, and results without data."""

import gc
import os
import signal
import unittest
import weakref

import torch
import torch.nn.functional as F

import quern
import quern.torch

ops = torch.ops.quern
# The relative error of one rounding.
_FLOATS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def norm(x, w, eps):
    x = x.double()
    return x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt() * w.double()


def attend(q, k, v, scale, window=2**31):
    """Causal attention in double of the last tokens to the `window` before them, [tokens, heads, head_dim]."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    back = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])[None]
    hidden = (back < 0) | (back >= window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -float("inf")).softmax(-1), v)


class ResultTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)

    def assert_near(self, have, want, bound):
        self.assertEqual(have.shape, want.shape)
        error = (have.double() - want).abs()
        worst = (error - bound).max() if error.numel() else 0
        self.assertTrue(bool((error <= bound).all()), f"{worst} over its bound")

    def test_norm_of_every_dtype_and_remainder(self):
        for dtype, ulp in _FLOATS.items():
            for rows, hidden in ((0, 8), (1, 1), (2, 15), (3, 16), (5, 67)):
                x, w = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
                y = ops.rms_norm(x, w, 1e-5)
                self.assertEqual((y.dtype, y.is_contiguous()), (dtype, True))
                want = norm(x, w, 1e-5)
                # The sum of squares and four roundings in f32, one to dtype, which may have no exponent left.
                self.assert_near(y, want, want.abs() * (ulp + (hidden + 8) * 2.0**-24) + torch.finfo(dtype).tiny * ulp)

    def test_what_pytorch_has_too(self):
        x, y = torch.randn(5, 64), torch.randn(5, 32)
        gate, up = (t.double() for t in x.chunk(2, -1))
        cases = [
            (ops.silu(x), F.silu(x.double())),
            (ops.gelu(x), F.gelu(x.double())),
            (ops.silu_and_mul(x), F.silu(gate) * up),
            (ops.gelu_and_mul(x), F.gelu(gate) * up),
            (ops.mul_and_silu(x), gate * F.silu(up)),
            (ops.sigmoid_mul(y, y), y.double() * torch.sigmoid(y.double())),
            (ops.relu2(x), F.relu(x.double()) ** 2),
        ]
        for have, want in cases:
            self.assert_near(have, want, want.abs() * 2.0**-20 + 2.0**-22)

    def test_products_and_convolutions(self):
        x, w, b = torch.randn(5, 32), torch.randn(24, 32), torch.randn(24)
        want = F.linear(x.double(), w.double(), b.double())
        bound = F.linear(x.double().abs(), w.double().abs(), b.double().abs()) * 34 * 2.0**-24
        weights = quern.torch.handle(quern.Linear.from_numpy(w, b))
        self.assert_near(ops.linear(x, weights), want, bound)
        self.assert_near(ops.replicated_linear(x, w, b), want, bound)
        image, kernel = torch.randn(2, 6, 9, 9), torch.randn(8, 3, 3, 3)
        want = F.conv2d(image.double(), kernel.double(), None, 2, 1, 1, 2)
        have = ops.conv2d(image, kernel, None, stride_h=2, stride_w=2, padding_h=1, padding_w=1, groups=2)
        bound = F.conv2d(image.double().abs(), kernel.double().abs(), None, 2, 1, 1, 2) * 29 * 2.0**-24
        self.assert_near(have, want, bound)

    def test_a_residual_is_added_and_not_written(self):
        x, w, r = torch.randn(5, 32), torch.randn(24, 32), torch.randn(24, 5).t()
        before = r.clone()
        y = ops.linear(x, quern.torch.handle(quern.Linear.from_numpy(w)), r)
        self.assert_near(y, F.linear(x.double(), w.double()) + r.double(), 1e-4)
        self.assertTrue(torch.equal(r, before))

    def test_a_layer_of_a_model(self):
        layer = torch.nn.Linear(32, 24).to(torch.bfloat16)
        packed = quern.torch.Linear.from_linear(layer)
        x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
        want = F.linear(x.double(), layer.weight.double(), layer.bias.double()).detach()
        self.assert_near(packed(x), want, want.abs() * 2.0**-8 + 2.0**-16)

    def test_rotation(self):
        positions, half = torch.tensor([0, 3, 1, 40]), 8
        angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        q, k = torch.randn(4, 2, 16), torch.randn(4, 1, 16)
        want = []
        for x in (q, k):
            a, b = x.double().chunk(2, -1)
            want.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        self.assertIsNone(ops.rotary_embedding(positions, q, k, max_position=64))
        for have, rotated in zip((q, k), want):
            self.assert_near(have, rotated, 2.0**-18)

    def test_scaled_rotation(self):
        q, positions = torch.randn(4, 2, 16), torch.tensor([0, 3, 1, 20])
        scaled, plain = q.clone(), q.clone()
        scaling = quern.torch.handle(quern.RotaryScaling("linear", factor=2.0))
        ops.rotary_embedding(2 * positions, scaled, scaling=scaling, max_position=64)
        ops.rotary_embedding(positions, plain, max_position=64)
        self.assertTrue(torch.equal(scaled, plain))

    @unittest.skipUnless(hasattr(torch, "float8_e4m3fn"), "this PyTorch has no 8-bit floats")
    def test_weights_of_8_bit_floats(self):
        w, scale = torch.randn(128, 128), torch.tensor([[0.5]])
        codes = w.to(torch.float8_e4m3fn)
        have = quern.Linear.from_numpy(codes, format="e4m3_block", scales=scale)
        bits = quern.view(codes.view(torch.uint8), "f8e4m3")
        want = quern.Linear.from_numpy(bits, format="e4m3_block", scales=scale)
        self.assertEqual(have.tobytes(), want.tobytes())
        self.assertEqual(quern.from_dlpack(codes).dtype, "f8e4m3")

    def test_tokens_of_no_sequence_are_zeros_in_a_new_result(self):
        x, weight = torch.randn(8, 32), torch.randn(32, 4)
        state, start = torch.zeros(1, 3, 32), torch.tensor([2, 5])
        torch.full((8, 32), float("nan"))
        y = ops.causal_conv1d_fn(x, weight, None, conv_states=state, cache_indices=torch.tensor([0]),
                                 query_start_loc=start)
        self.assertEqual((y != 0).any(1).tolist(), [False, False, True, True, True, False, False, False])

    def test_attention(self):
        cache = quern.KvCache(num_pages=8, page_size=16, kv_heads=2, head_dim=32, dtype="f32")
        schedule = cache.schedule(q_heads=4)
        k, v = torch.randn(2, 27, 2, 32)
        # Sequence 0 has 20 tokens and sequence 1 has 7, all of them new.
        schedule.build([20, 7], [20, 7], [[3, 1], [5]])
        q = torch.randn(27, 4, 32)
        out = quern.torch.attention(q, cache, schedule, key=k, value=v)
        want = torch.cat([attend(q[s], k[s], v[s], 32**-0.5) for s in (slice(0, 20), slice(20, 27))])
        self.assert_near(out, want, 2.0**-18)
        # One more step, without new keys.
        schedule.build([3, 1], [20, 7], [[3, 1], [5]])
        out = quern.torch.attention(q[:4], cache, schedule, scale=0.25)
        want = torch.cat([attend(q[:3], k[:20], v[:20], 0.25), attend(q[3:4], k[20:], v[20:], 0.25)])
        self.assert_near(out, want, 2.0**-18)

    def test_a_handler_may_be_filled_again(self):
        handler = quern.torch.handle(quern.OneDnnHandler())
        a, c = torch.randn(2, 8), torch.empty(2, 4)
        for _ in range(2):
            b = torch.randint(-4, 5, (8, 4)).float()
            ops.create_onednn_mm(b, handler)
            ops.onednn_mm(c, a, handler=handler)
            self.assert_near(c, a.double() @ b.double(), 2.0**-16)

    def test_several_results(self):
        x = torch.randn(3, 32)
        codes, scales = ops.quant_int8(x)
        self.assertEqual((codes.dtype, scales.dtype), (torch.int8, torch.float32))
        self.assert_near(codes * scales.view(3, 1), x.double(), scales.view(3, 1).double() * 0.5001)

    def test_views_are_read_in_place(self):
        wide = torch.randn(6, 40)
        for view in (wide[:, 4:20], wide[::2, :8], wide[1:1, :8], wide[:1].expand(3, 40)):
            self.assertTrue(torch.equal(ops.rms_norm(view, None), ops.rms_norm(view.clone(), None)))


class MutationTest(unittest.TestCase):
    def test_writes_what_its_schema_says_and_nothing_else(self):
        x, r, w = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
        total, same = x + r, w.clone()
        self.assertIsNone(ops.fused_add_rms_norm(x, r, w))
        self.assertTrue(torch.equal(r, total) and torch.equal(w, same))
        self.assertTrue(torch.equal(x, ops.rms_norm(total, w)))

    def test_a_written_view_leaves_its_surroundings(self):
        wide, r = torch.full((3, 20), float("nan")), torch.randn(3, 16)
        wide[:, 2:18] = 1
        ops.fused_add_rms_norm(wide[:, 2:18], r, None)
        self.assertTrue(bool(wide[:, :2].isnan().all() and wide[:, 18:].isnan().all()))
        self.assertFalse(bool(wide[:, 2:18].isnan().any()))

    def test_schemas_have_the_written_parameters_of_ours(self):
        for name in quern.torch.names:
            (schema,) = torch._C._jit_get_schemas_for_operator(f"quern::{name}")
            ours = quern.library().schemas[name]
            written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            # linear copies its residual instead.
            self.assertEqual(written, {p.name for p in ours.tensors if p.written and name != "linear"}, name)
            self.assertEqual(len(schema.returns), ours.returns, name)

    def test_every_operator_is_there_but_those_of_objects_that_python_lacks(self):
        missing = set(quern.library().schemas) - set(quern.torch.names)
        self.assertEqual(missing, {"multi_head_latent_attention", "sample"})


class RefusalTest(unittest.TestCase):
    def test_table(self):
        x, w = torch.ones(2, 16), torch.ones(16)
        weights = quern.torch.handle(quern.Linear.from_numpy(torch.ones(8, 16)))
        table = [
            (lambda: ops.rms_norm(x.double(), w.double()), TypeError, "x has dtype torch.float64"),
            (lambda: ops.rms_norm(x, w.int()), NotImplementedError, "weight"),
            (lambda: ops.rms_norm(x.int(), None), quern.Error, "rms_norm"),
            (lambda: ops.rms_norm(x, torch.ones(8)), ValueError, "weight"),
            (lambda: ops.rms_norm(torch.ones(16, 2).t(), w), ValueError, "stride"),
            (lambda: ops.rms_norm(x.to("meta"), w), ValueError, "devices"),
            (lambda: quern.torch.caller_of("rms_norm")((x, w.to("meta")), (1e-6, 0, "")), ValueError, "need the CPU"),
            (lambda: quern.torch.caller_of("rms_norm")((x, 1), (1e-6, 0, "")), TypeError, "need a torch.Tensor"),
            (lambda: ops.rms_norm(x, w, -1.0), ValueError, "eps"),
            (lambda: ops.rms_norm(x, w, 1e-6, 0, "q8"), ValueError, "out_dtype"),
            (lambda: ops.rms_norm(x.to_sparse(), None), NotImplementedError, "Sparse"),
            (lambda: ops.rms_norm([1.0], w), RuntimeError, "Tensor"),
            (lambda: ops.fused_add_rms_norm(x, x, w), ValueError, "overlap"),
            (lambda: ops.linear(x, 10**6), ValueError, "is no handle"),
            (lambda: ops.linear(torch.ones(2, 8), weights), ValueError, r"x is f32\[2, 8\]; need \[.., 16\]"),
            (lambda: ops.silu_and_mul(torch.ones(2, 15)), ValueError, "x"),
            (lambda: quern.torch.handle(quern.Executor(1)), TypeError, "an operator takes"),
            (lambda: quern.torch.attention(x, None, None, key=x), ValueError, "only one of key and value"),
        ]
        for at, (call, kind, words) in enumerate(table):
            with self.subTest(row=at), self.assertRaisesRegex(kind, words):
                call()

    def test_a_released_handle_is_refused_and_its_object_gets_another(self):
        weights = quern.Linear.from_numpy(torch.ones(8, 16))
        number = quern.torch.handle(weights)
        self.assertEqual(quern.torch.handle(weights), number)
        self.assertIs(quern.torch.object_of(number), weights)
        quern.torch.release(number)
        with self.assertRaisesRegex(ValueError, "was released"):
            ops.linear(torch.ones(2, 16), number)
        self.assertNotEqual(quern.torch.handle(weights), number)

    def test_a_gradient_is_refused_and_not_lost(self):
        x, w = torch.randn(2, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        layer = quern.torch.Linear.from_linear(torch.nn.Linear(16, 8))
        calls = [
            lambda: ops.rms_norm(x, None),
            lambda: ops.rms_norm(x.detach(), w),
            lambda: ops.linear(x * 1, layer._handle),
            lambda: layer(x),
            lambda: ops.fused_add_rms_norm(x.detach(), x * 1, None),
            lambda: ops.rms_norm(x.detach().to("meta").requires_grad_(), None),
        ]
        for at, call in enumerate(calls):
            with self.subTest(row=at), self.assertRaisesRegex(NotImplementedError, "quern::.* requires a gradient"):
                call()
        with torch.no_grad():
            want = ops.rms_norm(x, w)
        self.assertTrue(torch.equal(ops.rms_norm(x.detach(), w.detach()), want))
        with torch.inference_mode():
            self.assertTrue(torch.equal(ops.rms_norm(x, w), want))

        class Silu(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return ops.silu(x)

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                s = torch.sigmoid(x)
                return grad * s * (1 + x * (1 - s))

        have, want = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
        Silu.apply(have).sum().backward()
        F.silu(want).sum().backward()
        self.assertTrue(torch.allclose(have.grad, want.grad, atol=1e-6))

    def test_after_a_refusal_calls_go_on(self):
        x = torch.ones(2, 16)
        for _ in range(3):
            with self.assertRaises(ValueError):
                ops.rms_norm(x, torch.ones(8))
            self.assertTrue(torch.equal(ops.rms_norm(x, None, 0.0), x))


def examples():
    """Arguments of operators of every family: (name, arguments, arguments by name)."""
    x, w, image = torch.randn(5, 64), torch.randn(64), torch.randn(2, 3, 8, 8)
    logits = torch.randn(5, 8)
    linear = quern.torch.handle(quern.Linear.from_numpy(torch.randn(24, 64)))
    query, key = torch.randn(5, 2, 16), torch.randn(5, 1, 16)
    positions = torch.arange(5)
    return [
        ("rms_norm", (x, w), {}),
        ("rms_norm", (x.bfloat16(), w.bfloat16(), 1e-5, 0, "f32"), {}),
        ("gemma_rms_norm", (x, w), {}),
        ("l2_norm", (x,), {}),
        ("rms_norm_gated", (x, x), {"weight": w}),
        ("add_rms_norm", (x, x.clone(), w), {}),
        ("fused_add_rms_norm", (x.clone(), x.clone(), w), {}),
        ("rms_norm_quant", (x, w, "int8"), {}),
        ("quant_int8", (x,), {}),
        ("per_token_quant_int8_cpu", (x.bfloat16(),), {}),
        ("silu", (x,), {}),
        ("silu_and_mul", (x.half(),), {}),
        ("gelu_and_mul", (x, "tanh"), {}),
        ("swigluoai_and_mul", (x,), {}),
        ("convert", (x, "bf16"), {}),
        ("rotary_embedding", (positions, query.clone(), key.clone()), {"max_position": 64}),
        ("apply_rotary_emb", (query, torch.randn(5, 8), torch.randn(5, 8)), {}),
        ("dual_chunk_rotary_embedding", (positions, query, key, 64, 32, 8), {}),
        ("gather_rows", (x, torch.tensor([3, 0, 3])), {}),
        ("vocab_parallel_embedding", (torch.tensor([1, 4]), x), {}),
        ("topk_softmax", (logits,), {"topk": 3}),
        (
            "grouped_topk",
            (None,),
            dict(gating_output=logits, topk=2, renormalize=True, num_expert_group=2, topk_group=1),
        ),
        ("logits_processor", (x.clone(), 30.0), {}),
        ("linear", (x, linear), {}),
        ("linear", (x, linear, torch.randn(5, 24)), {}),
        ("linear", (x.bfloat16(), linear), {}),
        ("replicated_linear", (x, torch.randn(24, 64)), {}),
        ("conv2d", (image, torch.randn(6, 3, 4, 4)), {"stride_h": 4, "stride_w": 4}),
        ("mm_encoder_attn", (query[None], query[None], query[None]), {"num_heads": 2, "head_size": 16}),
        ("convert_weight_packed", (torch.randn(32, 64).bfloat16(),), {}),
    ]


def listed(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


class LifeTest(unittest.TestCase):
    """Objects are freed with their last user, without the garbage collector."""

    def setUp(self):
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def test_a_layer_frees_its_weights(self):
        before = len(quern.torch._handles)
        for _ in range(3):
            layer = quern.torch.Linear.from_linear(torch.nn.Linear(32, 8))
            twin = quern.torch.Linear(layer.weights)
            x = torch.randn(2, 32)
            self.assertTrue(torch.equal(layer(x), twin(x)))
            weights, number = weakref.ref(layer.weights), layer._handle
            with self.assertRaisesRegex(ValueError, "is no handle"):
                quern.torch.release(number)
            del layer
            twin(x)
            self.assertIsNotNone(weights())
            del twin
            self.assertIsNone(weights())
            with self.assertRaisesRegex(ValueError, "is no handle"):
                ops.linear(x, number)
        self.assertEqual(len(quern.torch._handles), before)

    def test_attention_frees_its_cache_and_schedule(self):
        cache = quern.KvCache(num_pages=2, page_size=16, kv_heads=1, head_dim=16, dtype="f32")
        schedule = cache.schedule(q_heads=1)
        schedule.build([2], [2], [[0]])
        q = torch.randn(2, 1, 16)
        quern.torch.attention(q, cache, schedule, key=q, value=q)
        gone = [weakref.ref(cache), weakref.ref(schedule)]
        del cache, schedule
        self.assertEqual([g() for g in gone], [None, None])

    def test_a_handle_keeps_its_object_until_it_is_released(self):
        number = quern.torch.handle(quern.Linear.from_numpy(torch.ones(8, 16)))
        gone = weakref.ref(quern.torch.object_of(number))
        self.assertEqual(ops.linear(torch.ones(2, 16), number).shape, (2, 8))
        quern.torch.release(number)
        self.assertIsNone(gone())


class FakeTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)

    def test_meta_results_are_like_real_ones(self):
        for name, args, kwargs in examples():
            def meta(value):
                return value.to("meta") if isinstance(value, torch.Tensor) else value

            operator = getattr(ops, name)
            fake = listed(operator(*map(meta, args), **{k: meta(v) for k, v in kwargs.items()}))
            real = listed(operator(*args, **kwargs))
            self.assertEqual(
                [(t.shape, t.dtype, t.stride(), t.device.type) for t in fake],
                [(t.shape, t.dtype, t.stride(), "meta") for t in real],
                name,
            )

    def test_meta_refuses_what_a_call_refuses(self):
        x = torch.ones(2, 15)
        for device in ("cpu", "meta"):
            with self.assertRaisesRegex(ValueError, "silu_and_mul"):
                ops.silu_and_mul(x.to(device))

    @unittest.skipUnless(hasattr(torch.library, "opcheck"), "this PyTorch has no opcheck")
    def test_opcheck(self):
        for name, args, kwargs in examples():
            with self.subTest(name):
                torch.library.opcheck(getattr(ops, name).default, args, kwargs)

    @unittest.skipUnless(hasattr(torch, "compile"), "this PyTorch has no torch.compile")
    def test_compiles_once_for_all_numbers_of_rows(self):
        import torch._dynamo.testing

        w = torch.randn(64)
        weights = quern.torch.handle(quern.Linear.from_numpy(torch.randn(24, 32)))

        def layer(x):
            # The sum compares rows, so a fake with another number of them shows.
            return ops.linear(ops.silu_and_mul(ops.rms_norm(x, w, 1e-5)), weights) + x[:, :24]

        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
        for rows in (5, 6, 9, 64):
            x = torch.randn(rows, 64)
            self.assertTrue(torch.equal(compiled(x), layer(x)))
        self.assertEqual(counter.frame_count, 1)


class ThreadTest(unittest.TestCase):
    def tearDown(self):
        quern.torch.set_executor(None)

    def test_bits_do_not_depend_on_threads(self):
        x = torch.randn(64, 1024)
        quern.torch.set_executor(None)
        want = ops.rms_norm(x, None)
        with quern.Executor(2) as executor:
            quern.torch.set_executor(executor)
            self.assertTrue(torch.equal(ops.rms_norm(x, None), want))
        with self.assertRaisesRegex(ValueError, "closed"):
            ops.rms_norm(x, None)
        with self.assertRaises(TypeError):
            quern.torch.set_executor(2)

    def test_a_forked_process_makes_its_own_threads(self):
        x = torch.ones(64, 1024)
        quern.torch.set_executor(quern.Executor(2))
        ops.rms_norm(x, None)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # instead of a test that waits for a child without threads
            try:
                # No operator of PyTorch, whose threads of OpenMP the child lacks.
                os._exit(0 if ops.rms_norm(x, None, 0.0)[63, 1020:].tolist() == [1.0] * 4 else 1)
            finally:
                os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


if __name__ == "__main__":
    unittest.main()
