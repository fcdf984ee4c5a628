#ifndef QUERN_QUANT_FP8_QUANTIZE_H_
#define QUERN_QUANT_FP8_QUANTIZE_H_

// Activations to fp8 e4m3fn: x[m, k], f32, bf16 or f16, to q[m, k] with scales.
//
//   q = e4m3(clamp(fl(x * fl(1 / s)), -448, 448))        x ~ s * q
//
//   kStatic   s is given        scales[ceil(m / block_rows),
//                                      ceil(k / block_cols)]
//   kTensor   s = S(max |x|)                    scales[1, 1]
//   kToken    s = S(min(max |x[i]|, max_abs))   scales[m, 1]
//   kGroup    s = S(max |x[i, g]|)              scales[m, ceil(k / group)]
//
//   S(a) = max(fl(a / 448), 1 / (448 * 512))
//
// A block of 0 is all rows or columns: scales are [1, 1] per tensor, [m, 1] per
// token, [1, k] per channel. g is a run of `group` columns, the last one
// perhaps shorter. With kPowerOfTwo (ue8m0) S(a) is the smallest power of two
// that is no less: for scales of one exponent byte.
//
// Everything is f32; e4m3() is to nearest, ties to even. The floor keeps a row
// of zeros at q = 0 and a power of two. Unlike torch's native form of groups, q
// is a product with 1 / s in place of a quotient: a code may differ by one
// where x / s is within a rounding of a tie (vLLM allows 0.2 % of them).
//
// A NaN in x is NaN in q (0x7f or 0xff). Where scales are dynamic, a NaN or an
// infinity makes its whole tensor, token or group NaN, and the scale; kStatic
// saturates an infinity.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/fp8_quantize_kernels.h"

namespace quern {

enum class Fp8Granularity : uint8_t { kStatic, kTensor, kToken, kGroup };
enum class Fp8ScaleFormat : uint8_t { kF32, kPowerOfTwo };

struct Fp8QuantizeSpec {
  DType dtype = DType::kBF16;  // of x: f32, bf16 or f16
  Fp8Granularity granularity = Fp8Granularity::kToken;
  Fp8ScaleFormat format = Fp8ScaleFormat::kF32;  // of dynamic scales
  int64_t group = 0;                             // kGroup: >= 1
  int64_t block_rows = 0;                        // kStatic: >= 0
  int64_t block_cols = 0;                        // kStatic: >= 0
  float max_abs = 0.0f;  // kToken: a finite bound on |x|, or 0 for none
  // kAuto streams q if x and q together exceed the last-level cache.
  Stores stores = Stores::kAuto;
};

class Fp8QuantizePlan {
 public:
  static constexpr float kMax = 448.0f;
  static constexpr float kMinScale = 1.0f / (448.0f * 512.0f);

  // InvalidArgument if a field is out of range; Unimplemented for other dtypes.
  static absl::StatusOr<Fp8QuantizePlan> Create(const Fp8QuantizeSpec& spec);

  const Fp8QuantizeSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // What Execute needs, and what ExecuteStatic needs: shapes as above, any row
  // strides, nothing that is written overlapping anything else; static scales
  // in [2^-125, 2^125].
  absl::Status CheckArgs(const AnyTensorView& x, MatrixView<Float8E4M3> q,
                         MatrixView<float> scales) const;
  absl::Status CheckStaticArgs(const AnyTensorView& x,
                               MatrixView<const float> scales,
                               MatrixView<Float8E4M3> q) const;

  // Dynamic: writes q and scales. m and k may be 0. Allocates nothing; any
  // number of threads may share the plan; the result does not depend on the
  // number of workers.
  void Execute(const AnyTensorView& x, MatrixView<Float8E4M3> q,
               MatrixView<float> scales, Executor& executor) const noexcept;
  // kStatic: writes q.
  void ExecuteStatic(const AnyTensorView& x, MatrixView<const float> scales,
                     MatrixView<Float8E4M3> q,
                     Executor& executor) const noexcept;

  // One row of k >= 0 elements under kToken, for kernels that quantise inside a
  // parallel region of their own: the bits of Execute. Returns the scale.
  float QuantizeRow(const void* x, int64_t k, Float8E4M3* q) const noexcept;

  // Quantise a row in parts, for kernels that hold a part of it at a time. The
  // scale of the row is that of the largest MaxCode of its parts.
  uint32_t MaxCode(const void* x, int64_t k) const noexcept;
  float ScaleOf(uint32_t max_code) const noexcept;
  void QuantizePart(const void* x, int64_t k, float scale,
                    Float8E4M3* q) const noexcept;

 private:
  explicit Fp8QuantizePlan(const Fp8QuantizeSpec& spec);
  absl::Status CheckMatrices(const AnyTensorView& x,
                             MatrixView<Float8E4M3> q) const;
  // Meanwhile prefetches as much at `next`.
  void Quantize(const void* x, int64_t n, float scale, const void* next,
                bool stream, Float8E4M3* q) const;
  float Dynamic(const void* x, int64_t n, const void* next, bool stream,
                Float8E4M3* q) const;
  bool Streams(int64_t m, int64_t k) const;

  Fp8QuantizeSpec spec_;
  Fp8QuantizeKernels kernels_;
  uint32_t (*max_code_)(const void* x, size_t n);
  int64_t last_level_bytes_;
};

}  // namespace quern

#endif  // QUERN_QUANT_FP8_QUANTIZE_H_
