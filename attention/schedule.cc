#include "attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/attention_spec.h"
#include "core/math_util.h"
#include "core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";

// A block is split where it alone would take more than one part in this many of
// a worker's share: then workers wait for one another for at most that part.
constexpr double kPartsPerWorker = 4;

absl::Status CheckLengths(absl::Span<const int64_t> q_lens,
                          absl::Span<const int64_t> kv_lens) {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "kv_lens.size()", static_cast<int64_t>(kv_lens.size()),
                 static_cast<int64_t>(q_lens.size()), "q_lens"));
  for (size_t s = 0; s < q_lens.size(); ++s) {
    if (q_lens[s] < 0 || q_lens[s] > AttentionSchedule::kMaxTokens) {
      return InvalidArgument(
          kOp, "sequence ", s, ": q_len=", q_lens[s],
          "; need 0 <= q_len <= ", AttentionSchedule::kMaxTokens);
    }
    if (kv_lens[s] < 0 || kv_lens[s] > AttentionSchedule::kMaxTokens) {
      return InvalidArgument(
          kOp, "sequence ", s, ": kv_len=", kv_lens[s],
          "; need 0 <= kv_len <= ", AttentionSchedule::kMaxTokens);
    }
    if (kv_lens[s] != 0 && q_lens[s] > kv_lens[s]) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_lens[s],
                             ", kv_len=", kv_lens[s],
                             "; need q_len <= kv_len, the new tokens included");
    }
  }
  return absl::OkStatus();
}

absl::Status TooMuchWork() {
  return absl::ResourceExhaustedError(absl::StrCat(
      kOp, ": the step has more than ", AttentionSchedule::kMaxWork,
      " work items; need fewer or shorter sequences"));
}

std::string ToString(const AttentionBlock& block) {
  return absl::StrCat("sequence ", block.sequence, " kv_head ", block.kv_head,
                      " queries [", block.q_begin, ", ", block.q_end, ")");
}

}  // namespace

absl::StatusOr<AttentionSchedule> AttentionSchedule::Build(
    const AttentionSpec& spec, absl::Span<const int64_t> q_lens,
    absl::Span<const int64_t> kv_lens, int num_workers,
    AttentionScheduleStorage& storage) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "num_workers", num_workers, 1));
  QUERN_RETURN_IF_ERROR(CheckLengths(q_lens, kv_lens));
  storage.sequences.clear();
  storage.work.clear();
  storage.merges.clear();

  AttentionSchedule schedule;
  schedule.group_ = spec.group();
  schedule.kv_heads_ = spec.kv.kv_heads();
  const int64_t block_queries =
      std::max(int64_t{1}, kBlockRows / schedule.group_);
  // Pairs of a query and a key, about: what the step costs for each head.
  double pairs = 0;
  for (size_t s = 0; s < q_lens.size(); ++s) {
    storage.sequences.push_back({schedule.num_tokens_, q_lens[s], kv_lens[s]});
    schedule.num_tokens_ += q_lens[s];
    pairs += static_cast<double>(q_lens[s]) * static_cast<double>(kv_lens[s]);
  }
  schedule.sequences_ = storage.sequences;
  int64_t blocks = 0;
  for (const int64_t q_len : q_lens) {
    // At most 2^31 heads of 2^30 blocks; the sum stays near the limit.
    blocks += schedule.kv_heads_ * DivCeil(q_len, block_queries);
    if (blocks > kMaxWork) return TooMuchWork();
  }
  const double share = pairs * static_cast<double>(schedule.kv_heads_) /
                       (kPartsPerWorker * num_workers);

  for (size_t s = 0; s < q_lens.size(); ++s) {
    for (int64_t head = 0; head < schedule.kv_heads_; ++head) {
      for (int64_t q = 0; q < q_lens[s]; q += block_queries) {
        AttentionBlock block;
        block.sequence = static_cast<int32_t>(s);
        block.kv_head = static_cast<int32_t>(head);
        block.q_begin = static_cast<int32_t>(q);
        block.q_end =
            static_cast<int32_t>(std::min(q_lens[s], q + block_queries));
        const int64_t rows = block.q_count() * schedule.group_;
        schedule.max_block_rows_ = std::max(schedule.max_block_rows_, rows);
        const int64_t visible = schedule.VisibleKeys(block, block.q_end - 1);
        const auto chunks =
            static_cast<int32_t>(DivCeil(visible, kChunkTokens));
        const double cost =
            static_cast<double>(block.q_count()) * static_cast<double>(visible);
        if (num_workers == 1 || chunks <= 1 || cost <= share) {
          storage.work.push_back({block, 0, chunks, kNoPartial});
          continue;
        }
        if (static_cast<int64_t>(storage.work.size()) + chunks > kMaxWork) {
          return TooMuchWork();
        }
        storage.merges.push_back({block, chunks, schedule.partial_rows_});
        for (int32_t chunk = 0; chunk < chunks; ++chunk) {
          storage.work.push_back(
              {block, chunk, chunk + 1, schedule.partial_rows_});
          schedule.partial_rows_ += rows;
        }
      }
    }
  }
  schedule.work_ = storage.work;
  schedule.merges_ = storage.merges;
  return schedule;
}

std::string AttentionSchedule::DebugString() const {
  std::string text;
  for (const AttentionWork& work : work_) {
    absl::StrAppend(&text, "work ", ToString(work.block), " chunks [",
                    work.chunk_begin, ", ", work.chunk_end, ")");
    if (work.partial != kNoPartial) {
      absl::StrAppend(&text, " partial ", work.partial);
    }
    text += '\n';
  }
  for (const AttentionMerge& merge : merges_) {
    absl::StrAppend(&text, "merge ", ToString(merge.block), " chunks ",
                    merge.chunks, " partial ", merge.partial, "\n");
  }
  return text;
}

}  // namespace quern
