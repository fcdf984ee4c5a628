"""SGLang's operators for CPUs by SGLang's names: torch.ops.sgl_kernel.silu_and_mul_cpu(x), by Quern.

    import quern.sglang
    quern.sglang.install()

SGLang's own library, if it was loaded before, keeps its schemas, and its kernels for the CPU are replaced.
Equations, roundings and refusals are those of ops/registry; what differs from SGLang's is in docs/porting.md
and docs/porting_attention.md. The schemas are of mid 2026. Attention, and the products of packed weights with
what packs them, are two families, each of which is installed whole or not at all. SGLang's own
fused_experts_cpu stays where its library is loaded, because SGLang passes packed experts and this package's
takes plain ones.

Plain weights (is_vnni=False) are packed by the first call, and kept with what they were packed from until
clear(). A change in place packs them anew, but not that of a tensor of inference mode, which PyTorch does not
count. Weights in SGLang's own form (is_vnni=True) are unpacked by every call, which is slow.
"""

from __future__ import annotations

import os
import threading

import torch

from . import _linear, _named, _named_ops, _recurrent_ops
from . import torch as quern_torch
from ._torch_call import dtype_of, name_of_dtype

_call = quern_torch.caller_of


class _Packed:
    """What was made from weights, by their memory. Keeps them, so that the memory is not used for others."""

    def __init__(self):
        self._made: dict = {}
        self._unlock()
        # Another thread of the parent may hold the lock for ever.
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self):
        self._lock = threading.Lock()

    def get(self, make, *weights):
        key = (make,) + tuple(None if w is None else (w.data_ptr(), w.dtype, w.shape, w.stride()) for w in weights)
        versions = tuple(None if w is None or w.is_inference() else w._version for w in weights)
        found = self._made.get(key)
        if found is None or found[0] != versions:
            with self._lock:
                found = self._made[key] = (versions, make(*weights), weights)
        return found[1]

    def clear(self):
        with self._lock:
            self._made.clear()


_packed = _Packed()


def clear() -> None:
    """Forgets all packed weights."""
    _packed.clear()


def _unary(name, scalars=()):
    def call(input):
        rows = input.reshape(-1, input.shape[-1])
        y = _call(name)((rows,), scalars)
        return y.view(input.shape[:-1] + y.shape[-1:])

    return call


def rmsnorm_cpu(input, weight, eps):
    rows = input.reshape(-1, input.shape[-1])
    return _call("rms_norm")((rows, weight), (eps, 0, "")).view(input.shape)


def fused_add_rmsnorm_cpu(input, residual, weight, eps):
    shape = (-1, input.shape[-1])
    _call("fused_add_rmsnorm_cpu")((input.view(shape), residual.view(shape), weight), (eps,))


def topk_softmax_cpu(hidden_states, gating_output, topk, renormalize):
    return _call("topk_softmax")((gating_output, None), (topk, renormalize, 1.0))


def topk_sigmoid_cpu(hidden_states, gating_output, topk, renormalize):
    return _call("topk_sigmoid")((gating_output, None), (topk, renormalize, 1.0))


def convert_weight_packed(weight):
    return _call("convert_weight_packed")((weight,), ())


def per_token_quant_int8_cpu(A):
    return _call("per_token_quant_int8_cpu")((A,), ())


def _plain(weight, bias):
    return _linear.Linear.from_numpy(weight, None if bias is None else bias.float())


def weight_packed_linear(mat1, mat2, bias, is_vnni):
    rows = mat1.reshape(-1, mat1.shape[-1])
    if is_vnni:
        y = _call("weight_packed_linear")((rows, mat2, bias), (is_vnni,))
    else:
        y = _call("linear")((rows, None), (_packed.get(_plain, mat2, bias), "none", "", "exact"))
    return y.view(mat1.shape[:-1] + y.shape[-1:])


def int8_scaled_mm_cpu(mat1, mat2, scales1, scales2, bias, out_dtype, is_vnni):
    return _call("int8_scaled_mm_cpu")((mat1, mat2, scales1, scales2, bias), (name_of_dtype(out_dtype), is_vnni))


def int8_scaled_mm_with_quant(mat1, mat2, scales2, bias, out_dtype, is_vnni):
    return _call("int8_scaled_mm_with_quant")((mat1, mat2, scales2, bias), (name_of_dtype(out_dtype), is_vnni))


