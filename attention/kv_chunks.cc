#include "quern/attention/kv_chunks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "quern/attention/attention_scratch.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"

namespace quern {
namespace {

constexpr auto kGroup = static_cast<int64_t>(kGroupTokens);
constexpr int64_t kChunkTokens = AttentionSchedule::kChunkTokens;
static_assert(KvLayout::kScaleBlock == static_cast<int64_t>(kLatentScaleDims),
              "attention and cache must agree on the elements of a scale");

}  // namespace

KvChunks::KvChunks(const PagedAttentionKernels& kernels,
                   const PackKvKernels& pack_kernels,
                   const PagedAttentionArgs& args,
                   const AttentionScratch& scratch)
    : layout_(args.kv.layout()),
      kernels_(kernels),
      pack_kernels_(pack_kernels),
      args_(args),
      scratch_(scratch),
      strides_(layout_),
      paired_(layout_.in_groups()),
      latent_(layout_.form() == KvForm::kLatent),
      narrow_(SizeOf(layout_.dtype()) == 1) {
  const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
  k_step_ = layout_.KOffset(kGroup, 0) * element;
  v_step_ = layout_.VOffset(kGroup, 0) * element;
}

KvChunk KvChunks::Locate(const AttentionBlock& block, int64_t chunk, int worker,
                         const KvChunk& current) const {
  KvChunk found = {};
  const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
  const int64_t page_size = layout_.page_size();
  const int64_t tokens = Tokens(block, chunk);
  const int64_t seen = FirstSeen(block, chunk);
  const int64_t group_begin = seen / kGroup * kGroup;
  const int64_t begin = paired_ ? group_begin : seen;
  int64_t index = (chunk * kChunkTokens + begin) / page_size;
  int64_t offset = (chunk * kChunkTokens + begin) % page_size;
  const auto advance = [&](int64_t by) {
    offset += by;
    if (offset != page_size) return;
    offset = 0;
    ++index;
  };
  if (paired_) {
    for (int64_t t = begin; t < tokens; t += kGroup) {
      const int64_t page = pages[static_cast<size_t>(index)];
      found.k[t / kGroup] =
          args_.kv.K(page, block.kv_head) + offset / kGroup * k_step_;
      found.v[t / kGroup] =
          args_.kv.V(page, block.kv_head) + offset / kGroup * v_step_;
      advance(kGroup);
    }
    return found;
  }
  found.k_rows = scratch_.rows.Of(worker);
  if (found.k_rows == current.k_rows) found.k_rows += 2 * kChunkTokens;
  found.v_rows = found.k_rows + kChunkTokens;
  found.tokens = static_cast<size_t>(tokens);
  const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
  for (int64_t t = begin; t < tokens; ++t) {
    const int64_t page = pages[static_cast<size_t>(index)];
    found.k_rows[t] =
        args_.kv.K(page, block.kv_head) + layout_.KOffset(offset, 0) * element;
    found.v_rows[t] =
        args_.kv.V(page, block.kv_head) + layout_.VOffset(offset, 0) * element;
    advance(1);
  }
  if (begin > 0) {
    const uint8_t** rows[] = {found.k_rows, found.v_rows};
    for (const uint8_t** of : rows) {
      const uint8_t* stand_in = begin < tokens ? of[begin] : nullptr;
      std::fill(of, of + group_begin, nullptr);
      std::fill(of + group_begin, of + begin, stand_in);
    }
  }
  return found;
}

void KvChunks::WidenLatents(int64_t group, int worker, const KvChunk& next,
                            KvChunk* of) const {
  const auto i = static_cast<size_t>(group);
  uint8_t* k = scratch_.k.Of(worker) + group * strides_.k_group;
  const uint8_t* from = of->k[i];
  const int64_t rest = layout_.head_dim() - layout_.v_head_dim();
  kernels_.widen_latent(from, next.k[i] != nullptr ? next.k[i] : from,
                        static_cast<size_t>(layout_.v_head_dim()),
                        static_cast<size_t>(DivCeil(rest, 2)), k);
  of->k[i] = k;
}

void KvChunks::Stage(const AttentionBlock& block, int64_t chunk, int64_t group,
                     int worker, const KvChunk& next, KvChunk* of) const {
  const int64_t tokens = Tokens(block, chunk) - group * kGroup;
  const auto i = static_cast<size_t>(group);
  uint8_t* k = scratch_.k.Of(worker) + group * strides_.k_group;
  uint8_t* v = scratch_.v.Of(worker) + group * strides_.v_group;
  const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
  const auto v_head_dim = static_cast<size_t>(layout_.v_head_dim());
  const int64_t k_count = kGroup * RoundUp(layout_.head_dim(), 2);
  const int64_t v_count = kGroup * layout_.v_head_dim();
  const auto widen = [&](const uint8_t* from, const uint8_t* fetch,
                         int64_t count, uint8_t* to) {
    kernels_.widen(from, fetch != nullptr ? fetch : from,
                   static_cast<size_t>(count), to);
  };
  if (latent_) {
    kernels_.stage_latent_v(of->k[i], v_head_dim, v);
  } else if (paired_ && narrow_) {
    widen(of->k[i], next.k[i], k_count, k);
    widen(of->v[i], next.v[i], v_count, v);
    of->k[i] = k;
  } else if (paired_) {
    if (tokens >= kGroup) return;
    std::memcpy(v, of->v[i], static_cast<size_t>(v_count * element));
  } else {
    // The row of the last token stands in for tokens that the sequence lacks.
    const uint8_t* k_rows[kGroupTokens];
    const uint8_t* v_rows[kGroupTokens];
    for (int64_t t = 0; t < kGroup; ++t) {
      const int64_t token = group * kGroup + std::min(t, tokens - 1);
      k_rows[t] = of->k_rows[token];
      v_rows[t] = of->v_rows[token];
    }
    // Bytes are widened where they lie, from the second half to both.
    uint8_t* k_to = narrow_ ? k + k_count : k;
    uint8_t* v_to = narrow_ ? v + v_count : v;
    const size_t v_row = v_head_dim * static_cast<size_t>(element);
    pack_kernels_.pack_k(
        k_rows, static_cast<size_t>(layout_.head_dim() * element), k_to);
    for (size_t t = 0; t < kGroupTokens; ++t) {
      if (pack_kernels_.pack_v == nullptr) {
        std::memcpy(v_to + t * v_row, v_rows[t], v_row);
      } else if (t % 2 == 0) {
        pack_kernels_.pack_v(v_rows[t], v_rows[t + 1], v_row, v_to + t * v_row);
      }
    }
    if (narrow_) {
      widen(k_to, k_to, k_count, k);
      widen(v_to, v_to, v_count, v);
    }
    of->k[i] = k;
  }
  of->v[i] = v;
  if (tokens < kGroup) {
    kernels_.mask_v(TokenBits(0, static_cast<uint32_t>(tokens)), v_head_dim, v);
  }
}

void KvChunks::SetScales(const AttentionBlock& block, int64_t chunk, int worker,
                         ChunkArgs* c) const {
  if (layout_.scaling() == KvScaling::kNone || in_blocks()) return;
  if (layout_.scaling() != KvScaling::kPerTokenHead) {
    c->scale_log2e *= *args_.kv.KScales(0, block.kv_head);
    return;
  }
  float* k = scratch_.k_scales.Of(worker);
  float* v = scratch_.v_scales.Of(worker);
  c->k_scales = k;
  c->v_scales = v;
  const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
  const int64_t tokens = Tokens(block, chunk);
  const int64_t page_size = layout_.page_size();
  int64_t t = FirstSeen(block, chunk);
  std::fill_n(k, t, 0.0f);
  std::fill_n(v, t, 0.0f);
  while (t < tokens) {
    const int64_t token = chunk * kChunkTokens + t;
    const int64_t page = pages[static_cast<size_t>(token / page_size)];
    const int64_t offset = token % page_size;
    const int64_t count = std::min(page_size - offset, tokens - t);
    std::copy_n(args_.kv.KScales(page, block.kv_head) + offset, count, k + t);
    std::copy_n(args_.kv.VScales(page, block.kv_head) + offset, count, v + t);
    t += count;
  }
  std::fill_n(k + t, kChunkTokens - t, 0.0f);
  std::fill_n(v + t, kChunkTokens - t, 0.0f);
}

void KvChunks::SetNext(const KvChunk& next, bool staged, ChunkArgs* c) const {
  FetchList& k = c->next[2];
  FetchList& v = c->next[3];
  k = v = {nullptr, 0, 0};
  const size_t element = SizeOf(layout_.dtype());
  const auto k_row = static_cast<size_t>(layout_.k_row()) * element;
  const auto v_row = static_cast<size_t>(layout_.v_head_dim()) * element;
  if (!paired_) {
    k = {next.k_rows, next.tokens, k_row};
    v = {next.v_rows, next.tokens, v_row};
  } else if (!staged) {
    k = {next.k, kChunkGroups, kGroupTokens * k_row};
    if (!latent_) v = {next.v, kChunkGroups, kGroupTokens * v_row};
  }
}

}  // namespace quern
