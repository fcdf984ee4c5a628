#ifndef QUERN_OPS_ROPE_TABLE_ROTARY_H_
#define QUERN_OPS_ROPE_TABLE_ROTARY_H_

// Rotary position embedding by a table of the caller's: engines that compute
// cosines and sines once for a model hand such a table to every layer.
//
//   table[p, 0 .. rot_dim / 2)        cosines of position p
//   table[p, rot_dim / 2 .. rot_dim)  its sines
//   out[a] = x[a] * cos[j] - x[b] * sin[j]
//   out[b] = x[b] * cos[j] + x[a] * sin[j]
//
// (a, b) is pair j of the style, as in ops/rope/rotary_embedding.h. Elements
// [rot_offset, rot_offset + rot_dim) are rotated, and the others are copied.
// kBackward takes -sin. Arithmetic is in f32, and the result is rounded once,
// to nearest even, to the dtype of x.
//
// With `sections` (t, h, w), whose sum is rot_dim / 2, a token has three
// positions, and pair j takes its cosine and sine from the row of one of them:
// the first t pairs from the first, the next h from the second, the last w from
// the third; interleaved, pair j from stream j % 3 while j is below 3 times
// that stream's section, and from the first otherwise (ops/rope/mrope.h).

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct TableRotarySpec {
  // rot_dim <= 1024; base and scaling have no effect.
  RotaryEmbeddingSpec rotary;
  DType table_dtype = DType::kF32;  // f32, bf16 or f16
  std::vector<int64_t> sections;    // three, or none
  bool interleaved = false;         // of sections
};

// A tensor of heads and what it becomes: [tokens, heads, head_dim], with any
// token and head strides. out may be x itself.
struct TableRotaryHeads {
  AnyTensorView x, out;
};
struct TableRotaryArgs {
  // The second and the third are those of the sections, and not read without.
  std::array<IndexView, 3> positions;
  AnyTensorView table;  // [max_positions, rot_dim]
  TableRotaryHeads query;
  TableRotaryHeads key;  // two views of rank 0 if there is none
};

class TableRotaryPlan {
 public:
  // InvalidArgument if a dimension or max_positions is out of range, or the
  // sections do not have rot_dim / 2 pairs. Unimplemented for other dtypes.
  static absl::StatusOr<TableRotaryPlan> Create(const TableRotarySpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const TableRotarySpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks shapes, dtypes,
  // strides, memory and aliasing, and that every position is in [0,
  // max_positions). What is written overlaps nothing else but, element by
  // element, what it becomes of.
  absl::Status CheckArgs(const TableRotaryArgs& args) const;

  // Writes out of query and key. Does nothing without tokens or heads.
  // Allocates nothing; safe to call concurrently; the result does not depend on
  // the number of workers.
  void Execute(const TableRotaryArgs& args, Executor& executor) const noexcept;

 private:
  explicit TableRotaryPlan(const TableRotarySpec& spec);
  // The stream whose position pair j is rotated by.
  size_t StreamOf(int64_t j) const;
  void MakeRow(const TableRotaryArgs& args, int64_t token, float* row) const;

  TableRotarySpec spec_;
  RotaryEmbeddingKernels kernels_;
  RowBlockKernels table_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_TABLE_ROTARY_H_
