#include "gemm/int4_linear.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/float_type.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/block_linear.h"
#include "gemm/block_linear_kernels.h"
#include "packing/code_layout.h"
#include "quant/scalar_convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "int4_linear";
constexpr int64_t kWordCodes = 8;
constexpr int64_t kGgufBlock = 32;
constexpr int64_t kGgufScaleBytes = 2;

bool IsGguf(Int4Format format) {
  return format == Int4Format::kQ4_0 || format == Int4Format::kQ8_0;
}
int64_t GgufBlockBytes(Int4Format format) {
  return kGgufScaleBytes +
         (format == Int4Format::kQ4_0 ? kGgufBlock / 2 : kGgufBlock);
}

// The rows of a matrix that has been checked. The stride of a single row means
// nothing.
template <typename T>
struct Rows {
  explicit Rows(const AnyTensorView& view)
      : data(static_cast<const T*>(view.data())),
        stride(view.extent(0) == 1 ? 0 : view.stride(0)) {}
  const T* operator[](int64_t row) const { return data + row * stride; }

  const T* data;
  int64_t stride;
};

uint8_t CodeOf(int32_t word, int64_t i) {
  return static_cast<uint8_t>(static_cast<uint32_t>(word) >> (4 * i) & 15);
}
// Which code of AWQ's words is column c: the inverse of the header's order.
int64_t AwqCode(int64_t c) {
  constexpr int64_t kCode[kWordCodes] = {0, 4, 1, 5, 2, 6, 3, 7};
  return kCode[c % kWordCodes];
}

absl::Status CheckMultiple(absl::string_view field, int64_t value, int64_t unit,
                           Int4Format format) {
  if (value % unit == 0) return absl::OkStatus();
  return InvalidArgument(kOp, field, "=", value, "; ", Int4FormatName(format),
                         " needs a multiple of ", unit);
}

absl::Status CheckNone(absl::string_view field, const AnyTensorView& view,
                       Int4Format format) {
  if (view.rank() == 0) return absl::OkStatus();
  return InvalidArgument(kOp, field, " is given; ", Int4FormatName(format),
                         " has none");
}

// Rows are divided between the workers; the first that is wrong is named,
// whoever finds it.
absl::Status CheckAtMost15(absl::string_view field, const AnyTensorView& view,
                           Executor& executor) {
  const Rows<uint8_t> rows(view);
  const int64_t cols = view.extent(1);
  const auto first_above = [&](int64_t r) {
    return std::find_if(rows[r], rows[r] + cols,
                        [](uint8_t value) { return value > 15; }) -
           rows[r];
  };
  std::atomic<int64_t> first{view.extent(0)};
  executor.ParallelFor(view.extent(0), [&](int64_t r, int /*worker*/) {
    int64_t seen = first.load(std::memory_order_relaxed);
    if (r > seen || first_above(r) == cols) return;
    while (r < seen &&
           !first.compare_exchange_weak(seen, r, std::memory_order_relaxed)) {
    }
  });
  const int64_t r = first.load();
  if (r == view.extent(0)) return absl::OkStatus();
  const int64_t i = first_above(r);
  return InvalidArgument(kOp, field, "[", r, ", ", i,
                         "]=", static_cast<int>(rows[r][i]),
                         "; need 15 or less");
}

absl::Status CheckShape(const Int4LinearSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "format",
                                   static_cast<int64_t>(spec.format), 0,
                                   static_cast<int64_t>(Int4Format::kQ8_0)));
  if (IsGguf(spec.format)) {
    QUERN_RETURN_IF_ERROR(CheckMultiple("k", spec.k, kGgufBlock, spec.format));
    return CheckEqual(kOp, "group_size", spec.group_size, kGgufBlock,
                      Int4FormatName(spec.format));
  }
  if (spec.format == Int4Format::kAwq) {
    QUERN_RETURN_IF_ERROR(CheckMultiple("n", spec.n, kWordCodes, spec.format));
  } else if (spec.format != Int4Format::kPlain) {
    QUERN_RETURN_IF_ERROR(CheckMultiple("k", spec.k, kWordCodes, spec.format));
  }
  if (spec.group_size == Int4LinearSpec::kWholeK ||
      (spec.group_size >= 16 && spec.group_size % 16 == 0) ||
      spec.group_size >= spec.k) {
    return absl::OkStatus();
  }
  return InvalidArgument(kOp, "group_size=", spec.group_size,
                         "; need a multiple of 16, k=", spec.k,
                         " or more, or -1");
}

