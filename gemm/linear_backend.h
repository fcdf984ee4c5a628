#ifndef QUERN_GEMM_LINEAR_BACKEND_H_
#define QUERN_GEMM_LINEAR_BACKEND_H_

// How a matrix library that a program may or may not link takes part in
// gemm/linear.h and gemm/scaled_linear.h. Nothing here names the library's own
// types, so the two compile, and link, without it.
//
// The one backend is //gemm/onednn. A program has it if that target is below
// the program's deps:
//
//   cc_binary(name = "engine", deps = ["@quern//gemm:linear",
//                                      "@quern//gemm/onednn"])

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/linear_spec.h"

namespace quern {

struct LinearArgs {
  AnyTensorView a;  // [m, k]
  AnyTensorView c;  // [m, n]
};

// One layer: the weights in the backend's own form. Immutable; any number of
// threads may call Execute at once, each with a workspace of its own.
template <typename Args>
class BackendLayer {
 public:
  virtual ~BackendLayer() = default;

  virtual std::string Explain(int64_t m) const = 0;
  virtual size_t packed_bytes() const = 0;
  // Bytes that Execute takes for any number of rows up to max_m >= 0.
  // ResourceExhausted if they do not fit in 63 bits.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                                 int workers) const = 0;
  virtual absl::Status CheckArgs(const Args& args) const = 0;
  virtual void Execute(const Args& args, const Workspace& workspace,
                       Executor& executor) const noexcept = 0;
};
using BackendLinear = BackendLayer<LinearArgs>;
using BackendScaledLinear = BackendLayer<ScaledLinearArgs>;

struct LinearBackend {
  const char* name;  // in target() and Explain()
  absl::StatusOr<std::unique_ptr<const BackendLinear>> (*linear)(
      const LinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& bias, Executor& executor);
  absl::StatusOr<std::unique_ptr<const BackendScaledLinear>> (*scaled_linear)(
      const ScaledLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& weight_scales, const AnyTensorView& bias,
      Executor& executor);
};

// Null if the program does not link //gemm/onednn.
const LinearBackend* OneDnnBackend();

// OneDnnBackend(), or FailedPrecondition in the name of `op`, which says what
// to link.
absl::StatusOr<const LinearBackend*> RequireOneDnn(const char* op);

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_BACKEND_H_
