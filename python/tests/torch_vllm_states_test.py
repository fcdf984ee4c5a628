"""vLLM's latent attention, Mamba and its convolution by vLLM's names, against formulas in double."""

import unittest

import torch
import torch.nn.functional as F

import quern.vllm  # noqa: F401

from .torch_names_test import NearTest, vllm
from .torch_vllm_products_test import SUM, TINY, U


def _starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


class LatentAttentionTest(NearTest):
    def test_tokens_go_to_their_slots(self):
        for dtype in U:
            latent, rope = torch.randn(5, 24).to(dtype), torch.randn(5, 1, 8).to(dtype)
            slots = torch.tensor([17, 3, -1, 0, 39])
            for k_pe in (rope, rope[:, 0]):
                cache = torch.randn(5, 8, 32).to(dtype)
                want = cache.clone()
                vllm.concat_and_cache_mla_cpu(latent, k_pe, cache, slots)
                for t in (0, 1, 3, 4):
                    want.view(40, 32)[slots[t]] = torch.cat((latent[t], rope[t, 0]))
                self.assertTrue(torch.equal(cache, want))
        with self.assertRaisesRegex(RuntimeError, r"slot_mapping\[0\]=40; need a slot of 40"):
            vllm.concat_and_cache_mla_cpu(latent, rope, cache, slots.fill_(40))

    def test_decode(self):
        for dtype in U:
            for heads, dim, value_dim, size in ((1, 12, 8, 4), (3, 40, 33, 16), (8, 72, 64, 7)):
                lens = torch.tensor([1, 5, 0, 29], dtype=torch.int32)
                tables = torch.randperm(40)[: 4 * 8].view(4, 8).int()
                query, cache = torch.randn(4, heads, dim).to(dtype), torch.randn(40, size, dim).to(dtype)
                out = torch.full((4, heads, value_dim), 9.0).to(dtype)
                vllm.mla_decode_kvcache(out, query, cache, 0.2, tables, lens)
                for s, length in enumerate(lens.tolist()):
                    keys = cache.double()[tables[s].long()].view(-1, dim)[:length]
                    values = keys[:, :value_dim]
                    scores = query[s].double() @ keys.t() * 0.2
                    p = scores.softmax(-1)
                    size_of = query[s].double().abs() @ keys.abs().t() * 0.2
                    # A weight is off by what its score is, and was rounded to the dtype of values.
                    off = 0.0 if length == 0 else 4 * SUM * (1 + float(size_of.max())) + U[dtype]
                    bound = (p @ values.abs()) * off + (p @ values).abs() * (U[dtype] + SUM) + TINY
                    self.assert_near(out[s], p @ values, bound)
        with self.assertRaisesRegex(RuntimeError, r"block_tables\[0\]\[0\]=99; need a block of 40"):
            vllm.mla_decode_kvcache(out, query, cache, 0.2, tables.fill_(99), lens)


def update(state, x, dt, a, b, c, d, z, bias, softplus):
    """One token of one sequence in double: the state after it, out, and the sums of magnitudes of both.

    state[heads, dim, n]; x and z[heads, dim]; dt, d and bias broadcast to that, and a to the state; b and c[heads, n].
    """
    delta = dt + (0 if bias is None else bias)
    delta = F.softplus(delta, threshold=60) if softplus else delta
    delta = delta.expand_as(x)
    decay = torch.exp(a * delta[..., None])
    added = b[:, None] * (delta * x)[..., None]
    state, size = decay * state[0] + added, decay * state[1] + added.abs()
    y = (state * c[:, None]).sum(-1) + (0 if d is None else d * x)
    y_size = (size * c[:, None].abs()).sum(-1) + (0 if d is None else (d * x).abs())
    if z is not None:
        y, y_size = y * F.silu(z), y_size * F.silu(z).abs()
    return (state, size), y, y_size


