#ifndef QUERN_OPS_REGISTRY_VLLM_ATTENTION_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_ATTENTION_OPS_H_

// vLLM's operators of attention on a CPU, by its names and with its arguments,
// over cache/write_kv.h, attention/schedule.h and attention/paged_attention.h,
// whose equations and roundings they have.

#include "absl/status/status.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/attention/varlen_attention.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What cpu_attn_get_scheduler_metadata makes and cpu_attention_with_kv_cache
// reads: the object that vLLM passes as a tensor of bytes. Both operators are
// made with its address. It is an object and not a tensor because it holds
// lists whose lengths depend on the values of a step; so it is made by Prepare,
// which may allocate and may refuse, and not by Execute, which may not. Layers
// with different windows need one each. It may be neither copied nor moved,
// because the schedule refers to the storage.
struct SchedulerMetadata {
  SchedulerMetadata() = default;
  SchedulerMetadata(const SchedulerMetadata&) = delete;
  SchedulerMetadata& operator=(const SchedulerMetadata&) = delete;

  // Upper limits over all steps. With max_sequences > 0, WorkspaceBytes of the
  // attention is enough for every step of up to max_rows tokens within these
  // limits; otherwise it is enough for the schedule below only.
  AttentionLimits limits = {};

  // Written by Prepare of cpu_attn_get_scheduler_metadata.
  AttentionSchedule schedule;
  VarlenAttentionStorage storage;
};

// cpu_attn_get_scheduler_metadata: seq_lens i32[requests], query_start_loc
// i32[requests + 1] from 0 on, dynamic_causal u8[requests] (0 or not), which
// replaces `causal`. Prepare builds the schedule of the step for the workers of
// its executor; Execute does nothing. window_size W >= 1 shows W keys, that of
// the query included, before it and where the request is not causal behind it;
// -1 shows all. num_req is the number of requests that the operator is made
// with; a later step may have another. dtype ("f32", "bf16" or "f16") is that
// of the queries. enable_kv_split is accepted and has no effect, because a
// split does not change a bit here.
//
// cpu_attn_reshape_and_cache: key and value[tokens, kv_heads, head_dim], with
// any token and head strides, go to slot_mapping[tokens] (i64; a negative one
// is skipped) of key_cache and value_cache[pages, kv_heads, page_size,
// head_dim]. The caches have any page and head strides, and no gaps within a
// head's page. How a token lies in it is this library's: KvForm::kPaired, which
// attention reads fastest, where page_size is a multiple of 16 and head_dim is
// even, else KvForm::kPlain. In vLLM it depends on the instruction set, and
// here it does not. value may have another head_dim than key.
//
// cpu_attention_with_kv_cache: query and output[tokens, q_heads, head_dim]
// (output: of the values' head_dim), with any token and head strides, over
// those caches. block_table i32[requests, any] has the pages of each request; a
// page before a window may be -1. alibi_slopes f32[q_heads]; s_aux[q_heads],
// the sinks, f32, bf16 or f16. scale 0 means 1 / sqrt(head_dim). causal,
// dynamic_causal, sliding_window, seq_lens and query_start_loc must be those
// that scheduler_metadata was built with: CheckArgs compares them.
//
// kv_cache_dtype "auto" is a cache of f32, bf16 or f16, not necessarily the
// dtype of the keys, and needs scales of 1. "fp8" and "fp8_e4m3", and
// "fp8_e5m2", are caches of u8 or of that type, of code * k_scale and code *
// v_scale, rounded to nearest.
//
// `isa` is accepted where it is one of vLLM's ("amx", "vec", "vec16", "neon",
// "rvv", "vxe", "vsx") or "auto", and has no effect: the CPU decides. Other
// names are refused.
//
// Providers: simd, and reference, which runs plain loops with sums in double on
// the calling thread. The schedule, integers only, has the provider reference
// alone.
absl::Status RegisterVllmAttentionOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ATTENTION_OPS_H_
