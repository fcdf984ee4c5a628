#include "quern/ops/registry/sglang/products/packed_weights.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/packed.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";
constexpr int64_t kCols = SglangLayout::kBlockCols;
// The k of an exponent of MXFP4, and the bytes of a block of 32 in GGUF's form.
constexpr int64_t kGroup = 32, kBlockBytes = 17;

absl::Status CheckPacked(const char* field, const AnyTensorView& v) {
  if (IsEmpty(v) || IsDense(v)) return absl::OkStatus();
  return InvalidArgument(kPlan, field,
                         " has gaps between its rows; need the dense tensor "
                         "that SGLang's packing returns");
}

// What a source shows, where it is not the caller's memory.
struct Decoded {
  AlignedBuffer codes;
  std::vector<int32_t> words;
  std::vector<uint8_t> zeros;
  std::vector<int32_t> zero_words;
  std::vector<float> scales;  // or weights
};

// SGLang's blocks of floats or int8, as rows.
absl::Status Unblock(const SglangWeightSpec& spec, const AnyTensorView& w,
                     Decoded& decoded, LinearSource& source) {
  QUERN_ASSIGN_OR_RETURN(const SglangLayout layout,
                         SglangLayout::Create(w.dtype(), spec.k, spec.n));
  const int64_t row_bytes = layout.plain_row_bytes();
  QUERN_ASSIGN_OR_RETURN(decoded.codes,
                         AlignedBuffer::Create(spec.n * row_bytes));
  CopyFromSglang(layout, static_cast<const uint8_t*>(w.data()),
                 static_cast<uint8_t*>(decoded.codes.data()), row_bytes);
  source.codes =
      AnyTensorView(w.dtype(), static_cast<const void*>(decoded.codes.data()),
                    2, {spec.n, spec.k}, {spec.k, 1});
  return absl::OkStatus();
}

// The code of w[n, k] among bytes of two.
int Mxfp4Code(const SglangWeightSpec& spec, const AnyTensorView& w, int64_t n,
              int64_t k) {
  const auto* const bytes = static_cast<const uint8_t*>(w.data());
  if (!spec.packed) {
    return bytes[n * w.RowStride() + k / 2] >> (k % 2 * 4) & 15;
  }
  // 64 codes of a pair of k: the first 32 in the low halves of their bytes.
  const int64_t place = 2 * (n % kCols) + k % 2;
  const uint8_t byte =
      bytes[n / kCols * kCols * (spec.k / 2) + k / 2 * kCols + place % kCols];
  return byte >> (place < kCols ? 0 : 4) & 15;
}

// MXFP4 as GGUF's blocks: an exponent, then codes i and i + 16 in a byte.
absl::Status BlocksOf(const SglangWeightSpec& spec, const SglangWeights& given,
                      Decoded& decoded, LinearSource& source) {
  const int64_t groups = spec.k / kGroup, row = groups * kBlockBytes;
  QUERN_ASSIGN_OR_RETURN(decoded.codes, AlignedBuffer::Create(spec.n * row));
  auto* to = static_cast<uint8_t*>(decoded.codes.data());
  const auto* const exponents =
      static_cast<const uint8_t*>(given.scales.data());
  for (int64_t n = 0; n < spec.n; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      *to++ =
          exponents[spec.packed ? (n / kCols * groups + g) * kCols + n % kCols
                                : n * given.scales.RowStride() + g];
      for (int64_t i = g * kGroup; i < g * kGroup + kGroup / 2; ++i) {
        *to++ = static_cast<uint8_t>(Mxfp4Code(spec, given.w, n, i) |
                                     Mxfp4Code(spec, given.w, n, i + kGroup / 2)
                                         << 4);
      }
    }
  }
  source.layout = WeightLayout::kBlocks;
  source.codes =
      AnyTensorView(DType::kU8, static_cast<const void*>(decoded.codes.data()),
                    2, {spec.n, row}, {row, 1});
  return absl::OkStatus();
}

