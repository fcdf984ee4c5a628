#ifndef QUERN_OPS_RECURRENT_DELTA_CHUNKS_H_
#define QUERN_OPS_RECURRENT_DELTA_CHUNKS_H_

// The delta rule on a prompt, a chunk of tokens at a time. With S the state
// before the chunk, P(i) the product of the decays of tokens 0 to i, and P(j,
// i) that of tokens j + 1 to i:
//
//   D[i] = beta[i] (v[i] - (P(i) k[i])^T S - sum over j < i of
//                                             (k[i] . P(j, i) k[j]) D[j])
//   out[i] = (P(i) q[i])^T S + sum over j <= i of (q[i] . P(j, i) k[j]) D[j]
//   S <- diag(P(n - 1)) S + sum over j of (P(j, n - 1) k[j]) D[j]^T
//
// D is the d of delta_rule.h for each token, which forward substitution finds:
// a triangle of numbers that all columns share, and products of matrices. The
// decays are products of numbers in [0, 1], never quotients. Source of the
// formula: the recurrence, applied to the tokens of a chunk.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/chunk_kernels.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

// What one worker needs beside the arguments. Matrices are those of
// chunk_kernels.h.
struct DeltaChunkScratch {
  float* state;         // [dk, columns]
  float* q;             // [chunk, dk]
  float* k;             // [chunk, dk]
  float* from_start;    // [chunk, dk]
  float* transposed;    // [dk, chunk]: k
  float* key_scores;    // [chunk, chunk]
  float* query_scores;  // [chunk, chunk]
  float* v;             // [chunk, columns]
  float* out;           // [chunk, columns]
  // A number for each token.
  float *g, *a, *beta, *first, *to_end;
  float* kept;  // [dk]: what is left of each row of the state
  // With a decay a channel only.
  float* decays;  // [chunk, dk]
  float* block;   // [3 kChannelBlock, dk]
};

template <typename Allocator>
DeltaChunkScratch LayOutDeltaChunk(Allocator& allocator,
                                   const DeltaRuleSpec& spec, int64_t columns) {
  // A square is transposed at a time.
  const int64_t tokens = RoundUp(spec.chunk, kChunkLine);
  const int64_t dk = RoundUp(spec.dk, kChunkLine);
  const int64_t row = ChunkStride(spec.dk), scores = ChunkStride(spec.chunk);
  const int64_t wide = ChunkStride(columns);
  const bool channels = spec.decay == DeltaDecay::kPerChannel;
  const auto floats = [&allocator](const char* name, int64_t count) {
    return allocator.template Allocate<float>(name, count);
  };
  DeltaChunkScratch s = {};
  s.state = floats("state", dk * wide);
  s.q = floats("q", tokens * row);
  s.k = floats("k", tokens * row);
  s.from_start = floats("from start", tokens * row);
  s.transposed = floats("transposed", dk * scores);
  s.key_scores = floats("key scores", tokens * scores);
  s.query_scores = floats("query scores", tokens * scores);
  s.v = floats("v", tokens * wide);
  s.out = floats("out", tokens * wide);
  for (float** vector : {&s.g, &s.a, &s.beta, &s.first, &s.to_end}) {
    *vector = floats("numbers of tokens", tokens);
  }
  s.kept = floats("kept", dk);
  s.decays = floats("decays", channels ? tokens * row : 0);
  s.block = floats("block", channels ? 3 * kChannelBlock * row : 0);
  return s;
}

// What DeltaChunks::Run computes: all tokens of a sequence on some columns of a
// value head.
struct DeltaChunkUnit {
  int64_t sequence, head, column, columns;
};

class DeltaChunks {
 public:
  // All references outlive it.
  DeltaChunks(const DeltaRuleSpec& spec, const ChunkKernels& kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& states,
              const RowBlockKernels& gates, const DeltaRuleArgs& args,
              const DeltaChunkScratch& scratch)
      : spec_(spec),
        kernels_(kernels),
        blocks_(blocks),
        states_(states),
        gates_(gates),
        args_(args),
        s_(scratch),
        row_(static_cast<size_t>(ChunkStride(spec.dk))),
        scores_(static_cast<size_t>(ChunkStride(spec.chunk))) {}

  void Run(const DeltaChunkUnit& unit);

 private:
  void LoadState(const DeltaChunkUnit& unit);
  void StoreState(const DeltaChunkUnit& unit);
  void LoadTokens(const DeltaChunkUnit& unit, int64_t first, int64_t n);
  void ScoresOfHead(int64_t n);
  void ScoresOfChannels(const DeltaChunkUnit& unit, int64_t first, int64_t n);
  void Columns(int64_t n, int64_t columns);
  size_t Wide(const DeltaChunkUnit& unit) const {
    return static_cast<size_t>(ChunkStride(unit.columns));
  }

  const DeltaRuleSpec& spec_;
  const ChunkKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& states_;
  const RowBlockKernels& gates_;
  const DeltaRuleArgs& args_;
  const DeltaChunkScratch s_;
  const size_t row_;     // stride of rows of dk
  const size_t scores_;  // stride of rows of the chunk's tokens
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_CHUNKS_H_
