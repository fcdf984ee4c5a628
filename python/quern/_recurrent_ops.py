"""Gated delta rules and their convolution by the names and with the arguments of SGLang and vLLM.

Equations and refusals are those of ops/registry/sglang/recurrent_ops.h. Tensors with a batch of 1 in front of
the tokens lose that dimension here, and get it back. States are written in place, whatever the schemas say.
"""

from __future__ import annotations

import torch

from . import _named_ops
from . import torch as quern_torch

_call = quern_torch.caller_of


def _tokens(op, name, x):
    """x[1, tokens, ..] as [tokens, ..]."""
    if x.shape[0] != 1:
        raise ValueError(f"{op}: {name} has a batch of {x.shape[0]}; need 1")
    return x.squeeze(0)


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    g, beta = _call("fused_gdn_gating_cpu")((A_log, a, b, dt_bias), ())
    return g.unsqueeze(0), beta.unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
    softplus_beta=1.0, softplus_threshold=20.0,
):
    """q, k and v are [1, batch, heads, dim], and the result is [batch, 1, heads, dim]."""
    q, k, v = (_tokens("fused_sigmoid_gating_delta_rule_update_cpu", name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    tensors = (A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens)
    scalars = (use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold)
    return _call("fused_sigmoid_gating_delta_rule_update_cpu")(tensors, scalars).unsqueeze(1)


def fused_sigmoid_gating_delta_rule_update_spec_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens,
    use_qk_l2norm_in_kernel, softplus_beta=1.0, softplus_threshold=20.0,
):
    tensors = (
        A_log, dt_bias, q, k, v, a, b, initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens,
    )
    scalars = (use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold)
    return _call("fused_sigmoid_gating_delta_rule_update_spec_cpu")(tensors, scalars)


def chunk_gated_delta_rule_cpu(
    query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices=None, eps=1e-6,
):
    """The states are written in place; the second result is initial_state."""
    if initial_state_indices is None:  # vLLM: a state for each sequence
        initial_state_indices = torch.arange(cu_seqlens.shape[0] - 1, dtype=torch.int32)
    given = (("query", query), ("key", key), ("value", value), ("g", g), ("beta", beta))
    tensors = tuple(_tokens("chunk_gated_delta_rule_cpu", name, x) for name, x in given) + (initial_state, cu_seqlens, initial_state_indices)
    scalars = (output_final_state, head_first, use_qk_l2norm_in_kernel, eps)
    return _call("chunk_gated_delta_rule_cpu")(tensors, scalars).unsqueeze(0), initial_state


def causal_conv1d_weight_pack(weight):
    return _call("causal_conv1d_weight_pack")((weight.detach(),), ())


def _states(conv_states):
    """[slots, channels, width - 1] as it is where it is dense; otherwise with channels last."""
    return conv_states if conv_states.stride(-1) == 1 else conv_states.transpose(-1, -2)


def causal_conv1d_fwd_cpu(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation, pad_slot_id,
    is_vnni,
):
    """x[batch, channels, tokens], or [channels, tokens] with query_start_loc.

    Without has_initial_state every sequence begins anew.
    """
    rows = x.transpose(-1, -2)
    tokens = rows.reshape(-1, rows.shape[-1])
    if query_start_loc is None:
        batch, length = rows.shape[:2]
        query_start_loc = torch.arange(batch + 1, dtype=torch.int32) * length
    batch = query_start_loc.shape[0] - 1
    if cache_indices is None:
        cache_indices = torch.arange(batch, dtype=torch.int32)
    if conv_states is None:
        conv_states = x.new_zeros((batch, weight.shape[-1] - 1, tokens.shape[-1])).transpose(-1, -2)
        cache_indices = torch.arange(batch, dtype=torch.int32)
    if has_initial_state is None:
        has_initial_state = torch.zeros(batch, dtype=torch.uint8)
    tensors = (
        tokens, weight, bias, _states(conv_states), query_start_loc, cache_indices, has_initial_state.view(torch.uint8),
    )
    y = _call("causal_conv1d_fwd_cpu")(tensors, (silu_activation, pad_slot_id, is_vnni))
    return y.view(rows.shape).transpose(-1, -2)


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias, silu_activation, cache_seqlens, conv_state_indices, pad_slot_id, is_vnni
):
    if conv_state_indices is None:
        conv_state_indices = torch.arange(x.shape[0], dtype=torch.int32)
    tensors = (x, _states(conv_states), weight, bias, cache_seqlens, conv_state_indices)
    return _call("causal_conv1d_update_cpu")(tensors, (silu_activation, pad_slot_id, is_vnni))


