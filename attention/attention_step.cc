#include "quern/attention/attention_step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/numeric/bits.h"
#include "absl/types/span.h"
#include "quern/attention/attention_scratch.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/kernels/softmax_state.h"
#include "quern/attention/kv_chunks.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"

namespace quern {
namespace {

constexpr int64_t kChunkTokens = AttentionSchedule::kChunkTokens;
static_assert(kChunkTokens == static_cast<int64_t>(kGroupTokens * kChunkGroups),
              "kernels and schedule must agree on tokens per chunk");
static_assert(KvLayout::kGroupTokens == static_cast<int64_t>(kGroupTokens),
              "attention and cache must agree on tokens per group");

// Bytes are widened again for every tile of rows, or once for all in the
// workspace: with more rows than these the latter is faster.
constexpr size_t kByteRows = 8;

// A bit for each token of the group that the first row of `c` sees.
uint32_t SeenBits(const ChunkArgs& c, size_t group) {
  const auto from = static_cast<uint32_t>(group * kGroupTokens);
  const auto in_group = [&](uint32_t token) {
    return std::clamp(token, from, from + uint32_t{kGroupTokens}) - from;
  };
  const uint32_t bits =
      TokenBits(in_group(c.seen->begin), in_group(c.seen->end));
  return bits & ~static_cast<uint32_t>(HiddenFrom(c, 0, from));
}

}  // namespace

AttentionStep::AttentionStep(const AttentionSpec& spec,
                             const PagedAttentionKernels& kernels,
                             const PackKvKernels& pack_kernels,
                             const PagedAttentionArgs& args,
                             const AttentionScratch& scratch)
    : spec_(spec),
      layout_(spec.kv),
      kernels_(kernels),
      args_(args),
      scratch_(scratch),
      chunks_(kernels, pack_kernels, args, scratch),
      strides_(layout_) {
  const double scale =
      spec.scale != 0.0f
          ? static_cast<double>(spec.scale)
          : 1.0 / std::sqrt(static_cast<double>(layout_.head_dim()));
  // exp(x) = exp2(log2(e) * x)
  scale_log2e_ = static_cast<float>(std::abs(scale) * 1.4426950408889634);
  sign_ = scale < 0 ? -1.0f : 1.0f;
  soft_cap_log2e_ = spec.soft_cap * kLog2E;
}

void AttentionStep::Work(const AttentionWork& work,
                         const AttentionWork* following, int worker) const {
  const AttentionBlock& block = work.block;
  LoadQueries(block, worker);
  const bool whole = work.partial == kNoPartial;
  const PartialRows total = scratch_.total.Of(worker);
  if (work.chunk_begin == work.chunk_end) Clear(Rows(block), total);
  KvChunk chunk = {};
  if (work.chunk_begin < work.chunk_end) {
    chunk = chunks_.Locate(block, work.chunk_begin, worker, chunk);
  }
  int64_t partial = work.partial;
  for (int32_t c = work.chunk_begin; c < work.chunk_end;) {
    const int32_t begin = c;
    const int32_t end = AttentionSchedule::PieceEnd(
        c, work.chunk_end, c == args_.schedule.FirstChunk(block));
    // The first piece is the total so far.
    const PartialRows piece = !whole ? Partial(partial)
                              : c == work.chunk_begin
                                  ? total
                                  : scratch_.piece.Of(worker);
    for (; c < end; ++c) {
      Upcoming next = {};
      if (c + 1 < work.chunk_end) {
        next.chunk = chunks_.Locate(block, c + 1, worker, chunk);
      } else {
        if (whole) next.stored = &block;
        if (following != nullptr) next.loaded = &following->block;
        if (following != nullptr &&
            following->chunk_begin < following->chunk_end) {
          next.chunk = chunks_.Locate(*next.loaded, following->chunk_begin,
                                      worker, chunk);
        }
      }
      ComputeChunk(block, c, worker, chunk, next, c == begin, piece);
      chunk = next.chunk;
    }
    if (!whole) {
      partial += Rows(block);
    } else if (begin != work.chunk_begin) {
      MergeRows(Rows(block), piece, total);
    }
  }
  if (whole) Store(block, 0, Rows(block), total);
}

void AttentionStep::Merge(const AttentionMerge& merge, int worker) const {
  const AttentionBlock& block = merge.block;
  const int64_t rows = int64_t{merge.row_end} - merge.row_begin;
  const PartialRows total = scratch_.total.Of(worker);
  Clear(rows, total);
  const absl::Span<const AttentionRun> runs = args_.schedule.Runs(merge);
  const int32_t first = runs.front().chunk_begin;
  PartialRows span = {};
  for (const AttentionRun& run : runs) {
    int64_t partial = run.partial + merge.row_begin;
    for (int32_t c = run.chunk_begin; c < run.chunk_end;) {
      const int32_t end =
          AttentionSchedule::PieceEnd(c, run.chunk_end, c == first);
      const PartialRows piece = Partial(partial);
      if (c == first || AttentionSchedule::IsSpanBegin(c)) {
        span = piece;
      } else {
        MergeRows(rows, piece, span);
      }
      if (AttentionSchedule::IsSpanBegin(end) || end == runs.back().chunk_end) {
        MergeRows(rows, span, total);
      }
      partial += run.rows;
      c = end;
    }
  }
  Store(block, merge.row_begin, merge.row_end, total);
}

void AttentionStep::LoadQueries(const AttentionBlock& block, int worker) const {
  const auto* q = static_cast<const uint8_t*>(args_.q.data());
  uint32_t* rows = scratch_.q.Of(worker);
  ForEachRow(block, [&](int64_t row, int64_t token, int64_t head,
                        const AttentionSequence& /*sequence*/) {
    kernels_.load_query(q + HeadRowOffsetBytes(args_.q, token, head),
                        static_cast<size_t>(layout_.head_dim()), sign_,
                        rows + row * strides_.q);
  });
}

FetchList AttentionStep::RowsOf(const AttentionBlock* block,
                                const AnyTensorView& view,
                                const uint8_t** rows) const {
  if (block == nullptr) return {nullptr, 0, 0};
  const auto* data = static_cast<const uint8_t*>(view.data());
  ForEachRow(*block, [&](int64_t row, int64_t token, int64_t head,
                         const AttentionSequence& /*sequence*/) {
    rows[row] = data + HeadRowOffsetBytes(view, token, head);
  });
  return {rows, static_cast<size_t>(Rows(*block)),
          static_cast<size_t>(view.extent(2)) * SizeOf(view.dtype())};
}

ChunkArgs AttentionStep::ArgsOf(const AttentionBlock& block, int64_t chunk,
                                int worker) const {
  ChunkArgs c;
  c.rows = static_cast<size_t>(Rows(block));
  c.q = scratch_.q.Of(worker);
  c.q_stride = static_cast<size_t>(strides_.q);
  c.head_dim = static_cast<size_t>(layout_.head_dim());
  c.v_head_dim = static_cast<size_t>(layout_.v_head_dim());
  c.scale_log2e = scale_log2e_;
  c.logits = scratch_.logits.Of(worker);
  c.weights = scratch_.weights.Of(worker);
  c.soft_cap_log2e = soft_cap_log2e_;
  c.hidden = nullptr;
  c.hidden_begin = 0;
  c.slopes = nullptr;
  c.ahead = nullptr;
  c.k_scales = nullptr;
  c.v_scales = nullptr;
  c.out_stride = static_cast<size_t>(strides_.out);
  if (!args_.alibi_slopes.empty()) SetSlopes(block, chunk, worker, &c);
  chunks_.SetScales(block, chunk, worker, &c);
  return c;
}

AttentionStep::SeenTokens AttentionStep::SetSeen(const AttentionBlock& block,
                                                 int64_t chunk, int worker,
                                                 ChunkArgs* c) const {
  const int64_t tokens = chunks_.Tokens(block, chunk);
  TokenRange* row = scratch_.seen.Of(worker);
  c->seen = row;
  SeenTokens seen;
  seen.tokens = tokens;
  seen.any = {static_cast<uint32_t>(tokens), 0};
  seen.all = {0, static_cast<uint32_t>(tokens)};
  const auto clip = [&](int64_t token) {
    return static_cast<uint32_t>(
        std::max(int64_t{0}, std::min(tokens, token - chunk * kChunkTokens)));
  };
  for (int64_t query = block.q_begin; query < block.q_end; ++query) {
    const TokenRange range = {clip(args_.schedule.VisibleBegin(block, query)),
                              clip(args_.schedule.VisibleEnd(block, query))};
    row = std::fill_n(row, spec_.group(), range);
    seen.all.begin = std::max(seen.all.begin, range.begin);
    seen.all.end = std::min(seen.all.end, range.end);
    if (range.begin >= range.end) continue;
    seen.any.begin = std::min(seen.any.begin, range.begin);
    seen.any.end = std::max(seen.any.end, range.end);
  }
  if (!args_.schedule.drafts().empty() && block.prefix == kNoPrefix) {
    HideDrafts(block, chunk, worker, &seen, c);
  }
  return seen;
}

void AttentionStep::HideDrafts(const AttentionBlock& block, int64_t chunk,
                               int worker, SeenTokens* seen,
                               ChunkArgs* c) const {
  const AttentionSequence& sequence =
      args_.schedule.sequences()[static_cast<size_t>(block.sequence)];
  // The first draft, counted from the chunk's first token, and the first draft
  // in the chunk.
  const int64_t begin =
      sequence.kv_len - sequence.draft_len - chunk * kChunkTokens;
  const int64_t skipped = std::max(int64_t{0}, -begin);
  if (begin >= seen->tokens || skipped >= sequence.draft_len) return;
  c->hidden_begin = static_cast<size_t>(begin + skipped);
  const auto in_chunk = static_cast<uint64_t>(seen->tokens) - c->hidden_begin;
  uint64_t* row = scratch_.hidden.Of(worker);
  uint64_t any = 0;
  for (int64_t query = block.q_begin; query < block.q_end; ++query) {
    const AttentionDraft* draft = args_.schedule.Draft(sequence, query);
    uint64_t hidden = 0;
    if (draft != nullptr) {
      // Those after the draft itself are not in its range.
      const int64_t index = query - (sequence.q_len - sequence.draft_len);
      const uint64_t up_to = (uint64_t{2} << index) - 1;
      hidden = (~draft->seen & up_to) >> skipped;
      if (in_chunk < 64) hidden &= (uint64_t{1} << in_chunk) - 1;
    }
    any |= hidden;
    row = std::fill_n(row, spec_.group(), hidden);
  }
  if (any == 0) return;
  c->hidden = scratch_.hidden.Of(worker);
  seen->all.end = std::min(seen->all.end,
                           static_cast<uint32_t>(c->hidden_begin) +
                               static_cast<uint32_t>(absl::countr_zero(any)));
}

void AttentionStep::ComputeChunk(const AttentionBlock& block, int64_t chunk,
                                 int worker, KvChunk groups,
                                 const Upcoming& next, bool first,
                                 const PartialRows& result) const {
  ChunkArgs c = ArgsOf(block, chunk, worker);
  c.first = first;
  c.state = result.state;
  c.out = result.out;
  const SeenTokens seen = SetSeen(block, chunk, worker, &c);
  const int64_t begin = seen.group_begin(), end = seen.group_end();
  // Every row sees all of each group that any sees.
  const bool whole =
      seen.all.begin <= begin * kGroup && seen.all.end >= end * kGroup;
  const bool tiled = chunks_.latent() && whole;
  c.latent_tile = tiled ? scratch_.v.Of(worker) : nullptr;
  std::copy_n(groups.k, kChunkGroups, c.k);
  std::copy_n(groups.v, kChunkGroups, c.v);
  const bool bytes =
      chunks_.narrow() && chunks_.paired() && whole && !chunks_.latent() &&
      c.rows <= kByteRows && kernels_.attend_bytes != nullptr &&
      (kernels_.serves_bytes == nullptr || kernels_.serves_bytes(c));
  bool finite = true;
  for (int64_t group = begin; group < end && !bytes; ++group) {
    if (chunks_.in_blocks()) {
      chunks_.WidenLatents(group, worker, next.chunk, &groups);
    }
    if (tiled) continue;
    chunks_.Stage(block, chunk, group, worker, next.chunk, &groups);
    if (seen.IsMixed(group)) {
      finite = finite &&
               kernels_.finite_v(groups.v[group],
                                 static_cast<size_t>(layout_.v_head_dim()));
    }
  }
  std::copy_n(groups.k, kChunkGroups, c.k);
  std::copy_n(groups.v, kChunkGroups, c.v);
  c.next[0] = RowsOf(next.stored, args_.out, scratch_.stored.Of(worker));
  c.next[1] = RowsOf(next.loaded, args_.q, scratch_.loaded.Of(worker));
  // Bytes have been widened, and the next ones fetched on the way.
  chunks_.SetNext(next.chunk, chunks_.narrow() && !bytes, &c);
  if (finite) {
    (bytes ? kernels_.attend_bytes : kernels_.attend)(c);
  } else {
    AttendRowByRow(seen, groups, worker, &c);
  }
}

void AttentionStep::AttendRowByRow(const SeenTokens& seen,
                                   const KvChunk& groups, int worker,
                                   ChunkArgs* c) const {
  uint8_t* masked = scratch_.masked_v.Of(worker);
  const size_t rows = c->rows;
  // Staged values have 2 or 4 bytes each, and values that are read in their
  // page as many as the cache's type.
  const int64_t v_bytes =
      kGroup * layout_.v_head_dim() *
      std::max(int64_t{2}, static_cast<int64_t>(SizeOf(layout_.dtype())));
  c->rows = 1;
  for (size_t row = 0; row < rows; ++row) {
    for (int64_t group = seen.group_begin(); group < seen.group_end();
         ++group) {
      if (!seen.IsMixed(group)) continue;
      uint8_t* to = masked + group * strides_.v_group;
      std::memcpy(to, groups.v[group], static_cast<size_t>(v_bytes));
      kernels_.mask_v(SeenBits(*c, static_cast<size_t>(group)), c->v_head_dim,
                      to);
      c->v[group] = to;
    }
    kernels_.attend(*c);
    c->q += c->q_stride;
    ++c->seen;
    if (c->hidden != nullptr) ++c->hidden;
    ++c->state;
    if (c->slopes != nullptr) {
      ++c->slopes;
      ++c->ahead;
    }
    c->out += c->out_stride;
  }
}

void AttentionStep::SetSlopes(const AttentionBlock& block, int64_t chunk,
                              int worker, ChunkArgs* c) const {
  float* slopes = scratch_.slopes.Of(worker);
  float* ahead = scratch_.ahead.Of(worker);
  c->slopes = slopes;
  c->ahead = ahead;
  ForEachRow(block, [&](int64_t row, int64_t token, int64_t head,
                        const AttentionSequence& s) {
    const int64_t position = s.kv_len - s.q_len + (token - s.q_offset);
    slopes[row] = args_.alibi_slopes[static_cast<size_t>(head)] * kLog2E;
    ahead[row] = static_cast<float>(chunk * kChunkTokens - position);
  });
}

void AttentionStep::MergeRows(int64_t rows, const PartialRows& part,
                              const PartialRows& total) const {
  for (int64_t row = 0; row < rows; ++row) {
    kernels_.merge(part.state[row], part.out + row * strides_.out,
                   static_cast<size_t>(layout_.v_head_dim()), total.state + row,
                   total.out + row * strides_.out);
  }
}

void AttentionStep::Store(const AttentionBlock& block, int64_t begin,
                          int64_t end, const PartialRows& total) const {
  auto* out = static_cast<uint8_t*>(args_.out.mutable_data());
  const bool one_scale = layout_.scaling() == KvScaling::kPerTensor ||
                         layout_.scaling() == KvScaling::kPerHead;
  const float v_scale = one_scale && args_.kv.num_pages() > 0
                            ? *args_.kv.VScales(0, block.kv_head)
                            : 1.0f;
  ForEachRow(block, [&](int64_t row, int64_t token, int64_t head,
                        const AttentionSequence& /*sequence*/) {
    if (row < begin || row >= end) return;
    SoftmaxState state = total.state[row - begin];
    // A sink is a key without a value: it only adds to the sum.
    if (!args_.sinks.empty()) {
      const float sink = args_.sinks[static_cast<size_t>(head)] * kLog2E;
      if (state.sum == 0.0f) {
        state.max = sink;
        state.sum = 1.0f;  // the output is 0
      } else {
        state.sum += std::exp2(sink - state.max);
      }
    }
    kernels_.store(state.sum, v_scale, total.out + (row - begin) * strides_.out,
                   static_cast<size_t>(layout_.v_head_dim()),
                   out + HeadRowOffsetBytes(args_.out, token, head));
    if (args_.lse.data() == nullptr) return;
    constexpr float kLn2 = 0.693147181f;
    // A sink so much larger than the logits that they vanish.
    *args_.lse.At(token, head) =
        state.sum == 0.0f       ? -std::numeric_limits<float>::infinity()
        : std::isinf(state.sum) ? args_.sinks[static_cast<size_t>(head)]
                                : (state.max + std::log2(state.sum)) * kLn2;
  });
}

}  // namespace quern
