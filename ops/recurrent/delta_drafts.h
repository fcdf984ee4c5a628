#ifndef QUERN_OPS_RECURRENT_DELTA_DRAFTS_H_
#define QUERN_OPS_RECURRENT_DELTA_DRAFTS_H_

// The delta rule on sequences of several tokens, token by token with the bits
// of decode steps. A block of columns of a head's state stays in L1 from the
// first token to the last: see DeltaRulePass.

#include <cstddef>
#include <cstdint>

#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/delta_rule_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

// A unit of work: all tokens of a sequence, on some columns of a head.
struct DeltaUnit {
  int64_t sequence, head, column, columns;
};

// Columns of the blocks that a unit is divided into.
inline int64_t DeltaDraftColumns(int64_t dk) {
  return dk <= 512 ? static_cast<int64_t>(kPassColumns) : 16;
}

// Token t as head `head` sees it. `token` has memory for its arrays.
void PrepareDeltaToken(const DeltaRuleSpec& spec,
                       const DeltaRuleKernels& kernels,
                       const RowBlockKernels& blocks,
                       const RowBlockKernels& gates, const DeltaRuleArgs& args,
                       int64_t t, int64_t head, DeltaRuleToken& token);

class DeltaDrafts {
 public:
  DeltaDrafts(const DeltaRuleSpec& spec, const DeltaRuleKernels& kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& gates,
              const DeltaRuleArgs& args);

  // Writes the outputs of the unit's tokens, and the states that are kept.
  // next: the unit after this one, or null; its state is asked for meanwhile.
  void Do(const DeltaUnit& unit, const DeltaUnit* next);

 private:
  static constexpr int64_t kStateFloats = 16384;
  static constexpr int64_t kTokenFloats = 8192;
  static constexpr int64_t kMostTokens = 16;
  // Passes over each block during which the state of the next unit is asked
  // for.
  static constexpr int64_t kAskPasses = 6;

  void* StateOf(const DeltaUnit& unit, int64_t slot) const;
  int64_t Destination(const DeltaUnit& unit, int64_t i) const;
  void AskForState(const DeltaUnit* next, int64_t passes);
  void AskForToken(const DeltaUnit& unit, int64_t t) const;
  void DoBlock(const DeltaUnit& unit, const DeltaUnit& block);
  const DeltaRuleToken& Token(const DeltaUnit& unit, int64_t i);

  const DeltaRuleSpec& spec_;
  const DeltaRuleKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& gates_;
  const DeltaRuleArgs& args_;
  const int64_t element_;
  const int64_t state_element_;
  const int64_t dk_;           // in whole vectors
  const int64_t token_count_;  // tokens that there is room for
  StateAhead ahead_ = {};
  int64_t prepared_[kMostTokens];
  DeltaRuleToken tokens_[kMostTokens];
  // What is behind the columns of a block is computed on.
  alignas(64) float a_[kPassColumns] = {};
  alignas(64) float b_[kPassColumns] = {};
  alignas(64) float v_[kRowBlock] = {};
  alignas(64) float out_[kPassColumns] = {};
  alignas(64) float q_[DeltaRulePlan::kMaxDk];
  alignas(64) float memory_[kTokenFloats];
  alignas(64) float state_[kStateFloats];
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_DRAFTS_H_
