#ifndef QUERN_OPS_RECURRENT_STATE_CHUNKS_H_
#define QUERN_OPS_RECURRENT_STATE_CHUNKS_H_

// The state update of Mamba-2 on a prompt, a chunk of tokens at a time. With S
// the state before the chunk, u[i] = delta[i] x[i], P(i) the product of the
// decays of tokens 0 to i, and P(j, i) that of tokens j + 1 to i:
//
//   y[i] = P(i) S c[i] + sum over j <= i of (c[i] . b[j]) P(j, i) u[j]
//   S <- P(n - 1) S + sum over j of (P(j, n - 1) u[j]) b[j]^T
//
// All are products of matrices; c . b is shared by the heads of a group. The
// decays are products of numbers in [0, 1], never quotients. Source of the
// formula: the recurrence, applied to the tokens of a chunk.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/chunk_kernels.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/state_update_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

// Heads and rows that one unit takes.
struct StateChunkSize {
  int64_t heads, rows;
};

// What one worker needs beside the arguments. Matrices are those of
// chunk_kernels.h.
struct StateChunkScratch {
  float* states;      // heads times [d_state, rows]: transposed states
  float* rows;        // [rows, d_state]: a state as it is stored
  float* b;           // [chunk, d_state]
  float* c;           // [chunk, d_state]
  float* transposed;  // [d_state, chunk]: b
  float* products;    // [chunk, chunk]: c . b
  float* scores;      // [chunk, chunk]
  float* x;           // [chunk, rows]
  float* u;           // [chunk, rows]
  float* y;           // [chunk, rows]
  // A number for each token.
  float *delta, *bias, *a, *first, *last;
  float* kept;  // [d_state]: what is left of the state
  // [kStateRows]
  float *d, *z;
};

template <typename Allocator>
StateChunkScratch LayOutStateChunk(Allocator& allocator,
                                   const StateUpdateSpec& spec,
                                   StateChunkSize size) {
  // A square is transposed at a time.
  const int64_t tokens = RoundUp(spec.chunk, kChunkLine);
  const int64_t n = RoundUp(spec.d_state, kChunkLine);
  const int64_t rows = RoundUp(size.rows, kChunkLine);
  const int64_t row = ChunkStride(spec.d_state);
  const int64_t scores = ChunkStride(spec.chunk);
  const int64_t wide = ChunkStride(size.rows);
  const auto floats = [&allocator](const char* name, int64_t count) {
    return allocator.template Allocate<float>(name, count);
  };
  StateChunkScratch s = {};
  s.states = floats("states", size.heads * n * wide);
  s.rows = floats("rows", rows * row);
  s.b = floats("b", tokens * row);
  s.c = floats("c", tokens * row);
  s.transposed = floats("transposed", n * scores);
  s.products = floats("products", tokens * scores);
  s.scores = floats("scores", tokens * scores);
  s.x = floats("x", tokens * wide);
  s.u = floats("u", tokens * wide);
  s.y = floats("y", tokens * wide);
  for (float** vector : {&s.delta, &s.bias, &s.a, &s.first, &s.last}) {
    *vector = floats("numbers of tokens", tokens);
  }
  s.kept = floats("kept", n);
  s.d = floats("d", static_cast<int64_t>(kStateRows));
  s.z = floats("z", static_cast<int64_t>(kStateRows));
  return s;
}

// What StateChunks::Run computes: all tokens of a sequence on some rows of
// heads that share b and c.
struct StateChunkUnit {
  int64_t sequence, head, heads, row, rows;
};

class StateChunks {
 public:
  // All references outlive it.
  StateChunks(const StateUpdateSpec& spec, const ChunkKernels& kernels,
              const StateUpdateKernels& token_kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& bc_blocks,
              const RowBlockKernels& states, const StateUpdateArgs& args,
              const StateChunkScratch& scratch)
      : spec_(spec),
        kernels_(kernels),
        token_kernels_(token_kernels),
        blocks_(blocks),
        bc_blocks_(bc_blocks),
        states_(states),
        args_(args),
        s_(scratch),
        row_(static_cast<size_t>(ChunkStride(spec.d_state))),
        scores_(static_cast<size_t>(ChunkStride(spec.chunk))) {}

  void Run(const StateChunkUnit& unit);

 private:
  void LoadState(const StateChunkUnit& unit, int64_t head);
  void StoreState(const StateChunkUnit& unit, int64_t head);
  void Ask(const StateChunkUnit& unit, int64_t token) const;
  void LoadTokens(const StateChunkUnit& unit, int64_t first, int64_t n);
  void LoadHead(const StateChunkUnit& unit, int64_t head, int64_t first,
                int64_t n);
  void Multiply(const StateChunkUnit& unit, int64_t head, int64_t n);
  void StoreOut(const StateChunkUnit& unit, int64_t head, int64_t first,
                int64_t n);

  size_t Wide(const StateChunkUnit& unit) const {
    return static_cast<size_t>(ChunkStride(unit.rows));
  }
  // The transposed state of a head of the unit.
  float* StateOf(const StateChunkUnit& unit, int64_t head) const {
    return s_.states +
           static_cast<size_t>(head - unit.head) *
               static_cast<size_t>(RoundUp(spec_.d_state, kChunkLine)) *
               Wide(unit);
  }

  const StateUpdateSpec& spec_;
  const ChunkKernels& kernels_;
  const StateUpdateKernels& token_kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& bc_blocks_;
  const RowBlockKernels& states_;
  const StateUpdateArgs& args_;
  const StateChunkScratch s_;
  const size_t row_;     // stride of rows of d_state
  const size_t scores_;  // stride of rows of the chunk's tokens
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_CHUNKS_H_
