"""SGLang's products by packed weights, for quern.sglang: linear layers, batched products and experts.

What SGLang packs is unpacked by the first call that sees it, packed for Quern's kernels, and kept.
"""

from __future__ import annotations

import os
import threading

import torch

from . import _named, _named_ops, _sglang_weights
from . import torch as quern_torch
from ._sglang_weights import FP8, INT4, INT8, METHODS, MXFP4, PLAIN
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

    def get(self, make, *weights, **options):
        key = (make, tuple(options.items())) + tuple(
            None if w is None else (w.data_ptr(), w.dtype, w.shape, w.stride()) for w in weights
        )
        versions = tuple(None if w is None or w.is_inference() else w._version for w in weights)
        found = self._made.get(key)
        if found is None or found[0] != versions:
            with self._lock:
                found = self._made.get(key)  # another thread may have been first
                if found is None or found[0] != versions:
                    # Not the tensors themselves, whose memory `.data = ` frees.
                    kept = tuple(None if w is None else w.detach() for w in weights)
                    found = self._made[key] = (versions, make(*weights, **options), kept)
        return found[1]

    def clear(self):
        with self._lock:
            self._made.clear()


_packed = _Packed()


def clear() -> None:
    """Forgets all packed weights."""
    _packed.clear()


def _linear(weight, scale=None, bias=None, zero=None, **options):
    return _sglang_weights.linear(weight, scale, bias, zero=zero, **options)


def _multiply(mat1, weights, out_dtype="", activation="none", residual=None):
    """The product of the rows of mat1, of any leading dimensions; a residual is added to in place, and returned."""
    rows = mat1.reshape(-1, mat1.shape[-1])
    outs = None if residual is None else (residual,)
    y = _call("linear")((rows, residual), (weights, activation, out_dtype, "exact"), outs)
    return y.view(mat1.shape[:-1] + y.shape[-1:])


def convert_weight_packed(weight):
    return _call("convert_weight_packed")((weight.detach(),), ())


def convert_scale_packed(scale):
    return _call("convert_scale_packed")((scale.detach().contiguous(),), ())


def convert_weight_packed_scale_zp(weight, qzeros, scales, quant_method_4bit):
    tensors = tuple(x.detach().contiguous() for x in (weight, qzeros, scales))
    return _call("convert_weight_packed_scale_zp")(tensors, (quant_method_4bit,))


def per_token_quant_int8_cpu(A):
    return _call("per_token_quant_int8_cpu")((A,), ())


def _is_narrow(mat2, is_vnni):
    """Whether mat2 is f32[k, n], which SGLang keeps in place of fewer than 16 columns."""
    return is_vnni and mat2.dtype is torch.float32


def _narrow(mat2, bias):
    # f32, as SGLang multiplies them.
    return _sglang_weights.linear(mat2.t().contiguous(), bias=bias)


def _weights(mat2, bias, is_vnni):
    if _is_narrow(mat2, is_vnni):
        return _packed.get(_narrow, mat2, bias)
    return _packed.get(_linear, mat2, None, bias, is_vnni=is_vnni)


def weight_packed_linear(mat1, mat2, bias, is_vnni):
    return _multiply(mat1, _weights(mat2, bias, is_vnni))


def fused_linear_sigmoid_mul(mat1, mat2, bias, is_vnni, post_mul_mat):
    gate = _multiply(mat1, _weights(mat2, bias, is_vnni), "f32")
    if gate.shape[-1] != 1:
        raise ValueError(f"fused_linear_sigmoid_mul: mat2 has {gate.shape[-1]} columns; need 1")
    return torch.sigmoid(gate).mul(post_mul_mat).to(mat1.dtype)


def int8_scaled_mm_cpu(mat1, mat2, scales1, scales2, bias, out_dtype, is_vnni):
    return _call("int8_scaled_mm_cpu")((mat1, mat2, scales1, scales2, bias), (name_of_dtype(out_dtype), is_vnni))


def int8_scaled_mm_with_quant(mat1, mat2, scales2, bias, out_dtype, is_vnni):
    weights = _packed.get(_linear, mat2, scales2, bias, method=INT8, is_vnni=is_vnni)
    return _multiply(mat1, weights, name_of_dtype(out_dtype))


def fp8_scaled_mm_cpu(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni):
    options = {"method": FP8, "block_size": tuple(block_size), "is_vnni": is_vnni}
    return _multiply(mat1, _packed.get(_linear, mat2, scales2, bias, **options), name_of_dtype(out_dtype))


