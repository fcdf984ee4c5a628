#ifndef QUERN_OPS_ROPE_DUAL_CHUNK_ROTARY_H_
#define QUERN_OPS_ROPE_DUAL_CHUNK_ROTARY_H_

// Rotary position embedding of dual chunk attention (Qwen2.5-1M). Keys are
// rotated by their position within a chunk. Queries are rotated five times,
// once for each distance class of the keys that they meet. With L = chunk -
// local and m = p mod L:
//
//   key_out[t]       = rot(key[t], m)
//   query_out[t, 0]  = rot(query[t], m)                  same chunk
//   query_out[t, 1]  = rot(query[t], min(m + L, chunk))  the chunk before
//   query_out[t, 2]  = rot(query[t], min(2 L - 1, chunk))  the last place of it
//   query_out[t, 3]  = rot(query[t], m + L)
//   query_out[t, 4]  = rot(query[t], m + chunk)
//
// rot(x, p) is ops/rope/rotary_embedding.h at position p, which also defines
// styles, scalings, the rotated range of a head, and rounding.

#include <cstdint>
#include <memory>

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

struct DualChunkRotarySpec {
  RotaryEmbeddingSpec rotary;
  int64_t chunk = 0;  // >= 1
  int64_t local = 0;  // 0 <= local < chunk
};

// Arguments of Execute: query and key are [tokens, heads, head_dim], each with
// its own number of heads; query_out is [tokens, 5 * heads, head_dim], one copy
// after the other.
struct DualChunkRotaryArgs {
  IndexView positions;
  AnyTensorView query;
  AnyTensorView key;
  AnyTensorView query_out;
  AnyTensorView key_out;
};

// Immutable after Create. Has a table of (2 * chunk - local) * rot_dim f32
// (kPairs: twice that), which copies of the plan share.
class DualChunkRotaryPlan {
 public:
  static constexpr int64_t kCopies = 5;

  // InvalidArgument for what RotaryEmbeddingPlan refuses, and for chunk or
  // local out of range; ResourceExhausted if the table cannot be allocated.
  // Unless null, `tables` has the table, which plans then share.
  static absl::StatusOr<DualChunkRotaryPlan> Create(
      const DualChunkRotarySpec& spec, RotaryTables* tables = nullptr);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const DualChunkRotarySpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks shapes, dtypes,
  // strides, memory, and that positions are in [0, max_positions). query_out
  // must overlap nothing; key_out may be key itself.
  absl::Status CheckArgs(const DualChunkRotaryArgs& args) const;

  // Writes query_out and key_out. Does nothing without tokens or heads.
  // Allocates nothing; safe to call concurrently; the result does not depend on
  // the number of workers.
  void Execute(const DualChunkRotaryArgs& args,
               Executor& executor) const noexcept;

 private:
  DualChunkRotaryPlan(const DualChunkRotarySpec& spec,
                      std::shared_ptr<const AlignedBuffer> table);

  DualChunkRotarySpec spec_;
  RotaryEmbeddingKernels kernels_;
  std::shared_ptr<const AlignedBuffer> table_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_DUAL_CHUNK_ROTARY_H_
