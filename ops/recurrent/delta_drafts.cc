#include "quern/ops/recurrent/delta_drafts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "quern/core/math_util.h"
#include "quern/core/prefetch.h"
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {

DeltaDrafts::DeltaDrafts(const DeltaRuleSpec& spec,
                         const DeltaRuleKernels& kernels,
                         const RowBlockKernels& blocks,
                         const RowBlockKernels& gates,
                         const DeltaRuleArgs& args)
    : spec_(spec),
      kernels_(kernels),
      blocks_(blocks),
      gates_(gates),
      args_(args),
      element_(static_cast<int64_t>(SizeOf(spec.dtype))),
      state_element_(static_cast<int64_t>(SizeOf(spec.state_dtype))),
      dk_(DivCeil(spec.dk, int64_t{16}) * 16),
      token_count_(std::min(kMostTokens, kTokenFloats / (4 * dk_))) {
  for (int64_t i = 0; i < token_count_; ++i) {
    float* const k = memory_ + i * 4 * dk_;
    tokens_[i] = {q_, k, k + dk_, k + 2 * dk_, k + 3 * dk_, 0.0f, 0.0f};
  }
}

void DeltaDrafts::Do(const DeltaUnit& unit, const DeltaUnit* next) {
  const SequenceBatch& batch = args_.batch;
  const int64_t begin = batch.begin(unit.sequence);
  const int64_t end = batch.end(unit.sequence);
  if (batch.source(unit.sequence) == spec_.null_slot) {
    for (int64_t t = begin; t < end; ++t) {
      ZeroRows(ElementAt(args_.out, t, unit.head, unit.column), 1,
               unit.columns * element_, 0);
    }
    return;
  }
  if (begin == end) return;
  std::fill(std::begin(prepared_), std::end(prepared_), -1);
  const int64_t columns = DeltaDraftColumns(spec_.dk);
  AskForState(next, std::min(end - begin + 1, kAskPasses) *
                        DivCeil(unit.columns, columns));
  if (next != nullptr) {
    const int64_t from = batch.begin(next->sequence);
    const int64_t count = batch.end(next->sequence) - from;
    for (int64_t i = 0; i < std::min(count, kMostTokens); ++i) {
      AskForToken(*next, from + i);
    }
  }
  for (int64_t c = 0; c < unit.columns; c += columns) {
    DoBlock(unit, {unit.sequence, unit.head, unit.column + c,
                   std::min(columns, unit.columns - c)});
  }
}

void* DeltaDrafts::StateOf(const DeltaUnit& unit, int64_t slot) const {
  return ElementAt(args_.state, slot, unit.head, 0, unit.column);
}

// The slot of the state after token i of the unit's sequence, or null_slot.
int64_t DeltaDrafts::Destination(const DeltaUnit& unit, int64_t i) const {
  const SequenceBatch& batch = args_.batch;
  if (batch.drafts()) {
    return batch.destination(unit.sequence, i, spec_.null_slot);
  }
  const bool last =
      batch.begin(unit.sequence) + i + 1 == batch.end(unit.sequence);
  return last ? batch.source(unit.sequence) : spec_.null_slot;
}

// Spreads the lines of the next unit's state, where it is read, over the rows
// of `passes`.
void DeltaDrafts::AskForState(const DeltaUnit* next, int64_t passes) {
  ahead_ = {};
  ahead_.steps = static_cast<size_t>(passes * spec_.dk);
  if (next == nullptr) return;
  const SequenceBatch& batch = args_.batch;
  const int64_t slot = batch.source(next->sequence);
  if (slot == spec_.null_slot || batch.fresh(next->sequence) ||
      batch.begin(next->sequence) == batch.end(next->sequence)) {
    return;
  }
  ahead_.row = static_cast<const char*>(StateOf(*next, slot));
  ahead_.rows = static_cast<size_t>(spec_.dk);
  ahead_.row_bytes = static_cast<size_t>(next->columns * state_element_);
  ahead_.stride = static_cast<size_t>(RowStride(args_.state) * state_element_);
  ahead_.lines = ahead_.rows * DivCeil(ahead_.row_bytes, size_t{64});
}

// Rows of a token lie far from those of the next one, where no hardware
// prefetcher looks, and each pass begins with v and ends with out.
void DeltaDrafts::AskForToken(const DeltaUnit& unit, int64_t t) const {
  const int64_t key_head = unit.head / (spec_.value_heads / spec_.key_heads);
  const auto bytes = static_cast<size_t>(unit.columns * element_);
  const auto key_bytes = static_cast<size_t>(spec_.dk * element_);
  PrefetchL2(ElementAt(args_.v, t, unit.head, unit.column), bytes);
  PrefetchL2(ElementAt(args_.out, t, unit.head, unit.column), bytes);
  PrefetchL2(ElementAt(args_.q, t, key_head), key_bytes);
  PrefetchL2(ElementAt(args_.k, t, key_head), key_bytes);
}

void DeltaDrafts::DoBlock(const DeltaUnit& unit, const DeltaUnit& block) {
  const SequenceBatch& batch = args_.batch;
  const int64_t begin = batch.begin(unit.sequence);
  const int64_t count = batch.end(unit.sequence) - begin;
  DeltaRulePass pass = {};
  pass.rows = static_cast<size_t>(spec_.dk);
  pass.columns = static_cast<size_t>(block.columns);
  pass.state = state_;
  pass.state_stride = DivCeil(pass.columns, size_t{16}) * 16;
  pass.from = StateOf(block, batch.source(unit.sequence));
  pass.from_stride = static_cast<size_t>(RowStride(args_.state));
  if (batch.fresh(unit.sequence)) {
    std::memset(state_, 0, pass.rows * pass.state_stride * sizeof(float));
    pass.from = state_;
    pass.from_stride = pass.state_stride;
  }
  pass.to_stride = static_cast<size_t>(RowStride(args_.state));
  pass.a = a_;
  pass.b = b_;
  pass.v = v_;
  pass.out = out_;
  pass.ahead = &ahead_;
  pass.next = &Token(unit, 0);
  kernels_.pass(pass);
  bool streamed = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = begin + i;
    if (i + kMostTokens < count) AskForToken(block, t + kMostTokens);
    pass.token = &Token(unit, i);
    pass.next = i + 1 < count ? &Token(unit, i + 1) : nullptr;
    const int64_t slot = Destination(unit, i);
    pass.to = slot == spec_.null_slot ? nullptr : StateOf(block, slot);
    // The state that was read is in the caches.
    pass.stream = pass.to != nullptr && slot != batch.source(unit.sequence) &&
                  StreamsRows(pass.to, pass.to_stride, spec_.state_dtype);
    streamed = streamed || pass.stream;
    blocks_.load(ElementAt(args_.v, t, unit.head, block.column), pass.columns,
                 v_);
    kernels_.pass(pass);
    blocks_.store(out_, pass.columns, /*stream=*/false,
                  ElementAt(args_.out, t, unit.head, block.column));
  }
  if (streamed) kernels_.flush();
}

