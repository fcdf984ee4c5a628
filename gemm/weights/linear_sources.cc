#include "quern/gemm/weights/linear_sources.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear_weights";

bool HasLayout(WeightFormat format, WeightLayout layout) {
  if (format == WeightFormat::kBlocks) return layout == WeightLayout::kBlocks;
  switch (layout) {
    case WeightLayout::kNK:
      return true;
    case WeightLayout::kKN:
      return !HasGroups(format);
    case WeightLayout::kBlocks:
      return false;
    default:
      return format == WeightFormat::kI4Group;
  }
}

// "sources[1].codes".
std::string FieldOf(size_t source, absl::string_view field) {
  return absl::StrCat("sources[", source, "].", field);
}

absl::Status CheckMultiple(absl::string_view field, int64_t value, int64_t unit,
                           WeightLayout layout) {
  if (value % unit == 0) return absl::OkStatus();
  return InvalidArgument(kOp, field, "=", value, "; ", WeightLayoutName(layout),
                         " needs a multiple of ", unit);
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

// One source of n columns; its layout is one of the format's.
class SourceCheck {
 public:
  SourceCheck(const LinearWeightsSpec& spec, const LinearSource& source,
              size_t index, int64_t n, Executor& executor)
      : spec_(spec),
        source_(source),
        index_(index),
        n_(n),
        groups_(HasGroups(spec.format) ? DivCeil(spec.k, spec.group_size) : 0),
        executor_(executor) {}

  absl::Status Run() const {
    QUERN_RETURN_IF_ERROR(CheckBias());
    if (spec_.format == WeightFormat::kBlocks) return CheckBlocks();
    if (!HasGroups(spec_.format)) return CheckFloatsOrI8();
    if (spec_.format == WeightFormat::kE4M3Block) return CheckE4M3();
    QUERN_RETURN_IF_ERROR(CheckGroupScales());
    return spec_.format == WeightFormat::kI8Group ? CheckI8() : CheckI4();
  }

 private:
  absl::Status Matrix(absl::string_view field, const AnyTensorView& view,
                      DType dtype, absl::Span<const int64_t> want) const {
    return CheckInput(kOp, FieldOf(index_, field), view, dtype, want);
  }
  // The codes: rows that overlap are refused in every format, as packing or
  // summing some of them refuses it.
  absl::Status Codes(DType dtype, absl::Span<const int64_t> want) const {
    QUERN_RETURN_IF_ERROR(Matrix("codes", source_.codes, dtype, want));
    return CheckElementsApart(kOp, FieldOf(index_, "codes"), source_.codes);
  }
  absl::Status None(absl::string_view field, const AnyTensorView& view) const {
    if (view.rank() == 0) return absl::OkStatus();
    return InvalidArgument(kOp, FieldOf(index_, field), " is given; ",
                           WeightFormatName(spec_.format), " in ",
                           WeightLayoutName(source_.layout), " has none");
  }
  absl::Status NoZerosAndOrder() const {
    QUERN_RETURN_IF_ERROR(None("zeros", source_.zeros));
    return None("g_idx", source_.g_idx);
  }

  absl::Status CheckBias() const {
    if (source_.bias.rank() == 0) return absl::OkStatus();
    return Matrix("bias", source_.bias, DType::kF32, {n_});
  }

  absl::Status CheckFloatsOrI8() const {
    const bool nk = source_.layout == WeightLayout::kNK;
    QUERN_RETURN_IF_ERROR(
        Codes(FloatOrI8(spec_.format), {nk ? n_ : spec_.k, nk ? spec_.k : n_}));
    QUERN_RETURN_IF_ERROR(NoZerosAndOrder());
    if (spec_.format != WeightFormat::kI8Channel) {
      return None("scales", source_.scales);
    }
    const bool one =
        source_.scales.rank() == 1 && source_.scales.extent(0) == 1;
    return Matrix("scales", source_.scales, DType::kF32, {one ? 1 : n_});
  }

  absl::Status CheckE4M3() const {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, FieldOf(index_, "block_n"),
                                     source_.block_n, 1,
                                     LinearWeights::kMaxExtent));
    QUERN_RETURN_IF_ERROR(Codes(DType::kF8E4M3, {n_, spec_.k}));
    QUERN_RETURN_IF_ERROR(Matrix("scales", source_.scales, DType::kF32,
                                 {DivCeil(n_, source_.block_n), groups_}));
    return NoZerosAndOrder();
  }

  absl::Status CheckBlocks() const {
    QUERN_RETURN_IF_ERROR(Codes(DType::kU8, {n_, BlockRowBytes(spec_)}));
    QUERN_RETURN_IF_ERROR(None("scales", source_.scales));
    return NoZerosAndOrder();
  }

  absl::Status CheckGroupScales() const {
    QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, FieldOf(index_, "scales"),
                                       source_.scales.dtype(), kFloatDTypes));
    return Matrix("scales", source_.scales, source_.scales.dtype(),
                  {groups_, n_});
  }

  absl::Status CheckI8() const {
    QUERN_RETURN_IF_ERROR(Codes(DType::kI8, {n_, spec_.k}));
    return NoZerosAndOrder();
  }

  absl::Status CheckI4() const {
    const bool plain = source_.layout == WeightLayout::kNK;
    const bool awq = source_.layout == WeightLayout::kAwq;
    if (plain) {
      QUERN_RETURN_IF_ERROR(Codes(DType::kU8, {n_, spec_.k}));
      QUERN_RETURN_IF_ERROR(
          CheckAtMost15(FieldOf(index_, "codes"), source_.codes, executor_));
    } else {
      QUERN_RETURN_IF_ERROR(Codes(
          DType::kI32,
          {awq ? spec_.k : spec_.k / kWordCodes, awq ? n_ / kWordCodes : n_}));
    }
    if (source_.zeros.rank() != 0) QUERN_RETURN_IF_ERROR(CheckZeros(plain));
    if (awq) return None("g_idx", source_.g_idx);
    if (source_.g_idx.rank() == 0) return absl::OkStatus();
    return Matrix("g_idx", source_.g_idx, DType::kI32, {spec_.k});
  }

  absl::Status CheckZeros(bool plain) const {
    if (plain) {
      QUERN_RETURN_IF_ERROR(
          Matrix("zeros", source_.zeros, DType::kU8, {groups_, n_}));
      return CheckAtMost15(FieldOf(index_, "zeros"), source_.zeros, executor_);
    }
    QUERN_RETURN_IF_ERROR(CheckMultiple("n", n_, kWordCodes, source_.layout));
    return Matrix("zeros", source_.zeros, DType::kI32,
                  {groups_, n_ / kWordCodes});
  }

  const LinearWeightsSpec& spec_;
  const LinearSource& source_;
  size_t index_;
  int64_t n_;
  int64_t groups_;
  Executor& executor_;
};

