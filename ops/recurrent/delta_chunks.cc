#include "quern/ops/recurrent/delta_chunks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/prefetch.h"
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/chunk_kernels.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/state_view.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

void DeltaChunks::Run(const DeltaChunkUnit& unit) {
  const SequenceBatch& batch = args_.batch;
  const int64_t end = batch.end(unit.sequence);
  LoadState(unit);
  for (int64_t t = batch.begin(unit.sequence); t < end; t += spec_.chunk) {
    const int64_t n = std::min(spec_.chunk, end - t);
    LoadTokens(unit, t, n);
    if (spec_.decay == DeltaDecay::kPerHead) {
      ScoresOfHead(n);
    } else {
      ScoresOfChannels(unit, t, n);
    }
    Columns(n, unit.columns);
    for (int64_t i = 0; i < n; ++i) {
      blocks_.store(s_.out + static_cast<size_t>(i) * Wide(unit),
                    static_cast<size_t>(unit.columns), /*stream=*/false,
                    ElementAt(args_.out, t + i, unit.head, unit.column));
    }
  }
  StoreState(unit);
}

void DeltaChunks::LoadState(const DeltaChunkUnit& unit) {
  const int64_t slot = args_.batch.state_indices[unit.sequence];
  for (int64_t i = 0; i < spec_.dk; ++i) {
    float* const row = s_.state + static_cast<size_t>(i) * Wide(unit);
    if (args_.batch.fresh(unit.sequence)) {
      std::fill(row, row + unit.columns, 0.0f);
    } else {
      states_.load(ElementAt(args_.state, slot, unit.head, i, unit.column),
                   static_cast<size_t>(unit.columns), row);
    }
  }
}

void DeltaChunks::StoreState(const DeltaChunkUnit& unit) {
  const int64_t slot = args_.batch.state_indices[unit.sequence];
  for (int64_t i = 0; i < spec_.dk; ++i) {
    states_.store(s_.state + static_cast<size_t>(i) * Wide(unit),
                  static_cast<size_t>(unit.columns), /*stream=*/false,
                  ElementAt(args_.state, slot, unit.head, i, unit.column));
  }
}

void DeltaChunks::LoadTokens(const DeltaChunkUnit& unit, int64_t first,
                             int64_t n) {
  const int64_t key_head = unit.head / (spec_.value_heads / spec_.key_heads);
  const size_t element = SizeOf(spec_.dtype);
  const int64_t end = args_.batch.end(unit.sequence);
  for (int64_t i = 0; i < n; ++i) {
    // Rows of a head are far apart, so the hardware does not read ahead.
    const int64_t next = first + i + spec_.chunk;
    if (next < end) {
      const auto dk_bytes = static_cast<size_t>(spec_.dk) * element;
      PrefetchL2(ElementAt(args_.q, next, key_head), dk_bytes);
      PrefetchL2(ElementAt(args_.k, next, key_head), dk_bytes);
      PrefetchL2(ElementAt(args_.v, next, unit.head, unit.column),
                 static_cast<size_t>(unit.columns) * element);
    }
    const auto at = static_cast<size_t>(i);
    LoadRow(blocks_, ElementAt(args_.q, first + i, key_head), spec_.dk, element,
            s_.q + at * row_);
    LoadRow(blocks_, ElementAt(args_.k, first + i, key_head), spec_.dk, element,
            s_.k + at * row_);
    blocks_.load(ElementAt(args_.v, first + i, unit.head, unit.column),
                 static_cast<size_t>(unit.columns), s_.v + at * Wide(unit));
    s_.beta[i] = NumberAt(args_.beta, first + i, unit.head);
    s_.g[i] = NumberAt(args_.g, first + i, unit.head);
  }
  const auto tokens = static_cast<size_t>(n);
  const auto dk = static_cast<size_t>(spec_.dk);
  const bool l2 = spec_.norm == DeltaNorm::kL2;
  const float eps = spec_.norm_eps;
  if (l2) kernels_.normalize(s_.k, row_, tokens, dk, l2, eps, 1.0f);
  kernels_.normalize(s_.q, row_, tokens, dk, l2, eps, spec_.scale);
}