def mxfp4_scaled_mm_cpu(mat1, mat2, scales2, bias, is_vnni):
    return _multiply(mat1, _packed.get(_linear, mat2, scales2, bias, method=MXFP4, is_vnni=is_vnni))


def int4_scaled_mm_cpu(x, w, w_zeros, w_scales, bias):
    return _multiply(x, _packed.get(_linear, w, w_scales, bias, w_zeros, method=INT4))


def fused_input_proj_cpu(hidden_states, qkvz_weight, ba_weight, is_vnni):
    return tuple(weight_packed_linear(hidden_states, w, None, is_vnni) for w in (qkvz_weight, ba_weight))


def _matrices(weights, scale, is_vnni):
    """A Linear for each matrix of a batch; one scale for all of fp8."""
    if scale is None:
        return [_sglang_weights.linear(w, is_vnni=is_vnni) for w in weights]
    n, k = weights.shape[1:]
    one = scale.reshape(1, 1).float()
    return [_sglang_weights.linear(w, one, method=FP8, block_size=(n, k), is_vnni=is_vnni) for w in weights]


def bmm_cpu(out, mat1, mat2, is_vnni, scale):
    """out[b] = mat1[b] * mat2[b].T for mat1[b, m, k] and mat2[b, n, k]; out and mat1 have any strides but the last."""
    if not len(out) == len(mat1) == len(mat2) or out.shape[1] != mat1.shape[1]:
        raise ValueError(
            f"bmm_cpu: out is {tuple(out.shape)}, mat1 {tuple(mat1.shape)} and mat2 {tuple(mat2.shape)}; "
            "need equal batches and rows"
        )
    for to, x, weights in zip(out, mat1, _packed.get(_matrices, mat2, scale, is_vnni=is_vnni)):
        to.copy_(_multiply(x, weights))


def _experts(w1, w2, w1_scale, w2_scale, w1_zero, w2_zero, w1_bias, w2_bias, *, interleaved, **options):
    def each(weights, scales, biases, zeros, **more):
        count = len(weights)
        parts = [[None] * count if x is None else x for x in (weights, scales, biases, zeros)]
        if any(len(part) != count for part in parts):
            raise ValueError(f"fused_experts_cpu: scales, zeros or biases are not those of {count} experts")
        return [_linear(*expert, **options, **more) for expert in zip(*parts)]

    gate_up = each(w1, w1_scale, w1_bias, w1_zero, gated=True, interleaved=interleaved)
    return _named.ExpertWeights(gate_up, each(w2, w2_scale, w2_bias, w2_zero))


def fused_experts_cpu(
    hidden_states, w1, w2, topk_weights, topk_ids, inplace, moe_comp_method=0, w1_scale=None, w2_scale=None,
    w1_zero=None, w2_zero=None, block_size=None, w1_bias=None, w2_bias=None, alpha=None, limit=None, is_vnni=False,
):
    """w1[experts, 2 * inter, hidden], gate over up, or in turn with alpha and limit; w2[experts, hidden, inter]."""
    if not 0 <= moe_comp_method < len(METHODS):
        raise ValueError(f"fused_experts_cpu: moe_comp_method={moe_comp_method}; need 0 to {len(METHODS) - 1}")
    clamped = alpha is not None and limit is not None and moe_comp_method in (PLAIN, FP8, MXFP4)
    if clamped and (alpha, limit) != (1.702, 7.0):
        raise NotImplementedError(f"fused_experts_cpu: alpha={alpha}, limit={limit}; need 1.702 and 7, or neither")
    experts = _packed.get(
        _experts, w1, w2, w1_scale, w2_scale, w1_zero, w2_zero, w1_bias, w2_bias, method=int(moe_comp_method),
        block_size=None if block_size is None else tuple(block_size), is_vnni=is_vnni, interleaved=clamped,
    )
    scalars = (experts, None, "swigluoai" if clamped else "silu", False, "", "exact")
    tensors = (hidden_states, topk_weights.float(), topk_ids.int(), None, None)
    y = _call("fused_experts_cpu")(tensors, scalars)
    return hidden_states.copy_(y) if inplace else y


