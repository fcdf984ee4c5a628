#ifndef QUERN_GEMM_LINEAR_WEIGHTS_H_
#define QUERN_GEMM_LINEAR_WEIGHTS_H_

// The weights b[k, n] of a linear layer (gemm/linear.h), with their scales and
// their bias, in the packed form that our kernels read.
//
//   LinearWeightsSpec spec;  spec.n = 4096;  spec.k = 14336;
//   LinearSource source;     source.codes = weights;        // bf16[n, k]
//   QUERN_ASSIGN_OR_RETURN(LinearWeights w,
//                          LinearWeights::Pack(spec, {source}, executor));
//
// Several sources are stacked along n: query, key and value, or gate and up.
//
// The packed form is one run of bytes that describes itself: bytes() may be
// written to a file, mapped by any number of processes, and adopted there
// without a copy.
//
//   QUERN_ASSIGN_OR_RETURN(LinearWeights w, LinearWeights::Adopt(mapped));
//
// What a weight is, by format; g = k / group_size:
//
//   kF32, kBF16, kF16   b[k, n] = code[k, n]
//   kI8Channel          b[k, n] = scale[n] * code[k, n]       code: int8
//   kE4M3Block          b[k, n] = scale[g, n] * code[k, n]    code: fp8 e4m3fn
//   kI4Group            b[k, n] = scale[g, n] * (code[k, n] - zero[g, n])
//                                  code: 0 .. 15; zero: 0 .. 15, or 16 (kGptq)
//   kI8Group            b[k, n] = scale[g, n] * code[k, n]    code: int8
//   kBlocks             b[k, n] = what quant/block_format.h says of
//                                  spec.block_format

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/block_format.h"

namespace quern {

enum class WeightFormat : uint8_t {
  kF32,
  kBF16,
  kF16,
  kI8Channel,
  kE4M3Block,
  kI4Group,
  kI8Group,
  kBlocks,
};

// The format of weights that are f32, bf16 or f16, given as codes of that type.
constexpr WeightFormat FormatOfFloats(DType codes) {
  return codes == DType::kF32    ? WeightFormat::kF32
         : codes == DType::kBF16 ? WeightFormat::kBF16
                                 : WeightFormat::kF16;
}

// "i4_group".
absl::string_view WeightFormatName(WeightFormat format);

// How codes, scales and zero points come; groups = ceil(k / group_size). A word
// is an i32 of eight codes, number 0 in the lowest bits.
//
//            format      codes             scales           zeros
//   kNK      floats      T[n, k]           none             none
//            kI8Channel  i8[n, k]          f32[n] or [1]    none
//            kE4M3Block  f8e4m3[n, k]      (below)          none
//            kI4Group    u8[n, k]          [groups, n]      u8[groups, n]
//            kI8Group    i8[n, k]          [groups, n]      none
//   kKN      floats      T[k, n]           none             none
//            kI8Channel  i8[k, n]          f32[n] or [1]    none
//   kAwq     kI4Group    i32[k, n / 8]     [groups, n]      i32[groups, n / 8]
//   kGptq    kI4Group    i32[k / 8, n]     [groups, n]      i32[groups, n / 8]
//   kGptqV2  kI4Group    i32[k / 8, n]     [groups, n]      i32[groups, n / 8]
//   kBlocks  kBlocks     u8[n, k/N * B]    among codes      none
//
// kNK of kI4Group: one code to a byte. Scales of kE4M3Block:
//   f32[ceil(n / block_n), groups].
// kAwq: number i of a word is column 8 w + {0, 2, 4, 6, 1, 3, 5, 7}[i].
// kGptq: number i of a word is k = 8 w + i, and of zeros column 8 w + i; zeros
//   are stored less one, so 15 is a zero point of 16. kGptqV2: as they are.
// kBlocks: rows of blocks of N values in B bytes, as quant/block_format.h lists
//   them. Their values become f32, or are multiplied by rows of int8
//   (LinearActivations). Blocks of Q4_0 and Q8_0 whose codes and scales have
//   been taken apart are kI4Group and kI8Group in kNK, of groups of 32: their
//   codes become bf16, and their scales multiply sums.
enum class WeightLayout : uint8_t {
  kNK,
  kKN,
  kAwq,
  kGptq,
  kGptqV2,
  kBlocks,
};

// "gptq_v2".
absl::string_view WeightLayoutName(WeightLayout layout);

// One matrix of weights in plain memory, n columns of b. Rows of codes lie at
// any stride of their length or more, and those of scales and zeros at any that
// is not negative. Views are of rank 0 where the table above has none.
struct LinearSource {
  WeightLayout layout = WeightLayout::kNK;
  AnyTensorView codes;
  // f32; the scales of kI4Group and kI8Group may also be bf16 or f16.
  AnyTensorView scales;
  AnyTensorView zeros;  // rank 0 stands for 8 everywhere
  // GPTQ's act-order, for kGptq, kGptqV2 and kNK of kI4Group: i32[k], the group
  // of each k; every group has group_size of them, the last what is left. Or of
  // rank 0: k / group_size. The same for all sources.
  AnyTensorView g_idx;
  AnyTensorView bias;     // f32[n], or of rank 0 for zeros
  int64_t block_n = 128;  // columns of a scale of kE4M3Block; the last may have
                          // fewer
};

struct LinearWeightsSpec {
  static constexpr int64_t kWholeK = -1;