void DeltaChunks::ScoresOfHead(int64_t n) {
  const auto tokens = static_cast<size_t>(n);
  const auto dk = static_cast<size_t>(spec_.dk);
  kernels_.transpose(s_.k, row_, tokens, dk, s_.transposed, scores_);
  ChunkProduct p = {};
  p.a_row = row_;
  p.a_k = 1;
  p.b = s_.transposed;
  p.b_stride = p.c_stride = scores_;
  p.depth = dk;
  // Above the diagonal no score is needed.
  const auto line = static_cast<size_t>(kChunkLine);
  for (size_t i = 0; i < tokens; i += line) {
    p.rows = std::min(line, tokens - i);
    p.columns = i + line;
    p.a = s_.k + i * row_;
    p.c = s_.key_scores + i * scores_;
    kernels_.product(p);
    p.a = s_.q + i * row_;
    p.c = s_.query_scores + i * scores_;
    kernels_.product(p);
  }
  kernels_.decay(s_.g, tokens, s_.a);
  kernels_.weigh({tokens, s_.a, s_.beta, s_.key_scores, s_.query_scores,
                  scores_, s_.first, s_.to_end});
  std::fill(s_.kept, s_.kept + dk, s_.first[n - 1]);
  kernels_.scale_rows(s_.q, row_, tokens, dk, s_.first, s_.q);
  for (int64_t i = 0; i < n; ++i) s_.first[i] *= -s_.beta[i];
  kernels_.scale_rows(s_.k, row_, tokens, dk, s_.first, s_.from_start);
  kernels_.scale_rows(s_.k, row_, tokens, dk, s_.to_end, s_.k);
}

void DeltaChunks::ScoresOfChannels(const DeltaChunkUnit& unit, int64_t first,
                                   int64_t n) {
  const auto dk = static_cast<size_t>(spec_.dk);
  const int64_t end = args_.batch.end(unit.sequence);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t next = first + i + spec_.chunk;
    if (next < end) {
      PrefetchL2(ElementAt(args_.g, next, unit.head),
                 dk * SizeOf(spec_.g_dtype));
    }
    const char* const at = ElementAt(args_.g, first + i, unit.head);
    const auto* g = reinterpret_cast<const float*>(at);
    float* const decays = s_.decays + static_cast<size_t>(i) * row_;
    if (spec_.g_dtype != DType::kF32) {
      LoadRow(gates_, at, spec_.dk, SizeOf(spec_.g_dtype), decays);
      g = decays;
    }
    kernels_.decay(g, dk, decays);
  }
  ChannelChunk c = {};
  c.n = static_cast<size_t>(n);
  c.dk = dk;
  c.stride = row_;
  c.score_stride = c.transposed_stride = scores_;
  c.a = s_.decays;
  c.beta = s_.beta;
  c.q = s_.q;
  c.k = s_.k;
  c.key_scores = s_.key_scores;
  c.query_scores = s_.query_scores;
  c.from_start = s_.from_start;
  c.kept = s_.kept;
  c.transposed = s_.transposed;
  c.block = s_.block;
  kernels_.channel_scores(c);
}

// D in place of v, out, and the new state.
void DeltaChunks::Columns(int64_t n, int64_t columns) {
  const auto tokens = static_cast<size_t>(n);
  const auto wide = static_cast<size_t>(ChunkStride(columns));
  ChunkProduct p = {};
  p.a = s_.from_start;
  p.a_row = row_;
  p.a_k = 1;
  p.b = s_.state;
  p.b_stride = p.c_stride = wide;
  p.scale = s_.beta;
  p.c = s_.v;
  p.rows = tokens;
  p.depth = static_cast<size_t>(spec_.dk);
  p.columns = static_cast<size_t>(columns);
  kernels_.product(p);
  p.a = s_.q;
  p.scale = nullptr;
  p.c = s_.out;
  kernels_.product(p);
  ChunkTriangle t = {s_.key_scores, scores_, s_.v,   wide,
                     s_.v,          wide,    tokens, p.columns};
  kernels_.solve(t);
  t.a = s_.query_scores;
  t.c = s_.out;
  kernels_.add_lower(t);
  p.a = s_.k;
  p.a_row = 1;
  p.a_k = row_;
  p.b = s_.v;
  p.scale = s_.kept;
  p.c = s_.state;
  p.rows = p.depth;
  p.depth = tokens;
  kernels_.product(p);
}

}  // namespace quern