// Four bits of convert_weight_packed_scale_zp: its blocks have rows of 64 bytes
// for each four k, where a byte has columns c and c + 8 of its 16.
absl::Status GroupsOf(const SglangWeightSpec& spec, const SglangWeights& given,
                      Decoded& decoded, LinearSource& source) {
  const int64_t n = spec.n, k = spec.k, groups = k / spec.group_size;
  const auto* const zeros = static_cast<const int8_t*>(given.zeros.data());
  const auto* const scales = static_cast<const float*>(given.scales.data());
  int8_t least = 16, most = 0;
  decoded.zeros.resize(static_cast<size_t>(groups * n));
  decoded.scales.resize(static_cast<size_t>(groups * n));
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t c = 0; c < n; ++c) {
      const int64_t from = (c / kCols * groups + g) * kCols + c % kCols;
      const auto to = static_cast<size_t>(g * n + c);
      least = std::min(least, zeros[from]);
      most = std::max(most, zeros[from]);
      decoded.zeros[to] = static_cast<uint8_t>(zeros[from]);
      decoded.scales[to] = scales[from];
    }
  }
  if (least < 0 || most > 16 || (least == 0 && most == 16)) {
    return InvalidArgument(kPlan, spec.names.zeros, " has zero points from ",
                           int{least}, " to ", int{most},
                           "; need 0 to 15, or 1 to 16");
  }
  QUERN_ASSIGN_OR_RETURN(decoded.codes, AlignedBuffer::Create(n * k));
  auto* const codes = static_cast<uint8_t*>(decoded.codes.data());
  const int64_t depth = spec.w.extents[1], block_bytes = spec.w.extents[2];
  const int64_t block = k / depth;
  const auto* const bytes = static_cast<const uint8_t*>(given.w.data());
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = (c / kCols * depth + i / block) * block_bytes +
                         i % block / 4 * 64 + (c % kCols / 16 * 8 + c % 8) * 4 +
                         i % 4;
      codes[c * k + i] = bytes[at] >> (c % 16 < 8 ? 0 : 4) & 15;
    }
  }
  source.codes = DenseMatrix<const uint8_t>(codes, n, k);
  source.zeros = DenseMatrix<const uint8_t>(decoded.zeros.data(), groups, n);
  source.scales = DenseMatrix<const float>(decoded.scales.data(), groups, n);
  if (most < 16) return absl::OkStatus();
  if (k % 8 != 0) {
    return InvalidArgument(kPlan, spec.names.zeros,
                           " has a zero point of 16 for k=", k,
                           "; need a multiple of 8");
  }
  // GPTQ's words alone have a zero point of 16: they are stored less one.
  decoded.words.resize(static_cast<size_t>(k / 8 * n));
  decoded.zero_words.resize(static_cast<size_t>(groups * n / 8));
  std::vector<uint32_t> words(decoded.words.size());
  std::vector<uint32_t> zero_words(decoded.zero_words.size());
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t i = 0; i < k; ++i) {
      words[static_cast<size_t>(i / 8 * n + c)] |= uint32_t{codes[c * k + i]}
                                                   << i % 8 * 4;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t zero = decoded.zeros[static_cast<size_t>(g * n + c)];
      zero_words[static_cast<size_t>((g * n + c) / 8)] |= (zero - 1)
                                                          << c % 8 * 4;
    }
  }
  const auto as_i32 = [](uint32_t word) { return static_cast<int32_t>(word); };
  std::transform(words.begin(), words.end(), decoded.words.begin(), as_i32);
  std::transform(zero_words.begin(), zero_words.end(),
                 decoded.zero_words.begin(), as_i32);
  source.layout = WeightLayout::kGptq;
  source.codes = DenseMatrix<const int32_t>(decoded.words.data(), k / 8, n);
  source.zeros =
      DenseMatrix<const int32_t>(decoded.zero_words.data(), groups, n / 8);
  return absl::OkStatus();
}

absl::Status TooLarge(absl::string_view op, const char* name) {
  return InvalidArgument(op, name, " has 2^63 weights or more");
}

}  // namespace

absl::Status SglangWeightSpec::Fill(absl::string_view op,
                                    const TensorMeta& matrix) {
  w = matrix;
  const bool grouped = w.dtype == DType::kU8 && names.zeros[0] != 0;
  if (w.extents.size() != (grouped ? 3u : 2u)) {
    return InvalidArgument(op, names.w, " has rank ", w.extents.size(),
                           "; need ",
                           grouped ? "[n / 32, k / block, bytes]" : "[n, k]");
  }
  if (grouped) {
    const int64_t bytes = w.extents[2] - 4 * kCols;
    if (bytes < 64 || bytes % 64 != 0) {
      return InvalidArgument(op, names.w, " has blocks of ", w.extents[2],
                             " bytes; need 16 for each k and 128 "
                             "behind them, for a multiple of 4 of k");
    }
    format = WeightFormat::kI4Group;
    packed = true;
    return CheckedMul(w.extents[0], kCols, &n) &&
                   CheckedMul(w.extents[1], bytes / 16, &k)
               ? absl::OkStatus()
               : TooLarge(op, names.w);
  }
  format = w.dtype == DType::kI8       ? WeightFormat::kI8Channel
           : w.dtype == DType::kF8E4M3 ? WeightFormat::kE4M3Block
           : w.dtype == DType::kU8     ? WeightFormat::kBlocks
                                       : FormatOfFloats(w.dtype);
  block_format = BlockFormat::kMXFP4;
  transposed = packed && w.dtype == DType::kF32;
  n = w.extents[transposed ? 1 : 0];
  k = w.extents[transposed ? 0 : 1];
  if (packed && w.dtype == DType::kI8) k -= 4;
  if (w.dtype == DType::kU8) {
    if (!CheckedMul(k, 2, &k)) return TooLarge(op, names.w);
    if (k % kGroup != 0) {
      return InvalidArgument(op, names.w, " has k=", k, "; need a multiple of ",
                             kGroup);
    }
  }
  if (!packed || transposed) return absl::OkStatus();
  return SglangLayout::Create(w.dtype, k, n).status();
}

