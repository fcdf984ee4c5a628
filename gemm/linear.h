#ifndef QUERN_GEMM_LINEAR_H_
#define QUERN_GEMM_LINEAR_H_

// A linear layer, on weights in any format of gemm/linear_weights.h:
//
//   v[m, n] = bias[n] + sum over k of a[m, k] * b[k, n]
//   c = round_c(v), or what gemm/epilogue.h makes of v and a residual
//
//   LinearSpec spec;
//   QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
//                          LinearPlan::Create(spec, weights, executor));
//   QUERN_ASSIGN_OR_RETURN(int64_t bytes,
//                          plan.WorkspaceBytes(max_m, executor.num_workers()));
//   ...
//   plan.Execute({a, c}, Workspace(memory), executor);
//
// Arithmetic, by the format of the weights:
//
//   kF32, kBF16, kF16      a and b are never rounded to a narrower type; sums
//                          are f32.
//   kE4M3Block, kI4Group,  with LinearActivations::kExact.
//   kI8Group                 v = sum over groups of
//                                scale * (sum a * code - zero * sum a)
//                          in f32, where sums are over the k of a group, and
//                          4-bit codes and zeros count from 8. a is never
//                          rounded, a code becomes bf16 exactly, and no scale
//                          is multiplied into a weight.
//                            |error| <= (k + 3 groups + k / 512) * 2^-23 *
//                                sum of |a| * scale * (|code| + |zero|)
//                          With zero points an infinity in a makes its row NaN.
//   kI8Channel             W8A8. a becomes int8 on the way in, by
//                          quant/int8_quantize.h, or is given as int8:
//                            dot[m, n] = sum over k of
//                                (q[m, k] - zero_point[m]) * code[k, n]
//                            v[m, n] = a_scale[m] * (scale[n] * dot) + bias[n]
//                          dot is exact; it becomes f32, one rounding, and the
//                          second product and the sum are fused where the CPU
//                          can.
//
//   kBlocks                with LinearActivations::kExact. a is never rounded,
//                          and a weight is the f32 of quant/block_format.h: it
//                          is exact, but formats with minima round it once.
//                          Products and sums are f32; c has the bits that kF32
//                          gives for weights of DecodeBlocks.
//                            |error| <= (k + k / 256 + 3) * 2^-24 *
//                                sum of |a| * |b|
//                          A scale that is NaN or infinite changes its column
//                          alone; a NaN or infinity in a changes its row alone.
//
//   kBlocks                with LinearActivations::kInt8Blocks. Each 32 k of a
//                          row become int8, x ~ ax * qa, by
//                          gemm/kernels/block_kernels.h:
//                            v = sum over blocks of ax * (s * dot - t * sum qa)
//                          with the weights s * (u - zero) - t. dot is exact;
//                          each block adds one or two fused multiply-adds in
//                          f32, in order of k. Rounding a to int8 changes v by
//                          at most 0.51 / 127 of sum over blocks of
//                          max|a| * sum |b|, where each max|a| is 0 or at least
//                          2^-118. A NaN or an infinity in a makes its row NaN.
//
//   kI4Group               with LinearActivations::kInt8Blocks. The same, with
//                            v = sum over blocks of ax * (scale * dot)
//                            dot = sum over k of (code[k, n] - zero) * qa[k]
//                          where dot is exact, so that zero points round
//                          nothing. With act-order, blocks are 32 k of the
//                          order of groups. Each sum is off by
//                          (k / 16 + 2) * 2^-24 at most of the sum of
//                          magnitudes |ax * qa| * |b|, where no ax * scale is
//                          subnormal or overflows. A scale that is NaN or
//                          infinite changes its column alone.
//
// c is rounded once, to nearest even. bf16 by bf16 uses the CPU's bf16 dot
// product where there is one, which rounds as two fused steps and takes
// subnormal numbers for zero; all else is widened to f32 in registers and uses
// its fused multiply-add.
//
// The packed kernels give a row the same bits alone and in a batch, for any
// number of threads: the sum over k is formed in chunks of 512 k (256 k of f32
// weights and of kBlocks with kExact; a group whose rows are not rounded ends
// there, too), each in the order of k, and the chunks are added in order. With
// kInt8Blocks it is one chain over all blocks.
//
// Implementations, in the order in which they are tried:
//
//   packed   our kernels, for every format; in every program
//   onednn   oneDNN's, for f32, bf16, f16 and int8 weights without an
//            activation and where the spec allows no residual; in programs that
//            link //gemm/onednn. The plan then holds a copy of the weights in
//            oneDNN's form. On AVX2 oneDNN sums in an order that depends on the
//            number of rows.
//
// LinearSpec::kernels, or else QUERN_KERNELS in the environment, is another
// order: "onednn,packed" tries oneDNN first, "onednn" alone refuses what oneDNN
// cannot run.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

class LinearLayer;

// Whether this program links //gemm/onednn.
bool OneDnnIsLinked();

// Whether the rows of a may be rounded to int8 before they are multiplied by
// weights in kBlocks or kI4Group. Other formats need kExact.
enum class LinearActivations : uint8_t {
  kExact,       // rows are not rounded
  kInt8Blocks,  // int8 with a scale for each 32 k
};

// Whether rows may become int8 in blocks for these weights, given as
// LinearWeights::spec(): those of kBlocks, and those of kI4Group whose k and
// whose groups are multiples of 32.
constexpr bool TakesInt8Blocks(const LinearWeightsSpec& weights) {
  return weights.format == WeightFormat::kBlocks ||
         (weights.format == WeightFormat::kI4Group && weights.k % 32 == 0 &&
          weights.group_size % 32 == 0);
}

