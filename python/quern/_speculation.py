"""vLLM's and SGLang's operators of speculative decoding: rejection sampling, trees of drafts, and their slots.

Ours have the same names and arguments. Shapes, dtypes and refusals are those of ops/speculation.
"""

from __future__ import annotations

import torch

from . import _named_ops
from . import torch as quern_torch

_call = quern_torch.caller_of

# ---- SGLang -----------------------------------------------------------------------------------------------


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):
    tensors = (
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
        target_predict,
    )
    _call("verify_tree_greedy_cpu")(tensors, ())


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):
    tensors = (
        parent_list, selected_index, verified_seq_len, tree_mask.view(-1), positions, retrive_index,
        retrive_next_token, retrive_next_sibling,
    )
    _call("build_tree_kernel_efficient_cpu")(tensors, (topk, depth, draft_token_num, tree_mask_mode))


def reconstruct_indices_from_tree_mask_cpu(
    tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch_size,
    draft_token_num,
):
    shape = (batch_size, draft_token_num)
    tree = (t.view(shape) for t in (retrive_index, retrive_next_token, retrive_next_sibling))
    tensors = (tree_mask.view(-1), verified_seq_len, positions.view(-1), *tree)
    _call("reconstruct_indices_from_tree_mask_cpu")(tensors, shape)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    tensors = (req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)
    _call("assign_req_to_token_pool_cpu")(tensors, (pool_len,))


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    tensors = (req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc.view(-1))
    _call("assign_extend_cache_locs_cpu")(tensors, (pool_len,))


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    tensors = (req_pool_indices, req_to_token, seq_lens, out_cache_loc.view(-1))
    _call("assign_draft_cache_locs_contiguous_cpu")(tensors, (pool_len, topk, num_steps))


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    tensors = (req_to_token, req_pool_indices, seq_lens)
    return _call("build_draft_decode_metadata_cpu")(tensors, (topk, num_steps, pool_len))


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    tensors = (accept_tokens.view(-1, accept_stride), accept_lens, bonus_tokens.view(-1))
    _call("fill_bonus_tokens_cpu")(tensors, (accept_stride,))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    tensors = (accept_index.view(-1), out_cache_loc.view(-1), accept_out_cache_loc.view(-1))
    _call("fill_accept_out_cache_loc_cpu")(tensors, ())


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    tensors = (input_ids, extend_start_loc, extend_seq_lens, topk_index.view(-1), select_index)
    _call("rotate_input_ids_cpu")(tensors, ())


# ---- vLLM -------------------------------------------------------------------------------------------------


def rejection_greedy_sample_kernel_impl(
    output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids, is_greedy, max_spec_len
):
    tensors = (output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids, is_greedy)
    _call("rejection_greedy_sample_kernel_impl")(tensors, (max_spec_len,))


def rejection_random_sample_kernel_impl(
    output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, bonus_token_ids,
    recovered_token_ids, uniform_probs, is_greedy, max_spec_len, vocab_size, no_draft_probs,
):
    tensors = (
        output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, bonus_token_ids,
        recovered_token_ids, uniform_probs, is_greedy,
    )
    _call("rejection_random_sample_kernel_impl")(tensors, (max_spec_len, vocab_size, no_draft_probs))


def expand_kernel_impl(output, input, cu_num_tokens, replace_from, replace_to):
    _call("expand_kernel_impl")((output, input, cu_num_tokens), (replace_from, replace_to))


def sample_recovered_tokens_kernel_impl(
    output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, inv_q, vocab_size,
    no_draft_probs,
):
    tensors = (output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, inv_q)
    _call("sample_recovered_tokens_kernel_impl")(tensors, (vocab_size, no_draft_probs))


def compute_slot_mapping_kernel_impl(query_start_loc, positions, block_table, slot_mapping, block_size):
    tensors = (query_start_loc, positions, block_table, slot_mapping)
    _call("compute_slot_mapping_kernel_impl")(tensors, (block_size,))


def eagle_prepare_inputs_padded_kernel_impl(
    cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc_gpu, token_indices_to_sample,
    num_rejected_tokens_gpu, num_reqs,
):
    tensors = (
        cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc_gpu, token_indices_to_sample,
        num_rejected_tokens_gpu,
    )
    _call("eagle_prepare_inputs_padded_kernel_impl")(tensors, (num_reqs,))


def eagle_prepare_next_token_padded_kernel_impl(
    sampled_token_ids, discard_request_mask, backup_next_token_ids, next_token_ids, valid_sampled_tokens_count,
    vocab_size, num_sampled_tokens_per_req, num_reqs,
):
    tensors = (
        sampled_token_ids, discard_request_mask, backup_next_token_ids, next_token_ids, valid_sampled_tokens_count
    )
    scalars = (vocab_size, num_sampled_tokens_per_req, num_reqs)
    _call("eagle_prepare_next_token_padded_kernel_impl")(tensors, scalars)


def eagle_step_slot_mapping_metadata_kernel_impl(
    positions, block_table, seq_lens, out_clamped_positions, out_slot_mapping, block_size, max_model_len, PAD_ID
):
    tensors = (positions, block_table, seq_lens, out_clamped_positions, out_slot_mapping)
    _call("eagle_step_slot_mapping_metadata_kernel_impl")(tensors, (block_size, max_model_len, PAD_ID))


