#include "quern/attention/shared_prefix.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "quern/attention/schedule.h"
#include "quern/cache/page_table.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "shared_prefix";
constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

// The pages of each sequence as far as they could be shared.
class Prefixes {
 public:
  Prefixes(const PageTable& pages, absl::Span<const int64_t> q_lens,
           absl::Span<const int64_t> kv_lens)
      : pages_(pages), q_lens_(q_lens), kv_lens_(kv_lens) {}

  // Whole chunks that all queries of the sequence see; 0 where its first page
  // is missing, because missing pages are no shared ones.
  int64_t Tokens(int32_t sequence) const {
    const auto s = static_cast<size_t>(sequence);
    const int64_t tokens = (kv_lens_[s] - q_lens_[s]) / kChunk * kChunk;
    return tokens > 0 && pages_.HasToken(sequence, 0) ? tokens : 0;
  }
  absl::Span<const int32_t> Pages(int32_t sequence) const {
    return pages_.Pages(sequence).first(
        static_cast<size_t>(DivCeil(Tokens(sequence), pages_.page_size())));
  }
  // The order of sequences by the keys to share, a prefix before what it
  // begins: by pages, then by how much of them is shared (less than all of a
  // large page), then by number.
  bool Before(int32_t a, int32_t b) const {
    const absl::Span<const int32_t> x = Pages(a), y = Pages(b);
    const auto [i, j] = std::mismatch(x.begin(), x.end(), y.begin(), y.end());
    if (i != x.end() && j != y.end()) return *i < *j;
    if (x.size() != y.size()) return x.size() < y.size();
    return Tokens(a) != Tokens(b) ? Tokens(a) < Tokens(b) : a < b;
  }
  int64_t SharedTokens(int32_t a, int32_t b) const {
    const absl::Span<const int32_t> x = Pages(a), y = Pages(b);
    const auto same =
        std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
    const int64_t tokens = static_cast<int64_t>(same) * pages_.page_size();
    return std::min({tokens / kChunk * kChunk, Tokens(a), Tokens(b)});
  }

 private:
  const PageTable& pages_;
  absl::Span<const int64_t> q_lens_, kv_lens_;
};

}  // namespace

absl::StatusOr<SharedPrefixes> SharedPrefixes::Find(
    const PageTable& pages, absl::Span<const int64_t> q_lens,
    absl::Span<const int64_t> kv_lens, SharedPrefixStorage& storage) {
  QUERN_RETURN_IF_ERROR(pages.CheckKvLens(kv_lens));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "q_lens.size()",
                                   static_cast<int64_t>(q_lens.size()),
                                   pages.num_sequences(), "kv_lens"));
  for (size_t s = 0; s < q_lens.size(); ++s) {
    if (q_lens[s] < 0 || q_lens[s] > kv_lens[s]) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_lens[s],
                             "; need 0 <= q_len <= ", kv_lens[s],
                             ", its kv_len");
    }
  }
  const Prefixes prefixes(pages, q_lens, kv_lens);
  auto& [members, groups, nested] = storage;
  members.clear();
  groups.clear();
  nested.clear();
  for (size_t s = 0; s < q_lens.size(); ++s) {
    const auto sequence = static_cast<int32_t>(s);
    if (q_lens[s] > 0 && prefixes.Tokens(sequence) > 0) {
      members.push_back(sequence);
    }
  }
  std::sort(members.begin(), members.end(),
            [&](int32_t a, int32_t b) { return prefixes.Before(a, b); });

  // In this order, sequences that share a prefix are neighbours, and the sets
  // that share at least so much are nested. `nested` holds those that are still
  // open; one that closes decides between itself and the best of its subsets.
  const auto count = static_cast<int32_t>(members.size());
  for (int32_t i = 1; i <= count; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t shared =
        i == count ? 0 : prefixes.SharedTokens(members[at - 1], members[at]);
    int32_t begin = i - 1;
    auto first_group = static_cast<int32_t>(groups.size());
    int64_t saved = 0;
    while (!nested.empty() && nested.back().tokens > shared) {
      const SharedPrefixStorage::Nested set = nested.back();
      nested.pop_back();
      const PrefixGroup whole = {set.begin, i, set.tokens};
      saved += set.saved;
      if (whole.saved_tokens() >= saved) {
        groups.resize(static_cast<size_t>(set.first_group));
        groups.push_back(whole);
        saved = whole.saved_tokens();
      }
      begin = set.begin;
      first_group = set.first_group;
    }
    if (!nested.empty() && nested.back().tokens == shared) {
      nested.back().saved += saved;
    } else if (shared > 0) {
      nested.push_back({shared, begin, first_group, saved});
    }
  }

  SharedPrefixes result;
  result.members_ = members;
  result.groups_ = groups;
  return result;
}

int64_t SharedPrefixes::saved_tokens() const {
  int64_t saved = 0;
  for (const PrefixGroup& group : groups_) saved += group.saved_tokens();
  return saved;
}

std::string SharedPrefixes::DebugString() const {
  std::string text;
  for (const PrefixGroup& group : groups_) {
    absl::StrAppend(&text, "tokens [0, ", group.tokens, ") of sequences ",
                    absl::StrJoin(Members(group), " "), "\n");
  }
  return text;
}

}  // namespace quern
