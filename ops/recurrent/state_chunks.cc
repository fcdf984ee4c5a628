#include "quern/ops/recurrent/state_chunks.h"

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
namespace {

// The number that a head has in a vector over heads, which may be no view.
float NumberOf(const AnyTensorView& v, int64_t head) {
  if (v.rank() == 0) return 0.0f;
  return *reinterpret_cast<const float*>(ElementAt(v, head));
}

}  // namespace

void StateChunks::Run(const StateChunkUnit& unit) {
  const SequenceBatch& batch = args_.batch;
  const int64_t end = batch.end(unit.sequence);
  const int64_t last = unit.head + unit.heads;
  for (int64_t h = unit.head; h < last; ++h) LoadState(unit, h);
  for (int64_t t = batch.begin(unit.sequence); t < end; t += spec_.chunk) {
    const int64_t n = std::min(spec_.chunk, end - t);
    LoadTokens(unit, t, n);
    for (int64_t h = unit.head; h < last; ++h) {
      LoadHead(unit, h, t, n);
      Multiply(unit, h, n);
      StoreOut(unit, h, t, n);
    }
  }
  for (int64_t h = unit.head; h < last; ++h) StoreState(unit, h);
}

void StateChunks::LoadState(const StateChunkUnit& unit, int64_t head) {
  const int64_t slot = args_.batch.state_indices[unit.sequence];
  const size_t element = SizeOf(spec_.state_dtype);
  for (int64_t p = 0; p < unit.rows; ++p) {
    float* const row = s_.rows + static_cast<size_t>(p) * row_;
    if (args_.batch.fresh(unit.sequence)) {
      std::fill(row, row + spec_.d_state, 0.0f);
    } else {
      LoadRow(states_, ElementAt(args_.state, slot, head, unit.row + p),
              spec_.d_state, element, row);
    }
  }
  kernels_.transpose(s_.rows, row_, static_cast<size_t>(unit.rows),
                     static_cast<size_t>(spec_.d_state), StateOf(unit, head),
                     Wide(unit));
}

void StateChunks::StoreState(const StateChunkUnit& unit, int64_t head) {
  const int64_t slot = args_.batch.state_indices[unit.sequence];
  const size_t element = SizeOf(spec_.state_dtype);
  const auto n = static_cast<size_t>(spec_.d_state);
  kernels_.transpose(StateOf(unit, head), Wide(unit), n,
                     static_cast<size_t>(unit.rows), s_.rows, row_);
  for (int64_t p = 0; p < unit.rows; ++p) {
    const float* const row = s_.rows + static_cast<size_t>(p) * row_;
    char* const to = ElementAt(args_.state, slot, head, unit.row + p);
    for (size_t i = 0; i < n; i += kRowBlock) {
      states_.store(row + i, std::min(kRowBlock, n - i), /*stream=*/false,
                    to + i * element);
    }
  }
}

// Asks for x and z of a token, because the hardware does not read ahead where
// rows are far apart.
void StateChunks::Ask(const StateChunkUnit& unit, int64_t token) const {
  const auto bytes = static_cast<size_t>(unit.rows) * SizeOf(spec_.dtype);
  for (int64_t h = unit.head; h < unit.head + unit.heads; ++h) {
    PrefetchL2(ElementAt(args_.x, token, h, unit.row), bytes);
    if (args_.z.rank() == 0) continue;
    PrefetchL2(ElementAt(args_.z, token, h, unit.row), bytes);
  }
}

// b, c and their products, for all heads of the group.
void StateChunks::LoadTokens(const StateChunkUnit& unit, int64_t first,
                             int64_t n) {
  const int64_t group = unit.head / (spec_.heads / spec_.groups);
  const size_t element = SizeOf(spec_.BcDType());
  const int64_t end = args_.batch.end(unit.sequence);
  for (int64_t i = 0; i < n; ++i) {
    if (first + i + spec_.chunk < end) Ask(unit, first + i + spec_.chunk);
    const size_t at = static_cast<size_t>(i) * row_;
    LoadRow(bc_blocks_, ElementAt(args_.b, first + i, group), spec_.d_state,
            element, s_.b + at);
    LoadRow(bc_blocks_, ElementAt(args_.c, first + i, group), spec_.d_state,
            element, s_.c + at);
  }
  const auto tokens = static_cast<size_t>(n);
  const auto d_state = static_cast<size_t>(spec_.d_state);
  kernels_.transpose(s_.b, row_, tokens, d_state, s_.transposed, scores_);
  ChunkProduct p = {};
  p.a_row = row_;
  p.a_k = 1;
  p.b = s_.transposed;
  p.b_stride = p.c_stride = scores_;
  p.depth = d_state;
  // Above the diagonal no product is needed.
  const auto line = static_cast<size_t>(kChunkLine);
  for (size_t i = 0; i < tokens; i += line) {
    p.rows = std::min(line, tokens - i);
    p.columns = i + line;
    p.a = s_.c + i * row_;
    p.c = s_.products + i * scores_;
    kernels_.product(p);
  }
}

