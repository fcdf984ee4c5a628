#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
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
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/models/byte_limit.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/llama_impl.h"
#include "quern/models/llama_state_impl.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";
constexpr int64_t kMaxSequences = 1 << 20;
constexpr int64_t kMaxStepTokens = 1 << 20;

// Keys and values of one byte: each row of a head with a scale of its own,
// which serves any model, as none was measured beforehand.
KvScaling ScalingOf(DType cache_dtype) {
  return SizeOf(cache_dtype) == 1 ? KvScaling::kPerTokenHead : KvScaling::kNone;
}

// What attention gets of queries, which come in f32. bf16 against bf16 or bytes
// are dot products; a model in f32, and a cache of more bits, want all of them.
DType QueryType(DType model, DType cache) {
  const bool dot = cache == DType::kBF16 || SizeOf(cache) == 1;
  return dot && model == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

// Makes `buffer` at least so large; its contents are lost if it grows.
absl::Status Reserve(AlignedBuffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.bytes()) >= bytes) return absl::OkStatus();
  buffer = AlignedBuffer();
  QUERN_ASSIGN_OR_RETURN(buffer, AlignedBuffer::Create(bytes));
  return absl::OkStatus();
}

}  // namespace

absl::Status LlamaState::Impl::CheckItems(
    absl::Span<const LlamaBatchItem> items) const {
  const LlamaConfig& c = model->config;
  std::vector<bool> seen(sequences.size());
  int64_t total = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const LlamaBatchItem& item = items[i];
    if (!Has(item.sequence)) {
      return InvalidArgument(kOp, "items[", i, "].sequence=", item.sequence,
                             " is not a sequence");
    }
    const auto id = static_cast<size_t>(item.sequence);
    if (seen[id]) {
      return InvalidArgument(kOp, "items[", i, "].sequence=", item.sequence,
                             " occurs twice");
    }
    seen[id] = true;
    const auto size = static_cast<int64_t>(item.tokens.size());
    if (size == 0) return InvalidArgument(kOp, "items[", i, "] has no tokens");
    if (size > model->context - sequences[id].length) {
      return InvalidArgument(kOp, "items[", i, "] has ", size, " tokens after ",
                             sequences[id].length, "; the context is ",
                             model->context);
    }
    total += size;
    for (const int32_t token : item.tokens) {
      if (token < 0 || token >= c.vocab) {
        return InvalidArgument(kOp, "items[", i, "] has token ", token,
                               "; need 0 <= token < ", c.vocab);
      }
    }
  }
  if (total > spec.max_step_tokens) {
    return InvalidArgument(kOp, "the step has ", total,
                           " tokens; need <= ", spec.max_step_tokens);
  }
  return absl::OkStatus();
}

absl::Status LlamaState::Impl::GrowSequences(
    absl::Span<const LlamaBatchItem> items, LogitsOf logits_of) {
  tokens.clear();
  positions.clear();
  q_lens.clear();
  kv_lens.clear();
  logit_rows.clear();
  table_storage.Clear();
  for (const LlamaBatchItem& item : items) {
    Sequence& sequence = sequences[static_cast<size_t>(item.sequence)];
    const auto size = static_cast<int64_t>(item.tokens.size());
    if (const absl::Status grown =
            allocator->Grow(sequence.length + size, sequence.pages);
        !grown.ok()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          kOp, ": the cache of ", allocator->num_pages() * spec.page_size,
          " tokens is full: sequence ", item.sequence, " needs ",
          sequence.length + size, ", ",
          allocator->free_pages() * spec.page_size, " are free"));
    }
    table_storage.Append(sequence.pages);
    for (int64_t i = 0; i < size; ++i) {
      positions.push_back(sequence.length + i);
      if (logits_of == LogitsOf::kAllTokens || i == size - 1) {
        logit_rows.push_back(static_cast<int64_t>(tokens.size()) + i);
      }
    }
    tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
    q_lens.push_back(size);
    kv_lens.push_back(sequence.length + size);
  }
  slots.resize(tokens.size());
  return absl::OkStatus();
}

void LlamaState::Impl::TrimSequences(absl::Span<const LlamaBatchItem> items) {
  for (const LlamaBatchItem& item : items) {
    Sequence& sequence = sequences[static_cast<size_t>(item.sequence)];
    const auto first =
        sequence.pages.begin() + DivCeil(sequence.length, spec.page_size);
    std::vector<int32_t> surplus(first, sequence.pages.end());
    sequence.pages.erase(first, sequence.pages.end());
    allocator->Release(surplus);
  }
}

