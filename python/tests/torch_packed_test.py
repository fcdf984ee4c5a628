"""SGLang's packed weights: what was packed comes back plain, and products by it are those in double."""

import re
import unittest

import torch
import torch.nn.functional as F

import quern.sglang
from quern import _sglang_weights as weights

from .torch_names_test import NearTest, sglang

_FP8 = getattr(torch, "float8_e4m3fn", None)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _random(dtype, *shape):
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(dtype)


def _same(a, b):
    # An old PyTorch compares no 8-bit floats.
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def _mxfp4(n, k):
    """(packed codes u8[n, k / 2], exponents u8[n, k / 32], the weights in double)."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (n, k // 32), dtype=torch.uint8)
    values = _E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).double())
    values = values * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, exponents, values


def _words(codes, shifts, dim):
    """Eight codes in each i32 word, along a dimension."""
    last = codes.transpose(dim, -1).long()
    last = last.reshape(*last.shape[:-1], -1, 8)
    words = sum(last[..., i] << shift for i, shift in enumerate(shifts))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().transpose(dim, -1).contiguous()


def _int4(k, n, group, algorithm):
    """(weight, zeros and scales of AWQ or GPTQ, the weights [n, k] in double)."""
    codes = torch.randint(0, 16, (k, n))
    zeros = torch.randint(0, 15, (k // group, n))
    scales = (torch.rand(k // group, n) / 16).bfloat16()
    values = (codes - zeros.repeat_interleave(group, 0)).double() * scales.double().repeat_interleave(group, 0)
    straight = range(0, 32, 4)
    if algorithm == weights.AWQ:
        order = (0, 16, 4, 20, 8, 24, 12, 28)
        words = _words(codes, order, -1), _words(zeros, order, -1)
    else:  # which counts zeros from 1
        words = _words(codes, straight, -2), _words((zeros - 1) & 15, straight, -1)
        values = torch.where(zeros.repeat_interleave(group, 0) == 0, values - 16 * scales.double().repeat_interleave(group, 0), values)
    return (*words, scales), values.t()


class PackedTest(NearTest):
    def tearDown(self):
        quern.sglang.clear()

    def test_weights_come_back(self):
        if _FP8 is None:
            print("this PyTorch has no 8-bit floats: not tried with them")
        for dtype in filter(None, (torch.bfloat16, torch.float16, torch.int8, _FP8)):
            for n, k in ((32, 32), (96, 64), (16, 32), (48, 160)):
                if dtype is torch.int8 and n % 32:
                    continue
                w = _random(dtype, n, k)
                self.assertTrue(_same(weights.plain(sglang.convert_weight_packed(w)), w), f"{dtype} {n} {k}")

    def test_mxfp4_comes_back(self):
        codes, exponents, _ = _mxfp4(96, 64)
        packed = sglang.convert_weight_packed(codes), sglang.convert_scale_packed(exponents)
        have, have_exponents = weights.plain_mxfp4(*packed, True)
        self.assertTrue(torch.equal(have[:, 0::2] | have[:, 1::2] << 4, codes))
        self.assertTrue(torch.equal(have_exponents, exponents))
        self.assertTrue(torch.equal(weights.plain_mxfp4(codes, exponents, False)[0], have))
        experts = torch.stack((exponents, exponents.flip(0)))
        self.assertTrue(torch.equal(sglang.convert_scale_packed(experts)[0], packed[1]))

    def test_int4_products(self):
        for algorithm in (weights.AWQ, weights.GPTQ):
            for k, n, group in ((256, 64, 128), (64, 32, 32), (512, 96, 256)):
                given, w = _int4(k, n, group, algorithm)
                packed, zeros, scales = sglang.convert_weight_packed_scale_zp(*given, algorithm)
                block = min(group, 128)
                self.assertEqual(packed.shape, (n // 32, k // block, 16 * block + 128))
                self.assertEqual((zeros.dtype, scales.dtype), (torch.int8, torch.float32))
                x, b = torch.randn(3, k).bfloat16(), torch.randn(n)
                y = sglang.int4_scaled_mm_cpu(x, packed, zeros, scales, b)
                want = F.linear(x.double(), w, b.double())
                magnitude = F.linear(x.double().abs(), w.abs())
                self.assert_near(y, want, want.abs() * 2.0**-8 + magnitude * 2.0**-10)
                # The sums behind the codes, of a column over the k of a block.
                sums = packed[..., 16 * block :].contiguous().view(torch.int32)
                codes, groups, _ = weights.plain_int4(packed, zeros, scales)
                first = codes[0, :block].int().sum() - block * int(groups[0, 0])
                self.assertEqual(int(sums[0, 0, 0]), int(first))

    def test_products(self):
        x, b = torch.randn(2, 3, 64).bfloat16(), torch.randn(96)
        codes, exponents, w = _mxfp4(96, 64)
        packed = sglang.convert_weight_packed(codes), sglang.convert_scale_packed(exponents)
        want = F.linear(x.double(), w, b.double())
        for mat2, scales, is_vnni in ((*packed, True), (codes, exponents, False)):
            y = sglang.mxfp4_scaled_mm_cpu(x, mat2, scales, b, is_vnni)
            self.assert_near(y, want, want.abs() * 2.0**-8 + F.linear(x.double().abs(), w.abs()) * 2.0**-16)
        w = torch.randn(96, 64).bfloat16()
        both = sglang.fused_input_proj_cpu(x, w, w[:32], False)
        self.assertTrue(torch.equal(both[0], sglang.weight_packed_linear(x, w, None, False)))
        self.assertTrue(torch.equal(both[1], both[0][..., :32]))

    def test_a_narrow_product_and_its_gate(self):
        x, w, b = torch.randn(4, 64).bfloat16(), torch.randn(1, 64).bfloat16(), torch.randn(1)
        packed = sglang.convert_weight_packed(w)
        self.assertEqual((packed.dtype, packed.shape), (torch.float32, (64, 1)))
        want = F.linear(x.double(), w.double(), b.double())
        self.assert_near(sglang.weight_packed_linear(x, packed, b, True), want, want.abs() * 2.0**-8 + 2.0**-12)
        by = torch.randn(4, 32).bfloat16()
        want = torch.sigmoid(want) * by.double()
        y = sglang.fused_linear_sigmoid_mul(x, packed, b, True, by)
        self.assert_near(y, want, by.double().abs() * 2.0**-7)

    def test_a_gated_product_is_rounded_once(self):
        for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
            x, w, b = torch.randn(64, 64).to(dtype), torch.randn(1, 64).to(dtype), torch.randn(1)
            by = torch.randn(64, 32).to(dtype)
            want = torch.sigmoid(F.linear(x.double(), w.double(), b.double())) * by.double()
            # The f32 sum of the products moves the sigmoid by at most that much of itself.
            sums = F.linear(x.double().abs(), w.double().abs(), b.double().abs()) * 2.0**-20
            # Half of the least f16.
            tiny = 2.0**-25 if dtype is torch.float16 else 0.0
            for mat2, is_vnni in ((w, False), (sglang.convert_weight_packed(w), True)):
                y = sglang.fused_linear_sigmoid_mul(x, mat2, b, is_vnni, by)
                self.assertIs(y.dtype, dtype)
                self.assert_near(y, want, want.abs() * (unit + sums + 2.0**-20) + tiny)

    def test_a_gated_product_has_one_column(self):
        by = torch.randn(4, 32).bfloat16()
        x = torch.randn(4, 64).bfloat16()
        with self.assertRaisesRegex(ValueError, "mat2 has 16 columns; need 1"):
            sglang.fused_linear_sigmoid_mul(x, torch.randn(16, 64).bfloat16(), None, False, by)

    def test_batched_products(self):
        x, w = torch.randn(5, 3, 64).bfloat16().transpose(0, 1), torch.randn(3, 32, 64).bfloat16()
        want = torch.bmm(x.double(), w.double().transpose(1, 2))
        for mat2, is_vnni in ((w, False), (sglang.convert_weight_packed(w), True)):
            out = torch.zeros(5, 3, 40).bfloat16().transpose(0, 1)
            sglang.bmm_cpu(out[..., :32], x, mat2, is_vnni, None)
            self.assert_near(out[..., :32], want, want.abs() * 2.0**-8 + 2.0**-12)
            self.assertTrue(bool((out[..., 32:] == 0).all()))

    def test_unequal_batches_are_refused(self):
        def zeros(*shape):
            return torch.zeros(shape).bfloat16()

        out, x, w = (3, 5, 32), (3, 5, 64), (3, 32, 64)
        for shapes in (
            ((2, 5, 32), x, w),
            (out, (2, 5, 64), w),
            (out, (4, 5, 64), w),
            (out, x, (2, 32, 64)),
            (out, x, (4, 32, 64)),
            (out, (3, 4, 64), w),
        ):
            with self.subTest(shapes):
                said = "bmm_cpu: out is {}, mat1 {} and mat2 {}; need equal batches and rows".format(*shapes)
                given = [zeros(*shape) for shape in shapes]
                given[0].fill_(7)
                with self.assertRaisesRegex(ValueError, re.escape(said)):
                    sglang.bmm_cpu(*given, False, None)
                self.assertTrue(bool((given[0] == 7).all()))

    def _experts_in_double(self, x, w1, w2, routes, ids, act):
        want = torch.zeros(x.shape).double()
        for t in range(len(x)):
            for j in range(ids.shape[1]):
                e = int(ids[t, j])
                want[t] += float(routes[t, j]) * (w2[e] @ act(w1[e] @ x[t].double()))
        return want

    def test_experts(self):
        experts, inter, hidden, tokens, top = 4, 32, 64, 6, 2
        x = torch.randn(tokens, hidden).bfloat16()
        routes, ids = torch.rand(tokens, top), torch.randint(0, experts, (tokens, top), dtype=torch.int32)

        def silu(v):
            gate, up = v.chunk(2)
            return F.silu(gate) * up

        def clamped(v):  # gate and up in turn
            gate, up = v[0::2].clamp(max=7), v[1::2].clamp(-7, 7)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)

        w1 = torch.randn(experts, 2 * inter, hidden).bfloat16() / 8
        w2 = torch.randn(experts, hidden, inter).bfloat16() / 8
        packed = sglang.convert_weight_packed(w1), sglang.convert_weight_packed(w2)
        m1, m2 = ([_mxfp4(*s) for _ in range(experts)] for s in ((2 * inter, hidden), (hidden, inter)))
        mx = []
        for matrices in (m1, m2):
            mx.append(sglang.convert_weight_packed(torch.stack([m[0] for m in matrices])))
            mx.append(sglang.convert_scale_packed(torch.stack([m[1] for m in matrices])))
        m1, m2 = (torch.stack([m[2] for m in matrices]) for matrices in (m1, m2))
        mixed = {
            "bf16": (w1, w2, silu, {}),
            "bf16, packed": (w1, w2, silu, dict(w1=packed[0], w2=packed[1], is_vnni=True)),
            "bf16, in turn": (w1, w2, clamped, dict(w1=packed[0], w2=packed[1], alpha=1.702, limit=7.0, is_vnni=True)),
            "mxfp4": (
                m1, m2, silu,
                dict(w1=mx[0], w1_scale=mx[1], w2=mx[2], w2_scale=mx[3], moe_comp_method=weights.MXFP4, is_vnni=True),
            ),
        }
        for name, (a, b, act, given) in mixed.items():
            with self.subTest(name):
                options = {"w1": w1, "w2": w2, **given}
                a, b = options.pop("w1"), options.pop("w2")
                y = sglang.fused_experts_cpu(x, a, b, routes, ids, False, **options)
                want = self._experts_in_double(x, mixed[name][0].double(), mixed[name][1].double(), routes, ids, act)
                self.assert_near(y, want, want.abs() * 2.0**-7 + float(want.abs().max()) * 2.0**-7)
        y = sglang.fused_experts_cpu(x, *packed, routes.bfloat16(), ids.long(), True, is_vnni=True)
        self.assertEqual(y.data_ptr(), x.data_ptr())
        with self.assertRaisesRegex(NotImplementedError, "alpha=1.5, limit=7.0; need 1.702 and 7"):
            sglang.fused_experts_cpu(x, *packed, routes, ids, False, alpha=1.5, limit=7.0, is_vnni=True)
        with self.assertRaisesRegex(ValueError, "moe_comp_method=5; need 0 to 4"):
            sglang.fused_experts_cpu(x, *packed, routes, ids, False, 5)

    def test_int8_experts_and_a_shared_one(self):
        inter, hidden = 32, 64
        x = torch.randn(5, hidden).bfloat16()
        w1, w2 = _random(torch.int8, 2 * inter, hidden), _random(torch.int8, hidden, inter)
        s1, s2 = torch.rand(2 * inter, 1) / 512, torch.rand(hidden, 1) / 512
        plain = [w.double() * s.double() for w, s in ((w1, s1), (w2, s2))]
        gate, up = (x.double() @ plain[0].t()).chunk(2, -1)
        want = (F.silu(gate) * up) @ plain[1].t()
        bound = float(want.abs().max()) / 32  # rows become int8 twice
        routed = torch.randn(5, hidden).bfloat16()
        for a, b, is_vnni in ((w1, w2, False), (*map(sglang.convert_weight_packed, (w1, w2)), True)):
            y = sglang.shared_expert_cpu(x, a, b, None, None, False, True, False, s1, s2, None, is_vnni)
            self.assert_near(y, want, bound)
            sum_ = sglang.shared_expert_cpu(x, a, b, routed, 16.0, False, True, False, s1, s2, None, is_vnni)
            self.assert_near(sum_, want + 16 * routed.double(), bound + 16 * routed.double().abs() * 2.0**-8)
            one, ids = torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32)
            experts = sglang.fused_experts_cpu(
                x, a.unsqueeze(0), b.unsqueeze(0), one, ids, False, weights.INT8, s1.unsqueeze(0), s2.unsqueeze(0),
                is_vnni=is_vnni,
            )
            self.assert_near(experts, want, bound)

    def test_what_is_packed_is_kept_until_it_changes(self):
        x, w = torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        packed = sglang.convert_weight_packed(w)
        first = sglang.weight_packed_linear(x, packed, None, True)
        made = quern.sglang._sglang_products._packed._made
        self.assertEqual(len(made), 1)
        sglang.weight_packed_linear(x, packed, None, True)
        self.assertEqual(len(made), 1)
        packed.neg_()
        self.assertTrue(torch.equal(sglang.weight_packed_linear(x, packed, None, True), -first))
        # The same memory as a plain weight is another one.
        self.assertFalse(torch.equal(sglang.weight_packed_linear(x, packed, None, False), -first))

    def test_data_of_a_weight_may_become_another(self):
        x = torch.randn(2, 64).bfloat16()

        def compare(weight):
            y = sglang.weight_packed_linear(x, weight, None, False)
            want = F.linear(x.double(), weight.double())
            self.assert_near(y, want, want.abs() * 2.0**-8 + 2.0**-12)

        taken = set()
        for _ in range(20):
            p = torch.nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
            # No address that the cache knows comes back with other numbers.
            self.assertNotIn(p.data_ptr(), taken)
            taken.add(p.data_ptr())
            compare(p)
            p.data = torch.empty(0, dtype=torch.bfloat16)
            compare(torch.randn(32, 64).bfloat16())
            p.data = torch.randn(32, 64).bfloat16()
            compare(p)
            taken.add(p.data_ptr())
            # The memory of one weight, of another shape.
            compare(p.data.view(64, 32).t().contiguous())

    def test_parameters_are_packed_with_gradients_on(self):
        w = torch.nn.Parameter(torch.randn(32, 64).bfloat16())
        packed = sglang.convert_weight_packed(w).detach()
        self.assertTrue(_same(weights.plain(packed), w.detach()))
        with self.assertRaisesRegex(NotImplementedError, "requires a gradient"):
            sglang.weight_packed_linear(torch.randn(2, 64).bfloat16(), w, None, False)

    def test_a_factor_needs_what_it_scales(self):
        x, w1, w2 = torch.randn(5, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.randn(64, 32).bfloat16()
        with self.assertRaisesRegex(
            ValueError, "shared_expert_cpu: routed_scaling_factor is given without fused_experts_out; need both, or"
        ):
            sglang.shared_expert_cpu(x, w1, w2, None, 16.0, False, False, False, None, None, None, False)

    def test_weights_without_scales_are_refused(self):
        x = torch.randn(5, 64).bfloat16()
        routes, ids = torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32)
        w1, w2 = _random(torch.int8, 64, 64), _random(torch.int8, 64, 32)
        with self.assertRaisesRegex(ValueError, "weights in int8 have no scales; need them"):
            sglang.shared_expert_cpu(x, w1, w2, None, None, False, True, False, None, None, None, False)
        for method in (weights.INT8, weights.FP8, weights.INT4, weights.MXFP4):
            with self.assertRaisesRegex(ValueError, f"weights in {weights.METHODS[method]} have no scales; need them"):
                sglang.fused_experts_cpu(x, w1.unsqueeze(0), w2.unsqueeze(0), routes, ids, False, method)

    def test_refusals(self):
        for args, why in (
            ((torch.zeros(32, 2),), r"scale is f32\[32, 2\]; need u8"),
            ((torch.zeros(33, 2, dtype=torch.uint8),), r"scale is u8\[33, 2\]; need .* a multiple of 32 rows"),
        ):
            with self.assertRaisesRegex(ValueError, why):
                sglang.convert_scale_packed(*args)
        given, _ = _int4(64, 32, 32, weights.AWQ)
        with self.assertRaisesRegex(ValueError, "quant_method_4bit=2"):
            sglang.convert_weight_packed_scale_zp(*given, 2)
        given, _ = _int4(64, 24, 32, weights.AWQ)
        with self.assertRaisesRegex(ValueError, "64 x 24 codes in 2 groups; need a multiple of 32 columns"):
            sglang.convert_weight_packed_scale_zp(*given, 0)


if __name__ == "__main__":
    unittest.main()
