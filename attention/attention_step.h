#ifndef QUERN_ATTENTION_ATTENTION_STEP_H_
#define QUERN_ATTENTION_ATTENTION_STEP_H_

// Private: one PagedAttentionPlan::Execute, the items and merges of its
// schedule one by one.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/attention/attention_scratch.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/kv_chunks.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"

namespace quern {

class AttentionStep {
 public:
  // All arguments are those of one Execute and outlive the step.
  AttentionStep(const AttentionSpec& spec, const PagedAttentionKernels& kernels,
                const PackKvKernels& pack_kernels,
                const PagedAttentionArgs& args,
                const AttentionScratch& scratch);

  // `following`: what this worker does next, or null.
  void Work(const AttentionWork& work, const AttentionWork* following,
            int worker) const;
  // Merges partial results into the output, with the arithmetic and in the
  // order of Work on an item without partial results.
  void Merge(const AttentionMerge& merge, int worker) const;

 private:
  int64_t Rows(const AttentionBlock& block) const {
    return block.q_count() * spec_.group();
  }

  PartialRows Partial(int64_t row) const {
    return {scratch_.partials.state + row,
            scratch_.partials.out + row * strides_.out};
  }

  void Clear(int64_t rows, const PartialRows& of) const {
    std::fill_n(of.state, rows, SoftmaxState());
    std::fill_n(of.out, rows * strides_.out, 0.0f);
  }

  // fn(row, token, head, sequence) for each row of the block: where it is in q
  // and out, and whose it is.
  template <typename Fn>
  void ForEachRow(const AttentionBlock& block, const Fn& fn) const {
    const AttentionSchedule& schedule = args_.schedule;
    const int64_t first_head = block.kv_head * spec_.group();
    int64_t row = 0;
    const auto rows_of = [&](int32_t index, int64_t begin, int64_t end) {
      const AttentionSequence& sequence =
          schedule.sequences()[static_cast<size_t>(index)];
      for (int64_t query = begin; query < end; ++query) {
        for (int64_t g = 0; g < spec_.group(); ++g) {
          fn(row++, sequence.q_offset + query, first_head + g, sequence);
        }
      }
    };
    if (block.prefix == kNoPrefix) {
      rows_of(block.sequence, block.q_begin, block.q_end);
      return;
    }
    const auto prefix = static_cast<size_t>(block.prefix);
    for (const int32_t s : schedule.Members(schedule.prefixes()[prefix])) {
      rows_of(s, 0, schedule.sequences()[static_cast<size_t>(s)].q_len);
    }
  }

  void LoadQueries(const AttentionBlock& block, int worker) const;

  // What is read or written once the chunk at hand is done. Its lines are
  // fetched meanwhile.
  struct Upcoming {
    KvChunk chunk;  // the next one, of this block or another
    // The block whose outputs are written, and the one whose queries are read.
    // Null: none.
    const AttentionBlock* stored;
    const AttentionBlock* loaded;
  };

  // Where the rows of the block lie in `view`, which is q or out. `rows` takes
  // their addresses. No rows if the block is null.
  FetchList RowsOf(const AttentionBlock* block, const AnyTensorView& view,
                   const uint8_t** rows) const;

  // What the rows of a block see of a chunk.
  struct SeenTokens {
    TokenRange any;  // all tokens that some row sees
    TokenRange all;  // tokens that every row sees
    int64_t tokens;  // of the chunk, that the sequence has

    // The groups that some row sees.
    int64_t group_begin() const { return any.begin / kGroup; }
    int64_t group_end() const { return DivCeil(int64_t{any.end}, kGroup); }
    // Whether some row does not see all of the group.
    bool IsMixed(int64_t group) const {
      return group * kGroup < all.begin ||
             std::min(tokens, (group + 1) * kGroup) > all.end;
    }
  };

  // The arguments that neither keys, values nor results change.
  ChunkArgs ArgsOf(const AttentionBlock& block, int64_t chunk,
                   int worker) const;

  // Sets c->seen and c->hidden, which have what each row sees.
  SeenTokens SetSeen(const AttentionBlock& block, int64_t chunk, int worker,
                     ChunkArgs* c) const;

  // Sets c->hidden to the drafts in the chunk that the masks of the block's
  // queries hide, if there are any, and takes those out of seen->all.
  void HideDrafts(const AttentionBlock& block, int64_t chunk, int worker,
                  SeenTokens* seen, ChunkArgs* c) const;

  // The block against one chunk of its sequence's keys.
  void ComputeChunk(const AttentionBlock& block, int64_t chunk, int worker,
                    KvChunk groups, const Upcoming& next, bool first,
                    const PartialRows& result) const;

  // Attends where a group that is not seen by all rows has a value that is not
  // finite. A weight of 0 times NaN is not 0, so each row is computed by
  // itself, with zeros for what it does not see.
  void AttendRowByRow(const SeenTokens& seen, const KvChunk& groups, int worker,
                      ChunkArgs* c) const;

  // ALiBi: slope * (the key's position - the query's).
  void SetSlopes(const AttentionBlock& block, int64_t chunk, int worker,
                 ChunkArgs* c) const;

  void MergeRows(int64_t rows, const PartialRows& part,
                 const PartialRows& total) const;

  // The rows [begin, end) of the block, the first of them at total's first.
  void Store(const AttentionBlock& block, int64_t begin, int64_t end,
             const PartialRows& total) const;

  static constexpr float kLog2E = 1.44269504f;
  static constexpr auto kGroup = static_cast<int64_t>(kGroupTokens);

  const AttentionSpec& spec_;
  const KvLayout& layout_;
  const PagedAttentionKernels& kernels_;
  const PagedAttentionArgs& args_;
  const AttentionScratch& scratch_;
  KvChunks chunks_;
  AttentionStrides strides_;
  float scale_log2e_;
  float sign_;
  float soft_cap_log2e_;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_ATTENTION_STEP_H_
