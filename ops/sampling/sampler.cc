#include "quern/ops/sampling/sampler.h"

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/sampling/draw.h"
#include "quern/ops/sampling/logit_blocks.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "sampler";

// The scratch of all workers, each piece one worker after the other.
template <typename Allocator>
DrawScratch LayOut(Allocator& allocator, int64_t vocab, int64_t workers) {
  const int64_t blocks = SamplerBlocks(vocab) * workers;
  return {allocator.template Allocate<float>("weights", kSamplerBlock * blocks),
          allocator.template Allocate<int32_t>("ids", kSamplerBlock * blocks),
          allocator.template Allocate<float>("largest of blocks", blocks),
          allocator.template Allocate<float>("order of blocks", blocks),
          allocator.template Allocate<double>("sums of blocks", blocks),
          allocator.template Allocate<int32_t>("gathered blocks", blocks)};
}
DrawScratch ScratchOf(const DrawScratch& all, int64_t vocab, int64_t worker) {
  const int64_t blocks = SamplerBlocks(vocab) * worker;
  return {all.weights + kSamplerBlock * blocks,
          all.ids + kSamplerBlock * blocks,
          all.largest + blocks,
          all.order + blocks,
          all.sums + blocks,
          all.gathered + blocks};
}

absl::Status CheckFraction(const char* field, float value) {
  if (value > 0.0f && value <= 1.0f) return absl::OkStatus();
  return InvalidArgument(kOp, field, "=", value, "; need 0 < ", field, " <= 1");
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
  QUERN_RETURN_IF_ERROR(CheckFraction("top_p", params.top_p));
  if (!(params.min_p >= 0.0f && params.min_p <= 1.0f)) {
    return InvalidArgument(kOp, "min_p=", params.min_p,
                           "; need 0 <= min_p <= 1");
  }
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "top_n_sigma", params.top_n_sigma,
                                         "finite top_n_sigma"));
  return CheckFraction("typical_p", params.typical_p);
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
  const DrawScratch all = LayOut(workspace, vocab, executor.num_workers());
  executor.ParallelFor(logits.extent(0), [&](int64_t row, int worker) {
    const size_t r = static_cast<size_t>(row);
    tokens[r] = params[r].temperature == 0.0f
                    ? GreedyToken(logits.Row(row), vocab, kernels_)
                    : DrawToken(logits.Row(row), vocab, params[r], kernels_,
                                ScratchOf(all, vocab, worker));
  });
}

}  // namespace quern
