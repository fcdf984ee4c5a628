"""SGLang's operators on rows, by its names and with its schemas: what quern.sglang installs of them."""

from __future__ import annotations

import torch

from . import _named_ops
from . import torch as quern_torch

_call = quern_torch.caller_of


def _rows(x):
    """x as [rows, n]: a view where the strides allow it."""
    return x.reshape(-1, x.shape[-1])


def _written(x, rows):
    """Copies rows back to x where _rows(x) was a copy."""
    if rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view(x.shape))


# ---- Activations ------------------------------------------------------------------------------------------


def _gated(name):
    def call(input):
        y = _call(name)((_rows(input),), ())
        return y.view(input.shape[:-1] + y.shape[-1:])

    return call


def fused_sigmoid_mul_cpu(input, gate, inplace):
    outs = (input,) if inplace else None
    return _call("fused_sigmoid_mul_cpu")((input, gate), (bool(inplace),), outs)


# ---- Norms ------------------------------------------------------------------------------------------------


def _norm(name):
    def call(input, weight, eps):
        return _call(name)((_rows(input), weight), (eps,)).view(input.shape)

    return call


def gemma4_rmsnorm_cpu(input, weight, eps, scale_shift, with_scale):
    scalars = (eps, scale_shift, bool(with_scale))
    return _call("gemma4_rmsnorm_cpu")((_rows(input), weight), scalars).view(input.shape)


def l2norm_cpu(input, eps):
    return _call("l2norm_cpu")((_rows(input),), (eps,)).view(input.shape)


def layernorm_cpu(input, weight, bias, eps):
    return _call("layernorm_cpu")((_rows(input), weight, bias), (eps,)).view(input.shape)


def fused_rmsnorm_gated_cpu(input, weight, gate, eps):
    y = _call("fused_rmsnorm_gated_cpu")((_rows(input), weight, _rows(gate)), (eps,))
    return y.view(input.shape)


def _fused_add(name):
    def call(input, residual, weight, eps):
        x, r = _rows(input), _rows(residual)
        _call(name)((x, r, weight), (eps,))
        _written(input, x)
        _written(residual, r)

    return call


def fused_add_layernorm_cpu(input, residual, weight, bias, eps):
    r = _rows(residual)
    y = _call("fused_add_layernorm_cpu")((_rows(input), r, weight, bias), (eps,))
    _written(residual, r)
    return y.view(input.shape)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    return _call("fused_qk_gemma_rmsnorm_cpu")((q, k, q_weight, k_weight), (eps, head_dim))


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_head):
    tensors = (q_gate, k, q_weight, k_weight)
    return _call("fused_qk_gemma_rmsnorm_with_gate_cpu")(tensors, (eps, head_dim, num_head))


# ---- Routers ----------------------------------------------------------------------------------------------


def _topk(name):
    def call(hidden_states, gating_output, topk, renormalize):
        return _call(name)((hidden_states, gating_output), (topk, bool(renormalize)))

    return call


def grouped_topk_cpu(
    hidden_states, gating_output, topk, renormalize, num_expert_group, topk_group, num_fused_shared_experts=0,
    routed_scaling_factor=None, num_token_non_padded=None,
):
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    scalars = (topk, bool(renormalize), num_expert_group, topk_group, num_fused_shared_experts, scale)
    return _call("grouped_topk_cpu")((hidden_states, gating_output, num_token_non_padded), scalars)


def biased_grouped_topk_cpu(
    hidden_states, gating_output, correction_bias, topk, renormalize, num_expert_group, topk_group,
    num_fused_shared_experts=0, routed_scaling_factor=None, num_token_non_padded=None,
):
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    scalars = (topk, bool(renormalize), num_expert_group, topk_group, num_fused_shared_experts, scale)
    tensors = (hidden_states, gating_output, correction_bias, num_token_non_padded)
    return _call("biased_grouped_topk_cpu")(tensors, scalars)


# ---- Rotations, copies ------------------------------------------------------------------------------------


