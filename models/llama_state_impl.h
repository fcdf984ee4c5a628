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
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/models/llama.h"
#include "quern/models/llama_impl.h"
#include "quern/quant/convert.h"

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
  AlignedBuffer scratch;      // of matrices, grows
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
