#ifndef QUERN_TOOLS_PERF_REGISTERED_REGISTERED_H_
#define QUERN_TOOLS_PERF_REGISTERED_REGISTERED_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/tensor_view.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"

namespace quern {

// Operators that are made by name: fused_add_rms_norm, gemma_rms_norm,
// rms_norm_gated, mixer2_gated_rms_norm, rotary_embedding and more. Check
// compares them with //testing's references in double (registered_check.h).
std::vector<OpEntry> RegisteredOps();

// What a test does to the tensors of a call, the schema's and then those that
// it returns, before Check reads them.
using Tamper = std::function<void(absl::Span<const AnyTensorView>)>;
absl::StatusOr<std::unique_ptr<Op>> MakeRegisteredForTest(const Args& args,
                                                          Tamper tamper);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_REGISTERED_REGISTERED_H_
