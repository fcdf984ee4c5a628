"""vLLM's experts, products of 4 bits, quantisers and choices by vLLM's names, against formulas in double.

Bounds: U is what a rounding to a dtype moves a number by, relative to it. Sums of f32 differ from exact ones by at
most SUM of the sum of magnitudes, which is 2^-24 for each of up to 128 terms and of what is done to them.
"""

import math
import unittest

import torch
import torch.nn.functional as F

import quern.vllm
from quern import _vllm_products

from .torch_names_test import NearTest, vllm

U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUM = 2.0**-17
# Half of the least f16: what an f16 below the normal ones is off by.
TINY = 2.0**-25
_FP8 = getattr(torch, "float8_e4m3fn", None)
_NEEDS_FP8 = unittest.skipIf(_FP8 is None, "this PyTorch has no 8-bit floats")


def _swigluoai(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Each has a slope of less than 1.2 in the gate, for |up| = 1.
ACTS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: _gelu_tanh(gate) * up,
    "swigluoai": _swigluoai,
}


def _rounded_row(x):
    """How far int8 with a scale for the row can be from each number of it: half a step, and its f32 roundings."""
    return x.abs().max(-1, keepdim=True).values * (0.5 / 127 + 2.0**-20)


def experts_in_double(x, w13, w2, b13, b2, routes, ids, act, unit, int8=False):
    """(output, bound without that of the last rounding); weights and biases in double, b13 and b2 or None."""
    want, bound = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if e < 0:
                continue
            v = w13[e] @ x[t] + (0 if b13 is None else b13[e])
            off = SUM * (w13[e].abs() @ x[t].abs() + (0 if b13 is None else b13[e].abs()))
            if int8:
                off = off + w13[e].abs() @ _rounded_row(x[t]).expand_as(x[t])
            halves = [(u[0::2], u[1::2]) if act == "swigluoai" else u.chunk(2) for u in (v, off)]
            (gate, up), (gate_off, up_off) = halves
            if act == "swigluoai":
                up_size = up.clamp(-7, 7).abs() + 1
            else:
                up_size = up.abs()
            h = ACTS[act](gate, up)
            h_off = 1.2 * gate_off * (up_size + up_off) + gate.abs() * up_off + h.abs() * unit + TINY
            if int8:
                h_off = h_off + _rounded_row(h.abs() + h_off)
            y = w2[e] @ h + (0 if b2 is None else b2[e])
            y_off = w2[e].abs() @ h_off + SUM * (w2[e].abs() @ h.abs() + (0 if b2 is None else b2[e].abs()))
            want[t] += float(routes[t, j]) * y
            bound[t] += abs(float(routes[t, j])) * y_off
    return want, bound


class VllmTest(NearTest):
    def tearDown(self):
        quern.vllm.clear()

    def assert_kept(self, count):
        self.assertEqual(len(_vllm_products._packed._made), count)


