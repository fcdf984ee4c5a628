#include "quern/core/max_isa.h"

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/isa.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kWhat[] = "max_isa";

absl::Status Refuse(absl::string_view isa, absl::string_view why) {
  return InvalidArgument(kWhat, "isa=\"", isa, "\" ", why, "; need one of ",
                         absl::StrJoin(GetCpuInfo().targets, ", "));
}

}  // namespace

int64_t IsaBit(absl::string_view isa) {
  for (const Isa& leaf : kIsasWithLeaf) {
    if (absl::EqualsIgnoreCase(isa, leaf.name())) return leaf.highway;
  }
  const std::string unknown = hwy::TargetName(0);
  for (int shift = 0; shift < 63; ++shift) {
    const int64_t bit = int64_t{1} << shift;
    const std::string name = hwy::TargetName(bit);
    if (name != unknown && absl::EqualsIgnoreCase(isa, name)) return bit;
  }
  return 0;
}

absl::Status SetMaxIsa(absl::string_view isa) {
  if (isa.empty()) {
    hwy::DisableTargets(0);
    AllowAvxVnniForTest(true);
    AllowAvxVnniInt8ForTest(true);
    return absl::OkStatus();
  }
  const int64_t bit = IsaBit(isa);
  if (bit == 0) return Refuse(isa, "is no instruction set");
  // Dispatch would otherwise fall back to a better one.
  if ((HWY_TARGETS & ~(bit - 1)) == 0) {
    return Refuse(isa, "and lesser ones have no kernels in this library");
  }
  hwy::DisableTargets(bit - 1);
  // AVX2 is without AVX-VNNI, and AVX2_VNNI without AVX-VNNI-INT8, whose rows
  // come before it.
  AllowAvxVnniForTest(!absl::EqualsIgnoreCase(isa, "AVX2"));
  AllowAvxVnniInt8ForTest(!absl::EqualsIgnoreCase(isa, kAvxVnniTarget));
  return absl::OkStatus();
}

}  // namespace quern
