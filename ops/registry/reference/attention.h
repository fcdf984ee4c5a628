#ifndef QUERN_OPS_REGISTRY_REFERENCE_ATTENTION_H_
#define QUERN_OPS_REGISTRY_REFERENCE_ATTENTION_H_

// Writing to a paged cache, and attention over it, as plain loops for the
// providers called "reference". Arguments must be ones that the plans accept.

#include <cstdint>

#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/write_kv.h"

namespace quern {

// Writes token by token and element by element. The bits equal those of
// WriteKvPlan without a rotation.
void NativeWriteKv(const WriteKvArgs& args) noexcept;

// Attention with sums in double and one rounding. `sums` is scratch of
// v_head_dim elements.
void NativeAttendSequence(const AttentionSpec& spec,
                          const PagedAttentionArgs& args, int64_t index,
                          const AttentionSequence& sequence,
                          double* sums) noexcept;

// NativeAttendSequence for every sequence of the schedule. A sequence has the
// pages of its index.
void NativePagedAttention(const AttentionSpec& spec,
                          const PagedAttentionArgs& args,
                          double* sums) noexcept;

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_ATTENTION_H_
