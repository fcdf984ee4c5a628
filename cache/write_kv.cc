#include "quern/cache/write_kv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/kv_writer.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/write_kv_division.h"
#include "quern/cache/write_kv_kernels.h"
#include "quern/core/algorithms/distinct.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "write_kv";

constexpr int64_t kGroup = KvLayout::kGroupTokens;

// Whether `token` lies in the same group as the one before, next to it: no task
// begins there, and so no group of 16 is divided.
bool Continues(absl::Span<const int64_t> slots, int64_t token) {
  const auto t = static_cast<size_t>(token);
  return t > 0 && t < slots.size() && slots[t] >= 0 && slots[t] % kGroup != 0 &&
         slots[t] == slots[t - 1] + 1;
}

// Calls fn(run) for all tokens in [begin, end) that are not padding, in runs of
// at most 16 tokens that do not pass a multiple of `unit` slots.
template <typename Fn>
void ForEachRun(absl::Span<const int64_t> slots, int64_t begin, int64_t end,
                int64_t unit, const Fn& fn) {
  for (int64_t token = begin; token < end;) {
    const int64_t slot = slots[static_cast<size_t>(token)];
    if (slot < 0) {
      ++token;
      continue;
    }
    const int64_t most =
        std::min({end - token, unit - slot % unit, int64_t{kGroup}});
    int64_t count = 1;
    while (count < most &&
           slots[static_cast<size_t>(token + count)] == slot + count) {
      ++count;
    }
    fn(KvWriter::Run{token, count, slot});
    token += count;
  }
}

// The bytes of a call from which on it streams.
int64_t StreamAboveBytes(Stores stores) {
  if (stores == Stores::kStream) return -1;
  return stores == Stores::kCached ? std::numeric_limits<int64_t>::max()
                                   : LastLevelBytes() / 2;
}

absl::Status CheckSlots(absl::Span<const int64_t> slots, int64_t end) {
  for (size_t token = 0; token < slots.size(); ++token) {
    if (slots[token] >= end) {
      return InvalidArgument(kOp, "slots[", token, "]=", slots[token],
                             "; need slot < ", end, ", or negative to skip");
    }
  }
  const int64_t twice = FindTwice(
      slots.size(), [&](size_t token) { return slots[token]; },
      [](const auto& /*window*/) {});
  if (twice != kNoNumber) {
    return InvalidArgument(kOp, "slot ", twice,
                           " is given twice; need distinct slots");
  }
  return absl::OkStatus();
}

absl::Status CheckRotation(const WriteKvSpec& spec, const WriteKvArgs& args) {
  const int64_t positions = args.cos.extent(0);
  const int64_t want[] = {positions, spec.rot_dim / 2};
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "cos", args.cos, DType::kF32, want));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "sin", args.sin, DType::kF32, want));
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "positions.size()", static_cast<int64_t>(args.positions.size()),
      static_cast<int64_t>(args.slots.size()), "the slots"));
  for (size_t token = 0; token < args.positions.size(); ++token) {
    const int64_t position = args.positions[token];
    if (args.slots[token] < 0) continue;
    if (position < 0 || position >= positions) {
      return InvalidArgument(kOp, "positions[", token, "]=", position,
                             "; need 0 <= position < ", positions,
                             ", the rows of cos");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WriteKvPlan> WriteKvPlan::Create(const WriteKvSpec& spec) {
  if (spec.kv == KvLayout()) return InvalidArgument(kOp, "kv layout is empty");
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "input", spec.input, kFloatDTypes));
  if (spec.rotation != KvRotation::kNone) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "rot_dim", spec.rot_dim, 2, spec.kv.head_dim()));
    if (spec.kv.form() == KvForm::kLatent) {
      return Unimplemented(kOp,
                           "the layout is latent; need keys that are rotated "
                           "already");
    }
    if (spec.rot_dim % 2 != 0) {
      return InvalidArgument(kOp, "rot_dim=", spec.rot_dim,
                             "; need an even number");
    }
  }
  KvWriteKernels kernels;
  kernels.rows = GetWriteKvKernels(spec.input, spec.kv.dtype());
  kernels.pack = GetPackKvKernels(SizeOf(spec.kv.dtype()));
  kernels.group =
      GetGroupKvKernels(spec.input, spec.kv.dtype(),
                        spec.kv.scaling() == KvScaling::kPerTokenHead);
  kernels.bf16_rows = GetWriteKvKernels(spec.input, DType::kBF16);
  kernels.bf16_pack = GetPackKvKernels(SizeOf(DType::kBF16));
  return WriteKvPlan(spec, kernels, StreamAboveBytes(spec.stores));
}

absl::Status WriteKvPlan::CheckArgs(const WriteKvArgs& args) const {
  const KvLayout& layout = spec_.kv;
  const auto tokens = static_cast<int64_t>(args.slots.size());
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "k", args.k, spec_.input, tokens,
                                      layout.kv_heads(),
                                      WriteKvRowDim(layout, /*value=*/false)));
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "v", args.v, spec_.input, tokens,
                                      layout.kv_heads(),
                                      WriteKvRowDim(layout, /*value=*/true)));
  if (args.cache.layout() != layout) {
    return InvalidArgument(kOp, "the cache has another layout than the plan");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "k", args.k, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "v", args.v, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(
      kOp, "slots", DenseVector(args.slots.data(), tokens), args.cache));
  if (spec_.rotation != KvRotation::kNone) {
    QUERN_RETURN_IF_ERROR(CheckRotation(spec_, args));
    QUERN_RETURN_IF_ERROR(CheckApartFromCache(
        kOp, "positions", DenseVector(args.positions.data(), tokens),
        args.cache));
    QUERN_RETURN_IF_ERROR(
        CheckApartFromCache(kOp, "cos", args.cos, args.cache));
    QUERN_RETURN_IF_ERROR(
        CheckApartFromCache(kOp, "sin", args.sin, args.cache));
  }
  // Blocks of at least page_size bytes lie apart: no overflow.
  return CheckSlots(args.slots, args.cache.num_pages() * layout.page_size());
}

void WriteKvPlan::Execute(const WriteKvArgs& args,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const bool paired = spec_.kv.in_groups();
  const int64_t unit = paired ? kGroup : spec_.kv.page_size();
  const auto tokens = static_cast<int64_t>(args.slots.size());
  const int64_t heads = spec_.kv.kv_heads();
  const int64_t row_elements = WriteKvRowDim(spec_.kv, /*value=*/false) +
                               WriteKvRowDim(spec_.kv, /*value=*/true);
  const int64_t moved =
      tokens * heads * row_elements *
      static_cast<int64_t>(SizeOf(spec_.input) + SizeOf(spec_.kv.dtype()));
  const bool stream = moved > stream_above_bytes_;
  const KvWriter writer(spec_, kernels_, args, stream);
  const WriteKvDivision division(tokens, heads, row_elements,
                                 executor.num_workers());
  executor.ParallelFor(division.tasks(), [&](int64_t task, int /*worker*/) {
    int64_t begin = division.TokenBegin(task);
    int64_t end = division.TokenEnd(task);
    while (paired && begin < end && Continues(args.slots, begin)) ++begin;
    while (paired && begin < end && Continues(args.slots, end)) ++end;
    ForEachRun(args.slots, begin, end, unit, [&](const KvWriter::Run& run) {
      writer.Write(run, division.HeadBegin(task), division.HeadEnd(task));
    });
    if (stream) kernels_.pack.flush();
  });
}

}  // namespace quern
