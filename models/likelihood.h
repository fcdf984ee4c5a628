#ifndef QUERN_MODELS_LIKELIHOOD_H_
#define QUERN_MODELS_LIKELIHOOD_H_

// The negative log-likelihood, in nats, of the tokens that came next:
//
//   sum over rows r of  lse[r] - logits[r, next[r]]
//   lse[r] = log(sum over v of exp(logits[r, v]))
//
// Perplexity is exp of the mean over rows. Accumulates in double.

#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/tensor_view.h"

namespace quern {

// `next` has a token of the vocabulary for each of the first next.size() rows.
double NegativeLogLikelihood(MatrixView<const float> logits,
                             absl::Span<const int32_t> next);

}  // namespace quern

#endif  // QUERN_MODELS_LIKELIHOOD_H_
