#include "quern/core/isa.h"

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "hwy/detect_targets.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"

namespace quern {
namespace {

// Whether this library was compiled with kernels that use the leaf.
bool IsCompiled(IsaLeaf leaf) {
  return leaf == IsaLeaf::kNone || QUERN_AVX_VNNI != 0;
}

bool CpuHas(IsaLeaf leaf) {
  switch (leaf) {
    case IsaLeaf::kNone:
      return true;
    case IsaLeaf::kAvxVnni:
      return HasAvxVnni();
    case IsaLeaf::kAvxVnniInt8:
      return HasAvxVnniInt8();
  }
  return false;
}

// Where Highway 1.2 looks at the CPU, dispatch takes all that it has found,
// whatever DisableTargets has said before, until the next Update.
int64_t SupportedTargets() {
  const int64_t targets = hwy::SupportedTargets();
  hwy::GetChosenTarget().Update(targets);
  return targets;
}

// What hwy::DispatchedTarget returns. Highway compiles that for every target,
// which takes as long as a kernel: an index into its tables of dispatch is one
// more than the place of the target's bit.
int64_t DispatchedTarget() {
  if constexpr ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) return HWY_TARGETS;
  hwy::ChosenTarget& chosen = hwy::GetChosenTarget();
  if (!chosen.IsInitialized()) chosen.Update(hwy::SupportedTargets());
  const int64_t index = static_cast<int64_t>(chosen.GetIndex());
  if (index > HWY_MAX_DYNAMIC_TARGETS) return HWY_STATIC_TARGET;
  return int64_t{1} << (index + HWY_HIGHEST_TARGET_BIT -
                        HWY_MAX_DYNAMIC_TARGETS);
}

}  // namespace

bool StandsFor(absl::string_view ran, absl::string_view isa) {
  if (ran == isa) return true;
  if (isa == "AVX3_DL") return ran == "AVX3";
  if (isa == "AVX3_ZEN4") return ran == "AVX3" || ran == "AVX3_DL";
  if (isa == kAvxVnniInt8Target) return ran == kAvxVnniTarget;
  return false;
}

void UseIsaForTest(const Isa* isa) {
  hwy::SetSupportedTargetsForTest(0);
  AllowAvxVnniForTest(isa == nullptr || *isa != Isa{HWY_AVX2});
  AllowAvxVnniInt8ForTest(isa == nullptr || *isa != kAvx2Vnni);
  if (isa == nullptr) return;
  // A lesser one has a higher bit.
  hwy::SetSupportedTargetsForTest(hwy::SupportedTargets() &
                                  ~(isa->highway - 1));
}

const char* Isa::name() const {
  switch (leaf) {
    case IsaLeaf::kNone:
      break;
    case IsaLeaf::kAvxVnni:
      return kAvxVnniTarget;
    case IsaLeaf::kAvxVnniInt8:
      return kAvxVnniInt8Target;
  }
  return hwy::TargetName(highway);
}

// DispatchedTarget, where it tells, because it is an integer in memory: to look
// at the CPU may leave a virtual machine, and dispatch forgets a cap meanwhile.
bool Isa::Runs() const {
  const int64_t dispatched = DispatchedTarget();
  const bool runs =
      highway == dispatched || isa_internal::TargetRuns<HWY_ARCH_X86 != 0>(
                                   highway, dispatched, &SupportedTargets);
  return runs && CpuHas(leaf);
}

std::vector<Isa> CompiledIsas() {
  std::vector<Isa> isas;
  for (int64_t left = HWY_TARGETS; left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    for (const Isa& isa : kIsasWithLeaf) {
      if (target == isa.highway && IsCompiled(isa.leaf)) isas.push_back(isa);
    }
    isas.push_back({target});
  }
  return isas;
}

std::vector<Isa> SupportedIsas() {
  const int64_t targets = SupportedTargets();
  std::vector<Isa> isas;
  for (const Isa& isa : CompiledIsas()) {
    if ((isa.highway & targets) != 0 && CpuHas(isa.leaf)) isas.push_back(isa);
  }
  return isas;
}

}  // namespace quern