  int64_t n = 0;  // columns of b: those of all sources
  int64_t k = 0;
  WeightFormat format = WeightFormat::kBF16;
  // The k of one scale, for kE4M3Block, kI4Group and kI8Group: a multiple of
  // 16, or k or more, or kWholeK. Other formats do not look at it.
  int64_t group_size = 128;
  // The format of the blocks of kBlocks. Other formats do not look at it.
  BlockFormat block_format = BlockFormat::kQ4_0;
  // Packed for a gated activation (gemm/epilogue.h): columns [0, n / 2) are the
  // gate, the others are up.
  bool gated = false;
};

// A value that shares its bytes: copying costs a reference. Immutable; any
// number of threads may read it.
class LinearWeights {
 public:
  // n and k are at most this; k of kI8Channel at most kMaxKI8.
  static constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;
  // A dot product of int8 must fit 32 bits: 128 * 128 * k < 2^31.
  static constexpr int64_t kMaxKI8 = 131071;

  // Where the packed form begins, and where adopted bytes must.
  static constexpr int64_t kAlignment = AlignedBuffer::kAlignment;

  // Weights of nothing; only to be assigned to.
  LinearWeights() = default;
  // There is no move, which would leave views of bytes that somebody else owns.
  LinearWeights(const LinearWeights&) = default;
  LinearWeights& operator=(const LinearWeights&) = default;

  // Copies all that `sources` show. Uses `executor` to pack.
  //
  // InvalidArgument: n or k outside [1, kMaxExtent]; an odd n where gated; a
  // group_size that the format does not have; no source; sources of more than
  // one layout, of a layout that the format does not have, or whose columns are
  // not n; n that is no multiple of 8 with kAwq, or with zeros of kGptq or
  // kGptqV2; k that is no multiple of 8 with kGptq and kGptqV2, of a block with
  // kBlocks; a block_format that does not exist; a view of another dtype, rank
  // or shape, null or misaligned, of a negative stride, or where there is none;
  // codes whose rows overlap; a code of kI4Group or a zero point of kNK above
  // 15; a g_idx with a group that does not exist or has too many, or that
  // differs from source to source; a packed form of 2^63 bytes or more.
  // Unimplemented: scales of kI4Group or kI8Group that are not f32, bf16 or
  // f16.
  // ResourceExhausted: no memory for the packed form.
  static absl::StatusOr<LinearWeights> Pack(
      const LinearWeightsSpec& spec, absl::Span<const LinearSource> sources,
      Executor& executor);

  // Bytes of the packed form at most: with a bias and whatever else the format
  // may have. InvalidArgument: a spec that Pack refuses.
  static absl::StatusOr<int64_t> MaxPackedBytes(const LinearWeightsSpec& spec);

  // The weights whose packed form is `bytes`, which stay the caller's, and must
  // live and not change as long as these weights or a plan of them. Reads the
  // header and the order of k, and nothing else.
  //
  // InvalidArgument: bytes that are no packed form of this version and byte
  // order, do not have the size that the header tells, or do not begin at a
  // multiple of kAlignment; a header that is damaged; an order that names a k
  // twice or outside [0, k).
  static absl::StatusOr<LinearWeights> Adopt(absl::Span<const uint8_t> bytes);

  // group_size is that of the packed form: k for kWholeK, 0 where the format
  // has none.
  const LinearWeightsSpec& spec() const { return spec_; }
  bool has_bias() const { return bias_ != nullptr; }
  // The packed form, header included.
  absl::Span<const uint8_t> bytes() const { return bytes_; }

  // What the kernels read (gemm/weights/packed_form.h says how it lies): panels
  // of codes; f32 per column, or per group and column; the order of k; sums of
  // columns; f32[n]. Null where the format, or these weights, have none.
  const uint8_t* panels() const { return panels_; }
  const float* scales() const { return scales_; }
  const float* zeros() const { return zeros_; }
  const int32_t* order() const { return order_; }
  const int32_t* column_sums() const { return column_sums_; }
  const float* bias() const { return bias_; }

 private:
  // `bytes` are those of the header's spec and flags, which have been proved.
  LinearWeights(const LinearWeightsSpec& spec, uint32_t flags,
                absl::Span<const uint8_t> bytes,
                std::shared_ptr<const AlignedBuffer> owned);

  LinearWeightsSpec spec_;
  std::shared_ptr<const AlignedBuffer> owned_;  // null: adopted
  absl::Span<const uint8_t> bytes_;
  const uint8_t* panels_ = nullptr;
  const float* scales_ = nullptr;
  const float* zeros_ = nullptr;
  const int32_t* order_ = nullptr;
  const int32_t* column_sums_ = nullptr;
  const float* bias_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_WEIGHTS_H_
