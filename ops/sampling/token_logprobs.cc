#include "quern/ops/sampling/token_logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/logit_blocks.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "token_logprobs";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scratch memory of one worker.
struct Scratch {
  int32_t* ids;    // candidates
  float* largest;  // of each block
  float* order;    // the same, to be sorted
};
template <typename Allocator>
Scratch LayOut(Allocator& allocator, int64_t vocab, int64_t workers) {
  const int64_t blocks = SamplerBlocks(vocab) * workers;
  return {allocator.template Allocate<int32_t>("ids", vocab * workers),
          allocator.template Allocate<float>("largest of blocks", blocks),
          allocator.template Allocate<float>("order of blocks", blocks)};
}

// One row of logits, and its results.
class Row {
 public:
  Row(const TokenLogprobsSpec& spec, const SamplerKernels& kernels,
      const TokenLogprobsArgs& args, int64_t row, const Scratch& scratch)
      : spec_(spec),
        kernels_(kernels),
        args_(args),
        row_(row),
        scratch_(scratch),
        logits_(args.logits.Row(row)),
        blocks_(logits_, spec.vocab) {}

  void Execute() {
    rule_.largest = blocks_.Largest(kernels_, scratch_.largest);
    rule_.temperature = 1.0f;
    rule_.least_logit = -kInfinity;
    least_ = blocks_.KthLargest(spec_.top_n, scratch_.largest, scratch_.order);
    end_ = scratch_.ids;
    std::fill_n(args_.ranks.Row(row_), spec_.given, 1);
    double total = 0.0;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      const float* const block = blocks_[b];
      if (rule_.largest > -kInfinity) {
        float weights[kSamplerBlock];
        total += kernels_.weights(block, rule_, weights);
      }
      Count(b, block);
      if (scratch_.largest[b] >= least_) Gather(b, block);
    }
    log_total_ = std::log(total);
    WriteTop();
    for (int64_t i = 0; i < spec_.given; ++i) {
      const int32_t id = args_.ids.Row(row_)[i];
      args_.logprobs.Row(row_)[i] =
          id == TokenLogprobsPlan::kNoToken ? -kInfinity : LogProb(id);
    }
  }

 private:
  // Adds to the ranks of given tokens those of the block that come before.
  void Count(int64_t b, const float* block) const {
    for (int64_t i = 0; i < spec_.given; ++i) {
      const int64_t id = args_.ids.Row(row_)[i];
      int32_t& rank = args_.ranks.Row(row_)[i];
      if (id == TokenLogprobsPlan::kNoToken) {
        rank = 0;
        continue;
      }
      const float value = logits_[id] > -kInfinity ? logits_[id] : -kInfinity;
      if (scratch_.largest[b] < value) continue;
      const int64_t before = id - b * kSamplerBlock;
      if (value > -kInfinity && before >= kSamplerBlock) {
        // Equal ones come before it, too.
        rank += kernels_.greater(block, value) +
                static_cast<int32_t>(
                    std::count(block, block + kSamplerBlock, value));
        continue;
      }
      rank += kernels_.greater(block, value);
      if (value > -kInfinity && before > 0) {
        rank += static_cast<int32_t>(std::count(block, block + before, value));
      }
    }
  }

  // Appends the ids of the block's logits from least_ on.
  void Gather(int64_t b, const float* block) {
    const int64_t count =
        std::min(kSamplerBlock, spec_.vocab - b * kSamplerBlock);
    for (int64_t i = 0; i < count; ++i) {
      if (block[i] >= least_ && block[i] > -kInfinity) {
        *end_++ = static_cast<int32_t>(b * kSamplerBlock + i);
      }
    }
  }

  void WriteTop() const {
    const LargerLogit larger{logits_};
    int32_t* const begin = scratch_.ids;
    const int64_t found = std::min<int64_t>(spec_.top_n, end_ - begin);
    if (found < end_ - begin) {
      std::nth_element(begin, begin + found, end_, larger);
    }
    std::sort(begin, begin + found, larger);
    int32_t* const ids = args_.top_ids.Row(row_);
    float* const logprobs = args_.top_logprobs.Row(row_);
    for (int64_t i = 0; i < spec_.top_n; ++i) {
      ids[i] = i < found ? begin[i] : TokenLogprobsPlan::kNoToken;
      logprobs[i] = i < found ? LogProb(begin[i]) : -kInfinity;
    }
  }

  float LogProb(int32_t id) const {
    const float logit = logits_[id];
    if (!(logit > -kInfinity)) return -kInfinity;
    // The difference of two infinities is not needed.
    const double below =
        logit == rule_.largest
            ? 0.0
            : static_cast<double>(logit) - static_cast<double>(rule_.largest);
    return static_cast<float>(below - log_total_);
  }

  const TokenLogprobsSpec& spec_;
  const SamplerKernels& kernels_;
  const TokenLogprobsArgs& args_;
  int64_t row_;
  const Scratch& scratch_;
  const float* logits_;
  LogitBlocks blocks_;
  WeightRule rule_;
  float least_ = 0.0f;      // of a candidate for the top_n
  int32_t* end_ = nullptr;  // of the candidates
  double log_total_ = 0.0;
};

}  // namespace

