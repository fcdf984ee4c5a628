#ifndef QUERN_MODELS_LAYER_H_
#define QUERN_MODELS_LAYER_H_

// Private: the parts that a decoder's layers are made of.
//
//   x += mixer(rms_norm(x))          tokens of a sequence meet one another
//   x += feed_forward(rms_norm(x))   each token by itself
//
// A part has its weights, says what scratch it needs, and, if it is a mixer,
// keeps what it remembers of a sequence in a pool of the state. Parts are
// immutable: any number of states use them at once.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/page_pool.h"

namespace quern {

// Where the last matrix of a part writes: y = residual + what the part
// computes, or without the first term where `residual` has no rank.
struct LayerTarget {
  AnyTensorView y;
  AnyTensorView residual;
};

// What is the same for all layers of a step.
struct LayerStep {
  AnyTensorView rows;       // [tokens, hidden]: what the part multiplies
  AnyTensorView positions;  // i64[tokens]
  Workspace scratch;        // of ScratchBytes
  Executor* executor;
};

class Mixer {
 public:
  virtual ~Mixer() = default;

  // Which of the state's pools, and which of its layers, a sequence's memory of
  // this layer is.
  virtual int64_t pool() const = 0;
  virtual int64_t pool_layer() const = 0;
  // Scratch of a step, by an executor of at most so many workers.
  // ResourceExhausted if the size overflows.
  virtual absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                               int max_workers) const = 0;
  // `pool` was prepared for the step.
  virtual void Execute(const LayerStep& step, PagePool& pool,
                       const LayerTarget& target) const noexcept = 0;
};

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // As Mixer's.
  virtual absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                               int max_workers) const = 0;
  virtual void Execute(const LayerStep& step,
                       const LayerTarget& target) const noexcept = 0;
  // What the first matrix's kernel for m rows is and why, for a person.
  virtual std::string Explain(int64_t m) const = 0;
};

struct DecoderLayer {
  AlignedBuffer attn_norm;  // f32[hidden]
  std::unique_ptr<Mixer> mixer;
  AlignedBuffer post_attn_norm;  // f32[hidden], with kPostNorms
  AlignedBuffer ffn_norm;        // f32[hidden]
  std::unique_ptr<FeedForward> feed_forward;
  AlignedBuffer post_ffn_norm;  // f32[hidden], with kPostNorms
};

}  // namespace quern

#endif  // QUERN_MODELS_LAYER_H_
