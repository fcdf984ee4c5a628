#include "quern/models/decoder/memory/page_pool.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/shared_prefix.h"
#include "quern/cache/copy_pages.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/memory/attention_work.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

// Pages are given back in multiples of this many tokens: a common multiple of
// span and page, so that the remaining tokens begin at a boundary of both.
int64_t GivenBackAtOnce(int64_t page_size) {
  return std::lcm(
      AttentionSchedule::kChunkTokens * AttentionSchedule::kSpanChunks,
      page_size);
}

NamedArgs WriteArgs(const AttentionSpec& spec, const TensorMeta& cache,
                    const KvLayout* layout) {
  const TensorMeta heads = {DType::kF32,
                            {1, spec.kv.kv_heads(), spec.kv.head_dim()}};
  return {{"key", heads},
          {"value", heads},
          {"slots", TensorMeta{DType::kI64, {1}}},
          {"cache", cache},
          {"layout", layout}};
}

NamedArgs AttendArgs(const PagePoolSpec& pool, const TensorMeta& cache,
                     const KvLayout* layout, const AttentionStep* step) {
  const AttentionSpec& spec = pool.attention;
  NamedArgs args = {
      {"query",
       TensorMeta{spec.q_dtype, {1, spec.q_heads, spec.kv.head_dim()}}},
      {"cache", cache},
      {"layout", layout},
      {"step", step},
      {"scale", spec.scale},
      {"window_left", spec.window_left},
      {"window_right", spec.window_right},
      {"soft_cap", spec.soft_cap},
      {"out_dtype", DTypeName(spec.out_dtype)}};
  if (pool.sinks) {
    args.emplace_back("sinks", TensorMeta{DType::kF32, {spec.q_heads}});
  }
  return args;
}

}  // namespace

int64_t PagePool::PagesOfWindow(int64_t window, int64_t page_size,
                                int64_t max_sequences, int64_t max_step_tokens,
                                int64_t pages_without_it) {
  // A sequence keeps the tokens that the next query sees and up to one unit
  // before them. Its first and its last page may each hold only one of these
  // tokens.
  const int64_t kept =
      DivCeil(window, page_size) + GivenBackAtOnce(page_size) / page_size + 2;
  return std::min(pages_without_it,
                  max_sequences * kept + DivCeil(max_step_tokens, page_size));
}

absl::StatusOr<PagePool> PagePool::Create(const PagePoolSpec& spec,
                                          const OpDispatcher& ops) {
  const KvLayout& layout = spec.attention.kv;
  PagePool pool;
  pool.spec_ = spec.attention;
  pool.layout_ = std::make_unique<const KvLayout>(layout);
  QUERN_ASSIGN_OR_RETURN(pool.allocator_,
                         PageAllocator::Create(spec.pages, layout.page_size()));
  pool.step_ = std::make_unique<AttentionStep>();
  if (spec.latent.has_value()) {
    QUERN_ASSIGN_OR_RETURN(
        pool.latent_,
        LatentAttention::Create(*spec.latent, *pool.layout_, spec.pages, ops));
  } else {
    QUERN_RETURN_IF_ERROR(pool.MakeOps(spec, ops));
  }
  pool.sequences_.resize(static_cast<size_t>(spec.max_sequences));
  QUERN_ASSIGN_OR_RETURN(pool.cache_,
                         KvCache::Create(layout, spec.pages, spec.layers));
  return pool;
}

