#include "quern/attention/schedule/prefix_blocks.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";
constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

// `seen` has the group of each sequence so far, or -1.
absl::Status CheckGroup(const AttentionBatch& batch, int64_t index,
                        std::vector<PrefixPlace>& seen) {
  const PrefixGroup& group = batch.prefix_groups[static_cast<size_t>(index)];
  const auto size = static_cast<int64_t>(batch.prefix_members.size());
  if (group.begin < 0 || group.begin > group.end || group.end > size) {
    return InvalidArgument(kOp, "prefix group ", index, ": members [",
                           group.begin, ", ", group.end,
                           "); need 0 <= begin <= end <= ", size);
  }
  if (group.tokens < kChunk || group.tokens % kChunk != 0) {
    return InvalidArgument(kOp, "prefix group ", index,
                           ": tokens=", group.tokens, "; need a multiple of ",
                           kChunk, " above 0");
  }
  for (int32_t i = group.begin; i < group.end; ++i) {
    const int32_t member = batch.prefix_members[static_cast<size_t>(i)];
    const auto sequences = static_cast<int64_t>(batch.q_lens.size());
    if (member < 0 || member >= sequences) {
      return InvalidArgument(kOp, "prefix group ", index, ": member ", member,
                             "; need 0 <= member < ", sequences);
    }
    const auto s = static_cast<size_t>(member);
    if (seen[s].prefix >= 0) {
      return InvalidArgument(kOp, "sequence ", member, " is in prefix group ",
                             seen[s].prefix, " and again in ", index);
    }
    seen[s].prefix = static_cast<int32_t>(index);
    const int64_t before = batch.kv_lens[s] - batch.q_lens[s];
    if (group.tokens > before) {
      return InvalidArgument(kOp, "prefix group ", index,
                             ": tokens=", group.tokens,
                             "; need tokens <= ", before,
                             ", what all queries of sequence ", member, " see");
    }
  }
  return absl::OkStatus();
}

// The members [begin, size()) of storage, which have `tokens` in common.
void EndPrefix(size_t begin, int64_t tokens,
               AttentionScheduleStorage& storage) {
  if (storage.members.size() - begin < 2) {
    storage.members.resize(begin);
    return;
  }
  int32_t queries = 0;
  for (size_t i = begin; i < storage.members.size(); ++i) {
    const auto s = static_cast<size_t>(storage.members[i]);
    storage.places[s] = {static_cast<int32_t>(storage.prefixes.size()),
                         queries};
    queries += static_cast<int32_t>(storage.sequences[s].q_len);
  }
  storage.prefixes.push_back({static_cast<int32_t>(begin),
                              static_cast<int32_t>(storage.members.size()),
                              tokens});
}

}  // namespace

absl::Status MakePrefixBlocks(const AttentionSpec& spec,
                              const AttentionBatch& batch,
                              int64_t block_queries,
                              AttentionScheduleStorage& storage) {
  storage.members.clear();
  storage.prefixes.clear();
  storage.places.clear();
  if (batch.prefix_groups.empty()) return absl::OkStatus();
  storage.places.resize(batch.q_lens.size());
  for (size_t i = 0; i < batch.prefix_groups.size(); ++i) {
    QUERN_RETURN_IF_ERROR(
        CheckGroup(batch, static_cast<int64_t>(i), storage.places));
  }
  if (AttentionSchedule::WindowTokens(spec.window_left) !=
      AttentionSchedule::kMaxTokens) {
    storage.places.clear();
    return absl::OkStatus();
  }
  storage.places.assign(batch.q_lens.size(), PrefixPlace());
  for (const PrefixGroup& group : batch.prefix_groups) {
    size_t begin = storage.members.size();
    int64_t queries = 0;
    for (int32_t i = group.begin; i < group.end; ++i) {
      const int32_t member = batch.prefix_members[static_cast<size_t>(i)];
      const int64_t q_len = batch.q_lens[static_cast<size_t>(member)];
      if (q_len == 0 || q_len > block_queries) continue;
      if (queries + q_len > block_queries) {
        EndPrefix(begin, group.tokens, storage);
        begin = storage.members.size();
        queries = 0;
      }
      storage.members.push_back(member);
      queries += q_len;
    }
    EndPrefix(begin, group.tokens, storage);
  }
  return absl::OkStatus();
}

}  // namespace quern
