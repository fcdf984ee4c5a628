"""Recurrent operators by SGLang's and vLLM's names, with their arguments, against PyTorch's own arithmetic."""

import unittest

import torch
import torch.nn.functional as F

import quern.sglang
import quern.vllm

quern.sglang.install("quern_test_sglang_recurrent")
quern.vllm.install("quern_test_vllm_recurrent")
sglang = torch.ops.quern_test_sglang_recurrent
vllm = torch.ops.quern_test_vllm_recurrent


def rule(q, k, v, g, beta, state, eps=1e-6):
    """The recurrence of one sequence in double: out, and the state after every token."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    heads = v.shape[1]
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    out, states = [], []
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(out), states


def gates(A_log, a, b, dt_bias):
    g = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double(), threshold=60)
    return g, b.double().sigmoid()


class RecurrentTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def close(self, have, want, relative):
        bound = relative * max(1.0, float(want.abs().max()))
        self.assertEqual(have.shape, want.shape)
        self.assertLess(float((have.double() - want).abs().max()), bound)

    def inputs(self, tokens):
        self.A_log = torch.randn(4)
        self.dt_bias = torch.randn(4).bfloat16()
        self.a, self.b = torch.randn(tokens, 4).bfloat16(), torch.randn(tokens, 4).bfloat16()
        self.q, self.k = torch.randn(tokens, 2, 16).bfloat16(), torch.randn(tokens, 2, 16).bfloat16()
        self.v = torch.randn(tokens, 4, 24).bfloat16()
        self.pool = torch.randn(7, 4, 16, 24)

    def test_gates(self):
        self.inputs(5)
        g, beta = sglang.fused_gdn_gating_cpu(self.A_log, self.a, self.b, self.dt_bias)
        self.assertEqual((tuple(g.shape), g.dtype), ((1, 5, 4), torch.float32))
        self.assertEqual((tuple(beta.shape), beta.dtype), ((1, 5, 4), torch.bfloat16))
        want_g, want_beta = gates(self.A_log, self.a, self.b, self.dt_bias)
        self.close(g[0], want_g, 1e-6)
        self.close(beta[0], want_beta, 2.0**-8)

    def test_a_decode_step_with_its_gates(self):
        self.inputs(3)
        slots, starts = torch.tensor([4, 0, 2], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
        for own in (sglang, vllm):
            pool = self.pool.clone()
            out = own.fused_sigmoid_gating_delta_rule_update_cpu(
                self.A_log, self.dt_bias, self.q[None], self.k[None], self.v[None], self.a, self.b, pool, slots,
                starts, True,
            )
            self.assertEqual(tuple(out.shape), (3, 1, 4, 24))
            g, beta = gates(self.A_log, self.a, self.b, self.dt_bias)
            for i, slot in enumerate(slots.tolist()):
                own_row = (x[i:i + 1] for x in (self.q, self.k, self.v, g, beta))
                want, states = rule(*own_row, self.pool[slot])
                self.close(out[i], want, 2.0**-7)
                self.close(pool[slot], states[-1], 1e-5)
            self.assertTrue(torch.equal(pool[[1, 3, 5, 6]], self.pool[[1, 3, 5, 6]]))

    def test_drafts(self):
        self.inputs(5)
        slots = torch.tensor([[4, 0, 2], [5, 1, 3]], dtype=torch.int32)
        accepted, starts = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
        pool = self.pool.clone()
        out = vllm.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            self.A_log, self.dt_bias, self.q, self.k, self.v, self.a, self.b, pool, slots, accepted, starts, True
        )
        g, beta = gates(self.A_log, self.a, self.b, self.dt_bias)
        for s in range(2):
            begin, end = int(starts[s]), int(starts[s + 1])
            own_rows = (x[begin:end] for x in (self.q, self.k, self.v, g, beta))
            want, states = rule(*own_rows, self.pool[slots[s, accepted[s] - 1]])
            self.close(out[begin:end], want, 2.0**-7)
            for i, state in enumerate(states):
                self.close(pool[slots[s, i]], state, 1e-5)

    def test_prompts(self):
        self.inputs(40)
        starts = torch.tensor([0, 33, 40], dtype=torch.int32)
        g, beta = gates(self.A_log, self.a, self.b, self.dt_bias)
        g, beta = g.float(), beta.bfloat16()
        for own, slots in ((sglang, torch.tensor([5, 2], dtype=torch.int32)), (vllm, None)):
            pool = self.pool.clone() if slots is not None else self.pool[:2].clone()
            before = pool.clone()
            args = [x[None] for x in (self.q, self.k, self.v, g, beta)] + [pool, True, starts, False, True]
            out, last = own.chunk_gated_delta_rule_cpu(*args, *([] if slots is None else [slots]), eps=1e-6)
            self.assertTrue(torch.equal(last, pool))
            for s, slot in enumerate([0, 1] if slots is None else slots.tolist()):
                begin, end = int(starts[s]), int(starts[s + 1])
                rows = (x[begin:end] for x in (self.q, self.k, self.v, g, beta))
                want, states = rule(*rows, before[slot])
                self.close(out[0, begin:end], want, 2.0**-7)
                self.close(pool[slot], states[-1], 1e-4)

    def test_convolutions(self):
        weight, bias = torch.randn(64, 4).bfloat16(), torch.randn(64).bfloat16()
        packed = sglang.causal_conv1d_weight_pack(weight)
        for dense in (False, True):
            states = torch.randn(5, 64, 3).bfloat16()
            if not dense:
                states = states.transpose(-1, -2).contiguous().transpose(-1, -2)
            x = torch.randn(2, 9, 64).bfloat16().transpose(-1, -2)
            slots, before = torch.tensor([3, 1], dtype=torch.int32), states.clone()
            out = sglang.causal_conv1d_fwd_cpu(
                x, packed, bias, states, None, slots, torch.tensor([True, False]), True, -1, True
            )
            for i, slot in enumerate(slots.tolist()):
                first = before[slot] if i == 0 else torch.zeros(64, 3).bfloat16()
                inputs = torch.cat([first, x[i]], dim=-1)
                want = F.silu(F.conv1d(inputs[None].double(), weight.double()[:, None], bias.double(), groups=64))
                self.close(out[i], want[0], 2.0**-7)
                self.assertTrue(torch.equal(states[slot], inputs[:, -3:]))
            before = states.clone()
            last = x[..., 0].contiguous()
            y = sglang.causal_conv1d_update_cpu(last, states, weight, None, False, None, slots, -1, False)
            for i, slot in enumerate(slots.tolist()):
                inputs = torch.cat([before[slot], x[i, :, :1]], dim=-1)
                self.close(y[i], (inputs.double() * weight.double()).sum(-1), 2.0**-7)
                self.assertTrue(torch.equal(states[slot], inputs[:, 1:]))

    def test_convolutions_without_states(self):
        x, weight = torch.randn(2, 6, 32).bfloat16().transpose(-1, -2), torch.randn(32, 4).bfloat16()
        out = sglang.causal_conv1d_fwd_cpu(x, weight, None, None, None, None, None, False, -1, False)
        want = F.conv1d(F.pad(x.double(), (3, 0)), weight.double()[:, None], groups=32)
        self.close(out, want, 2.0**-7)

    def test_fakes_have_the_shapes_of_results(self):
        self.inputs(3)
        meta = [x.to("meta") for x in (self.A_log, self.a, self.b, self.dt_bias)]
        fakes = sglang.fused_gdn_gating_cpu(*meta)
        results = sglang.fused_gdn_gating_cpu(self.A_log, self.a, self.b, self.dt_bias)
        for fake, result in zip(fakes, results):
            self.assertEqual((fake.shape, fake.dtype), (result.shape, result.dtype))


if __name__ == "__main__":
    unittest.main()