absl::Status SglangWeightSpec::CheckScales(const OpCall& call) {
  const TensorMeta* const given = call.Tensor(names.scales);
  if (!has_scales()) {
    if (given == nullptr) return absl::OkStatus();
    return InvalidArgument(call.op(), names.scales, " is given, and ", names.w,
                           " is ", DTypeName(w.dtype), "; need none");
  }
  if (given == nullptr) {
    return InvalidArgument(call.op(), names.scales, " is missing, and ",
                           names.w, " is ", DTypeName(w.dtype), "; need them");
  }
  scales = *given;
  const absl::string_view op = call.op();
  if (format == WeightFormat::kI8Channel) {
    if (scales == TensorMeta{DType::kF32, {1}}) return absl::OkStatus();
    return CheckMeta(op, names.scales, scales, {DType::kF32, {n}},
                     " or f32[1]");
  }
  if (format == WeightFormat::kE4M3Block) {
    QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "block_n", block_n, 1));
    QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "block_k", group_size, 1));
    return CheckMeta(
        op, names.scales, scales,
        {DType::kF32, {DivCeil(n, block_n), DivCeil(k, group_size)}},
        ", one for each block");
  }
  if (format == WeightFormat::kBlocks) {
    return CheckMeta(op, names.scales, scales, {DType::kU8, {n, k / kGroup}},
                     ", an exponent for each 32 of k");
  }
  const int64_t blocks = w.extents[0],
                block = k / std::max<int64_t>(1, w.extents[1]);
  const int64_t groups = scales.extents.size() == 3 ? scales.extents[1] : 0;
  if (k < 1 || groups < 1 || k % groups != 0 ||
      std::min<int64_t>(128, k / groups) != block || k / groups % block != 0) {
    return InvalidArgument(op, names.scales, " has ", groups,
                           " groups of k=", k, " in blocks of ", block,
                           "; need groups of a block, or of blocks of 128");
  }
  group_size = k / groups;
  QUERN_RETURN_IF_ERROR(CheckMeta(op, names.scales, scales,
                                  {DType::kF32, {blocks, groups, kCols}}));
  return CheckMeta(op, names.zeros, *call.Tensor(names.zeros),
                   {DType::kI8, {blocks, groups, kCols}}, ", as the scales");
}

absl::StatusOr<LinearWeights> PackSglangWeights(const SglangWeightSpec& spec,
                                                const SglangWeights& given,
                                                bool native,
                                                Executor& executor) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kPlan, spec.names.w, given.w, spec.w.dtype, spec.w.extents));
  QUERN_RETURN_IF_ERROR(CheckElementsApart(kPlan, spec.names.w, given.w));
  const bool decodes = spec.format == WeightFormat::kI4Group ||
                       spec.format == WeightFormat::kBlocks;
  if (spec.packed && !spec.transposed) {
    QUERN_RETURN_IF_ERROR(CheckPacked(spec.names.w, given.w));
  }
  if (decodes) {
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, spec.names.scales, given.scales,
                                     spec.scales.dtype, spec.scales.extents));
    if (spec.packed) {
      QUERN_RETURN_IF_ERROR(CheckPacked(spec.names.scales, given.scales));
    }
  }
  LinearSource source;
  source.codes = given.w;
  source.scales = given.scales;
  source.bias = given.bias;
  source.block_n = spec.block_n;
  Decoded decoded;
  if (spec.format == WeightFormat::kI4Group) {
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, spec.names.zeros, given.zeros,
                                     DType::kI8, spec.scales.extents));
    QUERN_RETURN_IF_ERROR(CheckPacked(spec.names.zeros, given.zeros));
    QUERN_RETURN_IF_ERROR(GroupsOf(spec, given, decoded, source));
  } else if (spec.format == WeightFormat::kBlocks) {
    source.scales = AnyTensorView();
    QUERN_RETURN_IF_ERROR(BlocksOf(spec, given, decoded, source));
    if (native) {
      LinearWeightsSpec floats = spec;
      floats.format = WeightFormat::kF32;
      decoded.scales.resize(static_cast<size_t>(spec.n * spec.k));
      DecodeBlocks(
          BlockFormat::kMXFP4,
          absl::MakeConstSpan(
              static_cast<const uint8_t*>(decoded.codes.data()),
              static_cast<size_t>(spec.n * spec.k / kGroup * kBlockBytes)),
          absl::MakeSpan(decoded.scales));
      source.layout = WeightLayout::kNK;
      source.codes =
          DenseMatrix<const float>(decoded.scales.data(), spec.n, spec.k);
      return LinearWeights::Pack(floats, {source}, executor);
    }
  } else if (spec.transposed) {
    source.layout = WeightLayout::kKN;
  } else if (spec.packed) {
    QUERN_RETURN_IF_ERROR(Unblock(spec, given.w, decoded, source));
  }
  return LinearWeights::Pack(spec, {source}, executor);
}

}  // namespace quern
