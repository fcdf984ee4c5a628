#ifndef QUERN_CORE_MAX_ISA_H_
#define QUERN_CORE_MAX_ISA_H_

// A cap on instruction sets, so that what happened on one CPU can be repeated
// on a better one. Kernels are chosen by process-wide dispatch, so the cap is
// one of the process.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

// Plans made from now on take no instruction set better than `isa`, in any
// letter case: Highway's names, such as "AVX2" or "AVX3_ZEN4", "AVX2_VNNI" or
// "AVX2_VNNI_INT8"; plain "AVX2" is without AVX-VNNI. An instruction set that
// is better than this CPU's changes nothing. "" lifts the cap. Plans that exist
// keep their kernels. No other thread may be making a plan.
//
// InvalidArgument for a name that no instruction set has, and where the library
// was compiled without kernels for this one and all lesser ones; it lists those
// of this CPU.
absl::Status SetMaxIsa(absl::string_view isa);

// The bit of an instruction set by its name, in any letter case, as Highway
// numbers them: a better one has a lower bit. Those with a leaf (core/isa.h)
// have that of AVX2. 0 for a name that no instruction set has.
int64_t IsaBit(absl::string_view isa);

}  // namespace quern

#endif  // QUERN_CORE_MAX_ISA_H_
