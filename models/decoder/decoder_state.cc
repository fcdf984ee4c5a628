#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_impl.h"
#include "quern/models/decoder/decoder_state_impl.h"
#include "quern/models/decoder/loading/byte_limit.h"
#include "quern/models/decoder/memory/attention_work.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/memory/recurrent_pool.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/models/decoder/parts/recurrent_mixer.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";
constexpr int64_t kMaxSequences = 1 << 20;
constexpr int64_t kMaxStepTokens = 1 << 20;

// Caches of one byte get a scale for each token and head, which works for any
// model without calibration.
KvScaling ScalingOf(DType cache_dtype) {
  return SizeOf(cache_dtype) == 1 ? KvScaling::kPerTokenHead : KvScaling::kNone;
}

// The type to which f32 queries are converted for attention. With keys of bf16
// or one byte, bf16 queries allow dot products; f32 models and wider caches
// keep the full precision.
DType QueryType(DType model, DType cache) {
  return AttendsInBF16(model, cache) ? DType::kBF16 : DType::kF32;
}

// Grows `buffer` to at least `bytes`; its contents are lost if it grows.
absl::Status Reserve(AlignedBuffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.bytes()) >= bytes) return absl::OkStatus();
  buffer = AlignedBuffer();
  QUERN_ASSIGN_OR_RETURN(buffer, AlignedBuffer::Create(bytes));
  return absl::OkStatus();
}

}  // namespace

