#ifndef QUERN_MODELS_DECODER_DECODER_STATE_IMPL_H_
#define QUERN_MODELS_DECODER_DECODER_STATE_IMPL_H_

// Private: the data of a DecoderState. decoder_state.cc manages sequences,
// pages and scratch; decoder_forward.cc computes.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_impl.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/memory/recurrent_pool.h"

namespace quern {

struct DecoderState::Impl {
  class Stream;
  struct Sequence {
    bool used = false;
    int64_t length = 0;
  };

  const Decoder::Impl* model = nullptr;
  DecoderStateSpec spec;
  std::vector<Sequence> sequences;
  // Indexed by Decoder::Impl::PoolOf; a single pool if there are no local
  // layers.
  std::vector<PagePool> pools;
  std::optional<RecurrentPool> recurrent;  // if the model has such layers

  AlignedBuffer activations;  // of one step's rows
  AlignedBuffer logits;       // f32[rows, vocab], grows
  AlignedBuffer scratch;      // of layers, grows
  int scratch_workers = 0;    // number that scratch is sized for

  // The current step; rebuilt by Prepare.
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions, logit_rows;
  DecoderWork last_work;  // of the last step that ran

  bool Has(int32_t sequence) const {
    return sequence >= 0 && static_cast<size_t>(sequence) < sequences.size() &&
           sequences[static_cast<size_t>(sequence)].used;
  }
  Sequence& At(int32_t sequence) {
    return sequences[static_cast<size_t>(sequence)];
  }
  // Bytes of `activations` for max_step_tokens. InvalidArgument if they exceed
  // 2^63.
  absl::StatusOr<int64_t> ActivationBytes() const;
  absl::Status CheckItems(absl::Span<const DecoderBatchItem> items) const;
  // One pool for each kind of attention layer in the model.
  absl::StatusOr<std::vector<PagePoolSpec>> PoolSpecs() const;
  // A pool without layers if the model has no recurrent ones.
  RecurrentPoolSpec RecurrentSpec() const;
  // ResourceExhausted if the pools and the activations take more than
  // spec.max_bytes.
  absl::Status CheckBytes(absl::Span<const PagePoolSpec> pool_specs,
                          int64_t activation_bytes) const;
  // Does everything that can fail. Afterwards each sequence has the pages of
  // its new length, and the buffers are large enough.
  absl::Status Prepare(absl::Span<const DecoderBatchItem> items,
                       LogitsOf logits_of, Executor& executor);
  absl::Status ReserveScratch(const Executor& executor);
  absl::Status GrowSequences(absl::Span<const DecoderBatchItem> items,
                             LogitsOf logits_of);
  // Gives back the pages beyond each sequence's current length.
  void TrimSequences(absl::Span<const DecoderBatchItem> items);
  // Returns `status`, or Unavailable if another rank's status is not OK, so
  // that no rank begins a step that some rank cannot do.
  absl::Status Agree(const absl::Status& status) const;
  // Computes the logits, and sets `last_work`.
  void Run(Executor& executor);
  void CountWork();
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_DECODER_STATE_IMPL_H_
