#ifndef QUERN_OPS_RECURRENT_STATE_DRAFTS_H_
#define QUERN_OPS_RECURRENT_STATE_DRAFTS_H_

// The state update on sequences of several tokens, token by token with the bits
// of decode steps. Rows of a state are independent: each stays in registers
// from the first token to the last, see StateUpdateDrafts.

#include <cstddef>
#include <cstdint>

#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/state_update_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

// A unit of work: all tokens of a sequence, on some rows of a head.
struct StateUnit {
  int64_t sequence, head, row, rows;
};

// What the rows of a unit have for all tokens.
class StateHead {
 public:
  // Returns the rate of the head, if there is one for all of its elements.
  float Load(const StateUpdateSpec& spec, const StateUpdateArgs& args,
             const StateUnit& unit);
  const float* a() const { return a_; }  // null without a rate for each element
  size_t a_stride() const { return a_stride_; }
  const float* d() const { return d_; }
  const float* bias() const { return bias_; }

 private:
  const float* a_ = nullptr;
  size_t a_stride_ = 0;
  alignas(64) float d_[kStateRows] = {};
  alignas(64) float bias_[kStateRows] = {};
};

// x and the steps delta of token t, for the rows of a unit.
void LoadStateToken(const StateUpdateSpec& spec,
                    const StateUpdateKernels& kernels,
                    const RowBlockKernels& blocks, const StateUpdateArgs& args,
                    int64_t t, const StateUnit& unit, const float* bias,
                    float* x, float* delta);

// Rows of a unit: a state that has no slot fits in the memory for it.
inline int64_t StateDraftRows(int64_t d_state) {
  constexpr int64_t kFloats = 8192;
  static_assert(kFloats >= StateUpdatePlan::kMaxState, "a row or more");
  return d_state * static_cast<int64_t>(kDraftRows) <= kFloats
             ? static_cast<int64_t>(kDraftRows)
             : kFloats / d_state;
}

class StateDrafts {
 public:
  StateDrafts(const StateUpdateSpec& spec, const StateUpdateKernels& kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& bc_blocks,
              const StateUpdateArgs& args);

  // Writes the outputs of the unit's tokens, and the states that are kept.
  // next: the unit after this one, or null; what it reads of its tokens is
  // asked for meanwhile.
  void Do(const StateUnit& unit, const StateUnit* next);

 private:
  static constexpr int64_t kBcFloats = 4096;  // of b, and of c
  static constexpr int64_t kMostTokens = static_cast<int64_t>(kDraftTokens);

  void AskForTokens(const StateUnit& unit) const;
  void LoadBc(int64_t group, int64_t first, int64_t count);
  void SetKeeps(const StateUnit& unit, int64_t first, int64_t count, bool last);
  void DoTokens(const StateUnit& unit, int64_t first, int64_t count,
                StateUpdateDrafts& drafts);

  const StateUpdateSpec& spec_;
  const StateUpdateKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& bc_blocks_;
  const StateUpdateArgs& args_;
  const int64_t element_;
  const int64_t bc_stride_;
  const int64_t token_count_;  // tokens that there is room for
  // What b_ and c_ hold.
  int64_t bc_group_ = -1, bc_first_ = -1, bc_count_ = 0;
  StateHead head_;
  StateKeep keep_[kDraftTokens];
  // What follows the rows of a block is computed on.
  alignas(64) float b_[kBcFloats];
  alignas(64) float c_[kBcFloats];
  alignas(64) float x_[kDraftTokens * kDraftRows] = {};
  alignas(64) float delta_[kDraftTokens * kDraftRows] = {};
  alignas(64) float y_[kDraftTokens * kDraftRows] = {};
  alignas(64) float z_[kDraftRows] = {};
  alignas(64) float kept_[8192];  // a state that has no slot
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_DRAFTS_H_
