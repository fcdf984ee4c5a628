#include "quern/ops/recurrent/state_drafts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/prefetch.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

// The numbers of kPerRow from the unit's first row on, or that of kPerHead for
// each row.
void LoadPerRow(const AnyTensorView& v, const StateUnit& unit, float* to) {
  if (v.rank() == 0) return;
  const auto* from = reinterpret_cast<const float*>(
      ElementAt(v, unit.head, v.rank() == 2 ? unit.row : 0));
  if (v.rank() == 2) {
    std::copy(from, from + unit.rows, to);
  } else {
    std::fill(to, to + kStateRows, *from);
  }
}

}  // namespace

float StateHead::Load(const StateUpdateSpec& spec, const StateUpdateArgs& args,
                      const StateUnit& unit) {
  LoadPerRow(args.d, unit, d_);
  LoadPerRow(args.dt_bias, unit, bias_);
  const bool per_row = spec.form == SsmForm::kPerRow;
  const auto* const a = reinterpret_cast<const float*>(
      ElementAt(args.a, unit.head, per_row ? unit.row : 0));
  if (!per_row) return *a;
  a_ = a;
  a_stride_ = static_cast<size_t>(RowStride(args.a));
  return 0.0f;
}

void LoadStateToken(const StateUpdateSpec& spec,
                    const StateUpdateKernels& kernels,
                    const RowBlockKernels& blocks, const StateUpdateArgs& args,
                    int64_t t, const StateUnit& unit, const float* bias,
                    float* x, float* delta) {
  const auto rows = static_cast<size_t>(unit.rows);
  blocks.load(ElementAt(args.x, t, unit.head, unit.row), rows, x);
  const bool softplus = spec.delta == SsmDelta::kSoftplus;
  if (spec.form == SsmForm::kPerRow) {
    blocks.load(ElementAt(args.dt, t, unit.head, unit.row), rows, delta);
    kernels.delta(delta, bias, softplus, rows, delta);
  } else {
    blocks.load(ElementAt(args.dt, t, unit.head), 1, delta);
    kernels.delta(delta, bias, softplus, 1, delta);
    std::fill(delta + 1, delta + rows, delta[0]);
  }
}

StateDrafts::StateDrafts(const StateUpdateSpec& spec,
                         const StateUpdateKernels& kernels,
                         const RowBlockKernels& blocks,
                         const RowBlockKernels& bc_blocks,
                         const StateUpdateArgs& args)
    : spec_(spec),
      kernels_(kernels),
      blocks_(blocks),
      bc_blocks_(bc_blocks),
      args_(args),
      element_(static_cast<int64_t>(SizeOf(spec.dtype))),
      bc_stride_(RoundUp(spec.d_state, 16)),
      token_count_(std::min(kMostTokens, kBcFloats / bc_stride_)) {}

void StateDrafts::Do(const StateUnit& unit, const StateUnit* next) {
  const SequenceBatch& batch = args_.batch;
  const int64_t begin = batch.begin(unit.sequence);
  const int64_t end = batch.end(unit.sequence);
  const int64_t slot = batch.source(unit.sequence);
  if (slot == spec_.null_slot) {
    for (int64_t t = begin; t < end; ++t) {
      ZeroRows(ElementAt(args_.out, t, unit.head, unit.row), 1,
               unit.rows * element_, 0);
    }
    return;
  }
  if (begin == end) return;
  if (next != nullptr) AskForTokens(*next);
  StateUpdateDrafts drafts = {};
  drafts.from = ElementAt(args_.state, slot, unit.head, unit.row);
  drafts.from_stride = static_cast<size_t>(RowStride(args_.state));
  drafts.rows = static_cast<size_t>(unit.rows);
  drafts.n = static_cast<size_t>(spec_.d_state);
  drafts.keep = keep_;
  drafts.b = b_;
  drafts.c = c_;
  drafts.bc_stride = static_cast<size_t>(bc_stride_);
  drafts.delta = delta_;
  drafts.x = x_;
  drafts.y = y_;
  drafts.a_head = head_.Load(spec_, args_, unit);
  drafts.a = head_.a();
  drafts.a_stride = head_.a_stride();
  if (batch.fresh(unit.sequence)) {
    std::memset(kept_, 0, drafts.rows * drafts.n * SizeOf(spec_.state_dtype));
    drafts.from = kept_;
    drafts.from_stride = drafts.n;
  }
  for (int64_t t = begin; t < end; t += token_count_) {
    const int64_t count = std::min(token_count_, end - t);
    SetKeeps(unit, t - begin, count, t + count == end);
    DoTokens(unit, t, count, drafts);
    drafts.from = keep_[count - 1].to;
    drafts.from_stride = keep_[count - 1].stride;
  }
}

