"""vLLM's and SGLang's newest schemas, and calls that their own tests make, by their arguments' names."""

import unittest

import torch
import torch.nn.functional as F

import quern
import quern.sglang
import quern.torch
import quern.vllm

from .torch_test import attend

# As their sources of July and August 2026 have them, and one argument that vLLM's next source adds.
_VLLM = (
    "onednn_mm(Tensor(a0!) c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()",
    "onednn_scaled_mm(Tensor(a0!) c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, Tensor? bias, "
    "Tensor handler_tensor) -> ()",
    "create_onednn_mm_handler(Tensor b, int primitive_cache_size) -> int",
    "create_onednn_scaled_mm_handler(Tensor b, Tensor b_scales, ScalarType output_type, bool dynamic_act_quant, "
    "bool use_azp, int primitive_cache_size) -> int",
    "release_dnnl_matmul_handler(int handler) -> ()",
    "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, bool enable_kv_split, "
    'Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor',
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache, "
    'Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()',
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, "
    "int sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux, "
    'Tensor? dynamic_causal, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()',
    "cpu_attn_has_isa(str isa) -> bool",
)
_SGLANG = (
    "fused_add_rmsnorm_cpu(Tensor(a0!) input, Tensor(a1!) residual, Tensor weight, float eps) -> ()",
    "decode_attention_cpu(Tensor query, Tensor k_cache, Tensor v_cahce, Tensor(a0!) output, Tensor? key, "
    "Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, "
    "Tensor? sinks) -> ()",
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a0!) o_extend, "
    "Tensor k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, "
    "Tensor? tree_mask=None) -> ()",
)


def _named(schema):
    return schema.partition("(")[0]


def _defined(namespace, schemas, install):
    """The project's operators, defined as its own library does, and what install() made of them."""
    lib = torch.library.Library(namespace, "DEF")
    for schema in schemas:
        lib.define(schema)
    became = install(namespace)
    return lib, getattr(torch.ops, namespace), {_named(s): became[_named(s)] for s in schemas}


_vllm_lib, vllm, _vllm_became = _defined("quern_test_vllm", _VLLM, quern.vllm.install)
_sglang_lib, sglang, _sglang_became = _defined("quern_test_sglang", _SGLANG, quern.sglang.install)


class SchemaTest(unittest.TestCase):
    def test_every_operator_is_replaced(self):
        for became in (_vllm_became, _sglang_became):
            self.assertEqual(set(became.values()), {"replaced"}, became)


class VllmTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)

    def test_azp_adj_is_a_row(self):
        weight, a = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((24, 32), (5, 32)))
        scales, a_scales = torch.rand(1, 24), torch.rand(5, 1)
        azp = torch.randint(-9, 9, (5, 1), dtype=torch.int32)
        azp_adj = scales * weight.t().sum(dim=0, keepdim=True, dtype=torch.float32)
        self.assertEqual(azp_adj.shape, (1, 24))
        handler = vllm.create_onednn_scaled_mm_handler(weight.t(), scales, torch.float32, True, True, 128)
        c = torch.empty(5, 24)
        vllm.onednn_scaled_mm(c, a, a_scales, azp, azp_adj, None, handler_tensor=torch.tensor(handler))
        want = (a.double() - azp.double()) @ weight.double().t() * scales * a_scales
        self.assertTrue(bool(((c.double() - want).abs() <= want.abs() * 2.0**-21).all()))
        vllm.release_dnnl_matmul_handler(handler)

    def test_attention_with_a_window_and_a_dtype_of_the_cache(self):
        caches = [torch.zeros(8, 2, 16, 32) for _ in range(2)]
        k, v = torch.randn(2, 20, 2, 32)
        slots = torch.tensor([3 * 16 + t for t in range(16)] + [16 + t for t in range(4)])
        vllm.cpu_attn_reshape_and_cache(k, v, *caches, slots, "vec")
        starts, lens = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3], [20]))
        table = torch.tensor([[3, 1]], dtype=torch.int32)
        q, out = torch.randn(3, 4, 32), torch.empty(3, 4, 32)
        step = vllm.get_scheduler_metadata(
            1, 4, 2, 32, lens, torch.float32, starts, casual=True, window_size=5, isa_hint="vec",
            enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
        )
        vllm.cpu_attention_with_kv_cache(
            q, *caches, out, starts, lens, 0.2, True, None, sliding_window_size=5, block_table=table, softcap=0.0,
            scheduler_metadata=step, s_aux=None, dynamic_causal=None,
        )
        want = attend(q, k, v, 0.2, 5)
        self.assertTrue(bool(((out.double() - want).abs() <= 2.0**-18).all()))


