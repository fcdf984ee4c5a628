#ifndef QUERN_MODELS_LIKELIHOOD_H_
#define QUERN_MODELS_LIKELIHOOD_H_

//   sum over rows r of  lse[r] - logits[r, next[r]]
//   lse[r] = log(sum over v of exp(logits[r, v]))
//
// in nats: how badly the logits predicted the tokens that did come. Perplexity
// is exp of the mean. Accumulates in double.

#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/tensor_view.h"

namespace quern {

// next: a token of the vocabulary for each of the first next.size() rows.
double NegativeLogLikelihood(MatrixView<const float> logits,
                             absl::Span<const int32_t> next);

}  // namespace quern

#endif  // QUERN_MODELS_LIKELIHOOD_H_
