#ifndef QUERN_ATTENTION_ATTENTION_ARGS_H_
#define QUERN_ATTENTION_ATTENTION_ARGS_H_

// What the plans of attention check alike.

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/core/tensor_view.h"

namespace quern {

// The arguments of one call that have nothing to do with keys and values; see
// PagedAttentionArgs.
struct AttentionRows {
  const AttentionSchedule& schedule;
  AnyTensorView q;
  AnyTensorView out;
  MatrixView<float> lse;
  absl::Span<const float> alibi_slopes;
  absl::Span<const float> sinks;
};

// InvalidArgument names the argument, its value and the bound: a schedule of
// another spec, shapes and types that are not the spec's, negative strides,
// null memory, out or lse with rows that overlap, or that overlap one another
// or q. Unimplemented: slopes and a schedule with drafts. `op` opens the
// message.
absl::Status CheckAttentionRows(const char* op, const AttentionSpec& spec,
                                const AttentionRows& rows);

}  // namespace quern

#endif  // QUERN_ATTENTION_ATTENTION_ARGS_H_