// Rows of a token lie far from those of the next one, where no hardware
// prefetcher looks.
void StateDrafts::AskForTokens(const StateUnit& unit) const {
  const SequenceBatch& batch = args_.batch;
  const int64_t begin = batch.begin(unit.sequence);
  const int64_t end = std::min(batch.end(unit.sequence), begin + token_count_);
  const auto bytes = static_cast<size_t>(unit.rows * element_);
  for (int64_t t = begin; t < end; ++t) {
    PrefetchL2(ElementAt(args_.x, t, unit.head, unit.row), bytes);
    PrefetchL2(ElementAt(args_.out, t, unit.head, unit.row), bytes);
    PrefetchL2(ElementAt(args_.dt, t, unit.head));
    if (args_.z.rank() != 0) {
      PrefetchL2(ElementAt(args_.z, t, unit.head, unit.row), bytes);
    }
  }
}

// All heads of a group share b and c.
void StateDrafts::LoadBc(int64_t group, int64_t first, int64_t count) {
  if (group == bc_group_ && first == bc_first_ && count == bc_count_) return;
  const size_t element = SizeOf(spec_.BcDType());
  for (int64_t i = 0; i < count; ++i) {
    LoadRow(bc_blocks_, ElementAt(args_.b, first + i, group), spec_.d_state,
            element, b_ + i * bc_stride_);
    LoadRow(bc_blocks_, ElementAt(args_.c, first + i, group), spec_.d_state,
            element, c_ + i * bc_stride_);
  }
  bc_group_ = group, bc_first_ = first, bc_count_ = count;
}

// Where tokens first to first + count - 1 of the unit's sequence leave their
// states. The state after the last of them is kept unless it ends the sequence.
void StateDrafts::SetKeeps(const StateUnit& unit, int64_t first, int64_t count,
                           bool last) {
  const SequenceBatch& batch = args_.batch;
  const int64_t source = batch.source(unit.sequence);
  const auto stride = static_cast<size_t>(RowStride(args_.state));
  for (int64_t i = 0; i < count; ++i) {
    const bool ends = last && i + 1 == count;
    const int64_t slot =
        batch.drafts()
            ? batch.destination(unit.sequence, first + i, spec_.null_slot)
            : (ends ? source : spec_.null_slot);
    keep_[i] = {};
    if (slot == spec_.null_slot) continue;
    keep_[i].to = ElementAt(args_.state, slot, unit.head, unit.row);
    keep_[i].stride = stride;
    // Rows that were read are in the caches.
    keep_[i].stream =
        slot != source && StreamsRows(keep_[i].to, stride, spec_.state_dtype);
  }
  StateKeep& behind = keep_[count - 1];
  if (!last && behind.to == nullptr) {
    behind = {kept_, static_cast<size_t>(spec_.d_state), false};
  }
}

void StateDrafts::DoTokens(const StateUnit& unit, int64_t first, int64_t count,
                           StateUpdateDrafts& drafts) {
  constexpr auto kRows = static_cast<int64_t>(kDraftRows);
  LoadBc(unit.head / (spec_.heads / spec_.groups), first, count);
  for (int64_t i = 0; i < count; ++i) {
    LoadStateToken(spec_, kernels_, blocks_, args_, first + i, unit,
                   head_.bias(), x_ + i * kRows, delta_ + i * kRows);
  }
  drafts.tokens = static_cast<size_t>(count);
  kernels_.drafts(drafts);
  const bool gated = args_.z.rank() != 0;
  bool streamed = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = first + i;
    if (gated) {
      blocks_.load(ElementAt(args_.z, t, unit.head, unit.row), drafts.rows, z_);
    }
    kernels_.finish(head_.d(), x_ + i * kRows, gated ? z_ : nullptr,
                    drafts.rows, y_ + i * kRows);
    blocks_.store(y_ + i * kRows, drafts.rows, /*stream=*/false,
                  ElementAt(args_.out, t, unit.head, unit.row));
    streamed = streamed || keep_[i].stream;
  }
  if (streamed) kernels_.flush();
}

}  // namespace quern