def copy_and_expand_eagle_inputs_kernel_impl(
    target_token_ids, target_positions, next_token_ids, out_input_ids, out_positions, out_is_rejected_token_mask,
    out_is_masked_token_mask, out_new_token_indices, out_hidden_state_mapping, query_start_loc, query_end_loc,
    padding_token_id, parallel_drafting_token_id, total_input_tokens, num_padding_slots_per_request, shift_input_ids,
):
    tensors = (
        target_token_ids, target_positions, next_token_ids, out_input_ids, out_positions, out_is_rejected_token_mask,
        out_is_masked_token_mask, out_new_token_indices, out_hidden_state_mapping, query_start_loc, query_end_loc,
    )
    scalars = (
        padding_token_id, parallel_drafting_token_id, total_input_tokens, num_padding_slots_per_request,
        shift_input_ids,
    )
    _call("copy_and_expand_eagle_inputs_kernel_impl")(tensors, scalars)


# ---- Schemas ----------------------------------------------------------------------------------------------


def _draft_rows(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    return req_to_token.new_empty((req_pool_indices.shape[0] * topk, pool_len), dtype=torch.int32)


_WRITERS_OF_SGLANG = (
    "verify_tree_greedy_cpu(Tensor(a0!) predicts, Tensor(a1!) accept_index, Tensor(a2!) accept_token_num, "
    "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, "
    "Tensor target_predict) -> ()",
    "build_tree_kernel_efficient_cpu(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
    "Tensor(a3!) tree_mask, Tensor(a4!) positions, Tensor(a5!) retrive_index, Tensor(a6!) retrive_next_token, "
    "Tensor(a7!) retrive_next_sibling, int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()",
    "reconstruct_indices_from_tree_mask_cpu(Tensor tree_mask, Tensor verified_seq_len, Tensor(a2!) positions, "
    "Tensor(a3!) retrive_index, Tensor(a4!) retrive_next_token, Tensor(a5!) retrive_next_sibling, int batch_size, "
    "int draft_token_num) -> ()",
    "assign_req_to_token_pool_cpu(Tensor req_pool_indices, Tensor(a1!) req_to_token, Tensor start_offset, "
    "Tensor end_offset, Tensor out_cache_loc, int pool_len) -> ()",
    "assign_extend_cache_locs_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor start_offset, "
    "Tensor end_offset, Tensor(a4!) out_cache_loc, int pool_len) -> ()",
    "assign_draft_cache_locs_contiguous_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
    "Tensor(a3!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()",
    "fill_bonus_tokens_cpu(Tensor accept_tokens, Tensor accept_lens, Tensor(a2!) bonus_tokens, int accept_stride) "
    "-> ()",
    "fill_accept_out_cache_loc_cpu(Tensor accept_index, Tensor out_cache_loc, Tensor(a2!) accept_out_cache_loc) "
    "-> ()",
    "rotate_input_ids_cpu(Tensor(a0!) input_ids, Tensor extend_start_loc, Tensor extend_seq_lens, Tensor topk_index, "
    "Tensor? select_index=None) -> ()",
)
_WRITERS_OF_VLLM = (
    "rejection_greedy_sample_kernel_impl(Tensor(a0!) output_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor draft_token_ids, Tensor target_argmax, Tensor bonus_token_ids, Tensor? is_greedy, int max_spec_len) -> ()",
    "rejection_random_sample_kernel_impl(Tensor(a0!) output_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor draft_token_ids, Tensor? draft_probs, Tensor target_probs, Tensor bonus_token_ids, "
    "Tensor recovered_token_ids, Tensor uniform_probs, Tensor? is_greedy, int max_spec_len, int vocab_size, "
    "bool no_draft_probs) -> ()",
    "expand_kernel_impl(Tensor(a0!) output, Tensor input, Tensor cu_num_tokens, int replace_from, int replace_to) "
    "-> ()",
    "sample_recovered_tokens_kernel_impl(Tensor(a0!) output_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor draft_token_ids, Tensor? draft_probs, Tensor target_probs, Tensor inv_q, int vocab_size, "
    "bool no_draft_probs) -> ()",
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a3!) slot_mapping, int block_size) -> ()",
    "eagle_prepare_inputs_padded_kernel_impl(Tensor cu_num_draft_tokens, Tensor valid_sampled_tokens_count, "
    "Tensor query_start_loc_gpu, Tensor(a3!) token_indices_to_sample, Tensor(a4!) num_rejected_tokens_gpu, "
    "int num_reqs) -> ()",
    "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled_token_ids, Tensor discard_request_mask, "
    "Tensor backup_next_token_ids, Tensor(a3!) next_token_ids, Tensor(a4!) valid_sampled_tokens_count, "
    "int vocab_size, int num_sampled_tokens_per_req, int num_reqs) -> ()",
    "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor block_table, Tensor(a2!) seq_lens, "
    "Tensor(a3!) out_clamped_positions, Tensor(a4!) out_slot_mapping, int block_size, int max_model_len, int PAD_ID) "
    "-> ()",
    "copy_and_expand_eagle_inputs_kernel_impl(Tensor target_token_ids, Tensor target_positions, "
    "Tensor next_token_ids, Tensor(a3!) out_input_ids, Tensor(a4!) out_positions, "
    "Tensor(a5!) out_is_rejected_token_mask, Tensor(a6!) out_is_masked_token_mask, "
    "Tensor(a7!) out_new_token_indices, Tensor(a8!) out_hidden_state_mapping, Tensor query_start_loc, "
    "Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id, int total_input_tokens, "
    "int num_padding_slots_per_request, bool shift_input_ids) -> ()",
)


def _writers(schemas):
    return tuple(_named_ops.Operator(s, globals()[s.partition("(")[0]], _named_ops.nothing) for s in schemas)


SGLANG = _writers(_WRITERS_OF_SGLANG) + (
    _named_ops.Operator(
        "build_draft_decode_metadata_cpu(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, int topk, "
        "int num_steps, int pool_len) -> Tensor",
        build_draft_decode_metadata_cpu, _draft_rows,
    ),
)
VLLM = _writers(_WRITERS_OF_VLLM)
