#ifndef QUERN_GEMM_INT4_LINEAR_H_
#define QUERN_GEMM_INT4_LINEAR_H_

// A linear layer on int4 weights q[k, n] = 0 .. 15 with a scale, and possibly a
// zero point, for each column and group of group_size k:
//
//   c[m, n] = round_c(bias[n] + sum over groups g of k of
//       scale[g, n] * (sum over k in g of a[m, k] * (q[k, n] - 8)
//                      - (zero[g, n] - 8) * sum over k in g of a[m, k]))
//
// which is bias[n] + sum of a[m, k] * scale * (q - zero). Without zero points
// they are 8. Also int8 weights of group size 32, as GGUF stores them.
//
// a and c are each f32, bf16 or f16. a is never rounded and no scale is
// multiplied into a weight, so nothing is rounded but the f32 sums, and c once,
// to nearest even: each sum is off by (k + 3 groups + k / 512) * 2^-23 at most
// of what it is of magnitudes, |a| * scale * (|q - 8| + |zero - 8|). bf16 uses
// the CPU's bf16 dot product where there is one, which rounds as two fused
// steps and takes subnormal numbers of a for zero; everything else is widened
// to f32 and uses its fused multiply-add. With zero points an infinity in a
// makes its row NaN.
//
// Weights are repacked once, from any of the layouts below to one of ours
// (packing/code_layout.h). A few rows of bf16 (16, or 8 of int8) decode in
// registers where the CPU can; more decode what they multiply once, to scratch.
// The bits of a row do not depend on the rows beside it, on the number of
// threads, or on which of the two it was.

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/block_linear.h"

namespace quern {

// How weights, scales and zero points come; groups = ceil(k / group_size). A
// word is an i32 of eight codes, number 0 in the lowest bits.
//
//             codes                    scales        zeros
//   kPlain    u8[n, k], one to a byte  [groups, n]   u8[groups, n]
//   kAwq      i32[k, n / 8]            [groups, n]   i32[groups, n / 8]
//   kGptq     i32[k / 8, n]            [groups, n]   i32[groups, n / 8]
//   kGptqV2   i32[k / 8, n]            [groups, n]   i32[groups, n / 8]
//   kQ4_0     u8[n, k / 32 * 18]       among codes   none
//   kQ8_0     u8[n, k / 32 * 34]       among codes   none
//
// kAwq: number i of a word is column 8 w + {0, 2, 4, 6, 1, 3, 5, 7}[i].
// kGptq: number i of a word is k = 8 w + i, and of zeros column 8 w + i; zeros
//   are stored less one. kGptqV2: as they are.
// kQ4_0: of each 32 k an f16 scale, then 16 bytes: byte j holds k = j in its
//   lower half and k = j + 16 in its upper one. kQ8_0: an f16 scale, 32 int8.
enum class Int4Format : uint8_t { kPlain, kAwq, kGptq, kGptqV2, kQ4_0, kQ8_0 };

// "gptq_v2".
absl::string_view Int4FormatName(Int4Format format);

struct Int4LinearSpec {
  static constexpr int64_t kWholeK = -1;

  int64_t n = 0;  // columns of c
  int64_t k = 0;  // columns of a
  // A multiple of 16, or k or more, or kWholeK. 32 with kQ4_0 and kQ8_0.
  int64_t group_size = 128;
  Int4Format format = Int4Format::kGptq;
  DType a = DType::kBF16;
  DType c = DType::kBF16;
};

// Each of any row stride.
struct Int4Weights {
  AnyTensorView codes;
  AnyTensorView scales;  // f32, bf16 or f16
  AnyTensorView zeros;   // or of rank 0: 8 everywhere
  // GPTQ's act-order: i32[k], the group of each k; every group has group_size
  // of them, the last what is left. Or of rank 0: k / group_size.
  AnyTensorView g_idx;
};

class Int4LinearPlan {
 public:
  // n and k are at most this.
  static constexpr int64_t kMaxExtent = BlockLinear::kMaxExtent;

  // `bias` is f32[n], or of rank 0 for none. All is copied. Uses `executor` to
  // pack.
  //
  // InvalidArgument: n or k outside [1, kMaxExtent]; a format that is none of
  // these; a group_size that the format does not have; n that is no multiple of
  // 8 with kAwq, or with zeros of kGptq or kGptqV2; k that is no multiple of 8
  // with kGptq and kGptqV2, of 32 with kQ4_0 and kQ8_0; a view of another
  // dtype, rank or shape, null or misaligned; scales, zeros or g_idx where the
  // format has none; a code or zero point of kPlain above 15; a g_idx with a
  // group that does not exist, or has too many.
  // Unimplemented: a, c or scales that are not f32, bf16 or f16.
  // ResourceExhausted: no memory for the packed weights.
  static absl::StatusOr<Int4LinearPlan> Create(const Int4LinearSpec& spec,
                                               const Int4Weights& weights,
                                               const AnyTensorView& bias,
                                               Executor& executor);

  const Int4LinearSpec& spec() const { return spec_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return linear_.target(); }
  // "packed AVX3_ZEN4 bf16 dot, decoded in registers, tiles of 1 x 128".
  std::string Explain(int64_t m) const { return linear_.Explain(m); }
  // Of codes, scales and zero points.
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
  Int4LinearPlan(const Int4LinearSpec& spec, BlockLinear linear)
      : spec_(spec), linear_(std::move(linear)) {}

  Int4LinearSpec spec_;
  BlockLinear linear_;
};

}  // namespace quern

#endif  // QUERN_GEMM_INT4_LINEAR_H_
