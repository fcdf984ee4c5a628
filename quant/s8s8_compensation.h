#ifndef QUERN_QUANT_S8S8_COMPENSATION_H_
#define QUERN_QUANT_S8S8_COMPENSATION_H_

// x86 byte dot products multiply unsigned by signed. To compute s8 * s8, a
// kernel flips the sign bit of a (a + 128, now u8) and subtracts what that
// added:
//
//   sum_k a[k] * b[k, n] = sum_k (a[k] + 128) * b[k, n] - comp[n]
//   comp[n] = 128 * sum_k b[k, n]
//
// exactly, in int32, once per weight matrix. Positive, to be subtracted.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/s8s8_compensation_kernels.h"

namespace quern {

// Weights packed in panels of quads, described by numbers so that this package
// need not know who packed them:
//
//   data[p * panel_stride + l * panel_cols * 4 + c * 4 + i]
//       = b[l * 4 + i, p * panel_cols + c],  or 0 beyond k
//
// Columns beyond n, which only the last panel may have, are not read from.
struct Vnni4Panels {
  const int8_t* data = nullptr;
  int64_t panel_cols = 0;    // 16 in our layout, 32 in SGLang's
  int64_t panel_stride = 0;  // bytes from panel to panel
};

struct S8S8CompensationSpec {
  int64_t k = 0;
  int64_t n = 0;
};

class S8S8CompensationPlan {
 public:
  // |comp[n]| <= 128 * k * 128, and the accumulator that it corrects must not
  // wrap either:  2^14 * k < 2^31  <=>  k <= 2^17 - 1.
  static constexpr int64_t kMaxK = 131071;

  // InvalidArgument unless 0 <= k <= kMaxK and 0 <= n.
  static absl::StatusOr<S8S8CompensationPlan> Create(
      const S8S8CompensationSpec& spec);

  const S8S8CompensationSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // What the functions below need: `b` is [k, n] (FromKN) or [n, k] (FromNK)
  // with a row stride >= its columns; panels have panel_cols >= 1 and a
  // panel_stride >= ceil(k / 4) * panel_cols * 4; comp is [n]. The stride of a
  // single row or panel may be any number, those of more must span fewer than
  // 2^63 bytes. InvalidArgument otherwise.
  absl::Status CheckKN(MatrixView<const int8_t> b,
                       VectorView<int32_t> comp) const;
  absl::Status CheckNK(MatrixView<const int8_t> b,
                       VectorView<int32_t> comp) const;
  absl::Status CheckPanels(const Vnni4Panels& b,
                           VectorView<int32_t> comp) const;

  // Write comp[0, n), which must not overlap b; k = 0 gives zeros. No alignment
  // is needed. They allocate nothing; any number of threads may share the plan.
  // Cost: one read of b.
  void FromKN(MatrixView<const int8_t> b, VectorView<int32_t> comp,
              Executor& executor) const noexcept;
  void FromNK(MatrixView<const int8_t> b, VectorView<int32_t> comp,
              Executor& executor) const noexcept;
  void FromPanels(const Vnni4Panels& b, VectorView<int32_t> comp,
                  Executor& executor) const noexcept;

 private:
  explicit S8S8CompensationPlan(const S8S8CompensationSpec& spec)
      : spec_(spec), kernels_(GetS8S8CompensationKernels()) {}
  int64_t quads() const { return spec_.k / 4 + (spec_.k % 4 != 0); }

  S8S8CompensationSpec spec_;
  S8S8CompensationKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_QUANT_S8S8_COMPENSATION_H_
