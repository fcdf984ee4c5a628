#include "quern/ops/sampling/adjust_logits.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/sampling/adjust_logits_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "adjust_logits";
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kWordBits = 32;

// Whether ids of a row strictly increase.
enum class Order { kAny, kIncreasing };

// What refusals call the ids of rows, and where each row's begin.
struct Names {
  absl::string_view ids, starts, starts_size;
};

absl::Status CheckLists(const Names& names, const TokenLists& lists,
                        int64_t rows, int64_t vocab, Order order) {
  const auto [ids, starts, starts_size] = names;
  if (lists.starts.size() == 0 && lists.ids.size() == 0) {
    return absl::OkStatus();
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, starts_size, lists.starts.size(),
                                   rows + 1, "one more than rows"));
  QUERN_RETURN_IF_ERROR(CheckIndices(kOp, ids, "id", lists.ids, vocab));
  QUERN_RETURN_IF_ERROR(
      CheckIndices(kOp, starts, "start", lists.starts, lists.ids.size() + 1));
  if (lists.starts[0] != 0 || lists.starts[rows] != lists.ids.size()) {
    return InvalidArgument(kOp, starts, " is from ", lists.starts[0], " to ",
                           lists.starts[rows], "; need from 0 to ",
                           lists.ids.size(), ", the number of ", ids);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t begin = lists.starts[r], end = lists.starts[r + 1];
    if (end < begin) {
      return InvalidArgument(kOp, starts, "[", r + 1, "]=", end, "; need ",
                             begin, " or more, ", starts, "[", r, "]");
    }
    if (order == Order::kAny) continue;
    for (int64_t i = begin + 1; i < end; ++i) {
      if (lists.ids[i] > lists.ids[i - 1]) continue;
      return InvalidArgument(kOp, ids, "[", i, "]=", lists.ids[i],
                             "; need more than ", lists.ids[i - 1],
                             ", the id before it in row ", r);
    }
  }
  return absl::OkStatus();
}

// `fits` says whether a number is one of those that `need` describes.
template <class Fits>
absl::Status CheckNumbers(absl::string_view name, absl::string_view size,
                          absl::Span<const float> numbers, int64_t rows,
                          const Fits& fits, absl::string_view need) {
  if (numbers.empty()) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, size, static_cast<int64_t>(numbers.size()), rows, "rows of logits"));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (fits(numbers[i])) continue;
    return InvalidArgument(kOp, name, "[", i, "]=", numbers[i], "; need ",
                           need);
  }
  return absl::OkStatus();
}

bool IsFinite(float v) { return std::isfinite(v); }
bool IsPositive(float v) { return v > 0.0f && v < kInfinity; }
bool IsPenalty(float v) { return std::abs(v) <= AdjustLogitsPlan::kMaxPenalty; }

AnyTensorView Numbers(absl::Span<const float> numbers) {
  return DenseVector(numbers.data(), static_cast<int64_t>(numbers.size()));
}

// One row, and its part of the arguments.
class Row {
 public:
  Row(const AdjustLogitsArgs& args, int64_t row)
      : args_(args), row_(row), logits_(args.logits.Row(row)) {}

  void Adjust(const AdjustLogitsKernels& kernels) const {
    const int32_t* const mask = Mask();
    if (mask != nullptr) {
      kernels.mask(logits_, static_cast<size_t>(args_.logits.extent(1)), mask);
    }
    const auto [forbidden, forbidden_end] = RangeOf(args_.forbidden);
    for (int64_t i = forbidden; i < forbidden_end; ++i) {
      logits_[args_.forbidden.ids[i]] = -kInfinity;
    }
    const auto [biased, biased_end] = RangeOf(args_.biased);
    for (int64_t i = biased; i < biased_end; ++i) {
      logits_[args_.biased.ids[i]] += args_.bias[static_cast<size_t>(i)];
    }
    Penalise();
  }

 private:
  struct Range {
    int64_t begin, end;
  };
  Range RangeOf(const TokenLists& lists) const {
    if (lists.starts.size() == 0) return {0, 0};
    return {lists.starts[row_], lists.starts[row_ + 1]};
  }
  const int32_t* Mask() const {
    if (args_.masks.extent(0) == 0) return nullptr;
    const int64_t mask =
        args_.mask_rows.size() == 0 ? row_ : args_.mask_rows[row_];
    return mask == AdjustLogitsPlan::kNoMask ? nullptr : args_.masks.Row(mask);
  }
  float NumberOf(absl::Span<const float> numbers, float without) const {
    return numbers.empty() ? without : numbers[static_cast<size_t>(row_)];
  }

  // Both lists increase, so that one pass over them meets a token that is in
  // both once.
  void Penalise() const {
    const float repetition = NumberOf(args_.repetition, 1.0f);
    const float frequency = NumberOf(args_.frequency, 0.0f);
    const float presence = NumberOf(args_.presence, 0.0f);
    auto [prompt, prompt_end] = RangeOf(args_.prompt);
    auto [output, output_end] = RangeOf(args_.output);
    constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
    for (;;) {
      const int64_t a = prompt < prompt_end ? args_.prompt.ids[prompt] : kNone;
      const int64_t b = output < output_end ? args_.output.ids[output] : kNone;
      const int64_t id = a < b ? a : b;
      if (id == kNone) return;
      const int64_t count = id == b ? args_.output_counts[output] : 0;
      if (id == a || count > 0) {
        float l = logits_[id];
        l = l > 0.0f ? l / repetition : l * repetition;
        if (count > 0) {
          // Rounded before it is subtracted.
          const auto product = static_cast<float>(
              static_cast<double>(frequency) * static_cast<double>(count));
          l = l - product;
          l = l - presence;
        }
        logits_[id] = l;
      }
      prompt += id == a ? 1 : 0;
      output += id == b ? 1 : 0;
    }
  }