class ExpertsTest(VllmTest):
    def test_packed_weights_lie_as_they_should(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            name = "prepack_moe_weight_int8" if dtype is torch.int8 else "prepack_moe_weight"
            weight = (torch.randn(3, 48, 20) * 40).to(dtype)
            for isa in ("vec", "amx", "neon"):
                packed = torch.empty_like(weight)
                getattr(vllm, name)(weight, packed, isa)
                pair = 4 // weight.element_size() if isa == "amx" else 1
                want = weight.view(3, 3, 16, 20 // pair, pair).permute(0, 1, 3, 2, 4).reshape(3, 48, 20)
                self.assertTrue(torch.equal(packed, want), f"{dtype} {isa}")
                self.assertTrue(torch.equal(_vllm_products._plain(packed, isa), weight), f"{dtype} {isa}")

    def make(self, dtype, tokens, top, inter=24, hidden=32, experts=5):
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.routes = torch.rand(tokens, top)
        self.ids = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
        self.shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)

    def packed(self, name, weights, isa):
        packed = torch.empty_like(weights)
        getattr(vllm, name)(weights, packed, isa)
        return packed

    def test_experts(self):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for act in ACTS:
                for tokens, top, isa, biased in ((1, 1, "vec", False), (7, 3, "amx", True)):
                    with self.subTest(f"{dtype} {act} {tokens}"):
                        self.make(dtype, tokens, top)
                        w13, w2 = (torch.randn(shape).to(dtype) / 4 for shape in self.shapes)
                        biases = [torch.randn(s[:2]).to(dtype) if biased else None for s in self.shapes]
                        if tokens > 1:
                            self.ids[2, 1] = -1
                        args = [self.packed("prepack_moe_weight", w, isa) for w in (w13, w2)] + biases
                        out = torch.full_like(self.x, 9)
                        vllm.cpu_fused_moe(out, self.x, *args, self.routes, self.ids, False, act, isa)
                        doubles = [None if t is None else t.double() for t in (self.x, w13, w2, *biases)]
                        want, bound = experts_in_double(*doubles, self.routes, self.ids, act, U[dtype])
                        self.assertIs(out.dtype, dtype)
                        self.assert_near(out, want, bound + want.abs() * U[dtype] + TINY)

    def test_int8_experts_are_exact_where_their_codes_are(self):
        """Rows hold integers and a 127, so that their scale is 1: gate = 508, up and the codes of 508 up are theirs."""
        self.make(torch.float32, 7, 2)
        (experts, rows, hidden), shape = self.shapes
        inter = rows // 2
        self.x = torch.zeros(7, hidden)
        self.x[:, 1:1 + inter] = torch.randint(-127, 128, (7, inter)).float()
        self.x[:, :2] = 127
        w13 = torch.zeros(experts, rows, hidden, dtype=torch.int8)
        w13[:, :inter, 0] = 1
        w13[:, range(inter, rows), range(1, 1 + inter)] = 1
        w2, scales = torch.randint(-9, 10, shape).to(torch.int8), [torch.ones(experts, rows), torch.ones(shape[:2])]
        scales[0][:, :inter] = 4
        scales[1] *= torch.tensor([0.5, 1, 2, 4, 8])[:, None]
        for isa in ("vec", "amx"):
            packed = [self.packed("prepack_moe_weight_int8", w, isa) for w in (w13, w2)]
            out, ones = torch.empty(7, hidden), torch.ones(7, 2)
            vllm.cpu_fused_moe_int8(out, self.x, *packed, *scales, None, None, ones, self.ids, False, "silu", isa)
            w = w2.double() * scales[1].double()[..., None]
            h = 508 * self.x[:, 1:1 + inter].double()
            want = sum(torch.einsum("tni,ti->tn", w[self.ids[:, j].long()], h) for j in range(2))
            self.assert_near(out, want, want.abs() * 2.0**-22)

    def test_int8_experts(self):
        for isa, act, tokens, top in (("vec", "silu", 1, 2), ("amx", "swigluoai", 7, 3), ("vec", "gelu", 33, 1)):
            with self.subTest(f"{isa} {act}"):
                self.make(torch.bfloat16, tokens, top)
                weights = [torch.randint(-127, 128, shape).to(torch.int8) for shape in self.shapes]
                scales = [torch.rand(shape[:2]) / 512 for shape in self.shapes]
                biases = [torch.randn(shape[:2]) for shape in self.shapes] if top > 1 else [None, None]
                args = [self.packed("prepack_moe_weight_int8", w, isa) for w in weights] + scales + biases
                out = torch.empty_like(self.x)
                vllm.cpu_fused_moe_int8(out, self.x, *args, self.routes, self.ids, False, act, isa)
                doubles = [w.double() * s.double().unsqueeze(-1) for w, s in zip(weights, scales)]
                doubles = [self.x.double(), *doubles] + [None if b is None else b.double() for b in biases]
                want, bound = experts_in_double(*doubles, self.routes, self.ids, act, U[torch.bfloat16], True)
                self.assert_near(out, want, bound + want.abs() * U[torch.bfloat16])
                # A bound of that size would let noise through.
                self.assertLess(float((out.double() - want).norm()), 0.05 * float(want.norm()))

    def test_input_that_is_weighted(self):
        self.make(torch.float32, 5, 1)
        w13, w2 = (torch.randn(shape) / 4 for shape in self.shapes)
        args = [self.packed("prepack_moe_weight", w, "vec") for w in (w13, w2)] + [None, None]
        out, ones = torch.empty_like(self.x), torch.empty_like(self.x)
        vllm.cpu_fused_moe(out, self.x, *args, self.routes, self.ids, True, "silu", "vec")
        vllm.cpu_fused_moe(ones, self.x, *args, torch.ones(5, 1), self.ids.long(), False, "silu", "vec")
        self.assertTrue(torch.equal(out, ones))
        ids = self.ids.repeat(1, 2)
        with self.assertRaisesRegex(ValueError, "cpu_fused_moe: skip_weighted is set for 2 experts of a token; need"):
            vllm.cpu_fused_moe(out, self.x, *args, torch.ones(5, 2), ids, True, "silu", "vec")

    def test_weights_are_packed_once_and_again_when_they_change(self):
        self.make(torch.float32, 3, 2)
        w13, w2 = (torch.randn(shape) / 4 for shape in self.shapes)
        packed = [self.packed("prepack_moe_weight", w, "vec") for w in (w13, w2)]

        def call():
            out = torch.empty_like(self.x)
            vllm.cpu_fused_moe(out, self.x, *packed, None, None, self.routes, self.ids, False, "silu", "vec")
            return out

        first = call()
        self.assert_kept(1)
        self.assertTrue(torch.equal(call(), first))
        self.assert_kept(1)
        packed[1].neg_()
        self.assertTrue(torch.equal(call(), -first))
        self.assert_kept(1)
        packed[1].data.neg_()  # which PyTorch does not count
        self.assertTrue(torch.equal(call(), -first))
        quern.vllm.clear()
        self.assert_kept(0)
        self.assertTrue(torch.equal(call(), first))


class Wna16Test(VllmTest):
    def words(self, codes):
        """i32 words of eight codes along the last dimension."""
        eights = codes.reshape(*codes.shape[:-1], -1, 8).long()
        words = sum(eights[..., i] << 4 * i for i in range(8))
        return torch.where(words >= 1 << 31, words - (1 << 32), words).int()

    def make(self, n, k, groups, dtype, zeroed=False, shuffled=False):
        codes, zeros = torch.randint(0, 16, (n, k)), torch.full((groups, n), 8)
        if zeroed:
            zeros = torch.randint(0, 16, (groups, n))
        scales = (torch.rand(groups, n) / 8).to(dtype)
        g_idx = torch.arange(k) // (k // groups)
        if shuffled:
            g_idx = g_idx[torch.randperm(k)]
        w = (codes - zeros[g_idx].t()).double() * scales[g_idx].t().double()
        # Sixteen rows of the weight lie beside each other, column by column.
        q_weight = self.words(codes.view(n // 16, 16, k).transpose(1, 2).reshape(n // 16, 16 * k))
        given = (self.words(zeros) if zeroed else None, g_idx.int() if shuffled else None)
        return q_weight, scales, given, w

    def test_products(self):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for tokens, n, k, groups, zeroed, shuffled in (
                (1, 16, 32, 1, False, False),
                (5, 48, 96, 3, True, False),
                (33, 32, 128, 4, False, True),
                (3, 16, 64, 2, True, True),
            ):
                with self.subTest(f"{dtype} {n} {k}"):
                    q_weight, scales, (zeros, g_idx), w = self.make(n, k, groups, dtype, zeroed, shuffled)
                    x, out = torch.randn(tokens, k).to(dtype), torch.full((tokens, n), 9.0).to(dtype)
                    bias = torch.randn(n).to(dtype) if zeroed else None
                    vllm.cpu_gemm_wna16(x, q_weight, out, scales, zeros, g_idx, bias, 8, "vec")
                    want = F.linear(x.double(), w, None if bias is None else bias.double())
                    # Codes multiply without their zero points, which are subtracted from sums.
                    sizes = w.abs() + 16 * scales.double().max()
                    size = F.linear(x.double().abs(), sizes, None if bias is None else bias.double().abs())
                    self.assert_near(out, want, want.abs() * U[dtype] + SUM * size + TINY)

    def test_weights_are_packed_once_and_again_when_they_change(self):
        q_weight, scales, _, w = self.make(32, 64, 2, torch.float32)
        x = torch.randn(3, 64)

        def call():
            out = torch.empty(3, 32)
            vllm.cpu_gemm_wna16(x, q_weight, out, scales, None, None, None, 8, "amx")
            return out

        first = call()
        self.assertTrue(torch.equal(call(), first))
        self.assert_kept(1)
        scales.mul_(2)
        self.assertTrue(torch.equal(call(), 2 * first))
        scales.data.mul_(0.5)
        self.assertTrue(torch.equal(call(), 2 * first))
        quern.vllm.clear()
        self.assertTrue(torch.equal(call(), first))
        with self.assertRaisesRegex(ValueError, "cpu_gemm_wna16: pack_factor=4; need 8"):
            vllm.cpu_gemm_wna16(x, q_weight, first, scales, None, None, None, 4, "vec")


class RowsTest(VllmTest):
    def test_gelu_tanh(self):
        for dtype in U:
            x = torch.randn(3, 5, 37).to(dtype) * 3
            out = torch.empty(3, 5, 37, dtype=dtype)
            vllm.gelu_tanh(out, x)
            want = _gelu_tanh(x.double())
            # tanh near -1 leaves the rounding of a number near 1.
            self.assert_near(out, want, want.abs() * U[dtype] + x.double().abs() * 2.0**-21 + TINY)

    def assert_codes(self, codes, x, scales):
        want = (x.float() * (1 / scales.float())).clamp(-448, 448).to(_FP8)
        self.assertTrue(torch.equal(codes.view(torch.uint8), want.view(torch.uint8)))

    @_NEEDS_FP8
    def test_static_fp8(self):
        def blocks(scale, rows, columns):
            return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:6, :40]

        for dtype in U:
            x = torch.randn(6, 40).to(dtype)
            out = torch.empty(6, 40, dtype=_FP8)
            for scale, group, each in (
                (torch.tensor([0.003]), None, lambda s: s),
                (torch.tensor(0.02), None, lambda s: s),
                (torch.rand(6, 1) + 0.1, (1, -1), lambda s: s),
                (torch.rand(6) + 0.1, (1, -1), lambda s: s[:, None]),
                (torch.rand(40) + 0.1, (-1, 1), lambda s: s[None]),
                (torch.rand(2, 5) + 0.1, None, lambda s: blocks(s, 3, 8)),
                (torch.rand(2, 3) + 0.1, (4, 16), lambda s: blocks(s, 4, 16)),
            ):
                with self.subTest(f"{dtype} {tuple(scale.shape)} {group}"):
                    vllm.static_scaled_fp8_quant(out, x, scale, group)
                    self.assert_codes(out, x, each(scale))
        with self.assertRaisesRegex(ValueError, r"static_scaled_fp8_quant: scale is \(6,\); need group_shape with it"):
            vllm.static_scaled_fp8_quant(out, x, torch.ones(6))

    @_NEEDS_FP8
    def test_dynamic_fp8(self):
        for dtype in U:
            x = torch.randn(5, 37).to(dtype)
            x[3] = 0
            out = torch.empty(5, 37, dtype=_FP8)
            for scale in (torch.empty(1), torch.empty(1, 1)):
                vllm.dynamic_scaled_fp8_quant(out, x, scale)
                self.assertEqual(float(scale), float(x.float().abs().max() / 448))
                self.assert_codes(out, x, scale.view(1))
            largest = x.float().abs().max(-1, keepdim=True).values
            least = torch.full_like(largest, 1 / (448 * 512))
            for bound in (None, torch.tensor(1.5), torch.tensor([1.5])):
                scale = torch.empty(5, 1)
                vllm.dynamic_per_token_scaled_fp8_quant(out, x, scale, bound)
                most = largest if bound is None else largest.clamp(max=1.5)
                self.assertTrue(torch.equal(scale, (most / 448).max(least)))
                self.assert_codes(out, x, scale)

    @_NEEDS_FP8
    def test_fp8_by_vectors(self):
        x = torch.randn(5, 37).bfloat16()
        codes, scales = vllm.quantize_fp8e4m3_vec(x, True, None)
        self.assertTrue(torch.equal(scales, x.float().abs().max(-1).values / 448))
        self.assert_codes(codes, x, scales[:, None])
        for scale in (torch.tensor(0.01), torch.tensor([[0.5]])):
            codes, scales = vllm.quantize_fp8e4m3_vec(x, False, scale)
            self.assertTrue(torch.equal(scales, scale.view(1)))
            self.assert_codes(codes, x, scale.view(1))

    def test_fp8_of_a_tensor_needs_its_scale(self):
        said = "quantize_fp8e4m3_vec: scale_opt is missing; need it where channelwise is false"
        with self.assertRaisesRegex(ValueError, said):
            vllm.quantize_fp8e4m3_vec(torch.randn(5, 37), False, None)

    def test_biased_topk(self):
        for tokens, experts, topk in ((1, 8, 1), (7, 37, 5), (33, 64, 8)):
            hidden, logits, bias = torch.randn(tokens, 16), torch.randn(tokens, experts), torch.randn(experts)
            for scoring in ("sigmoid", "sqrtsoftplus"):
                scores = logits.double()
                scores = scores.sigmoid() if scoring == "sigmoid" else F.softplus(scores, threshold=60).sqrt()
                ids = (scores + bias.double()).topk(topk).indices
                for renormalize, factor, applied in ((False, None, True), (True, 2.5, True), (True, 2.5, False)):
                    weights, have = vllm.biased_topk_cpu(
                        hidden, logits, bias, topk, renormalize, scoring, 0, factor, applied
                    )
                    self.assertEqual((weights.dtype, have.dtype), (torch.float32, torch.int32))
                    self.assertTrue(torch.equal(have.long(), ids))
                    want = scores.gather(1, ids)
                    if renormalize:
                        want = want / want.sum(-1, keepdim=True)
                    if factor is not None and applied:
                        want = want * factor
                    self.assert_near(weights, want, want * 2.0**-20)

    def test_greedy_argmax(self):
        for columns in (1, 37, 1000):
            logits = torch.randn(5, columns)
            logits[2] = 3.0
            logits[3, columns // 2:] = 50.0
            have = vllm.greedy_argmax(logits)
            first = [int((row == row.max()).nonzero()[0]) for row in logits]
            self.assertEqual((have.dtype, have.tolist()), (torch.int64, first))
            logits[4, 0] = math.nan
            self.assertEqual(int(vllm.greedy_argmax(logits)[4]), 0 if columns == 1 else 1 + int(logits[4, 1:].argmax()))


if __name__ == "__main__":
    unittest.main()
