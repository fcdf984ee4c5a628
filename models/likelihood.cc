#include "quern/models/likelihood.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/tensor_view.h"

namespace quern {

double NegativeLogLikelihood(MatrixView<const float> logits,
                             absl::Span<const int32_t> next) {
  QUERN_DCHECK(static_cast<int64_t>(next.size()) <= logits.extent(0));
  const int64_t vocab = logits.extent(1);
  double total = 0;
  for (size_t r = 0; r < next.size(); ++r) {
    QUERN_DCHECK(0 <= next[r] && next[r] < vocab);
    const float* row = logits.Row(static_cast<int64_t>(r));
    const float largest = *std::max_element(row, row + vocab);
    double sum = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      // exp in f32 is enough: a term's error is far below that of the mean.
      sum += static_cast<double>(std::exp(row[v] - largest));
    }
    total += std::log(sum) + static_cast<double>(largest) -
             static_cast<double>(row[next[r]]);
  }
  return total;
}

}  // namespace quern