  const AdjustLogitsArgs& args_;
  int64_t row_;
  float* logits_;
};

}  // namespace

absl::StatusOr<AdjustLogitsPlan> AdjustLogitsPlan::Create(
    const AdjustLogitsSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocab", spec.vocab, 1,
                                   std::numeric_limits<int32_t>::max()));
  return AdjustLogitsPlan(spec, GetAdjustLogitsKernels());
}

absl::Status AdjustLogitsPlan::CheckArgs(const AdjustLogitsArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "logits", args.logits, DType::kF32,
                                    {kAnyExtent, spec_.vocab}));
  const int64_t rows = args.logits.extent(0);
  const int64_t masks = args.masks.extent(0);
  // A negative extent is refused as well.
  if (masks != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bitmask", args.masks, DType::kI32,
                                     {kAnyExtent, kAnyExtent}));
    const int64_t words = DivCeil(spec_.vocab, kWordBits);
    if (args.masks.extent(1) < words) {
      return InvalidArgument(kOp, "bitmask.extent(1)=", args.masks.extent(1),
                             "; need ", words, " or more, words of ", kWordBits,
                             " of vocab=", spec_.vocab, " tokens");
    }
  }
  if (args.mask_rows.size() > 0) {
    QUERN_RETURN_IF_ERROR(CheckEqual(
        kOp, "mask_rows.size", args.mask_rows.size(), rows, "rows of logits"));
    QUERN_RETURN_IF_ERROR(
        CheckIndices(kOp, "mask_rows", "mask", args.mask_rows, masks, kNoMask));
  } else if (masks > 0) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "bitmask.extent(0)", masks, rows,
                                     "rows of logits without mask_rows"));
  }
  QUERN_RETURN_IF_ERROR(
      CheckLists({"forbidden_ids", "forbidden_starts", "forbidden_starts.size"},
                 args.forbidden, rows, spec_.vocab, Order::kAny));
  QUERN_RETURN_IF_ERROR(
      CheckLists({"bias_ids", "bias_starts", "bias_starts.size"}, args.biased,
                 rows, spec_.vocab, Order::kIncreasing));
  QUERN_RETURN_IF_ERROR(
      CheckLists({"prompt_ids", "prompt_starts", "prompt_starts.size"},
                 args.prompt, rows, spec_.vocab, Order::kIncreasing));
  QUERN_RETURN_IF_ERROR(
      CheckLists({"output_ids", "output_starts", "output_starts.size"},
                 args.output, rows, spec_.vocab, Order::kIncreasing));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "bias.size",
                                   static_cast<int64_t>(args.bias.size()),
                                   args.biased.ids.size(), "bias_ids"));
  QUERN_RETURN_IF_ERROR(CheckNumbers("bias", "bias.size", args.bias,
                                     args.biased.ids.size(), IsFinite,
                                     "a finite number"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "output_counts.size",
                                   args.output_counts.size(),
                                   args.output.ids.size(), "output_ids"));
  QUERN_RETURN_IF_ERROR(CheckIndices(kOp, "output_counts", "count",
                                     args.output_counts,
                                     std::numeric_limits<int32_t>::max()));
  QUERN_RETURN_IF_ERROR(CheckNumbers("repetition", "repetition.size",
                                     args.repetition, rows, IsPositive,
                                     "a finite number > 0"));
  constexpr char kPenalty[] = "-2^64 <= penalty <= 2^64";
  QUERN_RETURN_IF_ERROR(CheckNumbers("frequency", "frequency.size",
                                     args.frequency, rows, IsPenalty,
                                     kPenalty));
  QUERN_RETURN_IF_ERROR(CheckNumbers("presence", "presence.size", args.presence,
                                     rows, IsPenalty, kPenalty));
  const struct {
    const char* name;
    AnyTensorView view;
  } read[] = {{"bitmask", args.masks},
              {"mask_rows", args.mask_rows.tensor()},
              {"forbidden_ids", args.forbidden.ids.tensor()},
              {"forbidden_starts", args.forbidden.starts.tensor()},
              {"bias_ids", args.biased.ids.tensor()},
              {"bias_starts", args.biased.starts.tensor()},
              {"bias", Numbers(args.bias)},
              {"prompt_ids", args.prompt.ids.tensor()},
              {"prompt_starts", args.prompt.starts.tensor()},
              {"output_ids", args.output.ids.tensor()},
              {"output_starts", args.output.starts.tensor()},
              {"output_counts", args.output_counts.tensor()},
              {"repetition", Numbers(args.repetition)},
              {"frequency", Numbers(args.frequency)},
              {"presence", Numbers(args.presence)}};
  for (const auto& [name, view] : read) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, view, "logits", args.logits));
  }
  return absl::OkStatus();
}

void AdjustLogitsPlan::Execute(const AdjustLogitsArgs& args,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  ParallelRows(executor, args.logits.extent(0), spec_.vocab,
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   Row(args, r).Adjust(kernels_);
                 }
               });
}

}  // namespace quern
