#ifndef QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_
#define QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_

// Which sequences of a call go by chunks of tokens, and the workspace of a call
// that has such sequences.

#include <algorithm>
#include <cstdint>

#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

struct ChunkMemory {
  int64_t* sequences;  // numbers of the sequences that go by chunks
  uint8_t* workers;
};
// Room for `most` sequences, and `worker_bytes` for all workers together.
// Nothing if no sequence goes by chunks.
template <typename Allocator>
ChunkMemory LayOutChunks(Allocator& allocator, int64_t most,
                         int64_t worker_bytes) {
  if (most == 0) return {};
  return {allocator.template Allocate<int64_t>("sequences by chunks", most),
          allocator.template Allocate<uint8_t>("chunks", worker_bytes)};
}

struct ChunkedSequences {
  int64_t chunked = 0;
  int64_t others = 0;
  int64_t other_tokens = 0;
};

// Writes the sequences for which is_chunked(s) to `chunked`, the longest first,
// because they are started in this order.
template <typename IsChunked>
ChunkedSequences SplitSequences(const SequenceBatch& batch, int64_t* chunked,
                                const IsChunked& is_chunked) {
  ChunkedSequences split;
  const auto length = [&batch](int64_t s) {
    return batch.end(s) - batch.begin(s);
  };
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    if (is_chunked(s)) {
      chunked[split.chunked++] = s;
    } else {
      ++split.others;
      split.other_tokens += length(s);
    }
  }
  std::sort(chunked, chunked + split.chunked, [&](int64_t a, int64_t b) {
    return length(a) != length(b) ? length(a) > length(b) : a < b;
  });
  return split;
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_