def shared_expert_cpu(
    hidden_states, w1, w2, fused_experts_out, routed_scaling_factor, inplace, use_int8_w8a8, use_fp8_w8a16,
    w1_scale=None, w2_scale=None, block_size=None, is_vnni=False,
):
    """down(silu(gate) * up) + routed_scaling_factor * fused_experts_out, rounded once."""
    options = _method(use_int8_w8a8, use_fp8_w8a16, block_size, is_vnni)
    gate_up = _packed.get(_linear, w1, w1_scale, gated=True, **options)
    down = _packed.get(_linear, w2, w2_scale, **options)
    hidden = _multiply(hidden_states, gate_up, activation="silu_and_mul")
    if routed_scaling_factor is None:
        y = _multiply(hidden, down)
    else:
        if fused_experts_out is None:
            raise ValueError(
                "shared_expert_cpu: routed_scaling_factor is given without fused_experts_out; need both, or neither"
            )
        routed = fused_experts_out.float() * routed_scaling_factor
        y = _multiply(hidden, down, "f32", residual=routed).to(hidden_states.dtype)
    return hidden_states.copy_(y) if inplace else y


def _latent(q_a, latent, positions, cos_sin_cache, q_a_norm, kv_a_norm, eps, w_kc, w_scale, project, is_vnni):
    """What follows the first products of multi-head latent attention: (q_input, k_input, v_input).

    q_a[t, q_lora], latent[t, kv_lora + rope]; project(q_a) gives the queries [t, heads * (nope + rope)].
    """
    heads, kv_lora, nope = w_kc.shape
    tokens, rope = latent.shape[0], latent.shape[1] - kv_lora
    queries = project(_norm(q_a, q_a_norm, eps)).view(tokens, heads, nope + rope)
    q_input = latent.new_empty((tokens, heads, kv_lora + rope))
    k_input = latent.view(tokens, 1, kv_lora + rope)
    v_input = k_input[..., :kv_lora]
    v_input.copy_(_norm(latent[:, :kv_lora], kv_a_norm, eps).unsqueeze(1))
    bmm_cpu(q_input[..., :kv_lora].transpose(0, 1), queries[..., :nope].transpose(0, 1), w_kc, is_vnni, w_scale)
    cos, sin = (part.contiguous() for part in cos_sin_cache[positions].chunk(2, dim=-1))
    for to, x in ((q_input, queries[..., nope:]), (k_input, k_input[..., kv_lora:])):
        to[..., kv_lora:] = _call("apply_rotary_emb")((x.contiguous(), cos, sin), (False, False))
    return q_input, k_input, v_input


def _norm(x, weight, eps):
    return _call("rms_norm")((x, weight), (eps, 0, ""))


def _method(use_int8_w8a8, use_fp8_w8a16, block_size, is_vnni):
    return {
        "method": INT8 if use_int8_w8a8 else FP8 if use_fp8_w8a16 else PLAIN,
        "block_size": None if block_size is None else tuple(block_size),
        "is_vnni": is_vnni,
    }


def qkv_proj_with_rope(
    hidden_states, q_a_proj_weight, q_b_proj_weight, kv_a_proj_weight, w_kc, q_a_layernorm_weight,
    kv_a_layernorm_weight, positions, cos_sin_cache, eps, use_int8_w8a8, use_fp8_w8a16, q_a_proj_scale=None,
    q_b_proj_scale=None, kv_a_proj_scale=None, w_scale=None, is_vnni=True, block_size=None,
):
    options = _method(use_int8_w8a8, use_fp8_w8a16, block_size, is_vnni)
    q_a = _multiply(hidden_states, _packed.get(_linear, q_a_proj_weight, q_a_proj_scale, **options))
    latent = _multiply(hidden_states, _packed.get(_linear, kv_a_proj_weight, kv_a_proj_scale, **options))
    q_b = _packed.get(_linear, q_b_proj_weight, q_b_proj_scale, **options)
    return _latent(
        q_a, latent, positions, cos_sin_cache, q_a_layernorm_weight, kv_a_layernorm_weight, eps, w_kc, w_scale,
        lambda x: _multiply(x, q_b), is_vnni,
    )