class MambaTest(NearTest):
    HEADS, DIM, N, GROUPS = 4, 6, 5, 2

    def inputs(self, tokens, dtype, mamba1=False, dt_dtype=None, slots=7):
        """The arguments as vLLM has them: of Mamba-2 expanded from one number for each head."""
        heads, dim, n, groups = (1, 24, 5, 1) if mamba1 else (self.HEADS, self.DIM, self.N, self.GROUPS)
        self.state = torch.randn(slots, heads, dim, n)
        self.x, self.z = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, heads, dim).to(dtype)
        self.B, self.C = torch.randn(tokens, groups, n).to(dtype), torch.randn(tokens, groups, n).to(dtype)
        if mamba1:
            self.A = -torch.rand(heads, dim, n)
            self.dt = torch.rand(tokens, heads, dim).to(dt_dtype or dtype)
            self.D, self.bias = torch.randn(heads, dim), torch.randn(heads, dim)
        else:
            self.A = (-torch.rand(heads))[:, None, None].expand(heads, dim, n)
            self.dt = torch.rand(tokens, heads).to(dt_dtype or dtype)[..., None].expand(tokens, heads, dim)
            self.D, self.bias = (torch.randn(heads)[:, None].expand(heads, dim) for _ in range(2))

    def step(self, t, state, with_d=True, with_z=True, with_bias=True, softplus=True):
        """What update() says of token t."""
        x, dt, z = (v[t].double() for v in (self.x, self.dt, self.z))
        each = x.shape[0] // self.B.shape[1]
        b, c = (v[t].double().repeat_interleave(each, 0) for v in (self.B, self.C))
        return update(
            state, x, dt, self.A.double(), b, c, self.D.double() if with_d else None, z if with_z else None,
            self.bias.double() if with_bias else None, softplus,
        )

    @staticmethod
    def first(state):
        return state.double(), state.double().abs()

    def check_state(self, have, state):
        self.assert_near(have, state[0], SUM * state[1])

    def check_out(self, have, y, size):
        self.assert_near(have, y, y.abs() * U[have.dtype] + SUM * size + TINY)

    def test_decode_steps(self):
        for dtype in U:
            for mamba1 in (False, True):
                for dt_dtype in (dtype, torch.float32):
                    for given in (True, False):
                        with self.subTest(f"{dtype} {mamba1} {dt_dtype} {given}"):
                            self.decode(dtype, mamba1, dt_dtype, given)

    def decode(self, dtype, mamba1, dt_dtype, given):
        self.inputs(3, dtype, mamba1, dt_dtype)
        slots = torch.tensor([4, 0, 2], dtype=torch.int32)
        d, z, bias = (self.D, self.z, self.bias) if given else (None, None, None)
        state, out = self.state.clone(), torch.full_like(self.x, 9)
        indices = slots if given else None
        vllm.selective_state_update_cpu(
            state, self.x, self.dt, self.A, self.B, self.C, d, z, bias, given, indices, None, -1, out, None, None
        )
        slots = slots.tolist() if given else [0, 1, 2]
        for t, slot in enumerate(slots):
            after, y, size = self.step(t, self.first(self.state[slot]), given, given, given, given)
            self.check_state(state[slot], after)
            self.check_out(out[t], y, size)
        others = [i for i in range(7) if i not in slots]
        self.assertTrue(torch.equal(state[others], self.state[others]))

    def test_a_step_that_is_skipped_and_one_in_place(self):
        for dt_dtype in (torch.bfloat16, torch.float32):
            self.inputs(3, torch.bfloat16, dt_dtype=dt_dtype)
            slots = torch.tensor([4, 6, 2], dtype=torch.int32)
            state, x = self.state.clone(), self.x.clone()
            vllm.selective_state_update_cpu(
                state, x, self.dt, self.A, self.B, self.C, self.D, None, self.bias, True, slots, None, 6, x, None, None
            )
            self.assertTrue(bool((x[1] == 0).all()))
            self.assertTrue(torch.equal(state[6], self.state[6]))
            for t, slot in ((0, 4), (2, 2)):
                after, y, size = self.step(t, self.first(self.state[slot]), with_z=False)
                self.check_state(state[slot], after)
                self.check_out(x[t], y, size)

    def test_drafts(self):
        for dtype, dt_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
            self.inputs(5, dtype, dt_dtype=dt_dtype)
            slots = torch.tensor([[4, 0, 2], [5, 1, 3]], dtype=torch.int32)
            accepted, starts = torch.tensor([2, 1], dtype=torch.int32), _starts(3, 2)
            state, out = self.state.clone(), torch.empty_like(self.x)
            vllm.selective_state_update_cpu(
                state, self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.bias, True, slots, slots, -1, out,
                accepted, starts,
            )
            for s in range(2):
                after = self.first(self.state[slots[s, accepted[s] - 1]])
                for i, t in enumerate(range(int(starts[s]), int(starts[s + 1]))):
                    after, y, size = self.step(t, after)
                    self.check_state(state[slots[s, i]], after)
                    self.check_out(out[t], y, size)

    def test_prompts(self):
        for dtype in U:
            for lengths in ((1,), (33, 7), (5, 0, 40)):
                for given in (True, False):
                    self.inputs(sum(lengths), dtype, dt_dtype=torch.float32, slots=len(lengths))
                    states, out = self.state.clone(), torch.empty_like(self.x)
                    d, z = (self.D[:, 0], self.z) if given else (None, None)
                    vllm.mamba_chunk_scan_fwd_cpu(
                        out, states, self.x, self.dt[..., 0], self.A[:, 0, 0], self.B, self.C, d, z, _starts(*lengths)
                    )
                    t = 0
                    for s, length in enumerate(lengths):
                        after = self.first(self.state[s])
                        for _ in range(length):
                            after, y, size = self.step(t, after, given, given, False, False)
                            self.check_out(out[t], y, size)
                            t += 1
                        self.check_state(states[s], after)


