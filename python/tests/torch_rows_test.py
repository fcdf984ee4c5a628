"""SGLang's and vLLM's operators on rows by their names, with the cases of their tests, on formulas in double."""

import unittest

import torch
import torch.nn.functional as F

import quern
import quern.sglang

from .torch_names_test import NearTest, sglang, vllm

_EPS = 1e-6
_ULP = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def strided(x):
    """The same elements with gaps between rows."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 32, dtype=x.dtype)
    wide[..., : x.shape[-1]].copy_(x)
    return wide.narrow(-1, 0, x.shape[-1])


def rms(h, weight=None, shift=0.0):
    h = h.double()
    y = h / (h.pow(2).mean(-1, keepdim=True) + _EPS).sqrt()
    return y if weight is None else y * (weight.double() + shift)


def layer(h, weight, bias):
    h = h.double()
    y = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + _EPS).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


class RowsTest(NearTest):
    def near(self, have, want):
        self.assert_near(have, want, (want.abs() + 1) * _ULP[have.dtype])

    def test_gated_activations(self):
        for dtype in _ULP:
            x = torch.randn(7, 2 * 130).to(dtype)
            gate, up = (t.double() for t in x.chunk(2, -1))
            self.near(sglang.silu_and_mul_cpu(x), F.silu(gate) * up)
            self.near(sglang.gelu_and_mul_cpu(x), F.gelu(gate) * up)
            self.near(sglang.gelu_tanh_and_mul_cpu(x), F.gelu(gate, approximate="tanh") * up)

    def test_sigmoid_mul(self):
        heads, dim = 4, 24
        for dtype in _ULP:
            for in_heads in (False, True):
                x = torch.randn(5, heads * dim).to(dtype)
                gate = torch.randn(5, heads, 2 * dim).to(dtype)[..., :dim] if in_heads else torch.randn_like(x)
                want = x.double() * torch.sigmoid(gate.double().reshape(5, -1))
                self.near(sglang.fused_sigmoid_mul_cpu(x, gate, False), want)
                out = sglang.fused_sigmoid_mul_cpu(x, gate, True)
                self.assertEqual(out.data_ptr(), x.data_ptr())
                self.near(x, want)

    def test_norms(self):
        for dtype in _ULP:
            for shape in ((5, 33), (5, 3, 128), (2, 4, 3, 64)):
                x, w = strided(torch.randn(shape).to(dtype)), torch.randn(shape[-1]).to(dtype)
                self.near(sglang.rmsnorm_cpu(x, w, _EPS), rms(x, w))
                self.near(sglang.gemma_rmsnorm_cpu(x, w, _EPS), rms(x, w, 1))
                self.near(sglang.gemma3_rmsnorm_cpu(x, w, _EPS), rms(x, w, 1))
                self.near(sglang.gemma4_rmsnorm_cpu(x, w, _EPS, 0.5, True), rms(x, w, 0.5))
                self.near(sglang.gemma4_rmsnorm_cpu(x, w, _EPS, 0.5, False), rms(x))
                self.near(sglang.l2norm_cpu(x, _EPS), rms(x))
                for b in (None, torch.randn(shape[-1]).to(dtype)):
                    self.near(sglang.layernorm_cpu(x, w, b, _EPS), layer(x, w, b))
        # [batch, heads, tokens, n] as a view of [batch, tokens, heads, n], which has no common row stride.
        x, w = torch.randn(2, 3, 4, 16).transpose(1, 2), torch.randn(16)
        self.near(sglang.gemma3_rmsnorm_cpu(x, w, _EPS), rms(x, w, 1))

    def test_norms_of_a_sum(self):
        for dtype in _ULP:
            for shape in ((5, 33), (5, 3, 128)):
                w, b = torch.randn(2, shape[-1]).to(dtype)
                for name, shift in (("fused_add_rmsnorm_cpu", 0), ("gemma_fused_add_rmsnorm_cpu", 1)):
                    x, r = strided(torch.randn(shape).to(dtype)), torch.randn(shape).to(dtype)
                    h = x.double() + r.double()
                    self.assertIsNone(getattr(sglang, name)(x, r, w, _EPS))
                    self.assertTrue(torch.equal(r, h.float().to(dtype)))
                    self.near(x, rms(h, w, shift))
                x, r = strided(torch.randn(shape).to(dtype)), torch.randn(shape).to(dtype)
                h, before = x.double() + r.double(), x.clone()
                self.near(sglang.fused_add_layernorm_cpu(x, r, w, b, _EPS), layer(h, w, b))
                self.assertTrue(torch.equal(r, h.float().to(dtype)) and torch.equal(x, before))
        # No common row stride: what is written comes back all the same.
        x, r, w = torch.randn(3, 2, 16).transpose(0, 1), torch.randn(2, 3, 16), torch.randn(16)
        h = x.double() + r.double()
        sglang.fused_add_rmsnorm_cpu(x, r, w, _EPS)
        self.near(x, rms(h, w))

    def test_gated_norm(self):
        for dtype in _ULP:
            for n in (64, 1037):
                x, w, gate = strided(torch.randn(5, n).to(dtype)), torch.randn(n).to(dtype), torch.randn(5, n).to(dtype)
                self.near(sglang.fused_rmsnorm_gated_cpu(x, w, gate, _EPS), rms(x, w) * F.silu(gate.double()))

    def test_norms_of_queries_and_keys(self):
        for tokens, heads, kv_heads, dim in ((8, 4, 2, 128), (17, 8, 2, 64), (5, 3, 1, 96)):
            dtype = torch.bfloat16
            q, k = (strided(torch.randn(tokens, n * dim).to(dtype)) for n in (heads, kv_heads))
            qw, kw = torch.randn(2, dim).to(dtype)
            want_q = rms(q.reshape(tokens, heads, dim), qw, 1)
            want_k = rms(k.reshape(tokens, kv_heads, dim), kw, 1)
            have_q, have_k = sglang.fused_qk_gemma_rmsnorm_cpu(q, k, qw, kw, _EPS, dim)
            self.near(have_q, want_q.flatten(1))
            self.near(have_k, want_k.flatten(1))
            gate = torch.randn(tokens, heads, dim).to(dtype)
            both = strided(torch.cat((q.reshape(tokens, heads, dim), gate), -1).flatten(1))
            have_q, have_k, have_gate = sglang.fused_qk_gemma_rmsnorm_with_gate_cpu(both, k, qw, kw, _EPS, dim, heads)
            self.near(have_q, want_q.flatten(0, 1))
            self.near(have_k, want_k.flatten(0, 1))
            self.assertTrue(torch.equal(have_gate, gate.flatten(0, 1)))

    def test_routers(self):
        def chosen(choice, scores, groups, top_groups, k):
            by_group = choice.view(len(choice), groups, -1)
            best = by_group.topk(min(2, by_group.shape[-1]), -1)[0].sum(-1) if biased else by_group.max(-1)[0]
            kept = torch.zeros_like(best).scatter_(1, best.topk(top_groups)[1], 1.0)
            masked = by_group.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
            ids = masked.topk(k)[1]
            return scores.gather(1, ids), ids

        hidden = torch.randn(9, 16)
        for experts, groups, top_groups, k in ((64, 1, 1, 6), (160, 8, 3, 6), (256, 8, 4, 8)):
            logits, bias = torch.randn(9, experts), torch.randn(experts)
            for renormalize in (False, True):
                biased = False
                scores = logits.double().softmax(-1)
                want, ids = chosen(scores, scores, groups, top_groups, k)
                if renormalize:
                    want = want / want.sum(-1, keepdim=True)
                have, have_ids = sglang.grouped_topk_cpu(
                    hidden, logits, k, renormalize, groups, top_groups, 0, None, None
                )
                self.assertTrue(torch.equal(have_ids.long(), ids))
                self.near(have, want)
                biased = True
                scores = torch.sigmoid(logits.double())
                want, ids = chosen(scores + bias.double(), scores, groups, top_groups, k)
                if renormalize:
                    want = want / want.sum(-1, keepdim=True)
                for scale in (None, 2.5):
                    have, have_ids = sglang.biased_grouped_topk_cpu(
                        hidden, logits, bias, k, renormalize, groups, top_groups, 0, scale, None
                    )
                    self.assertTrue(torch.equal(have_ids.long(), ids))
                    self.near(have, want * (scale or 1.0))
        logits = torch.randn(9, 32)
        have, ids = sglang.topk_sigmoid_cpu(hidden, logits, 1, False)
        self.assertTrue(torch.equal(ids[:, 0].long(), logits.max(-1)[1]))
        self.near(have, torch.sigmoid(logits.double().max(-1, keepdim=True)[0]))
        with self.assertRaisesRegex(ValueError, "num_fused_shared_experts=1; need 0"):
            sglang.grouped_topk_cpu(hidden, logits, 2, True, 1, 1, 1, None, None)

    def test_rotations(self):
        heads, dim = 4, 32
        positions = torch.tensor([3, 0, 8, 8, 1, 5])
        for dtype in _ULP:
            table = torch.randn(9, dim).to(dtype)
            cos, sin = (t[:, None].double() for t in table[positions].chunk(2, -1))

            def turned(x, neox):
                x = x.reshape(6, -1, dim).double()
                a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
                one, two = a * cos - b * sin, b * cos + a * sin
                return torch.cat((one, two), -1) if neox else torch.stack((one, two), -1).flatten(-2)

            for neox in (True, False):
                for shape in ((6,), (6, heads), (2, 3, heads), "strided"):
                    if shape == "strided":  # batches that do not follow one another
                        q, k = (torch.randn(3, 2, n, dim).to(dtype).transpose(0, 1) for n in (heads, 1))
                    elif len(shape) == 1:
                        q, k = (strided(torch.randn(6, n * dim).to(dtype)) for n in (heads, 1))
                    else:
                        q, k = (torch.randn(*shape[:-1], n, dim).to(dtype) for n in (heads, 1))
                    want = [turned(x, neox).reshape(x.shape) for x in (q, k)]
                    before = q.clone()
                    have = sglang.rotary_embedding_cpu(positions, q, k, dim, table, neox)
                    for x, y in zip(have, want):
                        self.near(x, y)
                    in_place = q.dim() != 3
                    self.assertEqual(have[0].data_ptr() == q.data_ptr(), in_place)
                    self.assertEqual(torch.equal(q, before), not in_place)
        cos, sin, q, k = torch.randn(6, dim), torch.randn(6, dim), torch.randn(6, 2, dim), torch.randn(6, 2, dim)
        half = q.double().roll(dim // 2, -1) * torch.cat((-torch.ones(dim // 2), torch.ones(dim // 2))).double()
        want = q.double() * cos[:, None].double() + half * sin[:, None].double()
        self.assertEqual(sglang.apply_rotary_pos_emb_cpu(q, k, cos, sin)[0].data_ptr(), q.data_ptr())
        self.near(q, want)

    def test_multimodal_rotations(self):
        table, dim = torch.randn(9, 32), 32
        at = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]])
        for sections, interleaved in (([6, 6, 4], False), ([6, 6, 4], True), (None, False)):
            for neox in (True, False):
                q, k = torch.randn(3, 2 * dim), torch.randn(3, dim)
                stream = [0 if j < 6 else 1 if j < 12 else 2 for j in range(16)]
                if interleaved:
                    stream = [j % 3 if j < 3 * sections[j % 3] else 0 for j in range(16)]
                if sections is None:
                    stream = [0] * 16
                rows = torch.stack([table[at[s]][:, [j, j + 16]] for j, s in enumerate(stream)], 1)[:, None].double()
                x = q.view(3, 2, dim).double()
                a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
                one, two = a * rows[..., 0] - b * rows[..., 1], b * rows[..., 0] + a * rows[..., 1]
                want = torch.cat((one, two), -1) if neox else torch.stack((one, two), -1).flatten(-2)
                positions = at if sections else at[0]
                have, _ = sglang.multimodal_rotary_embedding_cpu(
                    positions, q, k, dim, table, sections, interleaved, neox
                )
                self.assertEqual(have.data_ptr(), q.data_ptr())
                self.near(q, want.flatten(1))

    def test_copies(self):
        heads_k, heads_v, dim = 4, 8, 16
        group = heads_v // heads_k
        for dtype in (torch.bfloat16, torch.float16):
            qkvz = torch.rand(7, heads_k * (2 + 2 * group) * dim).to(dtype)
            ba = torch.rand(7, 2 * heads_v).to(dtype)
            q, k, v, z = qkvz.view(7, heads_k, -1).split([dim, dim, group * dim, group * dim], 2)
            b, a = ba.view(7, heads_k, -1).chunk(2, 2)
            want = (
                torch.cat([x.reshape(7, -1) for x in (q, k, v)], 1), z.reshape(7, heads_v, dim), b.reshape(7, -1),
                a.reshape(7, -1),
            )
            have = sglang.fused_qkvzba_split_reshape_cat_cpu(qkvz, ba, heads_k, heads_v, dim, dim)
            self.assertTrue(all(torch.equal(x, y) for x, y in zip(have, want)))
            columns = (2 * heads_k + heads_v) * dim
            want = qkvz[:, :columns], qkvz[:, columns:].reshape(7, heads_v, dim), *ba.chunk(2, 1)
            have = sglang.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, heads_k, heads_v, dim, dim)
            self.assertTrue(all(torch.equal(x, y) for x, y in zip(have, want)))
        for dtype in (torch.float16, torch.bfloat16, torch.uint8):
            for index in (torch.int32, torch.int64):
                k, v = (torch.randint(0, 99, (7, 3, 64)).to(dtype) for _ in range(2))
                caches = [torch.zeros(40, 3, 64, dtype=dtype) for _ in range(2)]
                at = torch.randperm(40)[:7]
                want = [c.index_copy(0, at, x) for c, x in zip(caches, (k, v))]
                sglang.store_cache_cpu(k, v, *caches, at.to(index), 3 * 64)
                self.assertTrue(all(torch.equal(x, y) for x, y in zip(caches, want)))

    @unittest.skipUnless(hasattr(torch.library, "opcheck"), "this PyTorch has no opcheck")
    def test_opcheck(self):
        x, w, logits = torch.randn(5, 32), torch.randn(32), torch.randn(5, 64)
        q, k, head = torch.randn(5, 64), torch.randn(5, 32), torch.randn(16)
        for name, args in (
            ("gemma4_rmsnorm_cpu", (x, w, _EPS, 0.5, True)),
            ("layernorm_cpu", (x, w, None, _EPS)),
            ("fused_add_layernorm_cpu", (x, x.clone(), w, w, _EPS)),
            ("gemma_fused_add_rmsnorm_cpu", (x.clone(), x.clone(), w, _EPS)),
            ("fused_qk_gemma_rmsnorm_with_gate_cpu", (torch.randn(5, 128), k, head, head, _EPS, 16, 4)),
            ("fused_qk_gemma_rmsnorm_cpu", (q, k, head, head, _EPS, 16)),
            ("fused_qkvzba_split_reshape_cat_cpu", (torch.randn(5, 96), torch.randn(5, 8), 2, 4, 8, 8)),
            ("store_cache_cpu", (*torch.zeros(2, 3, 2, 8), *torch.zeros(2, 9, 2, 8), torch.arange(3), None)),
            ("biased_grouped_topk_cpu", (x, logits, torch.randn(64), 8, True, 8, 4, 0, 2.5, None)),
        ):
            with self.subTest(name):
                torch.library.opcheck(getattr(sglang, name).default, args)


class VllmRowsTest(NearTest):
    def test_gelu_of_bf16(self):
        x = torch.randn(3, 65).bfloat16()
        out = torch.empty_like(x)
        vllm.activation_lut_bf16(out, x, "gelu")
        want = F.gelu(x.double())
        self.assert_near(out, want, want.abs() * 2.0**-8 + 2.0**-20)
        with self.assertRaisesRegex(ValueError, 'activation="silu"; need "gelu"'):
            vllm.activation_lut_bf16(out, x, "silu")

    def test_quantisation(self):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(5, 67).to(dtype)
            out, scale, azp = torch.empty(5, 67, dtype=torch.int8), torch.empty(5, 1), torch.empty(5, 1).int()
            vllm.dynamic_scaled_int8_quant(out, x, scale, None)
            self.assert_near(scale, x.double().abs().max(1, keepdim=True)[0] / 127, 2.0**-24)
            self.assert_near(out * scale.double(), x.double(), scale.double() * 0.5001)
            vllm.dynamic_scaled_int8_quant(out, x, scale, azp)
            self.assert_near((out.double() - azp) * scale.double(), x.double(), scale.double() * 0.5001)
            for point in (None, torch.tensor([7]).int()):
                vllm.static_scaled_int8_quant(out, x, torch.tensor(1 / 32.0), point)
                want = ((x.double() * 32).round() + (0 if point is None else 7)).clamp(-128, 127)
                self.assertTrue(torch.equal(out.double(), want))


if __name__ == "__main__":
    unittest.main()
