#ifndef QUERN_OPS_ROPE_MROPE_H_
#define QUERN_OPS_ROPE_MROPE_H_

// Rotary position embedding of tokens that have several positions (time, row
// and column of an image patch): pair j of a head turns by the angle
//
//   angle[t, j] = positions[stream(j), t] * frequency[index(j)]
//
//   kContiguous   stream(j) = the section that j lies in      index(j) = j
//   kInterleaved  three streams, sections (t, h, w):          index(j) = j
//                 stream(j) = 1  if j % 3 == 1 and j < 3 h
//                             2  if j % 3 == 2 and j < 3 w
//                             0  otherwise
//   kSplit        as kContiguous, each section with a whole spectrum of its
//                 own, frequency[i] = base^(-2 i / (2 section)):
//                 index(j) = j - where the section begins.
//                 With sections (D / 4, D / 4) of a head of D, row and column:
//                 the 2-D embedding of vision encoders.
//
// Pairs, styles, scalings, the rotated range of a head, and rounding are as in
// ops/rope/rotary_embedding.h.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {

enum class MropeOrder : uint8_t { kContiguous, kInterleaved, kSplit };

struct MropeSpec {
  RotaryEmbeddingSpec rotary;     // rot_dim <= 1024
  std::vector<int64_t> sections;  // pairs of each stream, >= 0; together
                                  // rot_dim / 2
  MropeOrder order = MropeOrder::kContiguous;
};

// Immutable after Create. Has a table of max_positions * rot_dim f32 (kSplit:
// one section's part), which copies of the plan share. One plan serves all
// layers.
class MropePlan {
 public:
  // InvalidArgument for what RotaryEmbeddingPlan refuses, rot_dim > 1024,
  // sections that do not add up, kInterleaved without three sections, or kSplit
  // with sections that differ; ResourceExhausted if the table cannot be
  // allocated. Unless null, `tables` has the table, which plans then share.
  static absl::StatusOr<MropePlan> Create(const MropeSpec& spec,
                                          RotaryTables* tables = nullptr);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const MropeSpec& spec() const { return spec_; }

  // Like the functions of RotaryEmbeddingPlan: Execute rotates x[tokens, heads,
  // head_dim] into out, ExecuteQk rotates q and k in place. positions holds
  // streams * tokens numbers, all of stream 0 first.
  absl::Status CheckArgs(IndexView positions, const AnyTensorView& x,
                         const AnyTensorView& out) const;
  void Execute(IndexView positions, const AnyTensorView& x,
               const AnyTensorView& out, Executor& executor) const noexcept;
  absl::Status CheckQkArgs(IndexView positions, const AnyTensorView& q,
                           const AnyTensorView& k) const;
  void ExecuteQk(IndexView positions, const AnyTensorView& q,
                 const AnyTensorView& k, Executor& executor) const noexcept;

 private:
  // Origin of pair j's angle: a stream of positions, and an index of frequency.
  struct Source {
    int64_t stream;
    int64_t index;
  };
  MropePlan(const MropeSpec& spec, std::vector<Source> sources,
            int64_t spectrum, std::shared_ptr<const AlignedBuffer> table);
  int64_t streams() const {
    return static_cast<int64_t>(spec_.sections.size());
  }
  absl::Status CheckPositions(IndexView positions, int64_t tokens) const;
  void MakeRow(IndexView positions, int64_t tokens, int64_t token,
               float* row) const;

  MropeSpec spec_;
  RotaryEmbeddingKernels kernels_;
  std::vector<Source> sources_;
  int64_t spectrum_;  // frequencies in a row of the table
  std::shared_ptr<const AlignedBuffer> table_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_MROPE_H_
