#ifndef QUERN_OPS_REGISTRY_REFERENCE_RECURRENT_H_
#define QUERN_OPS_REGISTRY_REFERENCE_RECURRENT_H_

// The recurrent operators as plain loops over tokens: in double, rounded where
// the plans round. Arguments as the CheckArgs of the plans accept them.

#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/delta_gates.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/gated_delta_rule.h"
#include "quern/ops/recurrent/state_update.h"

namespace quern {

void NativeDeltaRule(const DeltaRuleSpec& spec, const DeltaRuleArgs& args);
void NativeDeltaGates(const DeltaGatesSpec& spec, const DeltaGatesArgs& args);
void NativeGatedDeltaRule(const GatedDeltaRuleSpec& spec,
                          const GatedDeltaRuleArgs& args);
void NativeCausalConv1d(const CausalConv1dSpec& spec,
                        const CausalConv1dArgs& args);
void NativeStateUpdate(const StateUpdateSpec& spec,
                       const StateUpdateArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_RECURRENT_H_