// What a head adds: decays, scores, x and u.
void StateChunks::LoadHead(const StateChunkUnit& unit, int64_t head,
                           int64_t first, int64_t n) {
  const auto tokens = static_cast<size_t>(n);
  const auto d_state = static_cast<size_t>(spec_.d_state);
  const auto rows = static_cast<size_t>(unit.rows);
  for (int64_t i = 0; i < n; ++i) {
    // The load fills a whole vector, which the next one overwrites.
    alignas(64) float dt[kRowBlock];
    blocks_.load(ElementAt(args_.dt, first + i, head), 1, dt);
    s_.delta[i] = dt[0];
    blocks_.load(ElementAt(args_.x, first + i, head, unit.row), rows,
                 s_.x + static_cast<size_t>(i) * Wide(unit));
  }
  std::fill(s_.bias, s_.bias + n, NumberOf(args_.dt_bias, head));
  token_kernels_.delta(s_.delta, s_.bias, spec_.delta == SsmDelta::kSoftplus,
                       tokens, s_.delta);
  const float rate = NumberOf(args_.a, head);
  for (int64_t i = 0; i < n; ++i) s_.a[i] = rate * s_.delta[i];
  kernels_.decay(s_.a, tokens, s_.a);
  std::copy(s_.products, s_.products + tokens * scores_, s_.scores);
  kernels_.weigh(
      {tokens, s_.a, nullptr, nullptr, s_.scores, scores_, s_.first, s_.last});
  std::fill(s_.kept, s_.kept + d_state, s_.first[n - 1]);
  kernels_.scale_rows(s_.x, Wide(unit), tokens, rows, s_.delta, s_.u);
}

// y, and the new state.
void StateChunks::Multiply(const StateChunkUnit& unit, int64_t head,
                           int64_t n) {
  const auto tokens = static_cast<size_t>(n);
  const size_t wide = Wide(unit);
  ChunkProduct p = {};
  p.a = s_.c;
  p.a_row = row_;
  p.a_k = 1;
  p.b = StateOf(unit, head);
  p.b_stride = p.c_stride = wide;
  p.c = s_.y;
  p.rows = tokens;
  p.depth = static_cast<size_t>(spec_.d_state);
  p.columns = static_cast<size_t>(unit.rows);
  kernels_.product(p);
  // Decays are applied to rows of x and y, which are shorter than b and c.
  kernels_.scale_rows(s_.y, wide, tokens, p.columns, s_.first, s_.y);
  kernels_.add_lower(
      {s_.scores, scores_, s_.u, wide, s_.y, wide, tokens, p.columns});
  kernels_.scale_rows(s_.u, wide, tokens, p.columns, s_.last, s_.u);
  p.a = s_.b;
  p.a_row = 1;
  p.a_k = row_;
  p.b = s_.u;
  p.scale = s_.kept;
  p.c = StateOf(unit, head);
  p.rows = p.depth;
  p.depth = tokens;
  kernels_.product(p);
}

void StateChunks::StoreOut(const StateChunkUnit& unit, int64_t head,
                           int64_t first, int64_t n) {
  const auto rows = static_cast<size_t>(unit.rows);
  std::fill(s_.d, s_.d + kStateRows, NumberOf(args_.d, head));
  const bool gated = args_.z.rank() != 0;
  for (int64_t i = 0; i < n; ++i) {
    const size_t at = static_cast<size_t>(i) * Wide(unit);
    if (gated) {
      blocks_.load(ElementAt(args_.z, first + i, head, unit.row), rows, s_.z);
    }
    token_kernels_.finish(s_.d, s_.x + at, gated ? s_.z : nullptr, rows,
                          s_.y + at);
    blocks_.store(s_.y + at, rows, /*stream=*/false,
                  ElementAt(args_.out, first + i, head, unit.row));
  }
}

}  // namespace quern
