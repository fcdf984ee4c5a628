#ifndef QUERN_GEMM_WEIGHTS_LINEAR_SOURCES_H_
#define QUERN_GEMM_WEIGHTS_LINEAR_SOURCES_H_

// Private: what LinearWeights::Pack does with its sources. `spec` is normalised
// (gemm/weights/packed_form.h).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/quant/block_format.h"

namespace quern {

// Codes in a word of AWQ and GPTQ.
inline constexpr int64_t kWordCodes = 8;

inline bool IsGptq(WeightLayout layout) {
  return layout == WeightLayout::kGptq || layout == WeightLayout::kGptqV2;
}

// The rows of a matrix that has been checked. The stride of a single row is
// meaningless and is not used.
template <typename T>
struct Rows {
  explicit Rows(const AnyTensorView& view)
      : data(static_cast<const T*>(view.data())),
        stride(view.extent(0) == 1 ? 0 : view.stride(0)) {}
  const T* operator[](int64_t row) const { return data + row * stride; }

  const T* data;
  int64_t stride;
};

// Returns the bytes of one row of kBlocks.
inline int64_t BlockRowBytes(const LinearWeightsSpec& spec) {
  const BlockFormatInfo& info =
      *FindBlockFormat(static_cast<uint32_t>(spec.block_format));
  return spec.k / info.values * info.bytes;
}

// Returns how many columns of b a source has. Its codes have rank 2.
inline int64_t ColumnsOf(const LinearSource& source) {
  switch (source.layout) {
    case WeightLayout::kAwq:
      // A number of words beyond all bounds does not wrap.
      return std::clamp<int64_t>(source.codes.extent(1), 0,
                                 LinearWeights::kMaxExtent) *
             kWordCodes;
    case WeightLayout::kKN:
    case WeightLayout::kGptq:
    case WeightLayout::kGptqV2:
      return source.codes.extent(1);
    default:
      return source.codes.extent(0);
  }
}

// The first code of each column of all sources, whose layouts have a row of
// bytes for each column.
inline std::vector<const uint8_t*> RowsOfCodes(
    absl::Span<const LinearSource> sources) {
  std::vector<const uint8_t*> rows;
  for (const LinearSource& source : sources) {
    const Rows<uint8_t> of_source(source.codes);
    for (int64_t n = 0; n < ColumnsOf(source); ++n) {
      rows.push_back(of_source[n]);
    }
  }
  return rows;
}

// Packs each part of the form from the rows of its columns.
template <typename Plan>
void PackParts(const Plan& plan, const PackedForm& form,
               absl::Span<const LinearSource> sources, uint8_t* to,
               Executor& executor) {
  const std::vector<const uint8_t*> rows = RowsOfCodes(sources);
  const auto n = static_cast<size_t>(form.part_n);
  for (int64_t part = 0; part < form.parts; ++part) {
    plan.Pack(
        absl::MakeConstSpan(rows).subspan(static_cast<size_t>(part) * n, n),
        to + form.panels + part * form.part_bytes, executor);
  }
}

// Checks every view of every source.
absl::Status CheckSources(const LinearWeightsSpec& spec,
                          absl::Span<const LinearSource> sources,
                          Executor& executor);

// Returns every k, sorted by its group and then by k. Empty where that is the
// order of k itself.
absl::StatusOr<std::vector<int32_t>> OrderOf(
    const LinearWeightsSpec& spec, absl::Span<const LinearSource> sources);

// PackSources for kBlocks, but for the bias.
void PackBlockSources(const LinearWeightsSpec& spec, const PackedForm& form,
                      absl::Span<const LinearSource> sources, uint8_t* to,
                      Executor& executor);

// Writes every section but the order of the packed form that begins at `to`.
// Where sources meet inside a panel, it needs memory for a copy of that panel:
// ResourceExhausted if there is none.
absl::Status PackSources(const LinearWeightsSpec& spec, const PackedForm& form,
                         absl::Span<const LinearSource> sources,
                         const std::vector<int32_t>& order, uint8_t* to,
                         Executor& executor);

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_LINEAR_SOURCES_H_