def qkv_proj_with_rope_fused_weight(
    hidden_states, qkv_a_proj_weight, q_b_proj_weight, w_kc, q_a_layernorm_weight, kv_a_layernorm_weight, positions,
    cos_sin_cache, eps, use_int8_w8a8, use_fp8_w8a16, qkv_a_proj_scale, q_b_proj_scale, w_scale, is_vnni, block_size,
    q_lora_rank, kv_lora_rank, qk_rope_head_dim,
):
    """The first two products by one matrix, of the rows of q_a and then those of kv_a."""
    options = _method(use_int8_w8a8, use_fp8_w8a16, block_size, is_vnni)
    both = _multiply(hidden_states, _packed.get(_linear, qkv_a_proj_weight, qkv_a_proj_scale, **options))
    if both.shape[-1] != q_lora_rank + kv_lora_rank + qk_rope_head_dim or w_kc.shape[1] != kv_lora_rank:
        raise ValueError(
            f"qkv_proj_with_rope_fused_weight: qkv_a_proj_weight has {both.shape[-1]} rows and w_kc {w_kc.shape[1]}; "
            f"need {q_lora_rank} + {kv_lora_rank} + {qk_rope_head_dim}, and {kv_lora_rank}"
        )
    q_b = _packed.get(_linear, q_b_proj_weight, q_b_proj_scale, **options)
    return _latent(
        both[:, :q_lora_rank], both[:, q_lora_rank:].contiguous(), positions, cos_sin_cache, q_a_layernorm_weight,
        kv_a_layernorm_weight, eps, w_kc, w_scale, lambda x: _multiply(x, q_b), is_vnni,
    )


def _columns(mat1, mat2, bias, is_vnni):
    return mat1.new_empty(mat1.shape[:-1] + (mat2.shape[1 if _is_narrow(mat2, is_vnni) else 0],))


def _packed_like(weight):
    return _call("convert_weight_packed").fake((weight,), ())


def _codes(A):
    return _call("per_token_quant_int8_cpu").fake((A,), ())


def _like(*args, **_):
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


def _gated(mat1, mat2, bias, is_vnni, post_mul_mat):
    return mat1.new_empty(post_mul_mat.shape)


def _two_products(hidden_states, qkvz_weight, ba_weight, is_vnni):
    return tuple(_columns(hidden_states, w, None, is_vnni) for w in (qkvz_weight, ba_weight))


def _blocks(x, w, w_zeros, w_scales, bias):
    return x.new_empty(x.shape[:-1] + (w.shape[0] * 32,))


def _int4_like(weight, qzeros, scales, quant_method_4bit):
    return _call("convert_weight_packed_scale_zp").fake((weight, qzeros, scales), (quant_method_4bit,))


def _product(count):
    """The fake of a product: mat1, mat2 and so on, `count` arguments, and the dtype of the result."""

    def fake(*args, **given):
        out_dtype = given["out_dtype"] if "out_dtype" in given else args[count]
        mat1, mat2 = (given[name] if name in given else args[i] for i, name in enumerate(("mat1", "mat2")))
        return mat1.new_empty(mat1.shape[:-1] + (mat2.shape[0],), dtype=dtype_of(out_dtype))

    return fake


def _latent_like(hidden_states, rope, w_kc):
    heads, kv_lora, _ = w_kc.shape
    q_input = hidden_states.new_empty((hidden_states.shape[0], heads, kv_lora + rope))
    k_input = hidden_states.new_empty((hidden_states.shape[0], 1, kv_lora + rope))
    return q_input, k_input, k_input[..., :kv_lora]


def _qkv(hidden_states, q_a_proj_weight, q_b_proj_weight, kv_a_proj_weight, w_kc, *_, **__):
    return _latent_like(hidden_states, kv_a_proj_weight.shape[0] - w_kc.shape[1], w_kc)


def _qkv_fused(hidden_states, qkv_a_proj_weight, q_b_proj_weight, w_kc, *args, **given):
    return _latent_like(hidden_states, given["qk_rope_head_dim"] if "qk_rope_head_dim" in given else args[-1], w_kc)


def _rows(mat1, mat2, scales2, bias, is_vnni):
    return mat1.new_empty(mat1.shape[:-1] + (mat2.shape[0],))


# What one of them packs, the others read.
_FAMILY = "products of packed weights"


def _operator(schema, function, fake, loads=False):
    return _named_ops.Operator(schema, function, fake, _FAMILY, loads=loads)


