#include "quern/attention/merge_states.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "merge_states";

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

// Heads whose weights are computed at once, on the stack.
constexpr int64_t kWeights = 64;

// Elements of a task at least: a few microseconds, of which starting it takes
// one.
constexpr int64_t kTaskElements = 32 << 10;

int64_t ByteStride(const AnyTensorView& view, int dimension) {
  return view.stride(dimension) * static_cast<int64_t>(SizeOf(view.dtype()));
}

// The log-sum-exps of up to kWeights heads of a token, one after another.
class LseRow {
 public:
  LseRow(const AnyTensorView& view, bool by_head, int64_t token, int64_t first,
         int64_t heads)
      : data_(static_cast<float*>(const_cast<void*>(view.data()))),
        step_(by_head ? view.stride(0) : 1),
        heads_(heads) {
    data_ += by_head ? first * step_ + token : token * view.stride(0) + first;
  }

  // Where they lie: in the view, or in `copy`, which has room for them.
  const float* Read(float* copy) const {
    if (step_ == 1 || heads_ == 1) return data_;
    for (int64_t h = 0; h < heads_; ++h) copy[h] = data_[h * step_];
    return copy;
  }
  // Where to write them, before Wrote is called.
  float* Place(float* copy) const {
    return step_ == 1 || heads_ == 1 ? data_ : copy;
  }
  void Wrote(const float* copy) const {
    if (copy == data_) return;
    for (int64_t h = 0; h < heads_; ++h) data_[h * step_] = copy[h];
  }

 private:
  float* data_;
  int64_t step_;  // from head to head
  int64_t heads_;
};

}  // namespace

absl::StatusOr<MergeStatesPlan> MergeStatesPlan::Create(
    const MergeStatesSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "heads", spec.heads, 1, kMax));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "head_dim", spec.head_dim, 1, kMax));
  if (spec.a_tokens < -1) {
    return InvalidArgument(kOp, "a_tokens=", spec.a_tokens,
                           "; need -1 or a number of tokens");
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kFloatDTypes));
  return MergeStatesPlan(spec);
}

absl::Status MergeStatesPlan::CheckArgs(const MergeStatesArgs& args) const {
  const int64_t tokens = args.a.out.extent(0);
  const int64_t heads = spec_.heads;
  const int64_t dim = spec_.head_dim;
  const bool with_lse = args.lse.rank() != 0;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a.out", args.a.out, spec_.dtype,
                                   {kAnyExtent, heads, dim}));
  if (spec_.a_tokens > tokens) {
    return InvalidArgument(kOp, "a_tokens=", spec_.a_tokens, "; need at most ",
                           tokens, ", the tokens");
  }
  const int64_t by_token[] = {tokens, heads}, by_head[] = {heads, tokens};
  const absl::Span<const int64_t> lse_extents =
      spec_.lse_by_head ? by_head : by_token;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a.lse", args.a.lse, DType::kF32, lse_extents));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "b.out", args.b.out, spec_.dtype, {tokens, heads, dim}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "b.lse", args.b.lse, DType::kF32, lse_extents));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", args.out, spec_.out_dtype, {tokens, heads, dim}));
  if (with_lse) {
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "lse", args.lse, DType::kF32, lse_extents));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "out", args.out, "lse", args.lse));
  }
  const struct {
    const char* out_name;
    const char* lse_name;
    const AttentionState& state;
  } parts[] = {{"a.out", "a.lse", args.a}, {"b.out", "b.lse", args.b}};
  for (const auto& part : parts) {
    QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, part.out_name,
                                              part.state.out, "out", args.out));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, part.lse_name, part.state.lse, "out", args.out));
    if (!with_lse) continue;
    QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, part.lse_name,
                                              part.state.lse, "lse", args.lse));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, part.out_name, part.state.out, "lse", args.lse));
  }
  return absl::OkStatus();
}

void MergeStatesPlan::Execute(const MergeStatesArgs& args,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t tokens = args.out.extent(0);
  if (tokens == 0) return;
  const auto* const a = static_cast<const uint8_t*>(args.a.out.data());
  const auto* const b = static_cast<const uint8_t*>(args.b.out.data());
  auto* const out = static_cast<uint8_t*>(args.out.mutable_data());
  const auto dim = static_cast<size_t>(spec_.head_dim);
  const int64_t per_task =
      std::max(DivCeil(tokens, int64_t{4} * executor.num_workers()),
               DivCeil(kTaskElements, spec_.heads * spec_.head_dim));
  const int64_t a_tokens = spec_.a_tokens < 0 ? tokens : spec_.a_tokens;
  const bool with_lse = args.lse.rank() != 0;
  executor.ParallelFor(DivCeil(tokens, per_task), [&](int64_t task, int) {
    float lse_a[kWeights], lse_b[kWeights], lse_out[kWeights];
    float weight_a[kWeights], weight_b[kWeights];
    const int64_t begin = task * per_task;
    const int64_t end = std::min(begin + per_task, tokens);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t first = 0; first < spec_.heads; first += kWeights) {
        const int64_t heads = std::min(kWeights, spec_.heads - first);
        const auto row = [&](const AnyTensorView& view) {
          return LseRow(view, spec_.lse_by_head, token, first, heads);
        };
        const float* const b_lse = row(args.b.lse).Read(lse_b);
        float* const lse = with_lse ? row(args.lse).Place(lse_out) : nullptr;
        if (token < a_tokens) {
          kernels_.weights(row(args.a.lse).Read(lse_a), b_lse,
                           static_cast<size_t>(heads), weight_a, weight_b, lse);
        } else {
          std::fill_n(weight_a, heads, 0.0f);
          std::fill_n(weight_b, heads, 1.0f);
          if (with_lse && lse != b_lse) std::copy_n(b_lse, heads, lse);
        }
        if (with_lse) row(args.lse).Wrote(lse);
        for (int64_t h = 0; h < heads; ++h) {
          const auto at = [&](const AnyTensorView& view) {
            return token * ByteStride(view, 0) +
                   (first + h) * ByteStride(view, 1);
          };
          kernels_.merge(a + at(args.a.out), weight_a[h], b + at(args.b.out),
                         weight_b[h], dim, out + at(args.out));
        }
      }
    }
  });
}

}  // namespace quern
