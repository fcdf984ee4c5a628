"""vLLM's experts, products of 4 bits, latent attention, Mamba and quantisers, for quern.vllm.

What vLLM packed is unpacked by the first call that sees it, packed for Quern's kernels, and kept.
"""

from __future__ import annotations

import torch

from . import _named, _named_ops, _sglang_weights
from . import torch as quern_torch
from ._linear import Linear
from ._recurrent_ops import _states
from ._sglang_products import _Packed
from ._sglang_weights import INT8, PLAIN
from ._torch_call import name_of_dtype

_call = quern_torch.caller_of
_packed = _Packed()
_COLUMNS = 16  # of a panel
_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)


def clear() -> None:
    """Forgets all packed weights."""
    _packed.clear()


# ---- Experts ----------------------------------------------------------------------------------------------


def prepack_moe_weight(weight, packed_weight, isa):
    _call("prepack_moe_weight")((weight.detach(), packed_weight), (_isa(isa),))


def prepack_moe_weight_int8(weight, packed_weight, isa):
    _call("prepack_moe_weight_int8")((weight.detach(), packed_weight), (_isa(isa),))


def _isa(isa):
    """amx has pairs side by side; the others of vLLM's do not."""
    return "amx" if isa == "amx" else "vec"


def _plain(packed, isa):
    """[experts, n, k] of what prepack_moe_weight wrote."""
    experts, n, k = packed.shape
    pair = 4 // packed.element_size() if _isa(isa) == "amx" else 1
    panels = packed.reshape(experts, n // _COLUMNS, k // pair, _COLUMNS, pair)
    return panels.permute(0, 1, 3, 2, 4).reshape(experts, n, k)


def _experts(w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, *, act, isa):
    def each(weights, scales, biases, **options):
        count = len(weights)
        parts = [[None] * count if x is None else x for x in (scales, biases)]
        method = PLAIN if scales is None else INT8
        plain = _plain(weights, isa)
        return [_sglang_weights.linear(*expert, method=method, **options) for expert in zip(plain, *parts)]

    gate_up = each(w13, w13_scale, w13_bias, gated=True, interleaved=act == "swigluoai")
    return _named.ExpertWeights(gate_up, each(w2, w2_scale, w2_bias))


def _fused(name, output, input, weights, topk_weights, topk_id, skip_weighted, act, isa):
    if skip_weighted and topk_id.shape[1] != 1:
        raise ValueError(f"{name}: skip_weighted is set for {topk_id.shape[1]} experts of a token; need one expert")
    experts = _packed.get(_experts, *weights, act=act, isa=isa)
    routes = torch.ones_like(topk_weights) if skip_weighted else topk_weights
    scalars = (experts, None, act, False, "", "exact")
    _call("fused_experts_cpu")((input, routes.float(), topk_id.int(), None, None), scalars, (output,))


def cpu_fused_moe(output, input, w13, w2, w13_bias, w2_bias, topk_weights, topk_id, skip_weighted, act, isa):
    weights = (w13, w2, None, None, w13_bias, w2_bias)
    _fused("cpu_fused_moe", output, input, weights, topk_weights, topk_id, skip_weighted, act, isa)


def cpu_fused_moe_int8(
    output, input, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, topk_weights, topk_id, skip_weighted, act, isa
):
    weights = (w13, w2, w13_scale, w2_scale, w13_bias, w2_bias)
    _fused("cpu_fused_moe_int8", output, input, weights, topk_weights, topk_id, skip_weighted, act, isa)


# ---- Products of 4 bits -----------------------------------------------------------------------------------


def _codes(words):
    """The eight codes of each i32, along the last dimension."""
    return ((words.unsqueeze(-1) >> _NIBBLES) & 15).flatten(-2).to(torch.uint8)


def _wna16(q_weight, scales, zeros, g_idx, bias):
    k = q_weight.shape[1] // 2
    codes = _codes(q_weight.reshape(-1, k, 2)).transpose(1, 2).reshape(-1, k)
    source = {"codes": codes.contiguous(), "scales": scales.detach().contiguous()}
    if zeros is not None:
        source["zeros"] = _codes(zeros).contiguous()
    if g_idx is not None:
        source["g_idx"] = g_idx.int().contiguous()
    if bias is not None:
        source["bias"] = bias.detach().float()
    return Linear.from_sources([source], format="i4_group", group_size=k // scales.shape[0])


def cpu_gemm_wna16(input, q_weight, output, scales, zeros, bias, pack_factor, isa_hint, g_idx=None):
    if pack_factor != 8:
        raise ValueError(f"cpu_gemm_wna16: pack_factor={pack_factor}; need 8, as words have codes of 4 bits")
    weights = _packed.get(_wna16, q_weight, scales, zeros, g_idx, bias)
    _call("linear")((input, None), (weights, "none", name_of_dtype(output.dtype), "exact"), (output,))


# ---- Latent attention -------------------------------------------------------------------------------------


def mla_decode_kvcache(out, query, kv_cache, scale, block_tables, seq_lens):
    _call("mla_decode_kvcache")((out, query, kv_cache, block_tables, seq_lens), (scale,))


def concat_and_cache_mla_cpu(kv_c_normed, k_pe, kv_cache, slot_mapping):
    if k_pe.dim() == 3:
        k_pe = k_pe.squeeze(1)
    _call("concat_and_cache_mla_cpu")((kv_c_normed, k_pe, kv_cache, slot_mapping), ())


# ---- Rows -------------------------------------------------------------------------------------------------


def gelu_tanh(out, input):
    rows = out.view(-1, out.shape[-1])
    _call("gelu_tanh")((input.reshape(rows.shape),), (), (rows,))


def _groups(scale, group_shape, shape):
    """(scale as a matrix, rows and columns of a group; 0 for all)."""
    if scale.dim() < 2 and group_shape is not None and scale.numel() > 1:
        scale = scale.reshape((1, -1) if group_shape[0] == -1 else (-1, 1))
    if scale.numel() == 1:
        return scale.reshape(1), (0, 0)
    if group_shape is not None:
        return scale, tuple(0 if n == -1 else int(n) for n in group_shape)
    if scale.dim() != 2:
        raise ValueError(f"static_scaled_fp8_quant: scale is {tuple(scale.shape)}; need group_shape with it")
    return scale, tuple(-(-n // of) for n, of in zip(shape, scale.shape))


def static_scaled_fp8_quant(out, input, scale, group_shape=None):
    scale, groups = _groups(scale, group_shape, input.shape)
    _call("static_scaled_fp8_quant")((out, input, scale.contiguous()), groups)


def dynamic_scaled_fp8_quant(out, input, scale):
    _call("dynamic_scaled_fp8_quant")((out, input, scale.view(1)), ())


def dynamic_per_token_scaled_fp8_quant(out, input, scale, scale_ub):
    bound = None if scale_ub is None else scale_ub.reshape(1)
    _call("dynamic_per_token_scaled_fp8_quant")((out, input, scale, bound), ())


def quantize_fp8e4m3_vec(input, channelwise, scale_opt):
    if not channelwise and scale_opt is None:
        raise ValueError("quantize_fp8e4m3_vec: scale_opt is missing; need it where channelwise is false")
    given = None if channelwise else scale_opt.reshape(1)
    return _call("quantize_fp8e4m3_vec")((input, given), (channelwise,))


def biased_topk_cpu(
    hidden_states, gating_output, correction_bias, topk, renormalize, scoring_func, num_fused_shared_experts,
    routed_scaling_factor, apply_routed_scaling_factor_on_output,
):
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    scalars = (
        topk, renormalize, scoring_func, num_fused_shared_experts, factor, apply_routed_scaling_factor_on_output,
    )
    return _call("biased_topk_cpu")((hidden_states, gating_output, correction_bias), scalars)


def greedy_argmax(logits):
    return _call("greedy_argmax")((logits,), ())


# ---- Mamba ------------------------------------------------------------------------------------------------


def _of_heads(x, dims):
    """A tensor without the trailing dimensions that it was expanded by, of `dims` or more."""
    while x is not None and x.dim() > dims and x.stride(-1) == 0:
        x = x[..., 0]
    return None if x is None else x.contiguous()


def selective_state_update_cpu(
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dst_state_batch_indices, null_block_id,
    out, num_accepted_tokens, cu_seqlens,
):
    a = _of_heads(A, 1).float()
    d, bias = (None if t is None else _of_heads(t, 1).float() for t in (D, dt_bias))
    dt = _of_heads(dt, 2) if a.dim() == 1 else dt.contiguous()
    given = out
    if dt.dtype is not x.dtype:
        # The operator takes both in one dtype: neither may lose bits before the arithmetic, which is in f32.
        x, dt, z, out = (None if t is None else t.float() for t in (x, dt, z, out))
    if state_batch_indices is None:
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state_batch_indices = torch.arange(count, dtype=torch.int32)
    tensors = (
        state, x, dt, a, B, C, d, z, bias, state_batch_indices, out, dst_state_batch_indices,
        num_accepted_tokens, cu_seqlens,
    )
    _call("selective_state_update_cpu")(tensors, (dt_softplus, null_block_id))
    if out is not given:
        given.copy_(out)


def mamba_chunk_scan_fwd_cpu(out, final_states, x, dt, A, B, C, D, z, cu_seqlens):
    a, d = (None if t is None else _of_heads(t, 1).float() for t in (A, D))
    tensors = (out, final_states, x, dt.float(), a, B, C, d, z, cu_seqlens)
    _call("mamba_chunk_scan_fwd_cpu")(tensors, ())


def causal_conv1d_update_cpu_vec(
    x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, pad_slot_id
):
    """x[batch, channels], or [batch, channels, tokens] without query_start_loc."""
    rows, starts = x, query_start_loc
    if x.dim() == 3:
        rows = x.transpose(1, 2).reshape(-1, x.shape[1])
        starts = torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[2]
    if conv_state_indices is None:
        count = x.shape[0] if starts is None else starts.shape[0] - 1
        conv_state_indices = torch.arange(count, dtype=torch.int32)
    tensors = (rows.contiguous(), _states(conv_state), weight, bias, conv_state_indices, starts)
    y = _call("causal_conv1d_update_cpu_vec")(tensors, (activation or "", pad_slot_id))
    return y if x.dim() == 2 else y.view(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2).contiguous()


def _like_x(x, *rest, **given):
    return x.new_empty(x.shape)


def _fake_topk(hidden_states, gating_output, correction_bias, topk, *rest, **given):
    shape = (gating_output.shape[0], topk)
    return gating_output.new_empty(shape, dtype=torch.float32), gating_output.new_empty(shape, dtype=torch.int32)


def _fake_quantised(input, channelwise, scale_opt):
    scales = (input.shape[0],) if channelwise else (1,)
    return input.new_empty(input.shape, dtype=torch.float8_e4m3fn), input.new_empty(scales, dtype=torch.float32)


def _fake_argmax(logits):
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


# What one of them packs, the others read.
_EXPERTS = "experts"
_INT8_EXPERTS = "int8 experts"

_EXPERT_ROUTES = "Tensor topk_weights, Tensor topk_id, bool skip_weighted, str act, str isa) -> ()"
_WRITERS = (
    ("prepack_moe_weight(Tensor weight, Tensor(a1!) packed_weight, str isa) -> ()", _EXPERTS),
    (
        "cpu_fused_moe(Tensor(a0!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
        + _EXPERT_ROUTES,
        _EXPERTS,
    ),
    ("prepack_moe_weight_int8(Tensor weight, Tensor(a1!) packed_weight, str isa) -> ()", _INT8_EXPERTS),
    (
        "cpu_fused_moe_int8(Tensor(a0!) output, Tensor input, Tensor w13, Tensor w2, Tensor w13_scale, "
        "Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias, " + _EXPERT_ROUTES,
        _INT8_EXPERTS,
    ),
    (
        "cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor(a2!) output, Tensor scales, Tensor? zeros, "
        "Tensor? g_idx, Tensor? bias, int pack_factor, str isa_hint) -> ()",
        None,
    ),
    (
        "mla_decode_kvcache(Tensor(a0!) out, Tensor query, Tensor kv_cache, float scale, Tensor block_tables, "
        "Tensor seq_lens) -> ()",
        None,
    ),
    (
        "concat_and_cache_mla_cpu(Tensor kv_c_normed, Tensor k_pe, Tensor(a2!) kv_cache, Tensor slot_mapping) -> ()",
        None,
    ),
    ("gelu_tanh(Tensor(a0!) out, Tensor input) -> ()", None),
    (
        "static_scaled_fp8_quant(Tensor(a0!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
        None,
    ),
    ("dynamic_scaled_fp8_quant(Tensor(a0!) result, Tensor input, Tensor(a2!) scale) -> ()", None),
    (
        "dynamic_per_token_scaled_fp8_quant(Tensor(a0!) result, Tensor input, Tensor(a2!) scale, Tensor? scale_ub) "
        "-> ()",
        None,
    ),
    (
        "selective_state_update_cpu(Tensor(a0!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices, "
        "int null_block_id, Tensor(a13!) out, Tensor? num_accepted_tokens, Tensor? cu_seqlens) -> ()",
        None,
    ),
    (
        "mamba_chunk_scan_fwd_cpu(Tensor(a0!) out, Tensor(a1!) final_states, Tensor x, Tensor dt, Tensor A, Tensor B, "
        "Tensor C, Tensor? D, Tensor? z, Tensor cu_seqlens) -> ()",
        None,
    ),
)

OPERATORS = tuple(
    _named_ops.Operator(
        schema, globals()[schema.partition("(")[0]], _named_ops.nothing, family, loads=schema.startswith("prepack_")
    )
    for schema, family in _WRITERS
) + (
    _named_ops.Operator(
        "quantize_fp8e4m3_vec(Tensor input, bool channelwise, Tensor? scale_opt) -> (Tensor, Tensor)",
        quantize_fp8e4m3_vec, _fake_quantised,
    ),
    _named_ops.Operator(
        "biased_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, "
        "bool renormalize, str scoring_func, int num_fused_shared_experts, float? routed_scaling_factor, "
        "bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)",
        biased_topk_cpu, _fake_topk,
    ),
    _named_ops.Operator("greedy_argmax(Tensor logits) -> Tensor", greedy_argmax, _fake_argmax),
    _named_ops.Operator(
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a1!) conv_state, Tensor weight, Tensor? bias, "
        "str? activation, Tensor? conv_state_indices, Tensor? query_start_loc, int pad_slot_id) -> Tensor",
        causal_conv1d_update_cpu_vec, _like_x,
    ),
)