def rotary_embedding_cpu(positions, query, key, head_size, cos_sin_cache, is_neox):
    """As in SGLang, matrices and batches are rotated in place, and [tokens, heads, n] into new tensors."""
    op, scalars = _call("rotary_embedding_cpu"), (head_size, bool(is_neox))
    if query.dim() == 3:
        return op((positions, query, key, cos_sin_cache), scalars)
    q, k = (x.flatten(0, 1) if x.dim() == 4 else x for x in (query, key))
    op((positions, q, k, cos_sin_cache), scalars, (q, k))
    _written(query, q)
    _written(key, k)
    return query, key


def multimodal_rotary_embedding_cpu(
    positions, query, key, head_size, cos_sin_cache, mrope_section, mrope_interleaved, is_neox
):
    if positions.dim() == 2 and mrope_section is None:
        raise ValueError("multimodal_rotary_embedding_cpu: positions[3, tokens] need mrope_section")
    sections = tuple(mrope_section) if mrope_section is not None else (0, 0, 0)
    scalars = (head_size, *sections, bool(mrope_interleaved), bool(is_neox))
    _call("multimodal_rotary_embedding_cpu")((positions, query, key, cos_sin_cache), scalars, (query, key))
    return query, key


def apply_rotary_pos_emb_cpu(query, key, cos, sin):
    _call("apply_rotary_pos_emb_cpu")((query, key, cos, sin), (), (query, key))
    return query, key