absl::StatusOr<TokenLogprobsPlan> TokenLogprobsPlan::Create(
    const TokenLogprobsSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocab", spec.vocab, 1,
                                   std::numeric_limits<int32_t>::max()));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "top_n", spec.top_n, 1, spec.vocab));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "given", spec.given, 1));
  return TokenLogprobsPlan(spec);
}

absl::StatusOr<int64_t> TokenLogprobsPlan::WorkspaceBytes(
    int64_t max_rows, int max_workers) const {
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

absl::Status TokenLogprobsPlan::CheckArgs(const TokenLogprobsArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "logits", args.logits, DType::kF32,
                                   {kAnyExtent, spec_.vocab}));
  const int64_t rows = args.logits.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "ids", args.ids, DType::kI32, {rows, spec_.given}));
  struct Written {
    const char* name;
    AnyTensorView view;
    int64_t extent;
  };
  const Written written[] = {{"top_ids", args.top_ids, spec_.top_n},
                             {"top_logprobs", args.top_logprobs, spec_.top_n},
                             {"logprobs", args.logprobs, spec_.given},
                             {"ranks", args.ranks, spec_.given}};
  for (const Written& one : written) {
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, one.name, one.view, one.view.dtype(),
                                      {rows, one.extent}));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "logits", args.logits, one.name, one.view));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", args.ids, one.name, one.view));
    for (const Written& other : written) {
      if (&other == &one) break;
      QUERN_RETURN_IF_ERROR(
          CheckApart(kOp, other.name, other.view, one.name, one.view));
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < spec_.given; ++i) {
      const int32_t id = args.ids.Row(r)[i];
      if (id == kNoToken || (0 <= id && id < spec_.vocab)) continue;
      return InvalidArgument(kOp, "ids[", r, ", ", i, "]=", id,
                             "; need 0 <= id < ", spec_.vocab, ", or ",
                             kNoToken);
    }
  }
  return absl::OkStatus();
}

void TokenLogprobsPlan::Execute(const TokenLogprobsArgs& args,
                                Workspace workspace,
                                Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t vocab = spec_.vocab;
  const int64_t blocks = SamplerBlocks(vocab);
  const Scratch all = LayOut(workspace, vocab, executor.num_workers());
  executor.ParallelFor(args.logits.extent(0), [&](int64_t row, int worker) {
    const Scratch mine = {all.ids + vocab * worker,
                          all.largest + blocks * worker,
                          all.order + blocks * worker};
    Row(spec_, kernels_, args, row, mine).Execute();
  });
}

}  // namespace quern