absl::Status DecoderState::Impl::CheckItems(
    absl::Span<const DecoderBatchItem> items) const {
  const DecoderConfig& c = model->config;
  std::vector<bool> seen(sequences.size());
  int64_t total = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const DecoderBatchItem& item = items[i];
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

absl::Status DecoderState::Impl::GrowSequences(
    absl::Span<const DecoderBatchItem> items, LogitsOf logits_of) {
  tokens.clear();
  positions.clear();
  logit_rows.clear();
  for (PagePool& pool : pools) pool.BeginStep();
  if (recurrent.has_value()) recurrent->BeginStep();
  for (const DecoderBatchItem& item : items) {
    const int64_t length = At(item.sequence).length;
    const auto size = static_cast<int64_t>(item.tokens.size());
    for (PagePool& pool : pools) {
      if (!pool.AddToStep(item.sequence, length, size).ok()) {
        return absl::ResourceExhaustedError(
            absl::StrCat(kOp, ": the cache of ", pool.tokens(),
                         " tokens is full: sequence ", item.sequence, " needs ",
                         length + size, ", ", pool.free_tokens(), " are free"));
      }
    }
    if (recurrent.has_value()) {
      recurrent->AddToStep(item.sequence, length, size);
    }
    for (int64_t i = 0; i < size; ++i) {
      positions.push_back(length + i);
      if (logits_of == LogitsOf::kAllTokens || i == size - 1) {
        logit_rows.push_back(static_cast<int64_t>(tokens.size()) + i);
      }
    }
    tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
  }
  return absl::OkStatus();
}

void DecoderState::Impl::TrimSequences(
    absl::Span<const DecoderBatchItem> items) {
  for (const DecoderBatchItem& item : items) {
    for (PagePool& pool : pools) {
      pool.Trim(item.sequence, At(item.sequence).length);
    }
  }
}

// Reserves for every layer, because layers of equal shape may keep their
// matrices in different forms.
absl::Status DecoderState::Impl::ReserveScratch(const Executor& executor) {
  const int workers = executor.num_workers();
  if (workers <= scratch_workers) return absl::OkStatus();
  const int64_t step = spec.max_step_tokens;
  QUERN_ASSIGN_OR_RETURN(int64_t most,
                         model->output->WorkspaceBytes(step, workers));
  QUERN_ASSIGN_OR_RETURN(const int64_t operators,
                         model->operators->WorkspaceBytes(step, workers));
  most = std::max(most, operators);
  for (const DecoderLayer& layer : model->layers) {
    QUERN_ASSIGN_OR_RETURN(const int64_t mixer,
                           layer.mixer->ScratchBytes(step, workers));
    QUERN_ASSIGN_OR_RETURN(const int64_t feed_forward,
                           layer.feed_forward->ScratchBytes(step, workers));
    most = std::max({most, mixer, feed_forward});
  }
  QUERN_RETURN_IF_ERROR(Reserve(scratch, most));
  scratch_workers = workers;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PagePoolSpec>> DecoderState::Impl::PoolSpecs()
    const {
  const DecoderConfig& c = model->config;
  KvLayoutSpec kv;
  kv.dtype = spec.cache_dtype;
  kv.scaling = ScalingOf(spec.cache_dtype);
  kv.kv_heads = model->shard.kv_heads();
  kv.head_dim = c.head_dim;
  kv.page_size = spec.page_size;
  if (model->latent.has_value()) LatentAttention::SetLayout(c, kv);
  PagePoolSpec pool;
  QUERN_ASSIGN_OR_RETURN(pool.attention.kv, KvLayout::Create(kv));
  pool.attention.q_heads = model->shard.q_heads();
  pool.attention.q_dtype = QueryType(model->dtype, spec.cache_dtype);
  pool.attention.out_dtype = model->attended_dtype();
  pool.attention.scale = c.attention_scale;
  pool.attention.soft_cap = c.attention_cap;
  pool.latent = model->latent;
  pool.sinks = c.Has(ModelPart::kSinks);
  pool.max_sequences = spec.max_sequences;
  // Each sequence's last page may be partly filled.
  pool.pages =
      spec.cache_tokens > 0
          ? DivCeil(spec.cache_tokens, spec.page_size)
          : spec.max_sequences * DivCeil(model->context, spec.page_size);
  pool.layers = model->LayersIn(Decoder::Impl::kFullPool);
  std::vector<PagePoolSpec> specs = {pool};
  if (c.window == 0) return specs;
  pool.attention.window_left = c.window - 1;
  pool.layers = model->LayersIn(Decoder::Impl::kLocalPool);
  pool.pages =
      PagePool::PagesOfWindow(c.window, spec.page_size, spec.max_sequences,
                              spec.max_step_tokens, pool.pages);
  specs.push_back(pool);
  return specs;
}

RecurrentPoolSpec DecoderState::Impl::RecurrentSpec() const {
  return RecurrentMixer::PoolSpec(
      model->config, model->dtype,
      model->LayersIn(Decoder::Impl::kRecurrentPool), spec.max_sequences);
}

absl::Status DecoderState::Impl::CheckBytes(
    absl::Span<const PagePoolSpec> pool_specs, int64_t activation_bytes) const {
  const ByteLimit limit = {spec.max_bytes, int64_t{4} << 30, 64,
                           model->weight_bytes, "weights'"};
  double cache_bytes = 0;
  int64_t layers = 0;
  for (const PagePoolSpec& pool : pool_specs) {
    layers += pool.layers;
    cache_bytes += static_cast<double>(pool.attention.kv.page_bytes()) *
                   static_cast<double>(pool.pages) *
                   static_cast<double>(pool.layers);
  }
  const double recurrent_bytes = RecurrentSpec().bytes();
  const double bytes =
      cache_bytes + recurrent_bytes + static_cast<double>(activation_bytes);
  if (bytes <= limit.bytes()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: a cache of %.0f tokens takes %.0f bytes in %d layers, %sactivations "
      "of max_step_tokens=%d take %d; %s",
      kOp,
      static_cast<double>(pool_specs[0].pages) *
          static_cast<double>(spec.page_size),
      cache_bytes, layers,
      recurrent_bytes == 0
          ? ""
          : absl::StrFormat(
                "the recurrent layers of max_sequences=%d take %.0f, ",
                spec.max_sequences, recurrent_bytes),
      spec.max_step_tokens, activation_bytes, limit.Need()));
}

absl::Status DecoderState::Impl::Prepare(
    absl::Span<const DecoderBatchItem> items, LogitsOf logits_of,
    Executor& executor) {
  QUERN_RETURN_IF_ERROR(ReserveScratch(executor));
  const absl::Status grown = GrowSequences(items, logits_of);
  for (PagePool& pool : pools) pool.CopyShared(executor);
  QUERN_RETURN_IF_ERROR(grown);
  for (PagePool& pool : pools) {
    QUERN_RETURN_IF_ERROR(pool.Prepare(executor.num_workers()));
  }
  return Reserve(logits, static_cast<int64_t>(logit_rows.size()) *
                             model->config.vocab *
                             static_cast<int64_t>(sizeof(float)));
}

absl::Status DecoderState::Impl::Agree(const absl::Status& status) const {
  if (model->shard.size() == 1) return status;
  float failed = status.ok() ? 0.0f : 1.0f;
  model->communicator->AllReduceSum(DenseMatrix(&failed, 1, 1));
  if (!status.ok() || failed == 0.0f) return status;
  return absl::UnavailableError(absl::StrCat(
      kOp, ": the step failed on another of ", model->shard.size(), " ranks"));
}

DecoderState::DecoderState(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
DecoderState::DecoderState(DecoderState&&) noexcept = default;
DecoderState& DecoderState::operator=(DecoderState&&) noexcept = default;
DecoderState::~DecoderState() = default;

absl::StatusOr<DecoderState> DecoderState::Create(
    const Decoder& model, const DecoderStateSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_sequences", spec.max_sequences, 1, kMaxSequences));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "max_step_tokens", spec.max_step_tokens,
                                   1, kMaxStepTokens));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "cache_tokens", spec.cache_tokens, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_bytes", spec.max_bytes, 0));
  auto s = std::make_unique<Impl>();
  s->model = model.impl_.get();
  s->spec = spec;
  QUERN_ASSIGN_OR_RETURN(const std::vector<PagePoolSpec> pools, s->PoolSpecs());
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes, s->ActivationBytes());
  QUERN_RETURN_IF_ERROR(s->CheckBytes(pools, bytes));
  s->sequences.resize(static_cast<size_t>(spec.max_sequences));
  for (const PagePoolSpec& pool : pools) {
    QUERN_ASSIGN_OR_RETURN(PagePool made,
                           PagePool::Create(pool, *model.impl_->ops));
    s->pools.push_back(std::move(made));
  }
  if (s->model->config.HasRecurrent()) {
    QUERN_ASSIGN_OR_RETURN(RecurrentPool made,
                           RecurrentPool::Create(s->RecurrentSpec()));
    s->recurrent.emplace(std::move(made));
  }
  QUERN_ASSIGN_OR_RETURN(s->activations, AlignedBuffer::Create(bytes));
  return DecoderState(std::move(s));
}

