#include "quern/ops/registry/docs/op_docs.h"

#include "absl/strings/string_view.h"

namespace quern {
namespace {

struct Doc {
  absl::string_view op, text;
};

// Lines that several operators share. A float is f32, bf16 or f16.
#define FLOATS "f32, bf16 or f16"
#define ROWS "x[.., n] is " FLOATS "; out is like x.\n"
#define GATED "x[.., 2 d] is " FLOATS "; out[.., d] has its dtype.\n"
#define STATES                                                            \
  "State indices and starts are i32 or i64; the sequence whose index is " \
  "null_slot is skipped, and its outputs are 0."
#define SEQUENCES                                                         \
  STATES                                                                  \
  "\nquery_start_loc[sequences + 1] says where each begins; None: each "  \
  "token is a sequence. has_initial_state u8[sequences]; None: all have " \
  "one.\n"
#define DRAFTS(to)                                                          \
  "Drafts: slots[sequences, columns], of which a sequence begins from the " \
  "one of column\nnum_accepted_tokens[sequences] - 1, and the state after " \
  "token i is left in column i, or in that of\n" to                         \
  "[sequences, columns]; a destination null_slot keeps no state.\n"
#define MIXER                                                 \
  "x[tokens, hidden] and out are " FLOATS                     \
  "; conv_weight[channels, width], conv_bias[channels] and\n" \
  "conv_state[slots, width - 1 or more, channels] have x's dtype.\n"
#define EXPERTS                                                               \
  "out[t] = sum over j < k of w[t, j] * down_e(act(gate_up_e(x[t]))) + "      \
  "shared_output[t], e = id[t, j]\n"                                          \
  "hidden_states, x, and out are [n, hidden], " FLOATS                        \
  ", as is shared_output. expert_map i32[all experts]\nmaps ids to experts; " \
  "-1 adds nothing. activation: silu, gelu, gelu_tanh, swigluoai, or one of " \
  "the\nfirst three with _no_mul.\n"
#define ROUTES "topk_weights f32[n, k] and topk_ids i32[n, k].\n" EXPERTS
#define ROUTED                                                                \
  "The routes are those of grouped_topk with router_logits[n, experts] and\n" \
  "e_score_correction_bias[experts], " FLOATS ".\n" EXPERTS
#define ROUTER                                              \
  "gating_output[n, experts] and bias[experts] are " FLOATS \
  "; the bias takes part in the choice alone.\n"            \
  "Returns weights f32[n, topk], which are multiplied by "  \
  "routed_scaling_factor, and ids i32[n, topk].\n"
#define DELTA                                                                 \
  "S <- exp(min(g, 0)) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T "      \
  "(scale q);  scale 0: 1 / sqrt(dk)\n"                                       \
  "q and k[tokens, key_heads, dk], v and out[tokens, value_heads, dv], "      \
  "beta[tokens, value_heads],\nstate[slots, value_heads, dk, dv] are " FLOATS \
  ", as is\ng[tokens, value_heads], or [.., dk] (KDA).\n"
#define GATED_RULE                                                          \
  "with the gates g and beta of fused_gdn_gating_cpu in f32, of a, b, "     \
  "a_log and dt_bias. cu_seqlens\n[sequences + 1] are starts; "             \
  "initial_state_source is written. use_qk_l2norm_in_kernel divides q and " \
  "k by\ntheir norms. softplus_beta: 1; softplus_threshold: 17 or more. "   \
  "Slots are\n"
#define CONV1D                                                            \
  "out[t, c] = act(bias[c] + sum over j < width of weight[c, j] * "       \
  "x[t - width + 1 + j, c])\n"                                            \
  "x[tokens, channels], weight[channels, width], bias[channels] and the " \
  "state[slots, width - 1 or more,\nchannels] have one dtype, " FLOATS    \
  ". activation: none or silu.\n"
#define ROPE                                                                  \
  "rot_dim 0: head_dim. is_neox: pairs (j, j + rot_dim / 2), else (2 j, 2 j " \
  "+ 1).\n"
#define MAMBA                                                             \
  "u, z = in_proj(x); u = silu(causal_conv1d(u)); dt, b, c = x_proj(u), " \
  "each normalised where its norm\nis given; y = state_update(u, "        \
  "dt_proj(dt), a, b, c, d, z); out = out_proj(y)\n"
#define MM                                                        \
  "mat1[.., k] and out[.., n]; mat2[n, k], or with is_vnni what " \
  "convert_weight_packed made of it; bias f32[n].\n"
#define LAYER                                                               \
  "out = x weight^T + bias. x[.., k], weight[n, k] and bias[n] are " FLOATS \
  "; out[.., n] is like x.\n"
#define RANKS                                                               \
  "With ranks, each gives its part of the weight (weight_is_shard) or the " \
  "whole.\n"
#define QUANT_NORM                                                          \
  "q_dtype: fp8 (e4m3) or int8. x, residual and weight[hidden] are " FLOATS \
  ".\n"
#define REJECT_GREEDY                                                      \
  "Writes to row r of output_token_ids the drafts of request r that are "  \
  "target_argmax, up to the first that is not,\nthen target_argmax of "    \
  "that one, or bonus_token_ids[r] if all are. What follows in the row "   \
  "is left as it is.\nToken ids are i32 or i64, all the "                  \
  "same.\noutput_token_ids[requests, cols], "                              \
  "cu_num_draft_tokens[requests] are the ends of the requests' drafts, "   \
  "draft_token_ids\nand target_argmax[tokens], bonus_token_ids[requests] " \
  "or [requests, 1]; is_greedy u8[requests]: only these requests.\n"
#define REJECT_RANDOM                                                     \
  "Writes to row r of output_token_ids the drafts t of request r with "   \
  "target_probs[t, draft] / draft_probs[t, draft] >=\nuniform_probs[t], " \
  "up to the first without, then recovered_token_ids of that one, or "    \
  "bonus_token_ids[r] if all have it.\nWhat follows in the row is left "  \
  "as it is. draft_probs None: 1. A NaN rejects.\nToken ids are i32 or "  \
  "i64, all the same.\noutput_token_ids[requests, cols], "                \
  "cu_num_draft_tokens[requests] are the ends of the requests' drafts, "  \
  "draft_token_ids,\nrecovered_token_ids and uniform_probs f32[tokens], " \
  "both probs f32[tokens, vocab], bonus_token_ids[requests] "             \
  "or\n[requests, 1]; is_greedy u8[requests]: not these requests.\n"
#define RECOVERED                                                          \
  "output_token_ids[t] = the v with the largest max(target_probs[t, v] - " \
  "draft_probs[t, v], 0) * inv_q[r, v], the lowest of\nequal ones, for "   \
  "the tokens t of request r. draft_probs None: target_probs[t, v], and "  \
  "0 for draft_token_ids[t].\noutput_token_ids and "                       \
  "draft_token_ids[tokens], cu_num_draft_tokens[requests], the ends of "   \
  "the requests' tokens, are i32\nor i64; the others f32[tokens, vocab] "  \
  "and inv_q f32[requests, vocab].\n"

constexpr Doc kDocs[] = {
    {"add_rms_norm",
     "residual <- round(x + residual);  out = residual / sqrt(mean over i of "
     "residual^2 + eps) * weight\n"
     "x, residual and out are [.., hidden], weight[hidden] (None: 1): " FLOATS
     ". out_dtype \"\": x's.\n"},
    {"adjust_logits",
     "Changes logits f32[rows, vocab] in place, token by token in this order: "
     "-infinity where the row's mask or\nforbidden_ids forbid it; + bias; of "
     "tokens in prompt_ids or output_ids l / repetition if l > 0, else "
     "l *\nrepetition; of those in output_ids - frequency * count, - "
     "presence.\n"
     "bitmask i32[masks, vocab / 32 or more]: bit i % 32 of word i / 32 allows "
     "token i. mask_rows[rows] says which mask\na row has, -1: none; None: "
     "mask r is of row r. Lists are those of all rows one after the other: "
     "ids\nof row r begin at element r of prompt_starts, output_starts, "
     "bias_starts or forbidden_starts, [rows + 1], and end\nwhere those of "
     "the next begin. Ids of a row increase, but for forbidden_ids. "
     "output_counts and bias_ids' bias f32 are\nof each id; repetition (1), "
     "presence (0) and frequency (0) are f32[rows].\n"},
    {"apply_rotary_emb",
     "out[a] = x[a] cos[t, j] - x[b] sin[t, j];  out[b] = x[b] cos[t, j] + "
     "x[a] sin[t, j]\n"
     "for each pair j = (a, b) of a head. x[tokens, heads, head_dim] or "
     "[batch, tokens, heads, head_dim],\n" FLOATS
     "; cos and sin[tokens, head_dim / 2]; out is like x.\n"},
    {"assign_draft_cache_locs_contiguous_cpu",
     "Reads the topk * num_steps slots behind the seq_lens[b] first ones of "
     "row req_pool_indices[b] of req_to_token, for each\nrequest, into "
     "out_cache_loc i64[requests * topk * num_steps]. req_to_token is "
     "i32[rows, pool_len]; the rest is i32 or i64.\n"},
    {"assign_extend_cache_locs_cpu",
     "Reads out_cache_loc from req_to_token[req_pool_indices[b], "
     "start_offset[b] .. end_offset[b]), request after "
     "request.\nreq_to_token is i32[rows, pool_len], out_cache_loc i64; "
     "rows and offsets[requests] are i32 or i64.\n"},
    {"assign_req_to_token_pool_cpu",
     "Writes out_cache_loc to req_to_token[req_pool_indices[b], "
     "start_offset[b] .. end_offset[b]), request after "
     "request.\nreq_to_token is i32[rows, pool_len], out_cache_loc i64; "
     "rows and offsets[requests] are i32 or i64.\n"},
    {"build_draft_decode_metadata_cpu",
     "Row b * topk + c of out, i32[requests * topk, pool_len], gets the "
     "seq_lens[b] first slots of row req_pool_indices[b] of\nreq_to_token, "
     "and then those of candidate c's num_steps drafts; what follows is not "
     "written. req_to_token is\ni32[rows, pool_len]; req_pool_indices and "
     "seq_lens[requests] are i32 or i64.\n"},
    {"build_tree_kernel_efficient_cpu",
     "Builds trees of n = draft_token_num nodes from the draft's scores: "
     "number selected_index[b, i - 1] is node i, and\nparent_list[b, number "
     "/ topk] its parent's number. tree_mask u8 is [requests * n * n] with "
     "tree_mask_mode 1; with 0\nthe seq_len columns of what comes before "
     "each row stand before it, and are left as they "
     "are.\nparent_list[requests, topk * (depth - 1) + 1], "
     "selected_index[requests, n - 1], "
     "verified_seq_len[requests],\npositions[requests * n], and the tree "
     "(retrive_index, retrive_next_token, retrive_next_sibling) [requests, "
     "n], are i32 or i64.\n"},
    {"causal_conv1d_fn", CONV1D
     "conv_states is written. cache_indices[sequences] are slots. " SEQUENCES
         DRAFTS("destination_indices")},
    {"causal_conv1d_fwd_cpu", CONV1D
     "conv_states is written, and may be dense, [slots, channels, width - 1]; "
     "cache_indices[sequences] are slots.\nis_vnni: weight is what "
     "causal_conv1d_weight_pack made. pad_slot_id is null_slot.\n" SEQUENCES},
    {"causal_conv1d_update", CONV1D
     "Without query_start_loc each token is a sequence. conv_state is "
     "written; conv_state_indices[sequences]\nare slots.\n" STATES "\n" DRAFTS(
         "destination_indices") "With one slot each, num_accepted_tokens - 1 "
                                "is the row of the "
                                "slot to begin from.\n"},
    {"causal_conv1d_update_cpu", CONV1D
     "Each token is a sequence. conv_states is written, and may be dense, "
     "[slots, channels, width - 1];\nconv_state_indices[tokens] are slots. "
     "is_vnni: weight is what causal_conv1d_weight_pack made.\nNo "
     "cache_seqlens. pad_slot_id is null_slot.\n" STATES "\n"},
    {"causal_conv1d_weight_pack",
     "weight[channels, 4], " FLOATS ", channels a multiple of 32, as "
     "[channels / 32][2][32][2] of pairs.\n"},
    {"chunk_gated_delta_rule",
     DELTA "state is written; state_indices[sequences]. use_qk_l2norm divides "
           "q and k by their norms.\n" SEQUENCES DRAFTS("destination_indices")},
    {"chunk_gated_delta_rule_cpu",
     DELTA "query, key and value are q, k and v; initial_state is written in "
           "the slots initial_state_indices[sequences].\ncu_seqlens"
           "[sequences + 1] are starts. output_final_state has no effect; "
           "head_first: False. eps is that of the norms.\n"},
    {"column_parallel_linear",
     LAYER RANKS "Each rank has n / ranks columns of out, or with "
                 "gather_output all.\n"},
    {"compute_slot_mapping_kernel_impl",
     "slot_mapping[t] = block_table[r, p / block_size] * block_size + p % "
     "block_size, p = positions[t], for the tokens t of\nrequest r. "
     "slot_mapping is i64; query_start_loc[requests + 1], "
     "positions[tokens], block_table[requests, blocks] are i32\nor i64.\n"},
    {"conv2d",
     "out[b, o, y, x] = bias[o] + sum over i, dy, dx of weight[o, i, dy, dx] "
     "* x[b, i, y * stride_h + dy * dilation_h - padding_h, ..]\n"
     "with zeros outside of x, and channels in groups. x[batch, channels, "
     "height, width], weight[out_channels, channels / groups, kernel_h, "
     "kernel_w] and bias[out_channels] are " FLOATS
     "; out[batch, out_channels, out_h, out_w] is like x.\n"},
    {"conv3d",
     "As conv2d, with depth: x[batch, channels, depth, height, width], "
     "weight[out_channels, channels / groups, kernel_d, kernel_h, kernel_w] "
     "and bias[out_channels] are " FLOATS
     "; out[batch, out_channels, out_d, out_h, out_w] is like x.\n"},
    {"convert", "out = x, rounded to nearest even. x[.., n] is " FLOATS
                "; out has out_dtype, one of these.\n"},
    {"convert_weight_packed",
     "The bytes that SGLang's products read, for is_vnni. weight[n, k] or "
     "[experts, n, k], bf16, f16, i8,\nf8e4m3 or u8 (two 4-bit codes); n % 16 "
     "= 0 (i8, u8: n % 32), k % 32 = 0. out is like weight; of i8\n[.., n, k "
     "+ 4]; of bf16 or f16 with n < 16 it is f32[k, n].\n"},
    {"copy_and_expand_eagle_inputs_kernel_impl",
     "Writes to out_input_ids target_token_ids[t] of each request, t from "
     "query_start_loc[r] (one later with shift_input_ids)\nto "
     "query_end_loc[r], "
     "then next_token_ids[r], num_padding_slots_per_request - 1 times "
     "parallel_drafting_token_id, and\npadding_token_id for each rejected "
     "token. out_positions count from target_positions of the first token. "
     "out_new_token_indices\nare the places of the new tokens, "
     "out_hidden_state_mapping those of the request's (with "
     "shift_input_ids).\nout_is_rejected_token_mask and "
     "out_is_masked_token_mask are u8; the others i32 or i64, outputs like "
     "their inputs.\n"},
    {"copy_stub",
     "out <- input, rounded to nearest even. out[..] and input[..] have one "
     "shape and are " FLOATS ".\n"},
    {"cpu_attention_with_kv_cache",
     "output[i, h] = sum over t of softmax(scale q[i, h] . k[t, g]) v[t, g], "
     "g = h / (q_heads / kv_heads)\n"
     "query[tokens, q_heads, head_dim] and output are " FLOATS
     "; key_cache and value_cache[pages, kv_heads,\npage_size, head_dim] as "
     "cpu_attn_reshape_and_cache writes them. query_start_loc i32[requests + "
     "1],\nseq_lens i32[requests], block_table i32[requests, any]; "
     "alibi_slopes f32[q_heads], s_aux[q_heads],\ndynamic_causal "
     "u8[requests]. scheduler_metadata must be of this step.\n"},
    {"cpu_attn_get_scheduler_metadata",
     "Builds the schedule of a step in scheduler_metadata. seq_lens "
     "i32[requests], query_start_loc\ni32[requests + 1] from 0 on, "
     "dynamic_causal u8[requests]; dtype, that of the queries, is " FLOATS
     ".\nwindow_size keys are seen, that of the query included; -1: all.\n"},
    {"cpu_attn_reshape_and_cache",
     "Writes key and value[tokens, kv_heads, head_dim], " FLOATS
     ", to slot_mapping i64[tokens] (negative:\nskipped) of key_cache and "
     "value_cache[pages, kv_heads, page_size, head_dim], of these dtypes, or "
     "u8\nor fp8 with kv_cache_dtype fp8 or fp8_e5m2 and scales.\n"},
    {"create_onednn_mm",
     "Packs b[k, n], " FLOATS ", row-major or a transposed [n, k], into "
     "handler, for onednn_mm.\n"},
    {"create_onednn_scaled_mm",
     "Packs b i8[k, n] with b_scales f32[n] or [1] into handler, for "
     "onednn_scaled_mm. output_type is\n" FLOATS ".\n"},
    {"decode_attention_cpu",
     "output[b, h] = sum over t of softmax(sm_scale q[b, h] . k[t]) v[t] over "
     "the tokens of request b\n"
     "query[requests, q_heads, head_dim], output[requests, q_heads, "
     "v_head_dim], k_buffer[slots, kv_heads,\nhead_dim], v_buffer[slots, "
     "kv_heads, v_head_dim] are " FLOATS
     ". Token t of request b is in slot\nreq_to_token[req_pool_indices[b], "
     "t], t < seq_lens[b]. key, value[requests, kv_heads, ..] and loc\n"
     "i64[requests], where given, are written first, of two in one slot the "
     "last; where rows of v_buffer\nbegin those of k_buffer, key alone. "
     "attn_logits is not read. encoder_lens[requests]; sinks[q_heads].\n"},
    {"dual_chunk_rotary_embedding",
     "Returns query rotated five times, [tokens, 5 heads, head_dim], and key "
     "rotated once, by the position\nwithin a chunk (Qwen2.5-1M). "
     "positions[tokens] are i32 or i64; query and key[tokens, heads, "
     "head_dim]\nare " FLOATS ". 0 <= local_size < chunk_size.\n" ROPE},
    {"eagle_prepare_inputs_padded_kernel_impl",
     "num_rejected_tokens_gpu[r] = drafts + 1 - "
     "valid_sampled_tokens_count[r] (0 without drafts), "
     "token_indices_to_sample[r] =\nquery_start_loc_gpu[r + 1] - 1 - "
     "num_rejected_tokens_gpu[r], r < num_reqs. "
     "cu_num_draft_tokens[requests] are the ends\nof the requests' drafts. "
     "All are i32 or i64.\n"},
    {"eagle_prepare_next_token_padded_kernel_impl",
     "valid_sampled_tokens_count[r] counts the first "
     "num_sampled_tokens_per_req tokens of sampled_token_ids[r] that are "
     "in\n[0, vocab_size), and next_token_ids[r] is the last of them; of "
     "none, and of a request that discard_request_mask\nu8[requests] marks, "
     "0 and backup_next_token_ids[r]. Ids are i32 or i64, all the same.\n"},
    {"eagle_step_slot_mapping_metadata_kernel_impl",
     "Advances each request by a token: out_clamped_positions[r] = "
     "positions[r] + 1, its slot in out_slot_mapping[r], and\nseq_lens[r] + "
     "1; from max_model_len on 0, pad_id and 1. Slots behind the requests "
     "become pad_id. Positions and slots\nthat are written are i64; "
     "positions, block_table[requests, blocks] and seq_lens are i32 or "
     "i64.\n"},
    {"expand_kernel_impl",
     "output[t] = input[r] for the tokens t of request r, with replace_to "
     "in place of replace_from. input[requests] and\noutput[tokens] are "
     "both f32, i32 or i64; cu_num_tokens[requests], i32 or i64, are the "
     "ends of the requests' tokens.\n"},
    {"expand_to_tokens",
     "output[t] = input[r] for the tokens t of request r, with replace_to "
     "in place of replace_from. input[requests] and\noutput[tokens] are "
     "both f32, i32 or i64; cu_num_tokens[requests], i32 or i64, are the "
     "ends of the requests' tokens.\n"},
    {"extend_attention_cpu",
     "Attention of the last extend_seq_lens[b] tokens of each request to all "
     "before them and themselves\n"
     "q_extend[tokens, q_heads, head_dim], o_extend[tokens, q_heads, "
     "v_head_dim], k_extend and v_extend\n[tokens, kv_heads, ..], which are "
     "written to k_buffer and v_buffer[slots, kv_heads, ..] first, are\n" FLOATS
     ". req_to_token, req_pool_indices and seq_lens as for "
     "decode_attention_cpu;\nextend_start_loc[requests] is where a request's "
     "queries begin. encoder_lens[requests]; sinks[q_heads];\ntree_mask "
     "u8[tokens * n].\n"},
    {"fatrelu_and_mul",
     "out = (x[:d] > threshold ? x[:d] : 0) * x[d:]\n" GATED},
    {"fill_accept_out_cache_loc_cpu",
     "accept_out_cache_loc gets out_cache_loc[i] for each i of accept_index "
     "that is not -1, one behind the other.\naccept_index[n] or [requests, "
     "steps] is i32 or i64, the slots are i64.\n"},
    {"fill_bonus_tokens_cpu",
     "bonus_tokens[b] = accept_tokens[b, accept_lens[b] - 1], and left as "
     "it is if accept_lens[b] is 0.\naccept_tokens[requests, "
     "accept_stride], accept_lens and bonus_tokens[requests] are i32 or "
     "i64, both tokens the same.\n"},
    {"fp8_scaled_mm_cpu",
     "out = mat1 (mat2 * scales2)^T + bias\n" MM "mat1 and out are " FLOATS
     "; mat2 is f8e4m3; scales2 f32[ceil(n / "
     "block_n), ceil(k / block_k)].\n"},
    {"fused_add_rms_norm",
     "residual <- round(x + residual);  x <- residual / sqrt(mean over i of "
     "residual^2 + eps) * weight\n"
     "x and residual are [.., hidden], weight[hidden] (None: 1): " FLOATS
     ".\n"},
    {"fused_add_rms_norm_quant",
     "residual <- round(x + residual), whose norm is quantised, a scale for "
     "each row\n" QUANT_NORM
     "Returns codes[rows, hidden] and scales f32[rows].\n"},
    {"fused_add_rms_norm_static_quant",
     "residual <- round(x + residual), whose norm / scale is "
     "quantised\n" QUANT_NORM "Returns codes[rows, hidden].\n"},
    {"fused_experts_cpu", ROUTES},
    {"fused_gdn_gating_cpu",
     "out0 = -exp(a_log) ln(1 + e^(a + dt_bias)), f32;  out1 = 1 / (1 + "
     "e^-b), like b\na and b[tokens, heads], a_log[heads] and "
     "dt_bias[heads] are " FLOATS ".\n"},
    {"fused_moe", ROUTED},
    {"fused_sigmoid_gating_delta_rule_update_cpu",
     DELTA GATED_RULE "initial_state_indices[sequences].\n"},
    {"fused_sigmoid_gating_delta_rule_update_spec_cpu", DELTA GATED_RULE
     "spec_state_indices[sequences, columns]: a sequence begins from column "
     "num_accepted_tokens - 1, and\nthe state after token i is left in column "
     "i.\n"},
    {"gated_delta_net",
     "q, k, v, z, b, a = in_proj(x); q, k, v = silu(causal_conv1d(q, k, v));\n"
     "g = -exp(a_log) ln(1 + e^(a + dt_bias)), beta = 1 / (1 + e^-b); out = "
     "out_proj(rms(y) norm silu(z)),\ny by the gated delta rule\n" MIXER
     "state[slots, value_heads, dk, dv]; a_log and dt_bias f32[value_heads]; "
     "norm[dv]; state_indices\n[sequences]. " SEQUENCES},
    {"gated_delta_rule_update",
     DELTA "Without query_start_loc each token is a sequence. state is "
           "written; state_indices[sequences].\n" STATES
           "\n" DRAFTS("destination_indices")},
    {"gather_rows",
     "out[t] = x[rows[t]]. x[n, columns] has any dtype; rows[m] are i32 or "
     "i64; out[m, columns].\n"},
    {"gelu", "out = gelu(x); approximate: none (erf) or tanh\n" ROWS},
    {"gelu_and_mul",
     "out = gelu(x[:d]) * x[d:]; approximate: none (erf) or tanh\n" GATED},
    {"gelu_and_mul_sparse",
     "out = gelu(max(g - cutoff, 0)) * x[d:], g = x[:d], cutoff = mean(g) + "
     "quantile(activation_sparsity)\n* standard deviation of g, of each "
     "row\n" GATED},
    {"gelu_fast", "out = gelu(x), by tanh\n" ROWS},
    {"gelu_new", "out = gelu(x), by tanh\n" ROWS},
    {"gemma_rms_norm",
     "out = x / sqrt(mean over i of x^2 + eps) * (1 + weight)\n"
     "x[.., hidden] and weight[hidden] are " FLOATS "; out is like x.\n"},
    {"grouped_topk",
     "Chooses topk_group of num_expert_group groups of experts, then topk "
     "experts in them.\nscoring_func: softmax, sigmoid or sqrtsoftplus. "
     "e_score_correction_bias[experts] takes part in the\nchoice alone; "
     "hidden_states[n, any] is not read.\n"
     "gating_output[n, experts] is " FLOATS
     ". Returns weights f32[n, topk] and ids i32[n, topk].\n"},
    {"int8_scaled_mm_cpu",
     "out = scales1 scales2 ((mat1 - 128) mat2^T) + bias\n" MM
     "mat1 u8 with scales1 f32[rows], as per_token_quant_int8_cpu makes them; "
     "mat2 i8 with scales2 f32[n] or\n[1]; out_dtype: " FLOATS ".\n"},
    {"int8_scaled_mm_with_quant",
     "As int8_scaled_mm_cpu, of mat1 that is quantised row by row\n" MM
     "mat1 and out are " FLOATS "; mat2 i8 with scales2 f32[n] or [1]. "
     "out_dtype \"\": mat1's.\n"},
    {"l2_norm",
     "out = x / sqrt(sum over i of x^2 + eps)\n"
     "x[.., hidden] is " FLOATS "; out is like x, of out_dtype; \"\": x's.\n"},
    {"layer_norm",
     "out = (x - mean(x)) / sqrt(mean over i of (x - mean(x))^2 + eps) * "
     "weight + bias\n"
     "x[.., hidden], weight and bias[hidden] (None: 1 and 0) are " FLOATS
     "; out is like x, of out_dtype; \"\": x's.\n"},
    {"linear",
     "out = act(x b + bias) + residual, where weights hold b[k, n] and bias "
     "(quern.Linear)\n"
     "x[.., k] is " FLOATS "; out[.., n] has out_dtype; \"\": the "
     "residual's dtype, or x's. residual[.., n] is\nadded to in place, so "
     "out must be it. activation: none, silu, gelu, gelu_tanh; for weights "
     "that "
     "are\ngated, whose out has n / 2 columns, silu_and_mul, gelu_and_mul, "
     "gelu_tanh_and_mul or\nswigluoai_and_mul. activations: exact, or "
     "int8_blocks for weights in blocks and int4 in groups.\n"},
    {"logits_processor",
     "logits <- scale * soft_cap * tanh(logits / soft_cap); soft_cap 0: scale "
     "* logits. Rounded after each\nstep. logits[n, vocab] is " FLOATS ".\n"},
    {"mamba_mixer", MAMBA MIXER
     "ssm_state[slots, 1, channels, d_state]; a[1, channels, d_state], d and "
     "dt_bias[1, channels];\ndt_norm[dt_rank], b_norm and c_norm[d_state]; "
     "state_indices[sequences]. " SEQUENCES},
    {"mamba_mixer2",
     "z, u, b, c, dt = in_proj(x); u, b, c = silu(causal_conv1d(u, b, c)); y "
     "= state_update(u, dt, a, b, c, d);\nout = out_proj(rms(y silu(z)) norm) "
     "over n_groups groups; without norm out_proj(y silu(z))\n" MIXER
     "ssm_state[slots, heads, head_dim, d_state]; a, d and dt_bias[heads]; "
     "norm[heads * head_dim];\nstate_indices[sequences]. " SEQUENCES},
    {"merge_attn_states",
     "output = (exp(prefix_lse) prefix_output + exp(suffix_lse) "
     "suffix_output) / exp(output_lse),\noutput_lse = log(exp(prefix_lse) + "
     "exp(suffix_lse)); -inf or +inf: a part without keys\n"
     "output, prefix_output and suffix_output[tokens, heads, head_dim] "
     "are " FLOATS "; each lse is f32[heads,\ntokens]. Tokens from "
     "prefill_tokens_with_context on have no prefix; -1: all have one.\n"},
    {"merge_states",
     "out = (exp(prefix_lse) prefix + exp(suffix_lse) suffix) / exp(lse),\n"
     "lse = log(exp(prefix_lse) + exp(suffix_lse)); -inf or +inf: a part "
     "without keys\n"
     "prefix and suffix[tokens, heads, head_dim] are " FLOATS
     "; prefix_lse and suffix_lse f32[tokens,\nheads]. Returns out, of "
     "out_dtype (\"\": prefix's), and lse f32[tokens, heads].\n"},
    {"mixer2_gated_rms_norm",
     "out = h / sqrt(mean over the group of h^2 + eps) * weight, h = x "
     "silu(gate)\n"
     "x, gate and out are [.., hidden], weight[hidden], " FLOATS
     "; n_groups groups of columns.\n"},
    {"mm_encoder_attn",
     "Attention of every query to every key of its sequence; scale 0: 1 / "
     "sqrt(head_size)\n"
     "query and out are [batch, tokens, num_heads * head_size] or [batch, "
     "tokens, num_heads, head_size],\nkey and value the same with "
     "num_kv_heads, " FLOATS
     ". cu_seqlens i32[sequences + 1] cuts each of the\nbatch into "
     "sequences.\n"},
    {"modular_fused_moe", ROUTES},
    {"mrope",
     "Rotates query and key in place, as rotary_embedding, by three "
     "positions: pair j takes time, row or\ncolumn by the sections, which "
     "together have rot_dim / 2 pairs\n"
     "positions[3, n] are i32 or i64, below max_position; query and key[n, "
     "heads, head_dim] are " FLOATS ".\n" ROPE},
    {"mul_and_silu", "out = x[:d] * silu(x[d:])\n" GATED},
    {"multi_head_latent_attention",
     "DeepSeek's layer, from hidden_states[tokens, hidden] to out[tokens, "
     "hidden], " FLOATS "\n"
     "positions[tokens] are i32 or i64; q_norm[q_lora]; kv_norm[kv_lora]; "
     "cache u8[pages, bytes of a page] is\nwritten; residual[tokens, hidden] "
     "is added. Needs objects of C++: weights, layout, rope, step.\n"},
    {"onednn_mm",
     "c <- a b + bias, where handler holds b[k, n]. a[m, k] and c[m, n] "
     "are " FLOATS ", each on its\nown; bias[n] has c's dtype.\n"},
    {"onednn_scaled_mm",
     "c <- a_scales (b_scales ((a - azp) b)) + bias, where handler holds b[k, "
     "n]. a i8[m, k];\na_scales f32[m, 1] and azp i32[m, 1], one for each "
     "row, or [1]; azp_adj f32[n] or [1, n] is not read;\nc[m, n] and bias[n] "
     "have the "
     "handler's output type.\n"},
    {"pack_vnni", "Another name of convert_weight_packed. weight[32, k].\n"},
    {"paged_attention",
     "out[i, h] = sum over t of softmax(scale q[i, h] . k[t, g]) v[t, g], g = "
     "h / (q_heads / kv_heads)\n"
     "query[tokens, q_heads, head_dim] is " FLOATS
     "; out[tokens, q_heads, v_head_dim] has out_dtype (\"\": query's).\n"
     "cache is the pages of layout (quern.KvCache.pages), step says which "
     "sequences there are\n(quern.Schedule); alibi_slopes and sinks "
     "f32[q_heads]. scale 0: 1 / sqrt(head_dim). lse f32[tokens, q_heads] "
     "is written, if given:\nlog of the sum over t of exp(scale q . k).\n"},
    {"parallel_lm_head",
     "out = hidden weight^T + bias. hidden[.., k], weight[vocab + added, k], "
     "bias[vocab + added] are\n" FLOATS "; out[.., vocab + added].\n" RANKS},
    {"per_token_quant_int8_cpu",
     "codes = 128 + int8 of mat1 / scale, scale = max |mat1| / 127 of each "
     "row\n"
     "mat1[.., k] is " FLOATS ". Returns codes u8[.., k] and scales "
     "f32[rows].\n"},
    {"plamo2_mamba_mixer", MAMBA MIXER
     "ssm_state[slots, heads, head_dim, d_state]; a, d and dt_bias[heads]; "
     "dt_norm[dt_rank], b_norm and\nc_norm[d_state]; "
     "state_indices[sequences]. " SEQUENCES},
    {"quant_fp8",
     "codes = e4m3 of x / scale, scale = max |x| / 448 of the tensor, token "
     "or group\n"
     "x[.., k], of m rows, is " FLOATS
     ". Returns codes f8e4m3[.., k] and scales f32[1] "
     "(granularity tensor), [m, 1]\n(token) or [m, ceil(k / group_size)] "
     "(group). ue8m0: scales are powers of two. scale_ub 0: none.\n"},
    {"quant_int8",
     "codes = int8 of x / scale, scale = max |x| / 127 of each row\n"
     "x[.., k], of m rows, is " FLOATS
     ". Returns codes i8[.., k] and scales f32[m].\n"},
    {"quick_gelu", "out = x / (1 + e^(-1.702 x))\n" ROWS},
    {"reconstruct_indices_from_tree_mask_cpu",
     "Finds the trees of n = draft_token_num nodes that have tree_mask "
     "u8[batch_size * n * n]. "
     "verified_seq_len[batch_size],\npositions[batch_size * n], and the "
     "tree (retrive_index, retrive_next_token, retrive_next_sibling) "
     "[batch_size, n], are i32 or i64.\n"},
    {"rejection_greedy_sample_kernel_impl",
     REJECT_GREEDY "At most max_spec_len drafts of a request.\n"},
    {"rejection_random_sample_kernel_impl",
     REJECT_RANDOM "At most max_spec_len drafts of a request. vocab_size "
                   "columns count; no_draft_probs: draft_probs is not read.\n"},
    {"rejection_sample", REJECT_RANDOM},
    {"rejection_sample_greedy", REJECT_GREEDY},
    {"relu2", "out = max(x, 0)^2\n" ROWS},
    {"replicated_linear", LAYER},
    {"rms_norm",
     "out = x / sqrt(mean over i of x^2 + eps) * weight\n"
     "x[.., hidden] and weight[hidden] (None: 1) are " FLOATS
     "; out has out_dtype (\"\": x's). var_hidden_size:\nthe mean is over so "
     "many columns; 0: all.\n"},
    {"rms_norm_gated",
     "out = rms(x act(z)) weight, or with norm_before_gate rms(x) weight "
     "act(z); z None: rms(x) weight,\nrms(h) = h / sqrt(mean over the group "
     "of h^2 + eps)\n"
     "x, z and out are [.., hidden], weight[hidden], " FLOATS
     "; group_size 0: hidden. activation: silu or sigmoid.\n"},
    {"rms_norm_quant",
     "codes = q of rms_norm(x) / scale, a scale for each row\n" QUANT_NORM
     "Returns codes[rows, hidden] and scales f32[rows].\n"},
    {"rms_norm_static_quant", "codes = q of rms_norm(x) / scale\n" QUANT_NORM
                              "Returns codes[rows, hidden].\n"},
    {"rotary_embedding",
     "Rotates each pair (a, b) of query and key in place by position * "
     "base^(-2 "
     "j / rot_dim):\na' = a cos - b sin,  b' = b cos + a sin\n"
     "positions[n] are i32 or i64, below max_position; query[n, heads, "
     "head_dim] and key[n, kv_heads,\nhead_dim] are " FLOATS ".\n" ROPE},
    {"rotate_input_ids_cpu",
     "Moves the extend_seq_lens[b] tokens of input_ids from "
     "extend_start_loc[b] on one place to the left, and "
     "writes\ntopk_index[b] behind them, or to place select_index[b]. "
     "Starts and lengths are i32 or i64, the others i64.\n"},
    {"row_parallel_linear",
     LAYER RANKS "Each rank has k / ranks columns of x (input_is_parallel), "
                 "and the sum over ranks is returned\n(reduce_results).\n"},
    {"s8s8_compensation",
     "out i32[n] = 128 * sum over k of the weights. packed i8[n, k + 4] is "
     "what convert_weight_packed made.\n"},
    {"sample",
     "out i32[rows] = a token for each row of logits f32[rows, vocab]. step is "
     "an object of C++; Python has\nquern.Sampler.\n"},
    {"sample_recovered_tokens", RECOVERED},
    {"sample_recovered_tokens_kernel_impl", RECOVERED
     "vocab_size columns count; no_draft_probs: draft_probs is not read.\n"},
    {"selective_state_update",
     "s <- exp(min(a dt', 0)) s + b (dt' x);  out = (s . c + d x) silu(z);  "
     "dt' = dt + dt_bias, or with\ndt_softplus ln(1 + e^(dt + dt_bias))\n"
     "state[slots, heads, head_dim, d_state] is written; x, z and out are "
     "[tokens, heads, head_dim], b and\nc[tokens, groups, d_state], " FLOATS
     ". a[heads], dt[tokens, heads], d and dt_bias[heads] (Mamba-2), "
     "or\na[heads, head_dim, d_state], dt[tokens, heads, head_dim], d and "
     "dt_bias[heads, head_dim] (Mamba-1).\nstate_batch_indices[sequences]; "
     "query_start_loc[sequences + 1]; None: each token is a sequence. "
     "Mamba-1 may come\nwithout the dimension of heads; b and c may have "
     "another dtype than x.\n" STATES "\n" DRAFTS("dst_state_batch_indices")},
    {"short_conv",
     "b, c, u = in_proj(x); out = out_proj(c * causal_conv1d(b * u))\n" MIXER
     "state_indices[sequences]. " SEQUENCES},
    {"sigmoid_mul",
     "out = x * sigmoid(gate). x and out are [.., d], gate[.., d] or [.., "
     "1], " FLOATS ". out_dtype \"\": x's.\n"},
    {"silu", "out = x / (1 + e^-x)\n" ROWS},
    {"silu_and_mul", "out = silu(x[:d]) * x[d:]\n" GATED},
    {"static_quant_fp8",
     "out = e4m3 of x / scale. x[.., k], of m rows, is " FLOATS
     "; scale f32[ceil(m / "
     "block_rows), ceil(k / block_cols)], where a\nblock of 0 is all rows or "
     "columns; out f8e4m3[.., k]. A single scale may be [1].\n"},
    {"swigluoai_and_mul",
     "out = g sigmoid(alpha g) * (clamp(u, -limit, limit) + 1), g = "
     "min(x[0::2], limit), u = x[1::2]\n" GATED},
    {"token_logprobs",
     "logprob = l - max l - log(sum of exp(l - max l)); rank: 1 for the "
     "largest logit, and of equal ones the\nlower id first. logits f32[rows, "
     "vocab]; ids i32[rows, given], or -1 for none.\n"
     "Returns the likeliest ids i32[rows, top_n], their logprobs f32, and "
     "logprobs f32[rows, given] and ranks\ni32[rows, given] of ids.\n"},
    {"topk_sigmoid",
     "The topk largest of sigmoid(gating_output) + bias; renormalize: weights "
     "add up to 1\n" ROUTER},
    {"topk_softmax",
     "The topk largest of softmax(gating_output) + bias; renormalize: weights "
     "add up to 1\n" ROUTER},
    {"transformers_fused_moe", ROUTES},
    {"unquantized_fused_moe", ROUTED},
    {"varlen_attention",
     "Attention of sequences that lie one after another; scale 0: 1 / "
     "sqrt(head_dim)\n"
     "query[tokens, q_heads, head_dim], key[kv_tokens, kv_heads, head_dim], "
     "value[kv_tokens, kv_heads,\nv_head_dim], " FLOATS
     "; cu_seqlens_q and cu_seqlens_k i32[sequences + 1]. causal: the last "
     "query\nstands where the last key does.\n"},
    {"verify_tree_greedy_cpu",
     "Walks each tree from its root to children whose candidates are "
     "target_predict of the node before. accept_index gets\nthe numbers of "
     "the nodes, accept_token_num how many but the root, predicts "
     "target_predict of each.\npredicts i32[requests * n], accept_index "
     "i32[requests, steps], accept_token_num i32[requests]; candidates, the "
     "tree\n(retrive_index, retrive_next_token, retrive_next_sibling) and "
     "target_predict[requests, n] are i32 or i64.\n"},
    {"vocab_parallel_embedding",
     "out[t] = scale * weight[ids[t]]. ids[tokens] are i32 or i64; "
     "weight[rows, hidden] is " FLOATS
     ";\nout[tokens, hidden] has out_dtype (\"\": weight's).\n" RANKS},
    {"weight_packed_linear",
     "out = mat1 mat2^T + bias\n" MM "mat1 and mat2 are " FLOATS
     ", each on its own; out has mat1's dtype.\n"},
    {"write_kv", "Writes key and value[tokens, kv_heads, head_dim], " FLOATS
                 ", to slots i64[tokens] of cache, the pages of\nlayout "
                 "(quern.KvCache.pages).\n"},
    {"xielu",
     "out = x > 0 ? p x^2 + beta x : n (e^min(x, eps) - 1 - x) + beta x,  p = "
     "ln(1 + e^alpha_p),\nn = beta + ln(1 + e^alpha_n)\n" ROWS},
};

}  // namespace

absl::string_view OpDoc(absl::string_view op) {
  for (const Doc& doc : kDocs) {
    if (doc.op == op) return doc.text;
  }
  return NamedOpDoc(op);
}

}  // namespace quern