def fp8_scaled_mm_cpu(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni):
    block_n, block_k = block_size
    scalars = (block_n, block_k, name_of_dtype(out_dtype), is_vnni)
    return _call("fp8_scaled_mm_cpu")((mat1, mat2, scales2, bias), scalars)


def _experts(w1, w2):
    gate_up = [_linear.Linear.from_numpy(w, gated=True) for w in w1]
    return _named.ExpertWeights(gate_up, [_linear.Linear.from_numpy(w) for w in w2])


def fused_experts_cpu(
    hidden_states, w1, w2, topk_weights, topk_ids, inplace, moe_comp_method=0, w1_scale=None, w2_scale=None,
    w1_zero=None, w2_zero=None, block_size=None, w1_bias=None, w2_bias=None, alpha=None, limit=None, is_vnni=False,
):
    """w1[experts, 2 * inter, hidden], gate before up, and w2[experts, hidden, inter], f32, bf16 or f16."""
    more = (w1_scale, w2_scale, w1_zero, w2_zero, block_size, w1_bias, w2_bias, alpha, limit)
    if moe_comp_method != 0 or is_vnni or any(given is not None for given in more):
        raise NotImplementedError(
            "fused_experts_cpu: only plain weights without scales, zeros, biases and limits; "
            "need quern.ExpertWeights and torch.ops.quern.fused_experts_cpu for others"
        )
    scalars = (_packed.get(_experts, w1, w2), None, "silu", False, "", "exact")
    tensors = (hidden_states, topk_weights, topk_ids, None, None)
    y = _call("fused_experts_cpu")(tensors, scalars)
    return hidden_states.copy_(y) if inplace else y


def decode_attention_cpu(
    query, k_cache, v_cache, output, key, value, loc, attn_logits, req_to_token, req_pool_indices, seq_lens,
    sm_scale, logit_cap, is_cross_attn=False, sliding_window=0, encoder_lens=None, sinks=None,
):
    tensors = (
        query, k_cache, v_cache, output, key, value, loc, attn_logits, req_to_token, req_pool_indices, seq_lens,
        encoder_lens, sinks,
    )
    _call("decode_attention_cpu")(tensors, (sm_scale, logit_cap, is_cross_attn, sliding_window))


def extend_attention_cpu(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
    extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross_attn=False, sliding_window=0,
    encoder_lens=None, sinks=None, tree_mask=None,
):
    tensors = (
        q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
        extend_seq_lens, extend_start_loc, encoder_lens, sinks, tree_mask,
    )
    _call("extend_attention_cpu")(tensors, (max_len_extend, sm_scale, logit_cap, is_cross_attn, sliding_window))