absl::StatusOr<int32_t> DecoderState::NewSequence() {
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

absl::Status DecoderState::EndSequence(int32_t sequence) {
  if (!impl_->Has(sequence)) {
    return InvalidArgument(kOp, "sequence=", sequence, " is not a sequence");
  }
  for (PagePool& pool : impl_->pools) pool.End(sequence);
  impl_->At(sequence) = {};
  return absl::OkStatus();
}

absl::StatusOr<int32_t> DecoderState::Fork(int32_t sequence) {
  if (!impl_->Has(sequence)) {
    return InvalidArgument(kOp, "sequence=", sequence, " is not a sequence");
  }
  QUERN_ASSIGN_OR_RETURN(const int32_t branch, NewSequence());
  const int64_t length = impl_->At(sequence).length;
  for (PagePool& pool : impl_->pools) {
    const absl::Status forked = pool.Fork(sequence, length, branch);
    if (forked.ok()) continue;
    QUERN_RETURN_IF_ERROR(EndSequence(branch));
    return forked;
  }
  if (impl_->recurrent.has_value()) impl_->recurrent->Fork(sequence, branch);
  impl_->At(branch).length = length;
  return branch;
}

int64_t DecoderState::length(int32_t sequence) const {
  return impl_->Has(sequence)
             ? impl_->sequences[static_cast<size_t>(sequence)].length
             : -1;
}

absl::StatusOr<MatrixView<const float>> DecoderState::Forward(
    absl::Span<const DecoderBatchItem> items, LogitsOf logits_of,
    Executor& executor) {
  Impl& s = *impl_;
  const DecoderConfig& c = s.model->config;
  QUERN_RETURN_IF_ERROR(s.CheckItems(items));
  if (items.empty())
    return MatrixView<const float>(nullptr, {0, c.vocab}, {c.vocab, 1});
  if (absl::Status prepared = s.Agree(s.Prepare(items, logits_of, executor));
      !prepared.ok()) {
    s.TrimSequences(items);
    return prepared;
  }
  s.Run(executor);
  for (const DecoderBatchItem& item : items) {
    int64_t& length = s.At(item.sequence).length;
    length += static_cast<int64_t>(item.tokens.size());
    for (PagePool& pool : s.pools) pool.Forget(item.sequence, length);
  }
  return DenseMatrix<const float>(s.logits.data<float>(),
                                  static_cast<int64_t>(s.logit_rows.size()),
                                  c.vocab);
}

int64_t DecoderState::max_step_tokens() const {
  return impl_->spec.max_step_tokens;
}
int64_t DecoderState::cache_bytes() const {
  int64_t bytes = 0;
  for (const PagePool& pool : impl_->pools) bytes += pool.bytes();
  if (impl_->recurrent.has_value()) bytes += impl_->recurrent->bytes();
  return bytes;
}
int64_t DecoderState::cache_bytes_per_token() const {
  int64_t bytes = 0;
  for (const PagePool& pool : impl_->pools) bytes += pool.bytes_per_token();
  return bytes;
}
int64_t DecoderState::free_tokens() const {
  int64_t tokens = impl_->pools[0].free_tokens();
  for (const PagePool& pool : impl_->pools) {
    tokens = std::min(tokens, pool.free_tokens());
  }
  return tokens;
}
int64_t DecoderState::shared_tokens() const {
  return impl_->pools[0].saved_tokens();
}
std::string DecoderState::ExplainAttention() const {
  return impl_->pools[0].Explain();
}
int64_t DecoderState::scratch_bytes() const {
  size_t bytes = impl_->activations.bytes() + impl_->logits.bytes() +
                 impl_->scratch.bytes();
  for (const PagePool& pool : impl_->pools) {
    bytes += static_cast<size_t>(pool.scratch_bytes());
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace quern