class ConvolutionTest(NearTest):
    def reference(self, state, rows, weight, bias, activation):
        """(out [channels, tokens] in double, sums of magnitudes, state after) of x [channels, tokens]."""
        width = weight.shape[1]
        inputs = torch.cat((state, rows), -1)
        y = F.conv1d(inputs.double()[None], weight.double()[:, None], groups=len(weight))[0]
        size = F.conv1d(inputs.double().abs()[None], weight.double().abs()[:, None], groups=len(weight))[0]
        if bias is not None:
            y, size = y + bias.double()[:, None], size + bias.double().abs()[:, None]
        return (F.silu(y) if activation else y), size, inputs[:, 1 - width:]

    def run_case(self, dtype, form, activation, biased, last):
        channels, width = 37, 4
        weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype) if biased else None
        state = torch.randn(6, channels, width - 1).to(dtype)
        if last:
            state = state.transpose(1, 2).contiguous().transpose(1, 2)
        before, slots, starts = state.clone(), torch.tensor([4, 1, 3], dtype=torch.int32), None
        if form == "tokens":
            starts = _starts(2, 1, 4)
            x = torch.randn(7, channels).to(dtype)
            parts = [x[starts[i]:starts[i + 1]].t() for i in range(3)]
        else:
            x = torch.randn(3, channels, 5 if form == "batch" else 1).to(dtype)
            parts = list(x)
            x = x[..., 0] if form == "rows" else x
        indices = None if form == "rows" else slots
        y = vllm.causal_conv1d_update_cpu_vec(x, state, weight, bias, activation, indices, starts, -1)
        self.assertEqual((y.shape, y.dtype, y.is_contiguous()), (x.shape, dtype, True))
        have = [y[starts[i]:starts[i + 1]].t() for i in range(3)] if starts is not None else y.view(3, channels, -1)
        slots = [0, 1, 2] if indices is None else slots.tolist()
        for i, slot in enumerate(slots):
            want, size, after = self.reference(before[slot], parts[i], weight, bias, activation)
            self.assert_near(have[i], want, want.abs() * U[dtype] + 1.2 * SUM * size + TINY)
            self.assertTrue(torch.equal(state[slot], after))
        others = [i for i in range(6) if i not in slots]
        self.assertTrue(torch.equal(state[others], before[others]))

    def test_all_forms(self):
        for dtype in U:
            for form in ("rows", "batch", "tokens"):
                for activation, biased, last in ((None, False, True), ("silu", True, True), ("swish", True, False)):
                    with self.subTest(f"{dtype} {form} {activation}"):
                        self.run_case(dtype, form, activation, biased, last)


if __name__ == "__main__":
    unittest.main()