absl::Status CheckWeights(const Int4LinearSpec& spec, int64_t groups,
                          const Int4Weights& w, Executor& executor) {
  const int64_t n = spec.n, k = spec.k;
  if (IsGguf(spec.format)) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "codes", w.codes, DType::kU8,
                   {n, k / kGgufBlock * GgufBlockBytes(spec.format)}));
    QUERN_RETURN_IF_ERROR(CheckNone("scales", w.scales, spec.format));
    QUERN_RETURN_IF_ERROR(CheckNone("zeros", w.zeros, spec.format));
    return CheckNone("g_idx", w.g_idx, spec.format);
  }
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "scales", w.scales.dtype(), types));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "scales", w.scales, w.scales.dtype(), {groups, n}));
  const bool zeros = w.zeros.rank() != 0;
  if (spec.format == Int4Format::kPlain) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "codes", w.codes, DType::kU8, {n, k}));
    QUERN_RETURN_IF_ERROR(CheckAtMost15("codes", w.codes, executor));
    if (zeros) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kOp, "zeros", w.zeros, DType::kU8, {groups, n}));
      QUERN_RETURN_IF_ERROR(CheckAtMost15("zeros", w.zeros, executor));
    }
  } else {
    const bool awq = spec.format == Int4Format::kAwq;
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "codes", w.codes, DType::kI32,
                   {awq ? k : k / kWordCodes, awq ? n / kWordCodes : n}));
    if (zeros) {
      QUERN_RETURN_IF_ERROR(CheckMultiple("n", n, kWordCodes, spec.format));
      QUERN_RETURN_IF_ERROR(CheckInput(kOp, "zeros", w.zeros, DType::kI32,
                                       {groups, n / kWordCodes}));
    }
    if (awq) return CheckNone("g_idx", w.g_idx, spec.format);
  }
  if (w.g_idx.rank() == 0) return absl::OkStatus();
  return CheckInput(kOp, "g_idx", w.g_idx, DType::kI32, {k});
}

// All k, those of group 0 first, in the order of k; empty where that is k.
absl::StatusOr<std::vector<int32_t>> OrderOf(const AnyTensorView& g_idx,
                                             int64_t k, int64_t group_size,
                                             int64_t groups) {
  std::vector<int32_t> order;
  if (g_idx.rank() == 0) return order;
  const auto* group = static_cast<const int32_t*>(g_idx.data());
  std::vector<int64_t> next;  // place of each group's next k
  for (int64_t g = 0; g < groups; ++g) next.push_back(g * group_size);
  order.resize(static_cast<size_t>(k));
  bool permuted = false;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t g = group[i];
    if (g < 0 || g >= groups) {
      return InvalidArgument(kOp, "g_idx[", i, "]=", g, "; need 0 <= group < ",
                             groups);
    }
    int64_t& place = next[static_cast<size_t>(g)];
    if (place == std::min((g + 1) * group_size, k)) {
      return InvalidArgument(kOp, "g_idx has more than ",
                             place - g * group_size, " of group ", g);
    }
    permuted = permuted || place != i;
    order[static_cast<size_t>(place++)] = static_cast<int32_t>(i);
  }
  if (!permuted) order.clear();
  return order;
}

void PackGguf(const Int4LinearSpec& spec, const AnyTensorView& codes,
              BlockLinear& linear, Executor& executor) {
  const Rows<uint8_t> rows(codes);
  const int64_t block_bytes = GgufBlockBytes(spec.format);
  const bool q4 = spec.format == Int4Format::kQ4_0;
  PackCodes(
      linear.layout(), ZeroByte(q4 ? BlockCodes::kI4 : BlockCodes::kI8),
      [&](int64_t k, int64_t n) {
        const uint8_t* block =
            rows[n] + k / kGgufBlock * block_bytes + kGgufScaleBytes;
        const int64_t i = k % kGgufBlock;
        if (!q4) return block[i];
        constexpr int64_t kHalf = kGgufBlock / 2;
        const uint8_t both = block[i % kHalf];
        return static_cast<uint8_t>(i < kHalf ? both & 15 : both >> 4);
      },
      linear.codes(), executor);
  linear.SetScales(
      [&](int64_t g, int64_t n) {
        uint16_t bits;  // at any address
        std::memcpy(&bits, rows[n] + g * block_bytes, sizeof(bits));
        return ToF32(Float16::FromBits(bits));
      },
      executor);
}

