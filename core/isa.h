#ifndef QUERN_CORE_ISA_H_
#define QUERN_CORE_ISA_H_

// Instruction sets as values: a target of Highway, and what kernels may use
// beside it that Highway has no target for.

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "hwy/detect_targets.h"

namespace quern {

enum class IsaLeaf : uint8_t {
  kNone,
  kAvxVnni,      // core/avx_vnni.h
  kAvxVnniInt8,  // core/avx_vnni.h
};

struct Isa {
  // One bit. A better target of the same architecture has a lower one.
  int64_t highway;
  IsaLeaf leaf = IsaLeaf::kNone;

  // What a plan's target() returns: "AVX3_ZEN4", "AVX2_VNNI".
  const char* name() const;
  // Whether plans made now may take kernels of this instruction set: the CPU
  // has its target and its leaf, and Highway's dispatch has chosen this target
  // or a better one. A cap (core/max_isa.h) and a test's choice
  // (testing/isa_test.h) count, too.
  bool Runs() const;
};

inline bool operator==(const Isa& a, const Isa& b) {
  return a.highway == b.highway && a.leaf == b.leaf;
}
inline bool operator!=(const Isa& a, const Isa& b) { return !(a == b); }

inline constexpr Isa kAvx2Vnni = {HWY_AVX2, IsaLeaf::kAvxVnni};
inline constexpr Isa kAvx2VnniInt8 = {HWY_AVX2, IsaLeaf::kAvxVnniInt8};

// All that have a leaf, best first.
inline constexpr Isa kIsasWithLeaf[] = {kAvx2VnniInt8, kAvx2Vnni};

// Whether kernels for `ran`, what a plan's target() returns, may be what a CPU
// whose best instruction set is `isa` runs: `ran` is `isa`, or what `isa` adds
// to it is of no use to them, so that there are none (core/sets).
bool StandsFor(absl::string_view ran, absl::string_view isa);

// Lets plans made from now on take kernels of `isa`, or those that stand for
// it, and no better ones. For tests and measurements; UseIsaForTest(nullptr)
// ends it.
void UseIsaForTest(const Isa* isa);

// The instruction sets that this library was compiled for, best first.
std::vector<Isa> CompiledIsas();
// Instruction sets that were compiled, that this CPU has, and that neither a
// cap nor a test forbids; best first. Runs() is true for each.
std::vector<Isa> SupportedIsas();

namespace isa_internal {

// Whether kernels for `target` run where dispatch has chosen `dispatched`.
// kOrdered: a target implies all that have higher bits, as on x86. Arm's do
// not: a CPU with SVE2_128 has no SVE_256. There `supported` has to tell.
template <bool kOrdered>
bool TargetRuns(int64_t target, int64_t dispatched, int64_t (*supported)()) {
  if (target < dispatched) return false;
  return kOrdered || (target & supported()) != 0;
}

}  // namespace isa_internal

}  // namespace quern

#endif  // QUERN_CORE_ISA_H_
