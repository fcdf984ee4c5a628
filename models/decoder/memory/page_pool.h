#ifndef QUERN_MODELS_DECODER_MEMORY_PAGE_POOL_H_
#define QUERN_MODELS_DECODER_MEMORY_PAGE_POOL_H_

// Private: the keys and values of the layers of a model that share one
// attention window, and what is the same for these layers in a step: the pages
// of each sequence, the slots of new tokens, the division of attention.
//
// Where the layers have a window, pages that it has left are given back. They
// are given back in whole spans of attention's chunks, so that the remaining
// chunks begin where they did and results do not depend on when pages are given
// back.
//
// Sequences may share pages (Fork). The first sequence that writes to a shared
// page gets its own copy. Keys that several sequences share are read from
// memory once per step.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/shared_prefix.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/convert.h"

namespace quern {

struct PagePoolSpec {
  AttentionSpec attention;  // cache layout, and the window
  // Set for layers that attend to latents. The cache then holds latents, and
  // has no window.
  std::optional<LatentSpec> latent;
  bool sinks = false;  // whether Attend gets sinks
  int64_t layers = 0;
  int64_t pages = 0;
  int64_t max_sequences = 0;
};

class PagePool {
 public:
  // Upper bound on the pages of max_sequences sequences in layers that see
  // `window` tokens, where a step brings max_step_tokens. At most
  // pages_without_it.
  static int64_t PagesOfWindow(int64_t window, int64_t page_size,
                               int64_t max_sequences, int64_t max_step_tokens,
                               int64_t pages_without_it);

  // write_kv and paged_attention come from `ops`, which is not kept.
  static absl::StatusOr<PagePool> Create(const PagePoolSpec& spec,
                                         const OpDispatcher& ops);

  // Begins a step without sequences.
  void BeginStep();
  // Adds to the step a sequence of `length` tokens and `count` new ones.
  // ResourceExhausted, with nothing changed, if too few pages are free.
  absl::Status AddToStep(int32_t sequence, int64_t length, int64_t count);
  // Copies the shared pages that the step writes to. Call it after the last
  // AddToStep, whether or not that succeeded, and before any other function.
  void CopyShared(Executor& executor) noexcept;
  // Prepares the step's attention, after all sequences have been added.
  absl::Status Prepare(int num_workers);

  // Gives back the pages beyond the first `length` tokens.
  void Trim(int32_t sequence, int64_t length);
  // Gives back pages that no query after the first `length` tokens sees.
  void Forget(int32_t sequence, int64_t length);
  void End(int32_t sequence);
  // Gives `branch`, which must be empty, the first `length` tokens of
  // `sequence`.
  absl::Status Fork(int32_t sequence, int64_t length, int32_t branch);

  // Writes the step's k and v, f32[tokens, kv_heads, head_dim], of one layer.
  void Write(int64_t layer, const AnyTensorView& k, const AnyTensorView& v,
             Executor& executor) noexcept;
  // Attention of the step's queries q[tokens, q_heads, head_dim], f32 with
  // consecutive heads, in one layer -> out, of the spec's dtype. `converted` is
  // scratch of ConvertedBytes; `sinks` is f32[q_heads], or of rank 0 without.
  void Attend(int64_t layer, const TensorView<float, 3>& q, uint8_t* converted,
              const AnyTensorView& sinks, const AnyTensorView& out,
              Executor& executor) noexcept;
  // Writes the step's latents and attends to them, in a pool of latents.
  // LatentAttention::Execute says what the arguments are.
  void AttendLatents(int64_t layer, const AnyTensorView& rows,
                     const AnyTensorView& positions,
                     const AnyTensorView& residual, const AnyTensorView& y,
                     Executor& executor) noexcept {
    latent_->Execute(layer, rows, positions, cache_.Layer(layer), residual, y,
                     executor);
  }
  // Bytes of `converted` that Attend needs for this many tokens.
  static int64_t ConvertedBytes(const AttentionSpec& spec, int64_t tokens);

  const AttentionSpec& spec() const { return spec_; }
  // The kernel of attention, for a person to read.
  std::string Explain() const {
    return latent_ != nullptr ? latent_->Explain() : attend_->Explain(1);
  }
  int64_t bytes() const { return static_cast<int64_t>(cache_.bytes()); }
  int64_t bytes_per_token() const;
  // Bytes of the keys and values that the step's queries see, each once, and
  // the operations of attention, after Prepare.
  DecoderWork step_work() const;
  int64_t scratch_bytes() const {
    return static_cast<int64_t>(workspace_.bytes()) +
           (latent_ != nullptr ? latent_->scratch_bytes() : 0);
  }
  int64_t free_tokens() const {
    return allocator_->free_pages() * allocator_->page_size();
  }
  int64_t tokens() const {
    return allocator_->num_pages() * allocator_->page_size();
  }
  // Keys of each head that the last step did not read again, because several
  // sequences share them.
  int64_t saved_tokens() const { return saved_tokens_; }

 private:
  struct Sequence {
    std::vector<int32_t> pages;
    int64_t gone = 0;  // tokens before `pages`, given back
  };

  PagePool() = default;
  // Makes the operators of layers that attend to keys of heads.
  absl::Status MakeOps(const PagePoolSpec& spec, const OpDispatcher& ops);
  Sequence& At(int32_t sequence) {
    return sequences_[static_cast<size_t>(sequence)];
  }

  AttentionSpec spec_;
  std::unique_ptr<const KvLayout> layout_;  // what the operators are made with
  std::vector<Sequence> sequences_;
  KvCache cache_;
  std::optional<PageAllocator> allocator_;
  // A pool of latents has latent_, and any other pool has write_ and attend_.
  std::unique_ptr<LatentAttention> latent_;
  std::unique_ptr<const BoundOp> write_, attend_;
  std::optional<ConvertPlan> convert_;  // nullopt if attention reads f32
  AlignedBuffer workspace_;             // of both operators; grows

  // State of the current step.
  std::vector<int64_t> q_lens_, kv_lens_, slots_;
  std::vector<PageCopy> copies_;
  PageTableStorage table_storage_;
  SharedPrefixStorage prefix_storage_;
  AttentionScheduleStorage schedule_storage_;
  std::unique_ptr<AttentionStep> step_;  // where attend_ finds it
  int64_t saved_tokens_ = 0;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_MEMORY_PAGE_POOL_H_
