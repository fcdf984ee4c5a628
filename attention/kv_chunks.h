#ifndef QUERN_ATTENTION_KV_CHUNKS_H_
#define QUERN_ATTENTION_KV_CHUNKS_H_

// Private: the keys and values of a chunk, found in their pages and brought
// into the form that kernels read.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/attention/attention_scratch.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"

namespace quern {

// Addresses of the keys and values of a chunk.
struct KvChunk {
  // Groups of 16 tokens. Null: the chunk has no such group, nobody sees it, or
  // the cache has no groups.
  const uint8_t* k[kChunkGroups];
  const uint8_t* v[kChunkGroups];
  // One row for each token in the plain form; null in the others.
  const uint8_t** k_rows;
  const uint8_t** v_rows;
  size_t tokens;  // rows of them
};

class KvChunks {
 public:
  // All arguments are those of one Execute and outlive the object.
  KvChunks(const PagedAttentionKernels& kernels,
           const PackKvKernels& pack_kernels, const PagedAttentionArgs& args,
           const AttentionScratch& scratch);

  bool paired() const { return paired_; }
  bool latent() const { return latent_; }
  bool narrow() const { return narrow_; }
  // Latents with a scale for each block: WidenLatents comes before Stage, and
  // before kernels read the keys.
  bool in_blocks() const { return latent_ && narrow_; }

  // Tokens of the chunk that the block's sequence has.
  int64_t Tokens(const AttentionBlock& block, int64_t chunk) const {
    const auto sequence = static_cast<size_t>(block.sequence);
    return std::min(AttentionSchedule::kChunkTokens,
                    args_.schedule.sequences()[sequence].kv_len -
                        chunk * AttentionSchedule::kChunkTokens);
  }

  // Where the chunk lies, in the arrays of the worker that `current` does not
  // use: two take turns. What lies before the keys that the block sees is not
  // looked up, because its pages may be missing. Its groups and rows are null,
  // and the first row that is seen stands in for those of its group before it.
  KvChunk Locate(const AttentionBlock& block, int64_t chunk, int worker,
                 const KvChunk& current) const;

  // Widens the keys of group `group` of the chunk.
  void WidenLatents(int64_t group, int worker, const KvChunk& next,
                    KvChunk* of) const;

  // Group `group` of the chunk, copied if kernels cannot read it where it lies:
  // a group of plain rows, values that are part of their keys, bytes, and a
  // group with slots beyond the sequence's tokens, whose values must not be
  // looked at.
  void Stage(const AttentionBlock& block, int64_t chunk, int64_t group,
             int worker, const KvChunk& next, KvChunk* of) const;

  // What stored keys and values are to be multiplied by. One scale for all keys
  // goes into that of the logits; one for all values is the caller's.
  void SetScales(const AttentionBlock& block, int64_t chunk, int worker,
                 ChunkArgs* c) const;

  // `next` as what is fetched meanwhile. `staged`: its groups are already.
  void SetNext(const KvChunk& next, bool staged, ChunkArgs* c) const;

 private:
  // The first token of the chunk that any query of the block sees, or the
  // chunk's end.
  int64_t FirstSeen(const AttentionBlock& block, int64_t chunk) const {
    const int64_t begin = args_.schedule.FirstKey(block) -
                          chunk * AttentionSchedule::kChunkTokens;
    return std::clamp(begin, int64_t{0}, Tokens(block, chunk));
  }

  const KvLayout& layout_;
  const PagedAttentionKernels& kernels_;
  const PackKvKernels& pack_kernels_;
  const PagedAttentionArgs& args_;
  const AttentionScratch& scratch_;
  AttentionStrides strides_;
  bool paired_;
  bool latent_;
  bool narrow_;
  // Bytes from a group of keys, or values, to the next of the page.
  int64_t k_step_;
  int64_t v_step_;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_KV_CHUNKS_H_