OPERATORS = (
    _operator("convert_weight_packed(Tensor weight) -> Tensor", convert_weight_packed, _packed_like, loads=True),
    _operator("convert_scale_packed(Tensor scale) -> Tensor", convert_scale_packed, _like, loads=True),
    _operator(
        "convert_weight_packed_scale_zp(Tensor weight, Tensor qzeros, Tensor scales, int quant_method_4bit) -> "
        "(Tensor, Tensor, Tensor)",
        convert_weight_packed_scale_zp, _int4_like, loads=True,
    ),
    _operator("per_token_quant_int8_cpu(Tensor A) -> (Tensor, Tensor)", per_token_quant_int8_cpu, _codes),
    _operator(
        "weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor",
        weight_packed_linear, _columns,
    ),
    _operator(
        "fused_linear_sigmoid_mul(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni, Tensor post_mul_mat) -> Tensor",
        fused_linear_sigmoid_mul, _gated,
    ),
    _operator(
        "int8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, Tensor? bias, "
        "ScalarType out_dtype, bool is_vnni) -> Tensor",
        int8_scaled_mm_cpu, _product(5),
    ),
    _operator(
        "int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, "
        "bool is_vnni) -> Tensor",
        int8_scaled_mm_with_quant, _product(4),
    ),
    _operator(
        "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, "
        "ScalarType out_dtype, bool is_vnni) -> Tensor",
        fp8_scaled_mm_cpu, _product(5),
    ),
    _operator(
        "mxfp4_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, bool is_vnni) -> Tensor",
        mxfp4_scaled_mm_cpu, _rows,
    ),
    _operator(
        "int4_scaled_mm_cpu(Tensor x, Tensor w, Tensor w_zeros, Tensor w_scales, Tensor? bias) -> Tensor",
        int4_scaled_mm_cpu, _blocks,
    ),
    _operator(
        "fused_input_proj_cpu(Tensor hidden_states, Tensor qkvz_weight, Tensor ba_weight, bool is_vnni) -> "
        "(Tensor, Tensor)",
        fused_input_proj_cpu, _two_products,
    ),
    _operator(
        "bmm_cpu(Tensor(a0!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()", bmm_cpu,
        _named_ops.nothing,
    ),
    # inplace is an argument and not an annotation in SGLang's schema, too.
    _operator(
        "fused_experts_cpu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
        "bool inplace, int moe_comp_method=0, Tensor? w1_scale=None, Tensor? w2_scale=None, Tensor? w1_zero=None, "
        "Tensor? w2_zero=None, int[]? block_size=None, Tensor? w1_bias=None, Tensor? w2_bias=None, "
        "float? alpha=None, float? limit=None, bool is_vnni=False) -> Tensor",
        fused_experts_cpu, _like,
    ),
    _operator(
        "shared_expert_cpu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor? fused_experts_out, "
        "float? routed_scaling_factor, bool inplace, bool use_int8_w8a8, bool use_fp8_w8a16, Tensor? w1_scale, "
        "Tensor? w2_scale, int[]? block_size, bool is_vnni) -> Tensor",
        shared_expert_cpu, _like,
    ),
    _operator(
        "qkv_proj_with_rope(Tensor hidden_states, Tensor q_a_proj_weight, Tensor q_b_proj_weight, "
        "Tensor kv_a_proj_weight, Tensor w_kc, Tensor q_a_layernorm_weight, Tensor kv_a_layernorm_weight, "
        "Tensor positions, Tensor cos_sin_cache, float eps, bool use_int8_w8a8, bool use_fp8_w8a16, "
        "Tensor? q_a_proj_scale, Tensor? q_b_proj_scale, Tensor? kv_a_proj_scale, Tensor? w_scale, bool is_vnni, "
        "int[]? block_size) -> (Tensor, Tensor, Tensor)",
        qkv_proj_with_rope, _qkv,
    ),
    _operator(
        "qkv_proj_with_rope_fused_weight(Tensor hidden_states, Tensor qkv_a_proj_weight, Tensor q_b_proj_weight, "
        "Tensor w_kc, Tensor q_a_layernorm_weight, Tensor kv_a_layernorm_weight, Tensor positions, "
        "Tensor cos_sin_cache, float eps, bool use_int8_w8a8, bool use_fp8_w8a16, Tensor? qkv_a_proj_scale, "
        "Tensor? q_b_proj_scale, Tensor? w_scale, bool is_vnni, int[]? block_size, int q_lora_rank, "
        "int kv_lora_rank, int qk_rope_head_dim) -> (Tensor, Tensor, Tensor)",
        qkv_proj_with_rope_fused_weight, _qkv_fused,
    ),
)