// Token i of the unit's sequence. The one before it stays.
const DeltaRuleToken& DeltaDrafts::Token(const DeltaUnit& unit, int64_t i) {
  const int64_t at = i % token_count_;
  if (prepared_[at] != i) {
    PrepareDeltaToken(spec_, kernels_, blocks_, gates_, args_,
                      args_.batch.begin(unit.sequence) + i, unit.head,
                      tokens_[at]);
    prepared_[at] = i;
  }
  return tokens_[at];
}

void PrepareDeltaToken(const DeltaRuleSpec& spec,
                       const DeltaRuleKernels& kernels,
                       const RowBlockKernels& blocks,
                       const RowBlockKernels& gates, const DeltaRuleArgs& args,
                       int64_t t, int64_t head, DeltaRuleToken& token) {
  const int64_t key_head = head / (spec.value_heads / spec.key_heads);
  const size_t element = SizeOf(spec.dtype);
  LoadRow(blocks, ElementAt(args.q, t, key_head), spec.dk, element, token.q);
  LoadRow(blocks, ElementAt(args.k, t, key_head), spec.dk, element, token.k);
  token.beta = NumberAt(args.beta, t, head);
  const bool per_channel = spec.decay == DeltaDecay::kPerChannel;
  const char* const at = ElementAt(args.g, t, head);
  const auto* g = reinterpret_cast<const float*>(at);
  if (spec.g_dtype != DType::kF32) {
    LoadRow(gates, at, per_channel ? spec.dk : 1, SizeOf(spec.g_dtype),
            token.a);
    g = token.a;  // where the decay of each g takes its place
  }
  const DeltaRuleNorm norm = {spec.norm == DeltaNorm::kL2, spec.norm_eps,
                              spec.scale};
  kernels.prepare(g, per_channel, static_cast<size_t>(spec.dk), norm, token);
}

}  // namespace quern
