#ifndef QUERN_QUANT_INT8_QUANTIZE_H_
#define QUERN_QUANT_INT8_QUANTIZE_H_

// Activations to int8: x[m, k], f32, bf16 or f16, to q[m, k] with a scale s and
// a zero point z, one pair for each row (token) or one for all:
//
//   q = clamp(rint(x * r) + z, -128, 127)      r = fl(1 / s)
//   x ~ s * (q - z)
//
//   per token, symmetric    s = fl(max|x| / 127)        z = 0
//   per token, asymmetric   s = fl((max - min) / 255)   z = -128 - rint(min*r)
//                           max, min of the row and 0; difference and quotient
//                           in double, where they cannot overflow
//   per tensor              s and z of the spec
//
// fl() rounds to f32 and rint() to an integer, both to nearest, ties to even;
// x * r is not rounded before rint(). That is one fused multiply-add, or a
// product in double where there is none: the same bits on every instruction
// set. A product with r, not a quotient, costs a tenth and is off by at most
// |x / s| * 2^-24 (and a little). Hence, where no scale of the spec makes it
// clamp,
//
//   symmetric    |x - s * q|       <= s * (1/2 + 2^-16)    127 * 2^-24 < 2^-17
//   asymmetric   |x - s * (q - z)| <= s * (1/2 + 2^-15)    255 * 2^-24 < 2^-16,
//                                     once for x and once for z
//
// Symmetric codes per token lie in [-127, 127], as the largest |x| has code 127
// or -127; -128 comes only from a scale of the spec. Unlike in vLLM, the
// asymmetric range includes 0: z lies in [-128, 127], 0 has a code, and a
// constant row has a scale.
//
// What is not an ordinary number:
//
//   zero row     s = 1, z = 0, q = 0. Not s = 0: the scale may be divided by,
//                and a product of the row is 0 * 1, whatever zero point terms
//                are added (they hold z).
//   tiny rows    s >= 2^-125. Below, 1 / s would overflow and s be denormal.
//                The error stays within s / 2.
//   denormals    count as zero: none is half of the smallest scale. The results
//                do not depend on flush-to-zero and denormals-are-zero.
//   -0           is 0.
//   per token, a NaN or an infinity in the row
//                s = NaN, z = 0, q = 0: every product of the row is NaN, and an
//                overflow upstream cannot hide in a plausible number.
//   per tensor, NaN        q = z, which stands for 0
//   per tensor, infinity   q = 127 or -128
//
// They assume the default rounding direction.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/int8_quantize_kernels.h"

namespace quern {

enum class Int8Granularity : uint8_t {
  kPerToken,   // dynamic: s and z from each row
  kPerTensor,  // static: s and z of the spec
};

enum class Int8ZeroPoint : uint8_t {
  kNone,  // symmetric: z = 0
  kUsed,  // asymmetric
};

struct Int8QuantizeSpec {
  DType dtype = DType::kBF16;  // of x: f32, bf16 or f16
  Int8Granularity granularity = Int8Granularity::kPerToken;
  Int8ZeroPoint zero_points = Int8ZeroPoint::kNone;
  // Per tensor only.
  float scale = 1.0f;      // kMinScale <= scale <= kMaxScale
  int32_t zero_point = 0;  // in [-128, 127]; 0 if zero_points is kNone
  // kAuto streams if x and q together exceed the last-level cache.
  Stores stores = Stores::kAuto;
};

class Int8QuantizePlan {
 public:
  // Scale, reciprocal, and the 256 steps that no code reaches are normal f32.
  static constexpr float kMinScale = 0x1p-125f;
  static constexpr float kMaxScale = 0x1p118f;

  // InvalidArgument: a scale or zero_point outside the ranges above, or, per
  // token, other than 1 and 0. Unimplemented: another dtype.
  static absl::StatusOr<Int8QuantizePlan> Create(const Int8QuantizeSpec& spec);

  const Int8QuantizeSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // What Execute needs: x[m, k] of the spec's type and q[m, k]; scales[m],
  // or empty if per tensor; zero_points[m], or empty unless per token and
  // kUsed. All are as CheckInput and CheckOutput of core/check_args.h want
  // them, and no two share an element. InvalidArgument otherwise.
  absl::Status CheckArgs(const AnyTensorView& x, MatrixView<int8_t> q,
                         VectorView<float> scales,
                         VectorView<int32_t> zero_points) const;

  // Writes q[m, k] and nothing between its rows, scales and zero_points. m and
  // k may be 0 (rows of nothing are zero rows); addresses need no alignment
  // beyond their element's. Allocates nothing. Any number of threads may share
  // the plan. A row is the work of one worker; few rows stay on the calling
  // thread. Costs one read of x from memory and one write of q: 4096 rows of
  // 4096 in bf16 go at 0.7 to 0.9 of the rate of a copy on 2 threads (where
  // that rate is 90 and 50 GB/s); one in cache takes 0.26 us (Zen 4, 2026).
  void Execute(const AnyTensorView& x, MatrixView<int8_t> q,
               VectorView<float> scales, VectorView<int32_t> zero_points,
               Executor& executor) const noexcept;

  // One row of k >= 0 elements, for kernels that quantise inside a parallel
  // region of their own: the bits of Execute. Write q[0, k), *scale, which per
  // tensor is the spec's, and unless it is null *zero_point. x and q do not
  // overlap. It may be null only where the zero point is 0: in plans of kNone.
  void QuantizeRow(const void* x, int64_t k, int8_t* q, float* scale,
                   int32_t* zero_point) const noexcept;
  // QuantizeRow with q + 128 in place of q: the unsigned factor of u8 x s8 dot
  // products (quant/s8s8_compensation.h). scale and zero_point are those of q.
  void QuantizeRowU8(const void* x, int64_t k, uint8_t* q_plus_128,
                     float* scale, int32_t* zero_point) const noexcept;

  // Quantise a row in parts, for kernels that hold a part of it at a time. The
  // terms of the row are those of the largest MaxCode of its parts. Plans that
  // find zero points per token (kUsed) cannot do this.
  struct Terms {
    float scale;
    float inverse;  // 0: the row is not finite
    int32_t zero_point;
  };
  uint32_t MaxCode(const void* x, int64_t k) const noexcept;
  Terms TermsOf(uint32_t max_code) const noexcept;
  void QuantizePart(const void* x, int64_t k, const Terms& terms,
                    int8_t* q) const noexcept;

 private:
  // What one row is written to and how.
  struct Target {
    void* q;
    const void* next_x;  // the row to prefetch meanwhile
    uint8_t flip;        // 0x80: q + 128
    bool stream;
  };
  Int8QuantizePlan(const Int8QuantizeSpec& spec,
                   const Int8QuantizeKernels& kernels);
  Terms AsymmetricTerms(const void* x, int64_t k) const;
  void Part(const void* x, int64_t k, const Terms& terms,
            const Target& target) const;
  Terms Row(const void* x, int64_t k, const Target& target) const;

  Int8QuantizeSpec spec_;
  Int8QuantizeKernels kernels_;
  int64_t last_level_bytes_;
};

}  // namespace quern

#endif  // QUERN_QUANT_INT8_QUANTIZE_H_