// row(k) is where the codes of k come from.
template <typename Row>
void PackWords(const Int4LinearSpec& spec, const AnyTensorView& codes,
               const Row& row, BlockLinear& linear, Executor& executor) {
  const auto pack = [&](const auto& code_at) {
    PackCodes(linear.layout(), ZeroByte(BlockCodes::kI4), code_at,
              linear.codes(), executor);
  };
  if (spec.format == Int4Format::kPlain) {
    const Rows<uint8_t> rows(codes);
    pack([&](int64_t k, int64_t n) { return rows[n][row(k)]; });
    return;
  }
  const Rows<int32_t> rows(codes);
  if (spec.format == Int4Format::kAwq) {
    pack([&](int64_t k, int64_t n) {
      return CodeOf(rows[k][n / kWordCodes], AwqCode(n));
    });
    return;
  }
  pack([&](int64_t k, int64_t n) {
    const int64_t from = row(k);
    return CodeOf(rows[from / kWordCodes][n], from % kWordCodes);
  });
}

void CopyScales(const AnyTensorView& scales, BlockLinear& linear,
                Executor& executor) {
  WithFloatType(scales.dtype(), [&](auto type) {
    const Rows<decltype(type)> rows(scales);
    linear.SetScales([&](int64_t g, int64_t n) { return ToF32(rows[g][n]); },
                     executor);
  });
}

// Less eight, as the codes.
void CopyZeros(const Int4LinearSpec& spec, const AnyTensorView& zeros,
               BlockLinear& linear, Executor& executor) {
  if (spec.format == Int4Format::kPlain) {
    const Rows<uint8_t> rows(zeros);
    linear.SetZeros(
        [&](int64_t g, int64_t n) {
          return static_cast<float>(rows[g][n] - 8);
        },
        executor);
    return;
  }
  const Rows<int32_t> rows(zeros);
  const bool awq = spec.format == Int4Format::kAwq;
  const int middle = spec.format == Int4Format::kGptq ? 7 : 8;
  linear.SetZeros(
      [&](int64_t g, int64_t n) {
        const int64_t code = awq ? AwqCode(n) : n % kWordCodes;
        return static_cast<float>(CodeOf(rows[g][n / kWordCodes], code) -
                                  middle);
      },
      executor);
}

}  // namespace

absl::string_view Int4FormatName(Int4Format format) {
  switch (format) {
    case Int4Format::kPlain:
      return "plain";
    case Int4Format::kAwq:
      return "awq";
    case Int4Format::kGptq:
      return "gptq";
    case Int4Format::kGptqV2:
      return "gptq_v2";
    case Int4Format::kQ4_0:
      return "q4_0";
    case Int4Format::kQ8_0:
      return "q8_0";
  }
  return "unknown";
}

absl::StatusOr<Int4LinearPlan> Int4LinearPlan::Create(
    const Int4LinearSpec& spec, const Int4Weights& weights,
    const AnyTensorView& bias, Executor& executor) {
  BlockLinearSpec block;
  block.op = kOp;
  block.n = spec.n;
  block.k = spec.k;
  block.codes =
      spec.format == Int4Format::kQ8_0 ? BlockCodes::kI8 : BlockCodes::kI4;
  block.a = spec.a;
  block.c = spec.c;
  QUERN_RETURN_IF_ERROR(BlockLinear::CheckSpec(block));
  QUERN_RETURN_IF_ERROR(CheckShape(spec));
  block.block_k = spec.group_size == Int4LinearSpec::kWholeK
                      ? spec.k
                      : std::min(spec.group_size, spec.k);
  const int64_t groups = DivCeil(spec.k, block.block_k);
  QUERN_RETURN_IF_ERROR(CheckWeights(spec, groups, weights, executor));
  QUERN_ASSIGN_OR_RETURN(const std::vector<int32_t> order,
                         OrderOf(weights.g_idx, spec.k, block.block_k, groups));
  block.zeros = weights.zeros.rank() != 0;
  block.permuted = !order.empty();

  QUERN_ASSIGN_OR_RETURN(BlockLinear linear, BlockLinear::Create(block, bias));
  if (IsGguf(spec.format)) {
    PackGguf(spec, weights.codes, linear, executor);
    return Int4LinearPlan(spec, std::move(linear));
  }
  if (block.permuted) {
    std::copy(order.begin(), order.end(), linear.permutation());
    PackWords(
        spec, weights.codes,
        [&](int64_t k) { return int64_t{order[static_cast<size_t>(k)]}; },
        linear, executor);
  } else {
    PackWords(
        spec, weights.codes, [](int64_t k) { return k; }, linear, executor);
  }
  CopyScales(weights.scales, linear, executor);
  if (block.zeros) CopyZeros(spec, weights.zeros, linear, executor);
  return Int4LinearPlan(spec, std::move(linear));
}

}  // namespace quern
