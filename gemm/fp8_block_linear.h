#ifndef QUERN_GEMM_FP8_BLOCK_LINEAR_H_
#define QUERN_GEMM_FP8_BLOCK_LINEAR_H_

// A linear layer on fp8 e4m3fn weights w[n, k] with one f32 scale for each
// block of block_n by block_k of them:
//
//   c[m, n] = round_c(bias[n] + sum over blocks g of k of
//       scales[n / block_n, g] * (sum over k in g of a[m, k] * w[n, k]))
//
// a and c are each f32, bf16 or f16. All 256 codes decode exactly: subnormal
// ones, both zeros, and NaN, which makes its column of c NaN. a is never
// rounded and no scale is multiplied into a weight, so nothing is rounded but
// the f32 sums, and c once, to nearest even. bf16 uses the CPU's bf16 dot
// product where there is one, which rounds as two fused steps and takes
// subnormal numbers of a for zero; everything else is widened to f32 and uses
// its fused multiply-add.
//
// A few rows of bf16 (16) decode in registers where the CPU can; more decode
// what they multiply once, to scratch. The bits of a row do not depend on the
// rows beside it, on the number of threads, or on which of the two it was.

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/block_linear.h"

namespace quern {

struct Fp8BlockLinearSpec {
  int64_t n = 0;  // columns of c
  int64_t k = 0;  // columns of a
  int64_t block_n = 128;
  int64_t block_k = 128;  // a multiple of 16, or k or more
  DType a = DType::kBF16;
  DType c = DType::kBF16;
};

class Fp8BlockLinearPlan {
 public:
  // n, k and the extents of blocks are at most this.
  static constexpr int64_t kMaxExtent = BlockLinear::kMaxExtent;

  // `weights` is f8e4m3[n, k], `scales` f32[ceil(n / block_n), ceil(k /
  // block_k)], each with any row stride; the last blocks may be ragged. `bias`
  // is f32[n], or of rank 0 for none. All are copied. Uses `executor` to pack.
  //
  // InvalidArgument: n, k, block_n or block_k outside [1, kMaxExtent]; block_k
  // < k that is no multiple of 16; weights, scales or bias of another dtype,
  // rank or shape, null or misaligned.
  // Unimplemented: a or c that is not f32, bf16 or f16.
  // ResourceExhausted: no memory for the packed weights.
  static absl::StatusOr<Fp8BlockLinearPlan> Create(
      const Fp8BlockLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& scales, const AnyTensorView& bias,
      Executor& executor);

  const Fp8BlockLinearSpec& spec() const { return spec_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return linear_.target(); }
  // "packed AVX3_ZEN4 bf16 dot, decoded in registers, tiles of 1 x 128".
  std::string Explain(int64_t m) const { return linear_.Explain(m); }
  // Of codes and scales.
  size_t packed_bytes() const { return linear_.packed_bytes(); }

  // Of the workspace that Execute needs for up to max_m rows on up to
  // max_workers workers.
  int64_t WorkspaceBytes(int64_t max_m, int max_workers) const {
    return linear_.WorkspaceBytes(max_m, max_workers);
  }

  // Whether Execute may be called with these: a is [m, k], c is writable and
  // [m, n], both of the spec's dtypes, and they do not overlap.
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& c) const {
    return linear_.CheckArgs(a, c);
  }

  // Writes c and nothing else; reads nothing outside the rows of a. m = 0 does
  // nothing. Any number of threads may call it at once, each with its own
  // workspace, and an executor that allows it. Allocates nothing. The workspace
  // has WorkspaceBytes(m, executor.num_workers()) or more: with less, aborts.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               Workspace workspace, Executor& executor) const noexcept {
    linear_.Execute(a, c, workspace, executor);
  }

 private:
  Fp8BlockLinearPlan(const Fp8BlockLinearSpec& spec, BlockLinear linear)
      : spec_(spec), linear_(std::move(linear)) {}

  Fp8BlockLinearSpec spec_;
  BlockLinear linear_;
};

}  // namespace quern

#endif  // QUERN_GEMM_FP8_BLOCK_LINEAR_H_
