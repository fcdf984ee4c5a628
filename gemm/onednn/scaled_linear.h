#ifndef QUERN_GEMM_ONEDNN_SCALED_LINEAR_H_
#define QUERN_GEMM_ONEDNN_SCALED_LINEAR_H_

// A linear layer with 8-bit weights and activations, weights packed once:
//
//   sum[m, n] = sum over k of (a[m, k] - zero_point[m]) * w[k, n]
//   c[m, n] = round_c(a_scale[m] * w_scale[n] * sum[m, n] + bias[n])
//
// a and w are i8. a_scale and zero_point are of each row (kPerToken) or one of
// each for all rows (kPerTensor, static quantisation). w_scale is of each
// column, or one for all. c is f32, bf16 or f16.
//
// The sum is exact, extremes included, on every CPU. It is rounded to f32 once;
// the product of the scales, the product with the sum, and the addition of the
// bias are f32 operations, of which the last two may be fused; then c is
// rounded once. A zero point beyond +-2^28 of kPerToken makes the sum an f64,
// which is off by 2^-53 of the product of zero point and column sum at most.
//
// kPerTensor runs wholly inside oneDNN's primitive. With kPerToken oneDNN
// computes i32 sums of one tile after the other in scratch, which the epilogue
// turns into c while they are in cache; the zero points enter there, through
// the weights' column sums: there is no m x n temporary. Without a dot product
// of bytes (AVX512-VNNI or AVX-VNNI) oneDNN's int8 kernels saturate sums of two
// products: there, both run as f32 products of at most 1024 terms, which are
// exact, over weights widened to f32 (four times the memory), and meet in i32.
//
// The same bits come for any number of threads, and for a row alone and in a
// batch: integers do not care.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"

namespace quern {

struct OneDnnScaledLinearSpec {
  int64_t n = 0;  // columns of c
  int64_t k = 0;  // columns of a
  DType c = DType::kBF16;

  enum class Activation { kPerToken, kPerTensor };
  Activation activation = Activation::kPerToken;
  // Whether activations have zero points: Execute must, or must not, get them.
  bool zero_points = false;
  // kNK: weights[n, k], as models store them; kKN: weights[k, n].
  WeightOrder order = WeightOrder::kNK;
};

struct OneDnnScaledLinearArgs {
  AnyTensorView a;            // i8[m, k], any row stride
  AnyTensorView scales;       // f32[m], or f32[1] of kPerTensor
  AnyTensorView zero_points;  // i32[m], or i32[1]; rank 0 for none
  AnyTensorView c;            // [m, n] of the spec's type, any row stride
};

class OneDnnScaledLinearPlan {
 public:
  // The sum must fit i32: k * 128 * 128 < 2^31. With kPerToken that is the sum
  // without zero points, which are added in f64.
  static constexpr int64_t kMaxK = 131071;
  // With a zero point of kPerTensor, in [-128, 127]: k * 255 * 128 < 2^31.
  static constexpr int64_t kMaxKZeroPoint = 65793;
  // oneDNN's kernels hold strides as 32-bit numbers of bytes.
  static constexpr int64_t kMaxExtent = (int64_t{1} << 29) - 1;

  // `weights` is i8 of two dimensions and any row stride, `weight_scales`
  // f32[1] or f32[n], `bias` f32[n] or empty (rank 0). All are copied. Uses
  // `executor` to pack.
  //
  // InvalidArgument: n outside [1, kMaxExtent]; k outside [1, kMaxK], or
  // kMaxKZeroPoint with a zero point of kPerTensor; c not f32, bf16 or f16;
  // weights, weight_scales or bias of another shape, rank or dtype, without
  // data or misaligned; a row stride outside [columns, kMaxExtent], another
  // stride than 1 within rows. ResourceExhausted: no memory for the packed
  // weights.
  static absl::StatusOr<OneDnnScaledLinearPlan> Create(
      const OneDnnScaledLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& weight_scales, const AnyTensorView& bias,
      Executor& executor);

  OneDnnScaledLinearPlan(OneDnnScaledLinearPlan&&) noexcept;
  OneDnnScaledLinearPlan& operator=(OneDnnScaledLinearPlan&&) noexcept;
  ~OneDnnScaledLinearPlan();

  // InvalidArgument unless Execute may be called with these: shapes and types
  // as above, row strides in [columns, kMaxExtent], c writable and apart from
  // all others, zero points exactly if the spec has them, that of kPerTensor in
  // [-128, 127].
  absl::Status CheckArgs(const OneDnnScaledLinearArgs& args) const;

  // Scratch of Execute for any number of rows up to max_m >= 0. Asks oneDNN for
  // the kernels of all those row counts: milliseconds. Internal if it fails.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int workers) const;

  // Writes c[0, m) x [0, n) and nothing else; reads nothing outside a's rows.
  // m = 0 does nothing.
  //
  // Any number of threads may call it at once, each with its own `scratch` and
  // an `executor` that allows it. Scratch that borrows WorkspaceBytes(m,
  // executor.num_workers()) does not grow. Kernels are generated and kept as in
  // OneDnnLinearPlan.
  void Execute(const OneDnnScaledLinearArgs& args, OneDnnScratch& scratch,
               Executor& executor) const noexcept;

  const OneDnnScaledLinearSpec& spec() const;
  size_t packed_bytes() const;
  OneDnnCacheStats cache_stats() const;

  // oneDNN's name of the kernel for `m` rows, the types it works on, and who
  // scales: "brg_matmul:avx512_core_vnni a=u8 b=i8 c=i32, epilogue AVX3_ZEN4",
  // or "..., scaled inside". Not for a loop.
  std::string Explain(int64_t m) const;
  // Highway's instruction set of the epilogue, e.g. "AVX3_ZEN4".
  const char* target() const;

 private:
  struct State;
  explicit OneDnnScaledLinearPlan(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_SCALED_LINEAR_H_
