#ifndef QUERN_EXAMPLES_PAGED_ATTENTION_REFERENCE_TESTUTIL_H_
#define QUERN_EXAMPLES_PAGED_ATTENTION_REFERENCE_TESTUTIL_H_

// Input data of the example (made-up queries, keys and values), and attention
// over them as a plain loop for comparison. An engine that copies main.cc has
// tensors of its own in place of this header, the only one that needs
// //testing.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/quant/scalar_convert.h"
#include "quern/testing/errors/largest_difference.h"

namespace quern {

constexpr int64_t kQHeads = 8, kKvHeads = 2, kHeadDim = 64;
constexpr int64_t kDocument = 256;  // common first tokens of all sequences

// An element of a query, key or value, in [-1, 1] and exact in bf16.
inline float Element(char which, int64_t sequence, int64_t token, int64_t head,
                     int64_t d) {
  auto x = static_cast<uint32_t>(which);
  for (const int64_t i : {token < kDocument ? 0 : sequence, token, head, d}) {
    x = (x ^ static_cast<uint32_t>(i)) * 2654435761u;
    x ^= x >> 15;
  }
  return static_cast<float>(static_cast<int>(x % 129) - 64) / 64.0f;
}

// Calls fn(sequence, token) for the rows of a step in their order: the new
// tokens of each sequence, which are the last q_lens[s] of its kv_lens[s].
template <typename Fn>
void ForEachRow(const std::vector<int64_t>& q_lens,
                const std::vector<int64_t>& kv_lens, const Fn& fn) {
  for (size_t s = 0; s < q_lens.size(); ++s) {
    for (int64_t t = kv_lens[s] - q_lens[s]; t < kv_lens[s]; ++t) {
      fn(static_cast<int64_t>(s), t);
    }
  }
}

// Rows [tokens, heads, kHeadDim], in place of a layer's projections.
inline std::vector<BFloat16> Rows(char which, int64_t heads,
                                  const std::vector<int64_t>& q_lens,
                                  const std::vector<int64_t>& kv_lens) {
  std::vector<BFloat16> rows;
  ForEachRow(q_lens, kv_lens, [&](int64_t sequence, int64_t token) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < kHeadDim; ++d) {
        rows.push_back(
            FromF32<BFloat16>(Element(which, sequence, token, h, d)));
      }
    }
  });
  return rows;
}

// Expected output [tokens, kQHeads, kHeadDim]: a loop over the keys that each
// row attends to.
inline std::vector<double> PlainAttention(const std::vector<int64_t>& q_lens,
                                          const std::vector<int64_t>& kv_lens) {
  std::vector<double> out;
  ForEachRow(q_lens, kv_lens, [&](int64_t s, int64_t token) {
    for (int64_t h = 0; h < kQHeads; ++h) {
      const int64_t g = h / (kQHeads / kKvHeads);
      std::vector<double> sums(kHeadDim);
      double weights = 0;
      for (int64_t t = 0; t <= token; ++t) {
        double logit = 0;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          logit += double{Element('q', s, token, h, d)} *
                   double{Element('k', s, t, g, d)};
        }
        const double weight = std::exp(logit / std::sqrt(double{kHeadDim}));
        weights += weight;
        for (size_t d = 0; d < sums.size(); ++d) {
          sums[d] +=
              weight * double{Element('v', s, t, g, static_cast<int64_t>(d))};
        }
      }
      for (const double sum : sums) out.push_back(sum / weights);
    }
  });
  return out;
}

// Returns the largest difference between `out` and PlainAttention. Internal if
// it exceeds rounding, or if elements are missing or not numbers.
inline absl::StatusOr<double> CompareWithPlainAttention(
    const std::vector<float>& out, const std::vector<int64_t>& q_lens,
    const std::vector<int64_t>& kv_lens) {
  // The kernel rounds weights to bf16 before it multiplies them with values of
  // at most 1.
  constexpr double kBound = 1.0 / 256;
  const double error =
      LargestDifferenceOf(out, PlainAttention(q_lens, kv_lens));
  if (error <= kBound) return error;
  return absl::InternalError(
      absl::StrCat("attention differs from the plain loop by ", error,
                   "; need at most ", kBound));
}

}  // namespace quern

#endif  // QUERN_EXAMPLES_PAGED_ATTENTION_REFERENCE_TESTUTIL_H_