def _split(name):
    def call(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
        return _call(name)((mixed_qkvz, mixed_ba), (num_heads_qk, num_heads_v, head_qk, head_v))

    return call


def store_cache_cpu(k, v, k_cache, v_cache, indices, row_dim=None):
    tensors = (k, v, k_cache, v_cache)
    if k.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
        tensors = tuple(x.view(torch.uint8) for x in tensors)  # fp8
    _call("store_cache_cpu")((*tensors, indices), (row_dim or 0,))


# ---- Their fakes ------------------------------------------------------------------------------------------


def _half(input):
    return input.new_empty(input.shape[:-1] + (input.shape[-1] // 2,))


def _like(input, *_, **__):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _gated_like(input, gate, inplace):
    return input if inplace else _like(input)


def _queries_and_keys(q, k, *_, **__):
    return _like(q), _like(k)


def _heads(q_gate, k, q_weight, k_weight, eps, head_dim, num_head):
    queries = (q_gate.shape[0] * num_head, head_dim)
    keys = (k.shape[0] * (k.shape[1] // head_dim), head_dim)
    return q_gate.new_empty(queries), k.new_empty(keys), q_gate.new_empty(queries)


def _routes(gating_output, topk):
    shape = (gating_output.shape[0], topk)
    return gating_output.new_empty(shape, dtype=torch.float32), gating_output.new_empty(shape, dtype=torch.int32)


def _chosen(hidden_states, gating_output, topk, *_, **__):
    return _routes(gating_output, topk)


def _biased(hidden_states, gating_output, correction_bias, topk, *_, **__):
    return _routes(gating_output, topk)


def _rotated(positions, query, key, *_, **__):
    return (_like(query), _like(key)) if query.dim() == 3 else (query, key)


def _rotated_in_place(positions, query, key, *_, **__):
    return query, key


def _applied(query, key, cos, sin):
    return query, key


def _parts(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
    tokens = mixed_qkvz.shape[0]
    shapes = (
        (tokens, 2 * num_heads_qk * head_qk + num_heads_v * head_v), (tokens, num_heads_v, head_v),
        (tokens, num_heads_v), (tokens, num_heads_v),
    )
    return tuple(mixed_qkvz.new_empty(shape) for shape in shapes)


_Operator = _named_ops.Operator
_GROUPS = (
    "int topk, bool renormalize, int num_expert_group, int topk_group, int num_fused_shared_experts, "
    "float? routed_scaling_factor, Tensor? num_token_non_padded) -> (Tensor, Tensor)"
)
_ADD = "(Tensor(a0!) input, Tensor(a1!) residual, Tensor weight, float eps) -> ()"

OPERATORS = (
    *(
        _Operator(f"{name}(Tensor input) -> Tensor", _gated(name), _half)
        for name in ("silu_and_mul_cpu", "gelu_and_mul_cpu", "gelu_tanh_and_mul_cpu")
    ),
    _Operator(
        "fused_sigmoid_mul_cpu(Tensor(a!) input, Tensor gate, bool inplace) -> Tensor(a!)",
        fused_sigmoid_mul_cpu, _gated_like,
    ),
    *(
        _Operator(f"{name}(Tensor input, Tensor weight, float eps) -> Tensor", _norm(name), _like)
        for name in ("rmsnorm_cpu", "gemma_rmsnorm_cpu", "gemma3_rmsnorm_cpu")
    ),
    _Operator(
        "gemma4_rmsnorm_cpu(Tensor input, Tensor weight, float eps, float scale_shift, bool with_scale) -> Tensor",
        gemma4_rmsnorm_cpu, _like,
    ),
    _Operator("l2norm_cpu(Tensor input, float eps) -> Tensor", l2norm_cpu, _like),
    _Operator(
        "layernorm_cpu(Tensor input, Tensor weight, Tensor? bias, float eps) -> Tensor", layernorm_cpu, _like
    ),
    _Operator(
        "fused_rmsnorm_gated_cpu(Tensor input, Tensor weight, Tensor gate, float eps) -> Tensor",
        fused_rmsnorm_gated_cpu, _like,
    ),
    *(
        _Operator(name + _ADD, _fused_add(name), _named_ops.nothing)
        for name in ("fused_add_rmsnorm_cpu", "gemma_fused_add_rmsnorm_cpu")
    ),
    # SGLang's schema does not say that residual is written.
    _Operator(
        "fused_add_layernorm_cpu(Tensor input, Tensor(a1!) residual, Tensor weight, Tensor? bias, float eps) -> Tensor",
        fused_add_layernorm_cpu, _like,
    ),
    _Operator(
        "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
        "-> (Tensor, Tensor)",
        fused_qk_gemma_rmsnorm_cpu, _queries_and_keys,
    ),
    _Operator(
        "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
        "int head_dim, int num_head) -> (Tensor, Tensor, Tensor)",
        fused_qk_gemma_rmsnorm_with_gate_cpu, _heads,
    ),
    *(
        _Operator(
            f"{name}(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize) -> (Tensor, Tensor)",
            _topk(name), _chosen,
        )
        for name in ("topk_softmax_cpu", "topk_sigmoid_cpu")
    ),
    _Operator(
        f"grouped_topk_cpu(Tensor hidden_states, Tensor gating_output, {_GROUPS}", grouped_topk_cpu, _chosen
    ),
    _Operator(
        f"biased_grouped_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, {_GROUPS}",
        biased_grouped_topk_cpu, _biased,
    ),
    # SGLang's schemas do not say that query and key are written.
    _Operator(
        "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> (Tensor, Tensor)",
        rotary_embedding_cpu, _rotated,
    ),
    _Operator(
        "multimodal_rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, "
        "Tensor cos_sin_cache, int[]? mrope_section, bool mrope_interleaved, bool is_neox) -> (Tensor, Tensor)",
        multimodal_rotary_embedding_cpu, _rotated_in_place,
    ),
    _Operator(
        "apply_rotary_pos_emb_cpu(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
        apply_rotary_pos_emb_cpu, _applied,
    ),
    *(
        _Operator(
            f"{name}(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, int head_v) "
            "-> (Tensor, Tensor, Tensor, Tensor)",
            _split(name), _parts,
        )
        for name in ("fused_qkvzba_split_reshape_cat_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu")
    ),
    _Operator(
        "store_cache_cpu(Tensor k, Tensor v, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor indices, int? row_dim) "
        "-> ()",
        store_cache_cpu, _named_ops.nothing,
    ),
)