// Layers have equal shapes, but their matrices may be kept in different forms.
absl::Status LlamaState::Impl::ReserveScratch(const Executor& executor) {
  if (executor.num_workers() <= scratch_workers) return absl::OkStatus();
  std::vector<const LinearPlan*> matrices = {&*model->output};
  for (const LlamaLayer& l : model->layers) {
    matrices.insert(matrices.end(), {&l.qkv, &l.attn_out, &l.gate_up, &l.down});
  }
  int64_t most = 0;
  for (const LinearPlan* matrix : matrices) {
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        matrix->WorkspaceBytes(spec.max_step_tokens, executor.num_workers()));
    most = std::max(most, bytes);
  }
  if (most > static_cast<int64_t>(scratch.bytes())) {
    QUERN_ASSIGN_OR_RETURN(scratch, AlignedBuffer::Create(most));
  }
  scratch_workers = executor.num_workers();
  return absl::OkStatus();
}

absl::Status LlamaState::Impl::CheckBytes(const KvLayout& layout, int64_t pages,
                                          int64_t activation_bytes) const {
  const ByteLimit limit = {spec.max_bytes, int64_t{4} << 30, 64,
                           model->weight_bytes, "weights'"};
  const int64_t layers = model->config.layers;
  const double cache_bytes = static_cast<double>(layout.page_bytes()) *
                             static_cast<double>(pages) *
                             static_cast<double>(layers);
  const double bytes = cache_bytes + static_cast<double>(activation_bytes);
  if (bytes <= limit.bytes()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: a cache of %d tokens takes %.0f bytes in %d layers, activations of "
      "max_step_tokens=%d take %d; %s",
      kOp, pages * spec.page_size, cache_bytes, layers, spec.max_step_tokens,
      activation_bytes, limit.Need()));
}

absl::Status LlamaState::Impl::Schedule(int num_workers, Attention& attention) {
  QUERN_ASSIGN_OR_RETURN(
      attention.schedule,
      AttentionSchedule::Build(attention.plan->spec(), q_lens, kv_lens,
                               num_workers, attention.storage));
  QUERN_ASSIGN_OR_RETURN(
      const int64_t workspace_bytes,
      attention.plan->WorkspaceBytes(attention.schedule, num_workers));
  return Reserve(workspace, workspace_bytes);
}

absl::Status LlamaState::Impl::Prepare(absl::Span<const LlamaBatchItem> items,
                                       LogitsOf logits_of,
                                       const Executor& executor,
                                       PageTable& table) {
  const int num_workers = executor.num_workers();
  QUERN_RETURN_IF_ERROR(ReserveScratch(executor));
  QUERN_RETURN_IF_ERROR(GrowSequences(items, logits_of));
  QUERN_ASSIGN_OR_RETURN(
      table, table_storage.Build(spec.page_size, allocator->num_pages()));
  QUERN_RETURN_IF_ERROR(
      table.SlotMapping(q_lens, kv_lens, absl::MakeSpan(slots)));
  QUERN_RETURN_IF_ERROR(Schedule(num_workers, full));
  // A window that hides nothing changes no bit: one schedule does then.
  windowed =
      local.plan.has_value() &&
      *std::max_element(kv_lens.begin(), kv_lens.end()) > model->config.window;
  if (windowed) QUERN_RETURN_IF_ERROR(Schedule(num_workers, local));
  return Reserve(logits, static_cast<int64_t>(logit_rows.size()) *
                             model->config.vocab *
                             static_cast<int64_t>(sizeof(float)));
}

