#ifndef QUERN_MODELS_LLAMA_STATE_IMPL_H_
#define QUERN_MODELS_LLAMA_STATE_IMPL_H_

// Private: what a LlamaState owns. llama_state.cc keeps the books, sequences,
// pages and scratch; llama_forward.cc computes.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/paged_attention.h"
#include "attention/schedule.h"
#include "cache/kv_cache.h"
#include "cache/kv_layout.h"
#include "cache/page_allocator.h"
#include "cache/page_table.h"
#include "cache/write_kv.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "models/llama.h"
#include "models/llama_impl.h"
#include "models/llama_matrix.h"
#include "quant/convert.h"

namespace quern {

struct LlamaState::Impl {
  struct Sequence {
    bool used = false;
    int64_t length = 0;
    std::vector<int32_t> pages;
  };

  // Attention within a window, or without one.
  struct Attention {
    std::optional<PagedAttentionPlan> plan;
    AttentionScheduleStorage storage;
    AttentionSchedule schedule;  // of this step
  };

  const LlamaModel::Impl* model = nullptr;
  LlamaStateSpec spec;
  std::vector<Sequence> sequences;
  KvCache cache;
  std::optional<PageAllocator> allocator;
  std::optional<WriteKvPlan> write_kv;
  std::optional<ConvertPlan> convert_queries;  // none if attention reads f32
  Attention full;
  Attention local;  // without a plan if no layer is local

  AlignedBuffer activations;  // of one step's rows
  AlignedBuffer logits;       // f32[rows, vocab], grows
  AlignedBuffer workspace;    // of attention, grows
  LlamaScratch scratch;       // of matrices
  int scratch_workers = 0;    // that scratch has room for

  // This step, rebuilt by Prepare.
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions, q_lens, kv_lens, slots, logit_rows;
  PageTableStorage table_storage;
  bool windowed = false;  // a sequence is longer than the window: local is used

  bool Has(int32_t sequence) const {
    return sequence >= 0 && static_cast<size_t>(sequence) < sequences.size() &&
           sequences[static_cast<size_t>(sequence)].used;
  }
  // Whether a layer's output goes to a buffer before it is added to x.
  bool NeedsBranch() const {
    return model->config.post_norms || !model->all_add;
  }
  // What `activations` needs for max_step_tokens. InvalidArgument if that is
  // more than 2^63 bytes.
  absl::StatusOr<int64_t> ActivationBytes() const;
  absl::Status CheckItems(absl::Span<const LlamaBatchItem> items) const;
  // All that may fail. Afterwards each sequence has the pages of its new
  // length, the buffers are large enough.
  absl::Status Prepare(absl::Span<const LlamaBatchItem> items,
                       LogitsOf logits_of, const Executor& executor,
                       PageTable& table);
  absl::Status Schedule(int num_workers, Attention& attention);
  // ResourceExhausted if `pages` pages in every layer and the activations take
  // more than spec.max_bytes.
  absl::Status CheckBytes(const KvLayout& layout, int64_t pages,
                          int64_t activation_bytes) const;
  absl::Status ReserveScratch(const Executor& executor);
  absl::Status GrowSequences(absl::Span<const LlamaBatchItem> items,
                             LogitsOf logits_of);
  // Gives back the pages beyond each sequence's length.
  void TrimSequences(absl::Span<const LlamaBatchItem> items);
  void Run(const PageTable& table, Executor& executor);
};

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_STATE_IMPL_H_
