#ifndef QUERN_GEMM_PACKED_SCALED_LINEAR_H_
#define QUERN_GEMM_PACKED_SCALED_LINEAR_H_

// W8A8: a linear layer on int8 weights in packing/vnni_layout.h and activations
// that are int8, or become so on the way in, multiplied by our own kernels.
//
//   c[m, n] = round_c(a_scale[m] * (b_scale[n] * dot[m, n]) + bias[n])
//   dot[m, n] = sum over k of (q[m, k] - zero_point[m]) * b[k, n]
//
// or that with an activation and a residual, gemm/epilogue.h.
//
// dot is exact. It becomes f32 (one rounding), is multiplied and added in f32
// (the second product and the sum fused where the CPU can), and the result is
// rounded once to c, to nearest even. Nothing else decides a result: it has the
// same bits for any number of rows around it and for any number of threads.
//
// spec.a says what comes in:
//
//   f32, bf16, f16   Execute quantises each row by quant/int8_quantize.h, whose
//                    formulas and special cases hold (a row with a NaN or an
//                    infinity, per token, makes all of its results NaN)
//   i8               q is given, and with it a_scale[m] and zero_point[m], or
//                    the spec's for all rows
//
// There is no M x N temporary: sums become c while they are in cache.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/epilogue_kernels.h"
#include "gemm/scaled_linear_kernels.h"
#include "packing/vnni_layout.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"

namespace quern {

struct PackedScaledLinearSpec {
  int64_t n = 0;  // columns of b, and of c unless the activation is gated
  int64_t k = 0;  // columns of a
  DType a = DType::kBF16;
  DType c = DType::kBF16;
  // kNK: weights[n, k], as models store them; kKN: weights[k, n].
  WeightOrder order = WeightOrder::kNK;

  Int8Granularity granularity = Int8Granularity::kPerToken;
  Int8ZeroPoint zero_points = Int8ZeroPoint::kNone;
  // Per tensor only, as in Int8QuantizeSpec.
  float a_scale = 1.0f;
  int32_t a_zero_point = 0;

  LinearActivation activation = LinearActivation::kNone;
};

class PackedScaledLinearPlan {
 public:
  // dot must not wrap; sums on the way to it may. |q * b| <= 128 * 128:
  // 128 * 128 * k < 2^31  <=>  k <= 131071.
  static constexpr int64_t kMaxK = 131071;
  // With zero points |(q - zero_point) * b| <= 255 * 128:
  // 255 * 128 * k < 2^31  <=>  k <= 65793.
  static constexpr int64_t kMaxKZeroPoint = 65793;
  static constexpr int64_t kMaxN = (int64_t{1} << 31) - 1;

  // `weights` is i8 of any row stride; `weight_scales` is f32[n], or f32[1] for
  // all columns; `bias` is f32[n], or of rank 0 for none. All are copied. Uses
  // `executor` to pack.
  //
  // InvalidArgument: n outside [1, kMaxN]; k outside [1, kMaxK], or
  // kMaxKZeroPoint where zero points are used; an odd n of a gated activation;
  // weights, scales or bias of another dtype, rank or shape, null or
  // misaligned; a scale or zero point of the spec that Int8QuantizePlan
  // refuses. Scales of weights may be any number: an infinity or a NaN goes to
  // its column.
  // Unimplemented: a that is not f32, bf16, f16 or i8; c that is not f32, bf16
  // or f16.
  // ResourceExhausted: no memory for the packed weights.
  static absl::StatusOr<PackedScaledLinearPlan> Create(
      const PackedScaledLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& weight_scales, const AnyTensorView& bias,
      Executor& executor);

  // What Create refuses of a spec, whatever the weights.
  static absl::Status CheckSpec(const PackedScaledLinearSpec& spec);
  // How rows of a that is not i8 are quantised.
  static Int8QuantizeSpec QuantizeSpecOf(const PackedScaledLinearSpec& spec);

  const PackedScaledLinearSpec& spec() const { return spec_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // "packed AVX3_ZEN4 u8 x s8 dot, tiles of 8 x 32".
  std::string Explain(int64_t m) const;

  // Of the packed weights, and how many of them lie in huge pages.
  size_t packed_bytes() const { return packed_.bytes(); }
  size_t HugePageBytes() const { return packed_.HugePageBytes(); }

  // Of the workspace that Execute needs for up to max_m rows on up to
  // max_workers workers. Grows with max_m up to a few hundred rows.
  int64_t WorkspaceBytes(int64_t max_m, int max_workers) const;

  // Whether Execute may be called with these: a is [m, k], c is writable and
  // [m, ColumnsOfC(activation, n)], both of the spec's dtypes, and nothing
  // overlaps c. a_scales is f32[m] where a is i8 and the granularity is per
  // token, else empty (rank 0 or no elements); a_zero_points is i32[m] where,
  // besides, zero points are used. Their values are not looked at: a zero point
  // outside [-128, 127] may wrap. residual is of rank 0, for none, or like c,
  // and may be c itself.
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& a_scales,
                         const AnyTensorView& a_zero_points,
                         const AnyTensorView& c,
                         const AnyTensorView& residual = {}) const {
    return CheckArgs(spec_, a, a_scales, a_zero_points, c, residual);
  }
  static absl::Status CheckArgs(const PackedScaledLinearSpec& spec,
                                const AnyTensorView& a,
                                const AnyTensorView& a_scales,
                                const AnyTensorView& a_zero_points,
                                const AnyTensorView& c,
                                const AnyTensorView& residual = {});

  // Writes c and nothing else; reads nothing outside the rows of a and of
  // residual. m = 0 does nothing. Any number of threads may call it at once,
  // each with its own workspace, and an executor that allows it. Allocates
  // nothing. The workspace has WorkspaceBytes(m, executor.num_workers()) or
  // more: with less, aborts.
  void Execute(const AnyTensorView& a, const AnyTensorView& a_scales,
               const AnyTensorView& a_zero_points, const AnyTensorView& c,
               const AnyTensorView& residual, Workspace workspace,
               Executor& executor) const noexcept;
  // The same without a residual.
  void Execute(const AnyTensorView& a, const AnyTensorView& a_scales,
               const AnyTensorView& a_zero_points, const AnyTensorView& c,
               Workspace workspace, Executor& executor) const noexcept {
    Execute(a, a_scales, a_zero_points, c, AnyTensorView(), workspace,
            executor);
  }
  // The same without scales and zero points.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               Workspace workspace, Executor& executor) const noexcept {
    Execute(a, AnyTensorView(), AnyTensorView(), c, workspace, executor);
  }

 private:
  PackedScaledLinearPlan(const PackedScaledLinearSpec& spec,
                         const VnniLayout& layout)
      : spec_(spec),
        layout_(layout),
        kernels_(GetScaledLinearKernels(spec.c)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)) {}

  PackedScaledLinearSpec spec_;
  VnniLayout layout_;  // of all columns, or of gate's and of up's
  ScaledLinearKernels kernels_;
  EpilogueKernels epilogue_;
  std::optional<Int8QuantizePlan> quantize_;  // where a is not i8
  AlignedBuffer packed_;
  AlignedBuffer col_sums_;  // i32[n]
  AlignedBuffer b_scale_;   // f32[n]
  AlignedBuffer bias_;      // f32[n], or empty for none
};

}  // namespace quern

#endif  // QUERN_GEMM_PACKED_SCALED_LINEAR_H_