absl::Status PagePool::MakeOps(const PagePoolSpec& spec,
                               const OpDispatcher& ops) {
  const TensorMeta cache = {DType::kU8, {spec.pages, layout_->page_bytes()}};
  QUERN_ASSIGN_OR_RETURN(
      MadeOp write,
      ops.Make("write_kv", WriteArgs(spec.attention, cache, layout_.get())));
  write_ = std::move(write.op);
  QUERN_ASSIGN_OR_RETURN(
      MadeOp attend,
      ops.Make("paged_attention",
               AttendArgs(spec, cache, layout_.get(), step_.get())));
  attend_ = std::move(attend.op);
  if (spec.attention.q_dtype != DType::kF32) {
    ConvertSpec convert;
    convert.to = spec.attention.q_dtype;
    convert.stores = Stores::kCached;
    QUERN_ASSIGN_OR_RETURN(convert_, ConvertPlan::Create(convert));
  }
  return absl::OkStatus();
}

int64_t PagePool::bytes_per_token() const {
  return cache_.num_layers() * cache_.layout().page_bytes() /
         cache_.layout().page_size();
}

DecoderWork PagePool::step_work() const {
  const KvLayout& kv = cache_.layout();
  const int64_t window = spec().window_left;
  DecoderWork work;
  int64_t tokens = -saved_tokens_;
  for (size_t i = 0; i < kv_lens_.size(); ++i) {
    const int64_t q_len = q_lens_[i], kv_len = kv_lens_[i];
    tokens += window == kNoWindow ? kv_len : std::min(kv_len, window + q_len);
    const PairShape shape =
        latent_ != nullptr
            ? latent_->PairOf(q_len, kv_len)
            : PairShape{spec().q_heads, kv.head_dim(), kv.v_head_dim(),
                        spec().q_dtype, kv.dtype()};
    AddPairs(shape, cache_.num_layers() * CausalPairs(q_len, kv_len, window),
             work);
  }
  work.cache_bytes = tokens * bytes_per_token();
  return work;
}

int64_t PagePool::ConvertedBytes(const AttentionSpec& spec, int64_t tokens) {
  if (spec.q_dtype == DType::kF32) return 0;
  return tokens * spec.q_heads * spec.kv.head_dim() *
         static_cast<int64_t>(SizeOf(spec.q_dtype));
}

void PagePool::BeginStep() {
  q_lens_.clear();
  kv_lens_.clear();
  copies_.clear();
  table_storage_.Clear();
}

absl::Status PagePool::AddToStep(int32_t sequence, int64_t length,
                                 int64_t count) {
  Sequence& s = At(sequence);
  const int64_t begin = length - s.gone, end = begin + count;
  QUERN_RETURN_IF_ERROR(allocator_->GrowForWrite(begin, end, s.pages, copies_));
  table_storage_.Append(s.pages);
  q_lens_.push_back(count);
  kv_lens_.push_back(end);
  return absl::OkStatus();
}

absl::Status PagePool::Prepare(int num_workers) {
  PageTable& table = step_->pages;
  QUERN_ASSIGN_OR_RETURN(table, table_storage_.Build(allocator_->page_size(),
                                                     allocator_->num_pages()));
  saved_tokens_ = 0;
  if (latent_ != nullptr) {
    return latent_->Prepare({q_lens_, kv_lens_, table}, num_workers);
  }
  int64_t tokens = 0;
  for (const int64_t q_len : q_lens_) tokens += q_len;
  slots_.resize(static_cast<size_t>(tokens));
  QUERN_RETURN_IF_ERROR(
      table.SlotMapping(q_lens_, kv_lens_, absl::MakeSpan(slots_)));

  AttentionBatch batch;
  batch.q_lens = q_lens_;
  batch.kv_lens = kv_lens_;
  if (q_lens_.size() > 1 && spec().window_left == kNoWindow) {
    QUERN_ASSIGN_OR_RETURN(
        const SharedPrefixes prefixes,
        SharedPrefixes::Find(table, q_lens_, kv_lens_, prefix_storage_));
    batch.prefix_groups = prefixes.groups();
    batch.prefix_members = prefixes.members();
  }
  QUERN_ASSIGN_OR_RETURN(step_->schedule, AttentionSchedule::Build(
                                              spec(), batch, AttentionTiles(),
                                              num_workers, schedule_storage_));
  for (const PrefixGroup& prefix : step_->schedule.prefixes()) {
    saved_tokens_ += prefix.saved_tokens();
  }
  int64_t bytes = 0;
  for (const BoundOp* op : {write_.get(), attend_.get()}) {
    QUERN_ASSIGN_OR_RETURN(const int64_t need,
                           op->WorkspaceBytes(tokens, num_workers));
    bytes = std::max(bytes, need);
  }
  if (static_cast<int64_t>(workspace_.bytes()) < bytes) {
    workspace_ = AlignedBuffer();  // freed before a new one exists
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
  }
  return absl::OkStatus();
}

