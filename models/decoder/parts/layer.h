#ifndef QUERN_MODELS_DECODER_PARTS_LAYER_H_
#define QUERN_MODELS_DECODER_PARTS_LAYER_H_

// Private: the parts that a decoder's layers are made of.
//
//   x += mixer(rms_norm(x))          tokens of a sequence meet one another
//   x += feed_forward(rms_norm(x))   each token by itself
//
// A part holds its weights, and says how much scratch it needs. A mixer also
// keeps its memory of each sequence in a pool of the state: keys and values in
// pages, or what a recurrence remembers in a slot of fixed size. Parts are
// immutable, so any number of states use them at once.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/memory/recurrent_pool.h"

namespace quern {

// Output of a part's last matrix: y = residual + result of the part, or the
// result alone if `residual` has rank 0.
struct LayerTarget {
  AnyTensorView y;
  AnyTensorView residual;
};

// Arguments that are the same for all layers of a step.
struct LayerStep {
  AnyTensorView rows;       // [tokens, hidden]: the part's input
  AnyTensorView positions;  // i64[tokens]
  Workspace scratch;        // of ScratchBytes bytes
  Executor* executor;
};

// Where the mixers of a state keep their memory of its sequences.
struct MixerMemory {
  absl::Span<PagePool> pages;  // indexed by Decoder::Impl::PoolOf
  RecurrentPool* recurrent;    // null if no layer is recurrent
};

class Mixer {
 public:
  virtual ~Mixer() = default;

  // Bytes of scratch for a step of up to max_tokens tokens on up to max_workers
  // workers. ResourceExhausted if the size overflows.
  virtual absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                               int max_workers) const = 0;
  // Runs the mixer. `memory` must have been prepared for the step.
  virtual void Execute(const LayerStep& step, const MixerMemory& memory,
                       const LayerTarget& target) const noexcept = 0;
};

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // Like Mixer::ScratchBytes.
  virtual absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                               int max_workers) const = 0;
  virtual void Execute(const LayerStep& step,
                       const LayerTarget& target) const noexcept = 0;
  // Names the kernel of the first matrix for m rows, and why it was chosen; for
  // people to read.
  virtual std::string Explain(int64_t m) const = 0;
};

struct DecoderLayer {
  AlignedBuffer attn_norm;  // f32[hidden]; empty with kBareInputs
  std::unique_ptr<Mixer> mixer;
  AlignedBuffer post_attn_norm;  // f32[hidden], with kPostNorms
  AlignedBuffer ffn_norm;        // like attn_norm
  std::unique_ptr<FeedForward> feed_forward;
  AlignedBuffer post_ffn_norm;  // f32[hidden], with kPostNorms
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_LAYER_H_
