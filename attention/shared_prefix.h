#ifndef QUERN_ATTENTION_SHARED_PREFIX_H_
#define QUERN_ATTENTION_SHARED_PREFIX_H_

// Which sequences of a step begin with the same keys: a system prompt, a
// document that several requests ask about. Their queries are computed against
// those keys together, which then come from memory once, where the groups are
// handed to AttentionSchedule::Build: the members and groups of AttentionBatch.
//
// Keys are the same where the page ids are. What a group shares is a multiple
// of AttentionSchedule::kChunkTokens and seen by every query of its members, so
// that a row's chunks and the order of their merging stay as they are.
//
// A sequence is in one group at most. Sets that share a prefix are nested or
// apart; of a set and the best of its subsets, that is chosen which saves more
// reading, (members - 1) * tokens. So of [system, a, x], [system, a, y] and
// [system, b] the first two are a group where `a` is long, and all three are
// one where it is short. What a chosen subset leaves over is in no group.
//
//   SharedPrefixStorage kept;  // from step to step
//   const auto prefixes = SharedPrefixes::Find(pages, q_lens, kv_lens, kept);
//   if (!prefixes.ok()) return prefixes.status();
//   AttentionBatch batch;
//   batch.q_lens = q_lens;
//   batch.kv_lens = kv_lens;
//   batch.prefix_groups = prefixes->groups();
//   batch.prefix_members = prefixes->members();
//   AttentionSchedule::Build(spec, batch, AttentionTiles(), workers, ...);
//
// PageAllocator::Fork makes sequences hold the same pages.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/schedule.h"
#include "quern/cache/page_table.h"

namespace quern {

// The arrays of SharedPrefixes, kept from step to step: only growth allocates.
struct SharedPrefixStorage {
  // A set of sequences, neighbours in `members`, that share `tokens`, and what
  // its subsets save.
  struct Nested {
    int64_t tokens;
    int32_t begin;
    int32_t first_group;
    int64_t saved;
  };
  std::vector<int32_t> members;
  std::vector<PrefixGroup> groups;
  std::vector<Nested> nested;
};

// Borrowed: the storage outlives it and does not change. Build copies what it
// needs, so that nothing of it need outlive Build.
class SharedPrefixes {
 public:
  // No groups.
  SharedPrefixes() = default;

  // For causal sequences without a window. Only keys of earlier steps count,
  // the first kv_lens[s] - q_lens[s] of sequence s, because every query sees
  // those: a sequence that brings the prefix itself, in a first prefill, is in
  // no group. A sequence whose first page is missing (kNoPage) is in none
  // either. InvalidArgument where PageTable::CheckKvLens refuses, or q_lens[s]
  // is not in [0, kv_lens[s]].
  // Deterministic: groups by their first member's pages, members of equal pages
  // by how much of them they can share, then by number. Cost: sorts the
  // sequences by their pages.
  static absl::StatusOr<SharedPrefixes> Find(const PageTable& pages,
                                             absl::Span<const int64_t> q_lens,
                                             absl::Span<const int64_t> kv_lens,
                                             SharedPrefixStorage& storage);

  // Each group has two members or more, which share at least one chunk.
  absl::Span<const PrefixGroup> groups() const { return groups_; }
  absl::Span<const int32_t> members() const { return members_; }
  absl::Span<const int32_t> Members(const PrefixGroup& group) const {
    return members_.subspan(static_cast<size_t>(group.begin),
                            static_cast<size_t>(group.end - group.begin));
  }
  // Keys of each head that need not be read again, if Build can use all groups:
  // schedule.prefixes() has what it used.
  int64_t saved_tokens() const;

  // One line for each group, to read and to compare.
  std::string DebugString() const;

 private:
  absl::Span<const int32_t> members_;
  absl::Span<const PrefixGroup> groups_;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_SHARED_PREFIX_H_