def _half(*args, **_):
    x = args[0]
    return x.new_empty(x.shape[:-1] + (x.shape[-1] // 2,))


def _like(*args, **_):
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


def _nothing(*args, **_):
    return None


def _topk(hidden_states, gating_output, topk, renormalize):
    shape = (gating_output.shape[0], topk)
    return gating_output.new_empty(shape, dtype=torch.float32), gating_output.new_empty(shape, dtype=torch.int32)


def _columns(mat1, mat2, bias, is_vnni):
    # Packed weights of f32 are those of fewer than 16 columns, [k, n].
    columns = mat2.shape[1 if is_vnni and mat2.dtype == torch.float32 else 0]
    return mat1.new_empty(mat1.shape[:-1] + (columns,))


def _packed_like(weight):
    return _call("convert_weight_packed").fake((weight,), ())


def _codes(A):
    return _call("per_token_quant_int8_cpu").fake((A,), ())


def _product(count):
    """The fake of a product: mat1, mat2 and so on, `count` arguments, and the dtype of the result."""

    def fake(*args, **given):
        out_dtype = given["out_dtype"] if "out_dtype" in given else args[count]
        mat1, mat2 = (given[name] if name in given else args[i] for i, name in enumerate(("mat1", "mat2")))
        return mat1.new_empty(mat1.shape[:-1] + (mat2.shape[0],), dtype=dtype_of(out_dtype))

    return fake


# The families: what one of their operators makes, the others read.
_PACKED_WEIGHTS = "products of packed weights"
_ATTENTION = "attention"
_PACKED_EXPERTS = "SGLang passes packed experts, and Quern's fused_experts_cpu takes plain ones"

_Operator = _named_ops.Operator
_OPERATORS = (
    _Operator("silu_and_mul_cpu(Tensor input) -> Tensor", _unary("silu_and_mul"), _half),
    _Operator("gelu_and_mul_cpu(Tensor input) -> Tensor", _unary("gelu_and_mul", ("none",)), _half),
    _Operator("gelu_tanh_and_mul_cpu(Tensor input) -> Tensor", _unary("gelu_and_mul", ("tanh",)), _half),
    _Operator("rmsnorm_cpu(Tensor input, Tensor weight, float eps) -> Tensor", rmsnorm_cpu, _like),
    _Operator(
        "fused_add_rmsnorm_cpu(Tensor(a0!) input, Tensor(a1!) residual, Tensor weight, float eps) -> ()",
        fused_add_rmsnorm_cpu, _nothing,
    ),
    _Operator(
        "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize) -> (Tensor, Tensor)",
        topk_softmax_cpu, _topk,
    ),
    _Operator(
        "topk_sigmoid_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize) -> (Tensor, Tensor)",
        topk_sigmoid_cpu, _topk,
    ),
    _Operator("convert_weight_packed(Tensor weight) -> Tensor", convert_weight_packed, _packed_like, _PACKED_WEIGHTS),
    _Operator(
        "per_token_quant_int8_cpu(Tensor A) -> (Tensor, Tensor)", per_token_quant_int8_cpu, _codes, _PACKED_WEIGHTS
    ),
    _Operator(
        "weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor",
        weight_packed_linear, _columns, _PACKED_WEIGHTS,
    ),
    _Operator(
        "int8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, Tensor? bias, "
        "ScalarType out_dtype, bool is_vnni) -> Tensor",
        int8_scaled_mm_cpu, _product(5), _PACKED_WEIGHTS,
    ),
    _Operator(
        "int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, "
        "bool is_vnni) -> Tensor",
        int8_scaled_mm_with_quant, _product(4), _PACKED_WEIGHTS,
    ),
    _Operator(
        "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, "
        "ScalarType out_dtype, bool is_vnni) -> Tensor",
        fp8_scaled_mm_cpu, _product(5), _PACKED_WEIGHTS,
    ),
    # inplace is an argument and not an annotation in SGLang's schema, too.
    _Operator(
        "fused_experts_cpu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
        "bool inplace, int moe_comp_method=0, Tensor? w1_scale=None, Tensor? w2_scale=None, Tensor? w1_zero=None, "
        "Tensor? w2_zero=None, int[]? block_size=None, Tensor? w1_bias=None, Tensor? w2_bias=None, "
        "float? alpha=None, float? limit=None, bool is_vnni=False) -> Tensor",
        fused_experts_cpu, _like, stays=_PACKED_EXPERTS,
    ),
    _Operator(
        "decode_attention_cpu(Tensor query, Tensor(a1!) k_cache, Tensor(a2!) v_cache, Tensor(a3!) output, "
        "Tensor? key, Tensor? value, Tensor? loc, Tensor? attn_logits, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn=False, "
        "int sliding_window=0, Tensor? encoder_lens=None, Tensor? sinks=None) -> ()",
        decode_attention_cpu, _nothing, _ATTENTION,
    ),
    _Operator(
        "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a3!) o_extend, "
        "Tensor(a4!) k_buffer, Tensor(a5!) v_buffer, Tensor req_to_token, Tensor req_pool_indices, "
        "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, "
        "float logit_cap, bool is_cross_attn=False, int sliding_window=0, Tensor? encoder_lens=None, "
        "Tensor? sinks=None, Tensor? tree_mask=None) -> ()",
        extend_attention_cpu, _nothing, _ATTENTION,
    ),
) + _recurrent_ops.SGLANG


def install(namespace: str = "sgl_kernel") -> dict:
    """Puts all of them under torch.ops.sgl_kernel; returns what became of each: "defined", "replaced", or why not.

    What was left out is also a warning of the logger "quern".
    """
    return _named_ops.install(namespace, _OPERATORS)
