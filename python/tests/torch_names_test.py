"""Operators by vLLM's and SGLang's names, on those that torch has too and on formulas in double."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

import torch
import torch.nn.functional as F

import quern
import quern.sglang
import quern.torch
import quern.vllm
from quern import _named_ops

from .torch_test import attend, norm

_PYTHON = [os.environ.get("QUERN_PYTHON") or sys.executable]
_BECAME = {"_C": quern.vllm.install(), "sgl_kernel": quern.sglang.install()}
vllm, sglang = torch.ops._C, torch.ops.sgl_kernel
# Libraries of operators that tests define. An operator goes with its library.
_KEPT: list = []


class NearTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(11)

    def assert_near(self, have, want, bound):
        self.assertEqual(have.shape, want.shape)
        self.assertTrue(bool(((have.double() - want).abs() <= bound).all()), f"{have} {want}")


class InstallTest(unittest.TestCase):
    def test_all_are_defined_here_and_a_second_call_changes_nothing(self):
        for namespace, install in (("_C", quern.vllm.install), ("sgl_kernel", quern.sglang.install)):
            self.assertEqual(set(_BECAME[namespace].values()), {"defined"})
            self.assertEqual(install(), _BECAME[namespace])
        self.assertEqual(quern.vllm.register(), _BECAME["_C"])

    def test_operators_of_the_project_keep_their_schemas(self):
        lib = torch.library.Library("quern_test_project", "DEF")
        lib.define("rms_norm(Tensor(a0!) result, Tensor input, Tensor weight, float epsilon=0.5) -> ()")
        lib.define("silu_and_mul(Tensor(a0!) out, Tensor input, int version_of_tomorrow) -> ()")
        lib.define("gelu_fast(Tensor(a0!) out) -> ()")
        became = quern.vllm.install("quern_test_project")
        self.assertEqual(became["rms_norm"], "replaced")
        self.assertEqual(became["silu_and_mul"], "left out: its arguments version_of_tomorrow are not known here")
        self.assertEqual(became["gelu_fast"], "left out: it lacks the arguments input")
        fragments = hasattr(torch, "compile")  # PyTorch 2
        self.assertEqual(became["gelu_new"], "defined" if fragments else "left out: " + _named_ops.NO_FRAGMENTS)
        x, w, out = torch.randn(2, 8), torch.randn(8), torch.empty(2, 8)
        torch.ops.quern_test_project.rms_norm(out, x, w, 1e-5)
        self.assertTrue(torch.equal(out, torch.ops.quern.rms_norm(x, w, 1e-5)))
        torch.ops.quern_test_project.rms_norm(out, input=x, weight=w)
        self.assertTrue(torch.equal(out, torch.ops.quern.rms_norm(x, w, 0.5)))

    def test_a_family_is_installed_whole_or_not_at_all(self):
        def became(install, namespace, *schemas):
            """What install() says beside a library with these operators, and the warnings."""
            lib = torch.library.Library(namespace, "DEF")
            for schema in schemas:
                lib.define(schema)
                _KEPT.append(lib)
            with self.assertLogs("quern", "WARNING") as logs:
                result = install(namespace)
            return result, logs.output

        # The schemas of the operators that changed, and one that did not.
        result, said = became(
            quern.vllm.install, "quern_test_families",
            "create_onednn_mm_handler(Tensor b, int primitive_cache_size) -> int",
            "onednn_mm(Tensor(a0!) c, Tensor a, Tensor? bias, Tensor handler_of_tomorrow) -> ()",
            "cpu_attention_with_kv_cache(Tensor query, int window_of_tomorrow) -> ()",
            "gelu_fast(Tensor(a0!) out, Tensor input) -> ()",
        )
        products = ("onednn_mm", "onednn_scaled_mm", "create_onednn_mm_handler", "create_onednn_scaled_mm_handler",
                    "release_dnnl_matmul_handler")
        attention = ("cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache", "get_scheduler_metadata",
                     "cpu_attn_has_isa")
        for names, family, why in (
            (products, "products with handlers", "handler_of_tomorrow"),
            (attention, "attention", "window_of_tomorrow"),
        ):
            for name in names:
                self.assertRegex(result[name], f"left out: .*{why}")
                self.assertTrue(any(f"quern_test_families.{name} is left out" in line for line in said), name)
            self.assertIn(f"{family} is installed whole or not at all, and ", result[names[2]])
        self.assertEqual(result["gelu_fast"], "replaced")
        # Another library's create_onednn_mm_handler is not reached by this package's onednn_mm.
        with self.assertRaises((RuntimeError, NotImplementedError)):
            torch.ops.quern_test_families.create_onednn_mm_handler(torch.ones(4, 4), 1)
        # A second call finds the same and does not warn again.
        with self.assertRaises(AssertionError), self.assertLogs("quern", "WARNING"):
            self.assertEqual(quern.vllm.install("quern_test_families"), result)

        result, _ = became(
            quern.sglang.install, "quern_test_packed",
            "convert_weight_packed(Tensor weight) -> Tensor",
            "fp8_scaled_mm_cpu(Tensor mat1, Tensor scales_of_tomorrow) -> Tensor",
            "decode_attention_cpu(Tensor query, int window_of_tomorrow) -> ()",
        )
        for name, why in (
            ("convert_weight_packed", "scales_of_tomorrow"),
            ("weight_packed_linear", "scales_of_tomorrow"),
            ("extend_attention_cpu", "window_of_tomorrow"),
        ):
            self.assertRegex(result[name], f"left out: .* is installed whole or not at all, and .*{why}")

    def test_refuses_tensors_that_need_a_gradient(self):
        x, out = torch.randn(2, 8, requires_grad=True), torch.empty(2, 8)
        with self.assertRaisesRegex(NotImplementedError, "_C::gelu_new: a tensor of shape .* requires a gradient"):
            vllm.gelu_new(out, x)
        with self.assertRaisesRegex(NotImplementedError, "sgl_kernel::silu_and_mul_cpu: .* requires a gradient"):
            sglang.silu_and_mul_cpu(x)
        with torch.no_grad():
            vllm.gelu_new(out, x)
        self.assertTrue(torch.equal(out, torch.ops.quern.gelu_new(x.detach())))

    def test_the_plugin_lets_vllm_define_its_operators_first(self):
        # A stand-in for vLLM: its library defines one operator when it is loaded.
        stand_in = textwrap.dedent("""
            import torch
            class current_platform:
                @staticmethod
                def import_kernels():
                    global lib
                    lib = torch.library.Library("_C", "DEF")
                    lib.define("gelu_new(Tensor(a0!) out, Tensor input) -> ()")
        """)
        program = textwrap.dedent("""
            import torch, quern.vllm
            quern.vllm.register()
            x, out = torch.randn(2, 8), torch.empty(2, 8)
            torch.ops._C.gelu_new(out, x)
            assert torch.equal(out, torch.ops.quern.gelu_new(x))
            print(quern.vllm.install()["gelu_new"])
        """)
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "vllm")
            package.mkdir()
            (package / "__init__.py").write_text("")
            (package / "platforms.py").write_text(stand_in)
            paths = os.pathsep.join([folder, *filter(None, sys.path)])
            said = subprocess.run(
                [*_PYTHON, "-c", program], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
            ).stdout.decode()
        self.assertEqual(said.strip(), "replaced")

    def test_older_names_of_arguments(self):
        def attention(*names):
            arguments = ", ".join(f"float {name}" for name in names)
            schema = torch._C.parse_schema(f"f({arguments}) -> ()")
            return _named_ops._by_name(quern.vllm.cpu_attention_with_kv_cache, schema)[1]

        common = (
            "query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal",
            "alibi_slopes",
        )
        end = ("block_table", "softcap", "sheduler_metadata", "s_aux")
        self.assertIsNone(attention(*common, "sliding_window_left", "sliding_window_right", *end))
        self.assertIsNone(attention(*common, "sliding_window", *end, "dynamic_causal"))
        self.assertIn("it lacks the arguments query", attention(*common[1:], *end))


class VllmTest(NearTest):
    def test_norms(self):
        x, r, w = torch.randn(2, 3, 24), torch.randn(2, 3, 24), torch.randn(24)
        out = torch.empty_like(x)
        vllm.rms_norm(out, x, w, 1e-5)
        self.assert_near(out, norm(x, w, 1e-5), 2.0**-19)
        total = x + r
        vllm.fused_add_rms_norm(x, r, w, 1e-5)
        self.assertTrue(torch.equal(r, total))
        self.assert_near(x, norm(total, w, 1e-5), 2.0**-19)

    def test_activations(self):
        x = torch.randn(2, 5, 32)
        gate, up = (t.double() for t in x.chunk(2, -1))
        d = x.double()
        tanh = 0.5 * d * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (d + 0.044715 * d**3)))
        gated = {
            "silu_and_mul": F.silu(gate) * up,
            "gelu_and_mul": F.gelu(gate) * up,
            "gelu_tanh_and_mul": F.gelu(gate, approximate="tanh") * up,
        }
        whole = {"gelu_new": tanh, "gelu_fast": tanh, "gelu_quick": d * torch.sigmoid(1.702 * d)}
        for name, want in {**gated, **whole}.items():
            with self.subTest(name):
                out = torch.full(want.shape, float("nan"))
                self.assertIsNone(getattr(vllm, name)(out, x))
                self.assert_near(out, want, 2.0**-18)

    def test_rotation_by_a_table(self):
        positions, heads, dim = torch.tensor([2, 0, 9]), 2, 16
        for rot_dim in (16, 8):
            angle = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(rot_dim // 2) / rot_dim)
            table = torch.cat((angle.cos(), angle.sin()), -1)
            cos, sin = (t[:, None].double() for t in table[positions].chunk(2, -1))
            for neox in (True, False):
                q, k = torch.randn(3, heads * dim), torch.randn(3, dim)
                want = []
                for x in (q, k):
                    heads_of = x.view(3, -1, dim).double()
                    part = heads_of[..., :rot_dim]
                    a, b = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
                    one, two = a * cos - b * sin, b * cos + a * sin
                    turned = torch.cat((one, two), -1) if neox else torch.stack((one, two), -1).flatten(-2)
                    want.append(torch.cat((turned, heads_of[..., rot_dim:]), -1).flatten(1))
                vllm.rotary_embedding(positions, q, k, dim, table, neox)
                self.assert_near(q, want[0], 2.0**-20)
                self.assert_near(k, want[1], 2.0**-20)
        alone = torch.randn(3, dim)
        vllm.rotary_embedding(positions, alone, None, dim, table, True)
        # The last half of each head, and back again.
        before = alone.clone()
        vllm.rotary_embedding(positions, alone, None, dim, table, True, dim - rot_dim)
        self.assertTrue(torch.equal(alone[:, : dim - rot_dim], before[:, : dim - rot_dim]))
        shifted = torch.cat((before[:, dim - rot_dim :], before[:, : dim - rot_dim]), -1).contiguous()
        vllm.rotary_embedding(positions, shifted, None, dim, table, True)
        self.assertTrue(torch.equal(alone[:, dim - rot_dim :], shifted[:, :rot_dim]))
        vllm.rotary_embedding(positions, alone, None, dim, table, True, dim - rot_dim, True)
        self.assert_near(alone, before.double(), 2.0**-20)
        with self.assertRaisesRegex(ValueError, "rope_dim_offset=9; need 0 <= rope_dim_offset <= 8"):
            vllm.rotary_embedding(positions, alone, None, dim, table, True, dim - rot_dim + 1)

    def test_products(self):
        for dtype, ulp in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)):
            weight = torch.randn(24, 32).to(dtype)
            a, bias = torch.randn(5, 32).to(dtype), torch.randn(24).to(dtype)
            handler = vllm.create_onednn_mm_handler(weight.t(), 128)
            for b in (None, bias):
                c = torch.empty(5, 24, dtype=dtype)
                vllm.onednn_mm(c, a, b, torch.tensor(handler))
                want = F.linear(a.double(), weight.double(), None if b is None else b.double())
                self.assert_near(c, want, want.abs() * ulp + 34 * 2.0**-20)
            vllm.release_dnnl_matmul_handler(handler)
            with self.assertRaisesRegex(ValueError, "was released"):
                vllm.onednn_mm(c, a, None, torch.tensor(handler))

    def test_integer_products_are_exact_but_for_the_scales(self):
        weight, a = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((24, 32), (5, 32)))
        scales, a_scales, bias = torch.rand(24), torch.rand(5, 1), torch.randn(24)
        azp = torch.randint(-9, 9, (5, 1), dtype=torch.int32)
        for use_azp in (False, True):
            handler = vllm.create_onednn_scaled_mm_handler(weight.t(), scales, torch.float32, True, use_azp, 128)
            c = torch.empty(5, 24)
            rows = azp.double() if use_azp else 0
            vllm.onednn_scaled_mm(c, a, a_scales, azp if use_azp else None, None, bias, torch.tensor(handler))
            want = (a.double() - rows) @ weight.double().t() * scales * a_scales + bias
            self.assert_near(c, want, (want.abs() + bias.abs()) * 2.0**-21)

    def paged(self, dtype, heads=2, dim=32, block=16):
        """Keys and values of sequences of 20 and 7 tokens, written to blocks."""
        # As vLLM has them: halves of one tensor, which alternate from head to head.
        caches = torch.zeros(8, heads, 2 * block, dim, dtype=dtype).chunk(2, dim=2)
        k, v = torch.randn(2, 27, heads, dim).to(dtype)
        table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
        at = [table[s, t // block].item() * block + t % block for s, n in ((0, 20), (1, 7)) for t in range(n)]
        vllm.cpu_attn_reshape_and_cache(k, v, *caches, torch.tensor(at), "vec")
        return caches, k, v, table

    def test_attention(self):
        starts, lens = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3, 4], [20, 7]))
        for dtype, ulp in ((torch.float32, 2.0**-18), (torch.bfloat16, 2.0**-6)):
            caches, k, v, table = self.paged(dtype)
            q = torch.randn(4, 4, 32).to(dtype)
            out = torch.full_like(q, float("nan"))
            step = vllm.get_scheduler_metadata(2, 4, 2, 32, lens, dtype, starts, True, -1, "vec", True)
            vllm.cpu_attention_with_kv_cache(q, *caches, out, starts, lens, 0.2, True, None, -1, table, 0.0, step)
            want = torch.cat([attend(q[:3], k[:20], v[:20], 0.2), attend(q[3:], k[20:], v[20:], 0.2)])
            self.assert_near(out, want, ulp)

    def test_windows_by_their_new_and_their_old_names(self):
        caches, k, v, table = self.paged(torch.float32)
        starts, lens = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3, 4], [20, 7]))
        q, out, old = torch.randn(4, 4, 32), torch.empty(4, 4, 32), torch.empty(4, 4, 32)
        step = vllm.get_scheduler_metadata(2, 4, 2, 32, lens, torch.float32, starts, True, 5, "vec", True)
        vllm.cpu_attention_with_kv_cache(q, *caches, out, starts, lens, 0.2, True, None, 5, table, 0.0, step)
        quern.vllm.cpu_attention_with_kv_cache(
            q, *caches, old, starts, lens, 0.2, True, None, table, 0.0, step, sliding_window_left=4,
            sliding_window_right=0,
        )
        want = torch.cat([attend(q[:3], k[:20], v[:20], 0.2, 5), attend(q[3:], k[20:], v[20:], 0.2, 5)])
        self.assert_near(out, want, 2.0**-18)
        self.assertTrue(torch.equal(old, out))

    def test_a_step_is_known_for_a_while(self):
        caches, *_, table = self.paged(torch.float32)
        starts, lens = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3, 4], [20, 7]))
        q = torch.randn(4, 4, 32)

        def schedule(n):
            return vllm.get_scheduler_metadata(2, 4, 2, 32, n, torch.float32, starts, True, -1, "vec", True)

        def run(step):
            out = torch.empty_like(q)
            vllm.cpu_attention_with_kv_cache(q, *caches, out, starts, lens, 0.2, True, None, -1, table, 0.0, step)
            return out

        first = schedule(lens)
        want = run(first)
        schedule(lens - 1)  # another step between them
        self.assertTrue(torch.equal(run(first), want))
        for _ in range(64):
            last = schedule(lens)
        self.assertTrue(torch.equal(run(last), want))
        with self.assertRaisesRegex(ValueError, "older than 64 steps"):
            run(first)
        with self.assertRaisesRegex(ValueError, "seq_len 20, causal; it has"):
            run(schedule(lens - 1))

    @unittest.skipUnless(hasattr(torch.library, "opcheck"), "this PyTorch has no opcheck")
    def test_opcheck(self):
        x, w = torch.randn(5, 32), torch.randn(32)
        handler = torch.tensor(vllm.create_onednn_mm_handler(torch.randn(32, 8), 128))
        for name, args in (
            ("rms_norm", (torch.empty(5, 32), x, w, 1e-5)),
            ("fused_add_rms_norm", (x.clone(), x.clone(), w, 1e-5)),
            ("silu_and_mul", (torch.empty(5, 16), x)),
            ("gelu_new", (torch.empty(5, 32), x)),
            ("onednn_mm", (torch.empty(5, 8), x, None, handler)),
        ):
            torch.library.opcheck(getattr(vllm, name).default, args)


class SglangTest(NearTest):
    def test_rows(self):
        x, w = torch.randn(2, 3, 32), torch.randn(32)
        gate, up = (t.double() for t in x.chunk(2, -1))
        self.assert_near(sglang.silu_and_mul_cpu(x), F.silu(gate) * up, 2.0**-18)
        self.assert_near(sglang.gelu_and_mul_cpu(x), F.gelu(gate) * up, 2.0**-18)
        self.assert_near(sglang.gelu_tanh_and_mul_cpu(x), F.gelu(gate, approximate="tanh") * up, 2.0**-18)
        self.assert_near(sglang.rmsnorm_cpu(x, w, 1e-5), norm(x, w, 1e-5), 2.0**-18)
        r = torch.randn(2, 3, 32)
        total = x + r
        sglang.fused_add_rmsnorm_cpu(x, r, w, 1e-5)
        self.assertTrue(torch.equal(r, total))
        self.assert_near(x, norm(total, w, 1e-5), 2.0**-18)

    def test_routes(self):
        logits = torch.randn(6, 8)
        weights, ids = sglang.topk_softmax_cpu(torch.empty(6, 1), logits, 2, False)
        want, at = logits.double().softmax(-1).topk(2)
        self.assertTrue(torch.equal(ids.long(), at))
        self.assert_near(weights, want, 2.0**-20)

    def test_products_of_plain_and_of_packed_weights(self):
        x, w, b = torch.randn(5, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32)
        want = F.linear(x.double(), w.double(), b.double())
        bound = want.abs() * 2.0**-8 + 2.0**-12
        self.assert_near(sglang.weight_packed_linear(x, w, b, False), want, bound)
        self.assert_near(sglang.weight_packed_linear(x, sglang.convert_weight_packed(w), b, True), want, bound)
        w.neg_()  # in place: packed anew
        want = F.linear(x.double(), w.double(), b.double())
        self.assert_near(sglang.weight_packed_linear(x, w, b, False), want, want.abs() * 2.0**-8 + 2.0**-12)
        quern.sglang.clear()

    def test_experts(self):
        experts, inter, hidden, top = 4, 16, 32, 2
        w1, w2 = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
        x, weights = torch.randn(6, hidden), torch.rand(6, top)
        ids = torch.randint(0, experts, (6, top), dtype=torch.int32)
        want = torch.zeros(6, hidden).double()
        for t in range(6):
            for j in range(top):
                gate, up = (w1[ids[t, j]].double() @ x[t].double()).chunk(2)
                want[t] += weights[t, j] * (w2[ids[t, j]].double() @ (F.silu(gate) * up))
        y = sglang.fused_experts_cpu(x, w1, w2, weights, ids, False)
        self.assert_near(y, want, 2.0**-11)
        self.assertIs(sglang.fused_experts_cpu(x, w1, w2, weights, ids, False).dtype, torch.float32)


if __name__ == "__main__":
    unittest.main()