// What the layout asks of n, k and group_size.
absl::Status CheckLayout(const LinearWeightsSpec& spec, WeightLayout layout,
                         int64_t n) {
  if (layout == WeightLayout::kAwq) {
    return CheckMultiple("n", n, kWordCodes, layout);
  }
  if (IsGptq(layout)) return CheckMultiple("k", spec.k, kWordCodes, layout);
  return absl::OkStatus();
}

// The groups of each k of one source, as places: see OrderOf.
absl::StatusOr<std::vector<int32_t>> OrderOfSource(
    const LinearWeightsSpec& spec, const AnyTensorView& g_idx,
    absl::string_view field) {
  std::vector<int32_t> order;
  if (g_idx.rank() == 0) return order;
  const auto* group = static_cast<const int32_t*>(g_idx.data());
  const int64_t groups = DivCeil(spec.k, spec.group_size);
  std::vector<int64_t> next;  // place of each group's next k
  for (int64_t g = 0; g < groups; ++g) next.push_back(g * spec.group_size);
  order.resize(static_cast<size_t>(spec.k));
  bool permuted = false;
  for (int64_t i = 0; i < spec.k; ++i) {
    const int64_t g = group[i];
    if (g < 0 || g >= groups) {
      return InvalidArgument(kOp, field, "[", i, "]=", g,
                             "; need 0 <= group < ", groups);
    }
    int64_t& place = next[static_cast<size_t>(g)];
    if (place == std::min((g + 1) * spec.group_size, spec.k)) {
      return InvalidArgument(kOp, field, " has more than ",
                             place - g * spec.group_size, " of group ", g);
    }
    permuted = permuted || place != i;
    order[static_cast<size_t>(place++)] = static_cast<int32_t>(i);
  }
  if (!permuted) order.clear();
  return order;
}

}  // namespace

absl::Status CheckSources(const LinearWeightsSpec& spec,
                          absl::Span<const LinearSource> sources,
                          Executor& executor) {
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "sources", static_cast<int64_t>(sources.size()), 1));
  int64_t columns = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    const LinearSource& source = sources[i];
    QUERN_RETURN_IF_ERROR(CheckRange(
        kOp, FieldOf(i, "layout"), static_cast<int64_t>(source.layout), 0,
        static_cast<int64_t>(WeightLayout::kBlocks)));
    if (!HasLayout(spec.format, source.layout)) {
      return InvalidArgument(kOp, FieldOf(i, "layout"), " is ",
                             WeightLayoutName(source.layout), "; ",
                             WeightFormatName(spec.format), " has no such");
    }
    if (source.layout != sources[0].layout) {
      return InvalidArgument(
          kOp, FieldOf(i, "layout"), " is ", WeightLayoutName(source.layout),
          "; need ", WeightLayoutName(sources[0].layout), ", as sources[0]");
    }
    const AnyTensorView& codes = source.codes;
    if (codes.rank() != 2) {
      return InvalidArgument(kOp, FieldOf(i, "codes"), " has rank ",
                             codes.rank(), "; need 2");
    }
    // One source has all columns, or is refused by its own extents.
    const int64_t n = sources.size() == 1 ? spec.n : ColumnsOf(source);
    if (n < 1 || n > spec.n - columns) {
      return InvalidArgument(kOp, FieldOf(i, "codes"), " has ", n,
                             " columns after ", columns,
                             " of the sources before; need 1 or more of each, "
                             "and n=",
                             spec.n, " in all");
    }
    columns += n;
    QUERN_RETURN_IF_ERROR(CheckLayout(spec, source.layout, n));
    QUERN_RETURN_IF_ERROR(SourceCheck(spec, source, i, n, executor).Run());
  }
  return CheckEqual(kOp, "columns of all sources", columns, spec.n,
                    "n of the spec");
}

absl::StatusOr<std::vector<int32_t>> OrderOf(
    const LinearWeightsSpec& spec, absl::Span<const LinearSource> sources) {
  QUERN_ASSIGN_OR_RETURN(
      std::vector<int32_t> order,
      OrderOfSource(spec, sources[0].g_idx, FieldOf(0, "g_idx")));
  for (size_t i = 1; i < sources.size(); ++i) {
    const std::string field = FieldOf(i, "g_idx");
    QUERN_ASSIGN_OR_RETURN(const std::vector<int32_t> own,
                           OrderOfSource(spec, sources[i].g_idx, field));
    if (own != order) {
      return InvalidArgument(kOp, field,
                             " is another order than that of sources[0]");
    }
  }
  return order;
}

}  // namespace quern