class MergeTest(unittest.TestCase):
    """Attention over two parts becomes attention over all, by vLLM's name and by SGLang's."""

    def setUp(self):
        torch.manual_seed(3)
        self.a, self.b = torch.randn(2, 5, 3, 16).bfloat16()
        self.a_lse, self.b_lse = torch.randn(2, 5, 3) * 4
        self.a_lse[1, 2] = self.b_lse[2, 0] = -float('inf')
        self.a_lse[3, 1] = self.b_lse[3, 1] = -float('inf')
        a, b = self.a_lse.double(), self.b_lse.double()
        self.lse = torch.logaddexp(a, b)
        weights = ((x - self.lse).exp().nan_to_num(0.0).unsqueeze(-1) for x in (a, b))
        self.out = sum(w * x.double() for w, x in zip(weights, (self.a, self.b)))

    def check(self, out, lse, tokens=slice(None)):
        out, lse, want = out[tokens].double(), lse[tokens].double(), self.out[tokens]
        self.assertTrue(bool(((out - want).abs() <= want.abs() * 2.0**-8 + 2.0**-12).all()))
        empty = self.lse[tokens].isinf()
        self.assertTrue(torch.equal(lse.isneginf(), empty))
        self.assertLess(float((lse - self.lse[tokens])[~empty].abs().max()), 2.0**-20)

    def test_merge_attn_states(self):
        turned = [x.t().contiguous() for x in (self.a_lse, self.b_lse)]
        ops = torch.ops._C
        quern.vllm.install()
        for tokens in (None, 5, 3, 1):
            out, lse = torch.empty(5, 3, 16).bfloat16(), torch.empty(3, 5)
            ops.merge_attn_states(out, lse, self.a, turned[0], self.b, turned[1], tokens)
            merged = 5 if tokens is None else tokens
            self.check(out, lse.t(), slice(0, merged))
            self.assertTrue(torch.equal(out[merged:], self.b[merged:]))
            self.assertTrue(torch.equal(lse[:, merged:], turned[1][:, merged:]))
        # Steps whose tokens all have a prefix are one operator, with that number or without.
        bound = quern.torch.caller_of("merge_attn_states").function.cache
        made = len(bound)
        for rows in (5, 4):
            parts = self.a[:rows], turned[0][:, :rows], self.b[:rows], turned[1][:, :rows]
            for tokens in (None, rows):
                ops.merge_attn_states(torch.empty_like(parts[0]), None, *parts, tokens)
            made += 1
            self.assertEqual(len(bound), made)
        again = torch.empty_like(out)
        ops.merge_attn_states(again, None, self.a, turned[0], self.b, turned[1], 1)
        self.assertTrue(torch.equal(again, out))
        with self.assertRaisesRegex(RuntimeError, 'prefill_tokens_with_context=6; need at most 5'):
            ops.merge_attn_states(out, lse, self.a, turned[0], self.b, turned[1], 6)
        with self.assertRaisesRegex(NotImplementedError, 'output_scale is given'):
            ops.merge_attn_states(out, lse, self.a, turned[0], self.b, turned[1], None, torch.ones(1))

    def test_merge_state_v2(self):
        quern.sglang.install()
        out, lse = torch.empty(5, 3, 16).bfloat16(), torch.empty(5, 3)
        torch.ops.sgl_kernel.merge_state_v2(self.a, self.a_lse, self.b, self.b_lse, out, lse)
        self.check(out, lse)


