"""SGLang's operators for CPUs by SGLang's names: torch.ops.sgl_kernel.silu_and_mul_cpu(x), by Quern.

    import quern.sglang
    quern.sglang.install()

SGLang's own library, if it was loaded before, keeps its schemas, and its kernels for the CPU are replaced.
Equations, roundings and refusals are those of ops/registry; what differs from SGLang's is in docs/porting.md,
docs/porting_ops.md and docs/porting_attention.md. The schemas are of mid 2026. Attention, and the products of
packed weights with what packs them, are two families, each of which is installed whole or not at all.

Weights, plain ones (is_vnni=False) and those of SGLang's own form (is_vnni=True), are packed for Quern's kernels by
the first call, and kept with what they were packed from until clear(). A change in place packs them anew, unless
PyTorch does not count it: through `.data`, or of a tensor of inference mode. Call clear() after such a change. Pass
the same scale and bias tensors in every call: each new one packs and keeps the weights again.
"""

from __future__ import annotations

import torch

from . import _merge_ops, _named_ops, _recurrent_ops, _sglang_products, _sglang_rows, _speculation
from . import torch as quern_torch
from ._sglang_products import clear  # noqa: F401

_call = quern_torch.caller_of


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


def _varlen(q, k, v, ends_q, ends_k, causal):
    return _call("varlen_attention")((q, k, v, ends_q, ends_k), (causal, 0.0))


def _ends(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """Query i of a causal sequence sees its first i + 1 keys, whatever the number of keys."""
    if not causal or torch.equal(cu_seqlens_q, cu_seqlens_k):
        return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)
    # As many queries and keys of each sequence by a causal mask; queries behind its keys see all of them.
    queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    both = torch.minimum(queries, keys)
    out = q.new_zeros(q.shape[:2] + v.shape[2:])

    def rows(starts, lengths):
        at = torch.repeat_interleave(starts - _ends(lengths)[:-1], lengths)
        return at + torch.arange(len(at))

    first, seen = rows(cu_seqlens_q[:-1], both), rows(cu_seqlens_k[:-1], both)
    out[first] = _varlen(q[first], k[seen], v[seen], _ends(both), _ends(both), True)
    behind = rows(cu_seqlens_q[:-1] + both, queries - both)
    if len(behind):
        out[behind] = _varlen(q[behind], k, v, _ends(queries - both), cu_seqlens_k, False)
    return out


# A family: what one of its operators makes, the others read.
_ATTENTION = "attention"

_Operator = _named_ops.Operator
_OPERATORS = (
    *_sglang_rows.OPERATORS,
    _Operator(
        "decode_attention_cpu(Tensor query, Tensor(a1!) k_cache, Tensor(a2!) v_cache, Tensor(a3!) output, "
        "Tensor? key, Tensor? value, Tensor? loc, Tensor? attn_logits, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn=False, "
        "int sliding_window=0, Tensor? encoder_lens=None, Tensor? sinks=None) -> ()",
        decode_attention_cpu, _named_ops.nothing, _ATTENTION,
    ),
    _Operator(
        "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a3!) o_extend, "
        "Tensor(a4!) k_buffer, Tensor(a5!) v_buffer, Tensor req_to_token, Tensor req_pool_indices, "
        "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, "
        "float logit_cap, bool is_cross_attn=False, int sliding_window=0, Tensor? encoder_lens=None, "
        "Tensor? sinks=None, Tensor? tree_mask=None) -> ()",
        extend_attention_cpu, _named_ops.nothing, _ATTENTION,
    ),
    _Operator(
        "flash_attn_varlen_func(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, bool causal) -> Tensor",
        flash_attn_varlen_func, lambda q, k, v, *_, **__: q.new_empty(q.shape[:2] + v.shape[2:]),
    ),
    *_sglang_products.OPERATORS,
    *_merge_ops.SGLANG,
    *_recurrent_ops.SGLANG,
    *_speculation.SGLANG,
)


def install(namespace: str = "sgl_kernel") -> dict:
    """Puts all of them under torch.ops.sgl_kernel; returns what became of each: "defined", "replaced", or why not.

    What was left out is also a warning of the logger "quern".
    """
    return _named_ops.install(namespace, _OPERATORS)
