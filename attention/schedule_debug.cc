// AttentionSchedule::DebugString.

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/attention/schedule.h"

namespace quern {
namespace {

std::string ToString(const AttentionBlock& block) {
  if (block.prefix != kNoPrefix) {
    return absl::StrCat("prefix ", block.prefix, " kv_head ", block.kv_head,
                        " queries [", block.q_begin, ", ", block.q_end, ")");
  }
  return absl::StrCat("sequence ", block.sequence, " kv_head ", block.kv_head,
                      " queries [", block.q_begin, ", ", block.q_end, ")");
}

}  // namespace

std::string AttentionSchedule::DebugString() const {
  std::string text = absl::StrCat(
      sequences_.size(), " sequences, ", num_tokens_, " tokens, ", kv_heads_,
      " kv_heads of ", group_, " rows, ", partial_rows_, " partial rows\n");
  for (const PrefixGroup& prefix : prefixes_) {
    absl::StrAppend(&text, "prefix of ", prefix.tokens, " tokens, sequences ",
                    absl::StrJoin(Members(prefix), " "), "\n");
  }
  for (size_t s = 0; s < sequences_.size(); ++s) {
    if (sequences_[s].draft_len == 0) continue;
    absl::StrAppend(&text, sequences_[s].draft_len, " drafts of sequence ", s,
                    "\n");
  }
  for (const AttentionShare& share : shares_) {
    absl::StrAppend(&text, "share of cost ", share.cost, "\n");
    for (const AttentionWork& work : Work(share)) {
      absl::StrAppend(&text, "  ", ToString(work.block), " chunks [",
                      work.chunk_begin, ", ", work.chunk_end, ")");
      if (work.partial != kNoPartial) {
        absl::StrAppend(&text, " partial ", work.partial);
      }
      text += '\n';
    }
  }
  for (const AttentionMerge& merge : merges_) {
    absl::StrAppend(&text, "merge ", ToString(merge.block), " rows [",
                    merge.row_begin, ", ", merge.row_end, ") of");
    for (const AttentionRun& run : Runs(merge)) {
      absl::StrAppend(&text, " [", run.chunk_begin, ", ", run.chunk_end,
                      ") partial ", run.partial);
    }
    text += '\n';
  }
  return text;
}

}  // namespace quern
