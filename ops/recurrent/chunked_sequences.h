#ifndef QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_
#define QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_

// Which sequences of a call go by chunks of tokens, and the workspace of a call
// that has such sequences.

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

struct ChunkMemory {
  int64_t* sequences;  // numbers of the sequences that go by chunks
  uint8_t* workers;
};
// Room for `most` sequences, and worker_bytes for each worker. Nothing if no
// sequence goes by chunks.
template <typename Allocator>
ChunkMemory LayOutChunks(Allocator& allocator, int64_t most,
                         int64_t worker_bytes, int workers) {
  if (most == 0 || worker_bytes == 0) return {};
  return {
      allocator.template Allocate<int64_t>("sequences by chunks", most),
      allocator.template Allocate<uint8_t>("chunks", workers * worker_bytes)};
}

// WorkspaceBytes of a plan in which sequences of `from` tokens or more go by
// chunks; worker_bytes is 0 if none does.
inline absl::StatusOr<int64_t> ChunkWorkspaceBytes(absl::string_view op,
                                                   int64_t from,
                                                   int64_t worker_bytes,
                                                   int64_t max_tokens,
                                                   int max_workers) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "max_tokens", max_tokens, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "max_workers", max_workers, 1));
  WorkspaceLayout layout;
  LayOutChunks(layout, max_tokens / from, worker_bytes, max_workers);
  if (layout.overflow()) {
    return InvalidArgument(op, "max_tokens=", max_tokens,
                           ": the workspace exceeds 2^63 bytes");
  }
  return layout.bytes();
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

// Lays out what ChunkWorkspaceBytes counted, and calls
// by_chunks(sequences, count, memory of the workers) and
// by_tokens(sequences, tokens), each unless it has no sequence.
template <typename IsChunked, typename ByChunks, typename ByTokens>
void RunSequences(const SequenceBatch& batch, int64_t most,
                  int64_t worker_bytes, int workers, Workspace workspace,
                  const IsChunked& is_chunked, const ByChunks& by_chunks,
                  const ByTokens& by_tokens) {
  const ChunkMemory memory =
      LayOutChunks(workspace, most, worker_bytes, workers);
  const ChunkedSequences split =
      SplitSequences(batch, memory.sequences, is_chunked);
  if (split.chunked > 0) {
    by_chunks(memory.sequences, split.chunked, memory.workers);
  }
  if (split.others > 0) by_tokens(split.others, split.other_tokens);
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_CHUNKED_SEQUENCES_H_
