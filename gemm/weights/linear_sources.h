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

// The rows of a matrix that has been checked.
template <typename T>
struct Rows {
  explicit Rows(const AnyTensorView& view)
      : data(static_cast<const T*>(view.data())), stride(view.RowStride()) {}
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

// Where a column of b comes from.
struct Column {
  size_t source;
  int64_t n;  // the column of that source
};

// The columns of all sources, one source after the other; `n` in all.
class Columns {
 public:
  Columns(absl::Span<const LinearSource> sources, int64_t n) {
    for (const LinearSource& source : sources) {
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + ColumnsOf(source));
    }
    ends_.back() = n;
  }
  size_t sources() const { return ends_.size(); }
  int64_t begin(size_t source) const {
    return source == 0 ? 0 : ends_[source - 1];
  }
  int64_t end(size_t source) const { return ends_[source]; }
  Column At(int64_t n) const {
    const auto source = static_cast<size_t>(
        std::upper_bound(ends_.begin(), ends_.end(), n) - ends_.begin());
    return {source, n - begin(source)};
  }

 private:
  std::vector<int64_t> ends_;
};

// Checks every view of every source.
absl::Status CheckSources(const LinearWeightsSpec& spec,
                          absl::Span<const LinearSource> sources,
                          Executor& executor);

// Returns every k, sorted by its group and then by k. Empty where that is the
// order of k itself.
absl::StatusOr<std::vector<int32_t>> OrderOf(
    const LinearWeightsSpec& spec, absl::Span<const LinearSource> sources);

// Writes every section but the order of the packed form that begins at `to`.
// Where sources meet inside a panel, it needs memory for a copy of that panel:
// ResourceExhausted if there is none.
absl::Status PackSources(const LinearWeightsSpec& spec, const PackedForm& form,
                         absl::Span<const LinearSource> sources,
                         const std::vector<int32_t>& order, uint8_t* to,
                         Executor& executor);

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_LINEAR_SOURCES_H_