class SglangTest(unittest.TestCase):
    """Requests of 5 and 7 tokens, in slots 8 b + t, and one more request that is not in the step."""

    def setUp(self):
        torch.manual_seed(3)
        self.table = torch.arange(24).reshape(3, 8).to(torch.int32)
        self.pool, self.lens = torch.tensor([0, 2]), torch.tensor([5, 7])

    def decode(self, q, k, v, key, value, loc, cross=False, encoder_lens=None):
        out = torch.empty(q.shape[:2] + v.shape[-1:], dtype=q.dtype)
        logits = torch.empty(q.shape[:2] + (8, v.shape[-1] + 1))
        sglang.decode_attention_cpu(
            q, k_cache=k, v_cahce=v, output=out, key=key, value=value, loc=loc, attn_logits=logits,
            req_to_token=self.table, req_pool_indices=self.pool, seq_lens=self.lens, sm_scale=0.25, logit_cap=0.0,
            is_cross_attn=cross, sliding_window_size=0, encoder_lens=encoder_lens, sinks=None,
        )
        return out

    def extend(self, q, key, value, k, v, new, cross=False, encoder_lens=None):
        out = torch.empty(q.shape[:2] + v.shape[-1:], dtype=q.dtype)
        new = torch.tensor(new, dtype=torch.int32)
        starts = (new.cumsum(0) - new).to(torch.int32)
        sglang.extend_attention_cpu(
            q, key, value, out, k, v, self.table, self.pool, self.lens, new, starts, int(new.max()), 0.25, 0.0, cross,
            sliding_window_size=0, encoder_lens=encoder_lens, sinks=None,
        )
        return out

    def slots(self, b, n):
        return self.table[self.pool[b], :n].long()

    def assert_near(self, have, want, bound=2.0**-17):
        self.assertEqual(have.shape, want.shape)
        self.assertTrue(bool(((have.double() - want).abs() <= bound).all()), f"{have} {want}")

    def test_values_that_are_columns_of_keys(self):
        q, k, key = torch.randn(2, 4, 24), torch.randn(24, 1, 24), torch.randn(2, 1, 24)
        loc = torch.tensor([4, 22])
        after = k.clone()
        after[loc] = key
        out = self.decode(q, k, k.narrow(2, 0, 16), key, key.narrow(2, 0, 16), loc)
        self.assertTrue(torch.equal(k, after))
        for b, n in enumerate((5, 7)):
            keys = after[self.slots(b, n)]
            self.assert_near(out[b : b + 1], attend(q[b : b + 1], keys, keys[..., :16], 0.25))

    def test_two_tokens_in_one_slot(self):
        q, k, v = torch.randn(2, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
        key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
        keys, values = k.clone(), v.clone()
        keys[1], values[1] = key[1], value[1]
        out = self.decode(q, k, v, key, value, torch.tensor([1, 1]))
        self.assertTrue(torch.equal(k, keys) and torch.equal(v, values))
        want = attend(q[:1], keys[self.slots(0, 5)], values[self.slots(0, 5)], 0.25)
        self.assert_near(out[:1], want)

    def test_cross_attention(self):
        q, k, v = torch.randn(2, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
        before = k.clone()
        encoder_lens, loc = torch.tensor([3, 6]), torch.tensor([0, 0])  # loc is required, and is not read
        out = self.decode(q, k, v, None, None, loc, True, encoder_lens)
        extended = self.extend(q, torch.randn(2, 2, 16), torch.randn(2, 2, 16), k, v, [1, 1], True, encoder_lens)
        self.assertTrue(torch.equal(k, before))
        self.assertTrue(torch.equal(extended, out))
        for b, n in enumerate((3, 6)):
            at = self.slots(b, n)
            self.assert_near(out[b : b + 1], attend(q[b : b + 1], k[at], v[at], 0.25))

    def test_a_prefill_whose_buffers_have_one_head(self):
        q, key, value = torch.randn(12, 4, 24), torch.randn(12, 2, 24), torch.randn(12, 2, 16)
        k = torch.full((24, 1, 24), float("nan"))
        out = self.extend(q, key, value, k, k.narrow(2, 0, 16), [5, 7])
        want = torch.cat([attend(q[a:b], key[a:b], value[a:b], 0.25) for a, b in ((0, 5), (5, 12))])
        self.assert_near(out, want)
        with self.assertRaisesRegex(ValueError, "request 1 has 7 keys, of which 6 are new; need new ones alone"):
            self.extend(q[:11], key[:11], value[:11], k, k.narrow(2, 0, 16), [5, 6])

    def test_the_norm_of_the_sum_in_f32(self):
        for dtype, ulp in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
            x, r = torch.randn(2, 121, 512).to(dtype)
            w = torch.randn(512).to(dtype)
            total = x.float() + r.float()
            want = F.normalize(total.double(), dim=-1) * 512**0.5 * w.double()
            sglang.fused_add_rmsnorm_cpu(x, r, w, 0.0)
            self.assertTrue(torch.equal(r, total.to(dtype)))
            # One rounding, where a norm of the rounded sum has two.
            self.assertLessEqual(((x.double() - want).abs() / want.abs().clamp(min=2.0**-13)).max(), ulp * 1.002)


class FakeTest(unittest.TestCase):
    """The operators of sgl_kernel, defined here, on tensors without data."""

    def test_dtypes_and_shapes(self):
        became = quern.sglang.install()
        own = torch.ops.sgl_kernel
        self.assertEqual(became["convert_weight_packed"], "defined")

        def meta(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device="meta")

        def told(*results):
            return [(tuple(t.shape), t.dtype) for t in results]

        packed = own.convert_weight_packed
        self.assertEqual(told(packed(meta(64, 32))), [((64, 32), torch.bfloat16)])
        self.assertEqual(told(packed(meta(4, 64, 32, dtype=torch.int8))), [((4, 64, 36), torch.int8)])
        self.assertEqual(told(packed(meta(8, 32))), [((32, 8), torch.float32)])
        codes = own.per_token_quant_int8_cpu(meta(5, 32))
        self.assertEqual(told(*codes), [((5, 32), torch.uint8), ((5,), torch.float32)])
        x, w, scales = meta(5, 32), meta(64, 36, dtype=torch.int8), meta(64, dtype=torch.float32)
        want = [((5, 64), torch.bfloat16)]
        self.assertEqual(told(own.int8_scaled_mm_with_quant(x, w, scales, None, torch.bfloat16, True)), want)
        mat1, scales1 = meta(5, 32, dtype=torch.uint8), meta(5, dtype=torch.float32)
        self.assertEqual(told(own.int8_scaled_mm_cpu(mat1, w, scales1, scales, None, torch.bfloat16, True)), want)
        blocks = meta(1, 1, dtype=torch.float32)
        w8 = meta(64, 32, dtype=getattr(torch, "float8_e4m3fn", torch.uint8))
        self.assertEqual(told(own.fp8_scaled_mm_cpu(x, w8, blocks, [64, 128], None, torch.bfloat16, True)), want)

    @unittest.skipUnless(hasattr(torch.library, "opcheck"), "this PyTorch has no opcheck")
    def test_opcheck(self):
        quern.sglang.install()
        own = torch.ops.sgl_kernel
        x, w = torch.randn(5, 32).bfloat16(), torch.randint(-128, 128, (64, 32), dtype=torch.int8)
        packed, scales = own.convert_weight_packed(w), torch.rand(64)
        for name, args in (
            ("convert_weight_packed", (w,)),
            ("per_token_quant_int8_cpu", (x,)),
            ("int8_scaled_mm_with_quant", (x, packed, scales, None, torch.bfloat16, True)),
            ("int8_scaled_mm_cpu", (*own.per_token_quant_int8_cpu(x), None)),
        ):
            if name == "int8_scaled_mm_cpu":
                codes, row_scales = args[:2]
                args = (codes, packed, row_scales, scales, None, torch.bfloat16, True)
            torch.library.opcheck(getattr(own, name).default, args)


if __name__ == "__main__":
    unittest.main()
