#ifndef QUERN_GEMM_LAYERS_LINEAR_LAYER_H_
#define QUERN_GEMM_LAYERS_LINEAR_LAYER_H_

// Private: how an implementation of linear layers takes part in gemm/linear.h.
// One that a program may or may not link (gemm/onednn) names nothing of its
// library here, so that this compiles, and links, without it.

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

// The weights in the implementation's own form. Immutable; any number of
// threads may call Execute at once, each with a workspace of its own.
class LinearLayer {
 public:
  virtual ~LinearLayer() = default;

  virtual const char* target() const = 0;
  virtual std::string Explain(int64_t m) const = 0;
  virtual int64_t packed_bytes() const = 0;
  // For max_m >= 0 and max_workers >= 1.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                                 int max_workers) const = 0;
  // The strides that rows of so many elements, of a or of c, may have. A single
  // row has none.
  struct RowStrides {
    int64_t least = 0;
    int64_t most = std::numeric_limits<int64_t>::max();
  };
  virtual RowStrides row_strides(int64_t /*columns*/) const { return {}; }
  // Refuse arguments, or rows of a, that this implementation cannot run
  // although LinearPlan::CheckArgs accepts them.
  virtual absl::Status CheckArgs(const LinearArgs& /*args*/) const {
    return absl::OkStatus();
  }
  virtual absl::Status CheckRows(const AnyTensorView& /*a*/) const {
    return absl::OkStatus();
  }
  virtual void Execute(const LinearArgs& args, const Workspace& workspace,
                       Executor& executor) const noexcept = 0;
};

struct LinearImplementation {
  const char* name;
  // Why not, in one sentence without a subject: "has no activation". Empty: it
  // can. The spec has been proved.
  std::string (*why_not)(const LinearSpec& spec,
                         const LinearWeightsSpec& weights);
  absl::StatusOr<std::unique_ptr<const LinearLayer>> (*create)(
      const LinearSpec& spec, const LinearWeights& weights, Executor& executor);
};

// Whether the spec, but for its `kernels`, goes with such weights.
absl::Status CheckLinearSpec(absl::string_view op, const LinearSpec& spec,
                             const LinearWeightsSpec& weights);

// How rows of a that are not int8 become so.
Int8QuantizeSpec QuantizeSpecOf(const LinearSpec& spec);

}  // namespace quern

#endif  // QUERN_GEMM_LAYERS_LINEAR_LAYER_H_
