"""Attention over two parts of the keys becomes attention over all, by vLLM's and SGLang's names.

Equations and refusals are those of attention/merge_states.h. The parts' log-sum-exps are what quern.attention
writes to its argument lse, vLLM's with heads first.
"""

from __future__ import annotations

from . import _named_ops
from . import torch as quern_torch
from ._torch_call import name_of_dtype

_call = quern_torch.caller_of


def merge_attn_states(
    output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, prefill_tokens_with_context=None,
    output_scale=None,
):
    """Tokens from prefill_tokens_with_context on have no prefix; None: all have one."""
    if output_scale is not None:
        raise NotImplementedError("merge_attn_states: output_scale is given; need None: there is no fp8 output")
    tensors = (output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)
    tokens = prefill_tokens_with_context
    if tokens is None or tokens == output.shape[0]:
        tokens = -1  # which means all, so that steps of any number of tokens are one bound operator
    _call("merge_attn_states")(tensors, (tokens,))


def merge_state_v2(v_a, s_a, v_b, s_b, v_merged, s_merged):
    _call("merge_states")((v_a, s_a, v_b, s_b), (name_of_dtype(v_merged.dtype),), (v_merged, s_merged))


VLLM = (
    _named_ops.Operator(
        "merge_attn_states(Tensor(a0!) output, Tensor(a1!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
        "Tensor suffix_output, Tensor suffix_lse, int? prefill_tokens_with_context=None, "
        "Tensor? output_scale=None) -> ()",
        merge_attn_states, _named_ops.nothing,
    ),
)
SGLANG = (
    _named_ops.Operator(
        "merge_state_v2(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a4!) v_merged, "
        "Tensor(a5!) s_merged) -> ()",
        merge_state_v2, _named_ops.nothing,
    ),
)