LlamaState::LlamaState(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LlamaState::LlamaState(LlamaState&&) noexcept = default;
LlamaState& LlamaState::operator=(LlamaState&&) noexcept = default;
LlamaState::~LlamaState() = default;

absl::StatusOr<LlamaState> LlamaState::Create(const LlamaModel& model,
                                              const LlamaStateSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_sequences", spec.max_sequences, 1, kMaxSequences));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "max_step_tokens", spec.max_step_tokens,
                                   1, kMaxStepTokens));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "cache_tokens", spec.cache_tokens, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_bytes", spec.max_bytes, 0));
  const LlamaConfig& c = model.config();
  auto s = std::make_unique<Impl>();
  s->model = model.impl_.get();
  s->spec = spec;
  KvLayoutSpec kv;
  kv.dtype = spec.cache_dtype;
  kv.scaling = ScalingOf(spec.cache_dtype);
  kv.kv_heads = c.kv_heads;
  kv.head_dim = c.head_dim;
  kv.page_size = spec.page_size;
  QUERN_ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Create(kv));
  // Each sequence ends within a page of its own.
  const int64_t pages =
      spec.cache_tokens > 0
          ? DivCeil(spec.cache_tokens, spec.page_size)
          : spec.max_sequences * DivCeil(model.context(), spec.page_size);
  QUERN_ASSIGN_OR_RETURN(s->allocator,
                         PageAllocator::Create(pages, spec.page_size));
  WriteKvSpec write;
  write.kv = layout;
  QUERN_ASSIGN_OR_RETURN(s->write_kv, WriteKvPlan::Create(write));
  AttentionSpec attention;
  attention.kv = layout;
  attention.q_heads = c.q_heads;
  attention.q_dtype = QueryType(model.impl_->dtype, spec.cache_dtype);
  attention.out_dtype = model.impl_->dtype;
  attention.scale = c.attention_scale;
  attention.soft_cap = c.attention_cap;
  QUERN_ASSIGN_OR_RETURN(s->full.plan, PagedAttentionPlan::Create(attention));
  if (c.window > 0) {
    attention.window_left = c.window - 1;
    QUERN_ASSIGN_OR_RETURN(s->local.plan,
                           PagedAttentionPlan::Create(attention));
  }

  if (attention.q_dtype != DType::kF32) {
    ConvertSpec convert;
    convert.to = attention.q_dtype;
    convert.stores = Stores::kCached;
    QUERN_ASSIGN_OR_RETURN(s->convert_queries, ConvertPlan::Create(convert));
  }

  QUERN_ASSIGN_OR_RETURN(const int64_t bytes, s->ActivationBytes());
  QUERN_RETURN_IF_ERROR(s->CheckBytes(layout, pages, bytes));
  s->sequences.resize(static_cast<size_t>(spec.max_sequences));
  QUERN_ASSIGN_OR_RETURN(s->cache, KvCache::Create(layout, pages, c.layers));
  QUERN_ASSIGN_OR_RETURN(s->activations, AlignedBuffer::Create(bytes));
  return LlamaState(std::move(s));
}

absl::StatusOr<int32_t> LlamaState::NewSequence() {
  for (size_t i = 0; i < impl_->sequences.size(); ++i) {
    if (!impl_->sequences[i].used) {
      impl_->sequences[i].used = true;
      return static_cast<int32_t>(i);
    }
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(kOp, ": all of max_sequences=", impl_->spec.max_sequences,
                   " are in use"));
}

absl::Status LlamaState::EndSequence(int32_t sequence) {
  if (!impl_->Has(sequence)) {
    return InvalidArgument(kOp, "sequence=", sequence, " is not a sequence");
  }
  Impl::Sequence& s = impl_->sequences[static_cast<size_t>(sequence)];
  impl_->allocator->Release(s.pages);
  s = {};
  return absl::OkStatus();
}

int64_t LlamaState::length(int32_t sequence) const {
  return impl_->Has(sequence)
             ? impl_->sequences[static_cast<size_t>(sequence)].length
             : -1;
}

absl::StatusOr<MatrixView<const float>> LlamaState::Forward(
    absl::Span<const LlamaBatchItem> items, LogitsOf logits_of,
    Executor& executor) {
  Impl& s = *impl_;
  const LlamaConfig& c = s.model->config;
  QUERN_RETURN_IF_ERROR(s.CheckItems(items));
  if (items.empty())
    return MatrixView<const float>(nullptr, {0, c.vocab}, {c.vocab, 1});
  PageTable table;
  if (absl::Status prepared = s.Prepare(items, logits_of, executor, table);
      !prepared.ok()) {
    s.TrimSequences(items);
    return prepared;
  }
  s.Run(table, executor);
  for (const LlamaBatchItem& item : items) {
    s.sequences[static_cast<size_t>(item.sequence)].length +=
        static_cast<int64_t>(item.tokens.size());
  }
  return DenseMatrix<const float>(s.logits.data<float>(),
                                  static_cast<int64_t>(s.logit_rows.size()),
                                  c.vocab);
}

int64_t LlamaState::max_step_tokens() const {
  return impl_->spec.max_step_tokens;
}
int64_t LlamaState::cache_bytes() const {
  return static_cast<int64_t>(impl_->cache.bytes());
}
int64_t LlamaState::cache_bytes_per_token() const {
  const KvCache& cache = impl_->cache;
  return cache.num_layers() * cache.layout().page_bytes() /
         cache.layout().page_size();
}
const char* LlamaState::attention_arithmetic() const {
  return impl_->full.plan->arithmetic();
}
int64_t LlamaState::scratch_bytes() const {
  return static_cast<int64_t>(impl_->activations.bytes() +
                              impl_->logits.bytes() + impl_->workspace.bytes() +
                              impl_->scratch.bytes());
}

}  // namespace quern