void PagePool::CopyShared(Executor& executor) noexcept {
  for (int64_t layer = 0; layer < cache_.num_layers(); ++layer) {
    const KvCacheView view = cache_.Layer(layer);
    CopyPages(view, view, copies_, executor);
  }
  copies_.clear();
}

void PagePool::Trim(int32_t sequence, int64_t length) {
  Sequence& s = At(sequence);
  const auto first =
      s.pages.begin() + DivCeil(length - s.gone, allocator_->page_size());
  std::vector<int32_t> surplus(first, s.pages.end());
  s.pages.erase(first, s.pages.end());
  allocator_->Release(surplus);
}

void PagePool::Forget(int32_t sequence, int64_t length) {
  if (spec().window_left == kNoWindow) return;
  Sequence& s = At(sequence);
  const int64_t page_size = allocator_->page_size();
  // The next query has the position `length`.
  const int64_t unit = GivenBackAtOnce(page_size);
  const int64_t unseen = std::max<int64_t>(0, length - spec().window_left);
  const int64_t gone = unseen / unit * unit;
  if (gone <= s.gone) return;
  const auto end = s.pages.begin() + (gone - s.gone) / page_size;
  std::vector<int32_t> left(s.pages.begin(), end);
  s.pages.erase(s.pages.begin(), end);
  s.gone = gone;
  allocator_->Release(left);
}

void PagePool::End(int32_t sequence) {
  Sequence& s = At(sequence);
  allocator_->Release(s.pages);
  s.gone = 0;
}

absl::Status PagePool::Fork(int32_t sequence, int64_t length, int32_t branch) {
  const Sequence& from = At(sequence);
  Sequence& to = At(branch);
  QUERN_RETURN_IF_ERROR(
      allocator_->Fork(from.pages, length - from.gone, to.pages));
  to.gone = from.gone;
  return absl::OkStatus();
}

void PagePool::Write(int64_t layer, const AnyTensorView& k,
                     const AnyTensorView& v, Executor& executor) noexcept {
  write_->Execute({k, v,
                   DenseVector<const int64_t>(
                       slots_.data(), static_cast<int64_t>(slots_.size())),
                   CachePages(cache_.Layer(layer))},
                  Workspace(workspace_), executor);
}

void PagePool::Attend(int64_t layer, const TensorView<float, 3>& q,
                      uint8_t* converted, const AnyTensorView& sinks,
                      const AnyTensorView& out, Executor& executor) noexcept {
  AnyTensorView queries = q;
  if (convert_.has_value()) {
    const int64_t tokens = q.extent(0), dim = q.extent(2);
    const int64_t cols = q.extent(1) * dim;
    const DType dtype = spec().q_dtype;
    convert_->Execute(
        MatrixView<const float>(q.data(), {tokens, cols}, {q.stride(0), 1}),
        AnyTensorView(dtype, static_cast<void*>(converted), 2, {tokens, cols},
                      {cols, 1}),
        executor);
    queries = AnyTensorView(dtype, static_cast<const void*>(converted), 3,
                            {tokens, q.extent(1), dim}, {cols, dim, 1});
  }
  attend_->Execute(
      {queries, CachePages(cache_.Layer(layer)), {}, sinks, {}, out},
      Workspace(workspace_), executor);
}

}  // namespace quern
