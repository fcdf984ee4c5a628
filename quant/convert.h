#ifndef QUERN_QUANT_CONVERT_H_
#define QUERN_QUANT_CONVERT_H_

// Conversion between f32, bf16, f16, fp8 e4m3fn and fp8 e5m2, every pair:
//
//   out[r, c] = Round(F32(in[r, c]) * scale + bias[c])
//
// F32() is exact. The product and the sum are each rounded to f32, so there is
// no fused multiply-add. Round() is the identity for f32. These rules are the
// only ones in the library; one value at a time is quant/scalar_convert.h, and
// kernels share quant/convert-inl.h:
//
//   rounding   to nearest, ties to even
//   denormals  are values like any others, in both directions: none is flushed
//   zero       keeps its sign
//   infinity   stays infinity, finite overflow becomes infinity: kIeee. In
//              e4m3fn, which has none, both become NaN, as in a cast of torch.
//              With kSaturate both become the largest finite value of that sign
//              (the OCP saturating mode; what quantisers want).
//   NaN        stays NaN with its sign, also with kSaturate. Narrowing makes it
//              quiet and keeps the upper payload bits; e4m3fn has one NaN,
//              S.1111.111. bf16 -> f32 keeps all bits, the other widenings
//              make NaN quiet. The payload of a NaN that passed scale or bias
//              is unspecified.
//
// The bits are the same on every instruction set and for every number of
// workers. They assume the default rounding direction; without scale and bias
// they do not depend on flush-to-zero and denormals-are-zero.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/convert_kernels.h"
#include "quern/quant/float_format.h"

namespace quern {

struct ConvertSpec {
  DType from = DType::kF32;
  DType to = DType::kBF16;
  OverflowMode overflow = OverflowMode::kIeee;
  // kAuto streams an output that exceeds the last-level cache.
  Stores stores = Stores::kAuto;
};

// What may change from call to call. Neutral by default: no product, no sum.
struct ConvertTerms {
  float scale = 1.0f;
  VectorView<const float> bias;  // [cols], or empty: none
};

class ConvertPlan {
 public:
  // Unimplemented: `from` or `to` is an integer type.
  static absl::StatusOr<ConvertPlan> Create(const ConvertSpec& spec);

  const ConvertSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // What Execute needs: `in` and `out` of the spec's types and of equal shape,
  // both [cols] or both [rows, cols], as CheckInput and CheckOutput of
  // core/check_args.h want them; bias empty or [cols]. `out` shares no element
  // with bias, nor with `in` unless it is `in` itself (same address and stride)
  // and the element sizes agree. InvalidArgument otherwise.
  absl::Status CheckArgs(const AnyTensorView& in, const AnyTensorView& out,
                         const ConvertTerms& terms = {}) const;

  // Writes `out` and nothing between its rows. Sizes may be 0; addresses need
  // no alignment beyond their element's. Allocates nothing. Any number of
  // threads may share the plan. Costs one read and one write of memory from
  // about 100 KiB on; chunks of fixed size go to the executor.
  void Execute(const AnyTensorView& in, const AnyTensorView& out,
               Executor& executor,
               const ConvertTerms& terms = {}) const noexcept;

 private:
  struct Job;
  ConvertPlan(const ConvertSpec& spec, int64_t last_level_bytes);
  void Row(const Job& job, int64_t row, int64_t col, int64_t cols) const;

  ConvertSpec spec_;
  ConvertKernels kernels_;
  int64_t last_level_bytes_;
  uint32_t clamp_bits_ = 0;
};

}  // namespace quern

#endif  // QUERN_QUANT_CONVERT_H_
