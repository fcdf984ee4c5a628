#ifndef QUERN_OPS_REGISTRY_REFERENCE_MERGE_STATES_H_
#define QUERN_OPS_REGISTRY_REFERENCE_MERGE_STATES_H_

// Merging two parts of attention as plain loops in double, for the providers
// called "reference".

#include "quern/attention/merge_states.h"

namespace quern {

// The equations of attention/merge_states.h with one rounding. Arguments must
// be ones that MergeStatesPlan accepts.
void NativeMergeStates(const MergeStatesSpec& spec,
                       const MergeStatesArgs& args) noexcept;

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_MERGE_STATES_H_