struct LinearSpec {
  DType a = DType::kBF16;  // f32, bf16 or f16; or i8 with kI8Channel
  DType c = DType::kBF16;  // f32, bf16 or f16
  // A gated activation needs weights packed with gated = true, and such weights
  // need a gated activation.
  LinearActivation activation = LinearActivation::kNone;
  LinearActivations activations = LinearActivations::kExact;
  // Whether Execute may be given a residual.
  bool residual = false;

  // How a becomes, or became, int8. Only kI8Channel looks at these.
  Int8Granularity granularity = Int8Granularity::kPerToken;
  Int8ZeroPoint zero_points = Int8ZeroPoint::kNone;
  // The scale and the zero point of all rows, where the granularity is per
  // tensor.
  float a_scale = 1.0f;
  int32_t a_zero_point = 0;

  // Names of implementations to try, in this order, with commas between them;
  // blanks around a name do not count. Empty: as QUERN_KERNELS says, or else
  // all.
  std::string kernels = {};
};

// The activations of one product in a layer that has several: `blocks` where
// the weights of this product allow kInt8Blocks, else kExact.
constexpr LinearActivations ActivationsFor(const LinearWeightsSpec& weights,
                                           LinearActivations blocks) {
  return TakesInt8Blocks(weights) ? blocks : LinearActivations::kExact;
}

struct LinearArgs {
  AnyTensorView a;  // [m, k]
  AnyTensorView c;  // [m, ColumnsOfC(activation, n)]
  // Added to the result where the spec allows it: of c's dtype and shape, c
  // itself or memory that does not overlap c. Rank 0 adds nothing.
  AnyTensorView residual = {};
  // f32[m] where a is i8 and the granularity is per token, else empty.
  AnyTensorView a_scales = {};
  // i32[m] where, besides, zero points are used, else empty.
  AnyTensorView a_zero_points = {};
};

class LinearPlan {
 public:
  // With zero points, a dot product of int8 must fit 32 bits:
  // 255 * 128 * k < 2^31.
  static constexpr int64_t kMaxKZeroPoint = 65793;
  static constexpr int kMaxWorkers = 1 << 16;

  // Uses `executor` if an implementation has a packed form of its own. Reads
  // the environment, which the program must not change meanwhile.
  //
  // InvalidArgument: an activation that is none, or is gated where the weights
  // are not, or the other way round; k above kMaxKZeroPoint where zero points
  // are used; a scale or zero point that Int8QuantizePlan refuses; a name in
  // `kernels`, or in QUERN_KERNELS, that no implementation has.
  // Unimplemented: a or c of another dtype; kInt8Blocks with weights that do
  // not allow it (TakesInt8Blocks); no implementation that may be tried can run
  // this: the message has each one's reason. ResourceExhausted: no memory for a
  // packed form of its own. `weights` may be dropped afterwards; bytes that
  // they adopted may not.
  static absl::StatusOr<LinearPlan> Create(const LinearSpec& spec,
                                           const LinearWeights& weights,
                                           Executor& executor);

  LinearPlan(LinearPlan&&) noexcept;
  LinearPlan& operator=(LinearPlan&&) noexcept;
  ~LinearPlan();

  const LinearSpec& spec() const { return spec_; }
  // The weights' spec, without the weights, which the implementation may not
  // keep.
  const LinearWeightsSpec& weights() const { return weights_; }
  int64_t n() const { return weights_.n; }
  int64_t k() const { return weights_.k; }

  // "packed" or "onednn".
  const char* implementation() const { return implementation_; }
  // The instruction set of the packed kernels, e.g. "AVX3_ZEN4", or "oneDNN".
  const char* target() const;
  // What runs for m rows, and what chose it: "packed AVX3_ZEN4 bf16 dot, tiles
  // of 8 x 32; first of packed,onednn". Names each implementation that was
  // tried before, and its reason.
  std::string Explain(int64_t m) const;
  // Bytes of the weights in the form that Execute reads, with scales and bias.
  int64_t packed_bytes() const;

  // Bytes of workspace that Execute needs for up to max_m rows on up to
  // max_workers workers. InvalidArgument: max_m < 0, or max_workers outside [1,
  // kMaxWorkers]. ResourceExhausted: more than 63 bits.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const;

  // Whether Execute may be called with these: dtypes of the spec, shapes as
  // LinearArgs says, nothing but a residual overlaps c. Values are not looked
  // at: a zero point outside [-128, 127] may wrap.
  // InvalidArgument, besides: a residual where the spec has none; row strides
  // beyond 2^29 - 1, if the implementation is oneDNN.
  absl::Status CheckArgs(const LinearArgs& args) const;

  // Checks a as CheckArgs does, for a c that the caller lays out densely.
  absl::Status CheckRows(const AnyTensorView& a) const;

  // Checks, in the name of `op` and `field`, only that the implementation takes
  // the row stride of this a or c, for a caller who checks all else.
  absl::Status CheckRowStride(absl::string_view op, absl::string_view field,
                              const AnyTensorView& rows) const;

  // Writes the elements of c and nothing else; reads nothing outside the rows
  // of a and of residual. m = 0 does nothing. Any number of threads may call it
  // at once, each with its own workspace, and an executor that allows it. The
  // workspace has WorkspaceBytes(m, executor.num_workers()) or more: with less,
  // aborts. The packed kernels allocate nothing; oneDNN allocates small blocks.
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept;

 private:
  LinearPlan();

  LinearSpec spec_;
  LinearWeightsSpec weights_;
  const char* implementation_ = "";
  std::string why_;  // the end of Explain
  std::unique_ptr<const LinearLayer> layer_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_H_