def _fake_gates(A_log, a, b, dt_bias):
    return a.new_empty((1,) + a.shape, dtype=torch.float32), b.new_empty((1,) + b.shape)


def _fake_update(A_log, dt_bias, q, k, v, *rest, **given):
    return v.new_empty((v.shape[1], v.shape[0]) + v.shape[2:])


def _fake_drafts(A_log, dt_bias, q, k, v, *rest, **given):
    return v.new_empty(v.shape)


def _fake_chunks(query, key, value, g, beta, initial_state, *rest, **given):
    return value.new_empty(value.shape), initial_state


def _fake_pack(weight):
    return torch.empty_like(weight)


def _fake_fwd(x, *rest, **given):
    return x.transpose(-1, -2).new_empty(x.shape[:-2] + (x.shape[-1], x.shape[-2])).transpose(-1, -2)


def _fake_conv_update(x, *rest, **given):
    return x.new_empty(x.shape)


_Operator = _named_ops.Operator
_UPDATE = (
    "Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
    "Tensor(a!) initial_state_source, "
)
_SOFTPLUS = "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"
_CHUNKS = (
    "chunk_gated_delta_rule_cpu(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
    "Tensor initial_state, bool output_final_state, Tensor cu_seqlens, bool head_first, "
    "bool use_qk_l2norm_in_kernel, "
)
# What both projects register with one schema.
_BOTH = (
    _Operator(
        "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        fused_gdn_gating_cpu, _fake_gates,
    ),
    _Operator(
        f"fused_sigmoid_gating_delta_rule_update_cpu({_UPDATE}Tensor initial_state_indices, Tensor cu_seqlens, "
        + _SOFTPLUS,
        fused_sigmoid_gating_delta_rule_update_cpu, _fake_update,
    ),
    _Operator(
        "causal_conv1d_weight_pack(Tensor weight) -> Tensor", causal_conv1d_weight_pack, _fake_pack, loads=True
    ),
    _Operator(
        "causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_states, "
        "Tensor? query_start_loc, "
        "Tensor? cache_indices, Tensor? has_initial_state, bool silu_activation, int pad_slot_id, bool is_vnni) "
        "-> Tensor",
        causal_conv1d_fwd_cpu, _fake_fwd,
    ),
    _Operator(
        "causal_conv1d_update_cpu(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, "
        "bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices, int pad_slot_id, bool is_vnni) "
        "-> Tensor",
        causal_conv1d_update_cpu, _fake_conv_update,
    ),
)
SGLANG = _BOTH + (
    _Operator(
        _CHUNKS + "Tensor initial_state_indices, float eps=1e-6) -> (Tensor, Tensor)",
        chunk_gated_delta_rule_cpu, _fake_chunks,
    ),
)
VLLM = _BOTH + (
    _Operator(_CHUNKS + "float eps=1e-5) -> (Tensor, Tensor)", chunk_gated_delta_rule_cpu, _fake_chunks),
    _Operator(
        f"fused_sigmoid_gating_delta_rule_update_spec_cpu({_UPDATE}Tensor spec_state_indices, "
        "Tensor num_accepted_tokens, Tensor cu_seqlens, " + _SOFTPLUS,
        fused_sigmoid_gating_delta_rule_update_spec_cpu, _fake_drafts,
    ),
)
