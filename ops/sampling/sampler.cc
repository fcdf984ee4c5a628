#include "quern/ops/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/sampling/philox.h"

namespace quern {
namespace {

constexpr char kOp[] = "sampler";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scratch memory of one worker: the weight of every token, and ids to be
// sorted.
struct Scratch {
  float* weights;
  int32_t* ids;
};
template <typename Allocator>
Scratch LayOut(Allocator& allocator, int64_t vocab, int64_t workers) {
  return {allocator.template Allocate<float>("weights", vocab * workers),
          allocator.template Allocate<int32_t>("ids", vocab * workers)};
}

// The strict order of sampler.h: a larger logit first, then a lower id.
struct Larger {
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
  const float* logits;
};

// Returns the id of the largest logit. NaN never wins, because no comparison
// with NaN is true.
int32_t Greedy(const float* logits, int64_t vocab) {
  int32_t best = SamplerPlan::kNoToken;
  float largest = -kInfinity;
  for (int64_t i = 0; i < vocab; ++i) {
    if (logits[i] > largest) {
      largest = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

// The last token, in the order of `Larger`, of the smallest set that the
// filters of `params` keep; kNoToken if they keep all.
int32_t LastKept(const float* logits, int64_t vocab,
                 const SamplingParams& params, const Scratch& scratch) {
  const Larger larger{logits};
  int32_t* const begin = scratch.ids;
  int32_t* end = begin;
  for (int64_t i = 0; i < vocab; ++i) {
    if (logits[i] > -kInfinity) *end++ = static_cast<int32_t>(i);
  }
  int32_t last = SamplerPlan::kNoToken;
  if (params.top_k > 0 && params.top_k < end - begin) {
    int32_t* const kth = begin + params.top_k - 1;
    std::nth_element(begin, kth, end, larger);
    last = *kth;
    end = kth + 1;
  }
  if (params.top_p == 1.0f) return last;

  // A heap yields the largest ids one by one, so only those needed are sorted.
  double total = 0.0;
  for (const int32_t* id = begin; id != end; ++id) {
    total += static_cast<double>(scratch.weights[*id]);
  }
  const double wanted = static_cast<double>(params.top_p) * total;
  const auto smaller = [&](int32_t a, int32_t b) { return larger(b, a); };
  std::make_heap(begin, end, smaller);
  double sum = 0.0;
  do {
    std::pop_heap(begin, end, smaller);
    last = *--end;
    sum += static_cast<double>(scratch.weights[last]);
  } while (sum < wanted && end != begin);
  return last;
}

int32_t Draw(const float* logits, int64_t vocab, const SamplingParams& params,
             const Scratch& scratch) {
  const int32_t greedy = Greedy(logits, vocab);
  if (greedy == SamplerPlan::kNoToken) return greedy;
  const float largest = logits[greedy];

  // A logit equal to the largest has weight 1. Testing equality first avoids
  // the difference of two infinities.
  for (int64_t i = 0; i < vocab; ++i) {
    const float logit = logits[i];
    scratch.weights[i] = logit == largest ? 1.0f
                         : logit < largest
                             ? std::exp((logit - largest) / params.temperature)
                             : 0.0f;
  }
  if (params.top_k > 0 || params.top_p < 1.0f) {
    const int32_t last = LastKept(logits, vocab, params, scratch);
    if (last != SamplerPlan::kNoToken) {
      const Larger larger{logits};
      for (int64_t i = 0; i < vocab; ++i) {
        const int32_t id = static_cast<int32_t>(i);
        // For a NaN logit `larger` is false, and its weight is 0 already.
        if (id != last && !larger(id, last)) scratch.weights[i] = 0.0f;
      }
    }
  }

  double total = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    total += static_cast<double>(scratch.weights[i]);
  }
  const double at = PhiloxUniform(params.seed, params.step) * total;
  double sum = 0.0;
  int32_t token = greedy;
  for (int64_t i = 0; i < vocab; ++i) {
    if (scratch.weights[i] == 0.0f) continue;
    token = static_cast<int32_t>(i);
    sum += static_cast<double>(scratch.weights[i]);
    if (sum > at) break;
  }
  // If rounding made `at` equal the total, this is the last token with a
  // weight.
  return token;
}

}  // namespace

absl::StatusOr<SamplerPlan> SamplerPlan::Create(const SamplerSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocab", spec.vocab, 1,
                                   std::numeric_limits<int32_t>::max()));
  return SamplerPlan(spec);
}

absl::Status SamplerPlan::CheckParams(const SamplingParams& params) {
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "temperature", params.temperature,
                                         "finite temperature"));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "top_k", params.top_k, 0));
  if (!(params.top_p > 0.0f && params.top_p <= 1.0f)) {
    return InvalidArgument(kOp, "top_p=", params.top_p,
                           "; need 0 < top_p <= 1");
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SamplerPlan::WorkspaceBytes(int64_t max_rows,
                                                    int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_rows", max_rows, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_workers", max_workers, 1));
  WorkspaceLayout layout;
  LayOut(layout, spec_.vocab, max_workers);
  if (layout.overflow()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        kOp, ": vocab=", spec_.vocab, ", max_workers=", max_workers,
        "; their workspace has 2^63 bytes or more"));
  }
  return layout.bytes();
}

absl::Status SamplerPlan::CheckArgs(MatrixView<const float> logits,
                                    absl::Span<const SamplingParams> params,
                                    absl::Span<const int32_t> tokens) const {
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "logits.extent(1)", logits.extent(1),
                                   spec_.vocab, "vocab"));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "rows", logits.extent(0), 0));
  if (logits.data() == nullptr && logits.extent(0) > 0) {
    return InvalidArgument(kOp, "logits is null; need ", logits.extent(0),
                           " rows");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "params.size",
                                   static_cast<int64_t>(params.size()),
                                   logits.extent(0), "rows of logits"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "tokens.size",
                                   static_cast<int64_t>(tokens.size()),
                                   logits.extent(0), "rows of logits"));
  for (const SamplingParams& p : params) QUERN_RETURN_IF_ERROR(CheckParams(p));
  return absl::OkStatus();
}

void SamplerPlan::Execute(MatrixView<const float> logits,
                          absl::Span<const SamplingParams> params,
                          absl::Span<int32_t> tokens, Workspace workspace,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(logits, params, tokens));
  const int64_t vocab = spec_.vocab;
  const Scratch all = LayOut(workspace, vocab, executor.num_workers());
  executor.ParallelFor(logits.extent(0), [&](int64_t row, int worker) {
    const size_t r = static_cast<size_t>(row);
    tokens[r] =
        params[r].temperature == 0.0f
            ? Greedy(logits.Row(row), vocab)
            : Draw(logits.Row(row), vocab, params[r],
                   {all.weights + worker * vocab, all.ids + worker * vocab});
  });
}

}  // namespace quern
