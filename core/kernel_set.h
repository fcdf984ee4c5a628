#ifndef QUERN_CORE_KERNEL_SET_H_
#define QUERN_CORE_KERNEL_SET_H_

// The kernels of one arithmetic as a list, best first, which plans, tests and
// measurements walk: a row for each instruction set. A *_simd.cc has it where
// HWY_ONCE:
//
//   constexpr Int8KernelSet kSets[] = {
//       QUERN_HWY_SETS_ABOVE_AVX2(GetKernels),
//       {kAvx2Vnni, &GetInt8AvxVnniKernels},
//       QUERN_HWY_SETS_FROM_AVX2(GetKernels),
//   };
//
// GetKernels is a function of HWY_NAMESPACE. Kernels for what Highway has no
// target for are one more row, before the first that they shall replace, and
// one more IsaLeaf.

#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/isa.h"

namespace quern {

// Kernels is a struct of functions and of what they need: the form of a row,
// the sizes of tiles. Spec is what they are chosen by besides: types, a format.
template <class Kernels, class... Spec>
struct KernelSet {
  Isa isa;
  Kernels (*get)(Spec...);  // null where this library has no such kernels

  bool runs() const { return get != nullptr && isa.Runs(); }
};

// The set that plans take: the first that runs, or the least of Highway's, to
// which Highway dispatches, too, if a cap forbids all that were compiled.
template <class Kernels, class... Spec>
const KernelSet<Kernels, Spec...>& FirstThatRuns(
    absl::Span<const KernelSet<Kernels, Spec...>> sets) {
  const KernelSet<Kernels, Spec...>* least = nullptr;
  for (const KernelSet<Kernels, Spec...>& set : sets) {
    if (set.runs()) return set;
    if (set.get != nullptr && set.isa.leaf == IsaLeaf::kNone) least = &set;
  }
  QUERN_CHECK(least != nullptr && "a kernel set for some target");
  return *least;
}

}  // namespace quern

// Rows of Highway's targets. One that foreach_target.h does not generate has
// null for `get`.
#define QUERN_HWY_SETS(get) \
  QUERN_HWY_SETS_ABOVE_AVX2(get), QUERN_HWY_SETS_FROM_AVX2(get)
// clang-format off
#define QUERN_HWY_SETS_ABOVE_AVX2(get) \
  QUERN_HWY_SET(AVX3_SPR, get),        \
  QUERN_HWY_SET(AVX3_ZEN4, get),       \
  QUERN_HWY_SET(AVX3_DL, get),         \
  QUERN_HWY_SET(AVX3, get)
#define QUERN_HWY_SETS_FROM_AVX2(get)   \
  QUERN_HWY_SET(AVX2, get),             \
  QUERN_HWY_SET(SSE4, get),             \
  QUERN_HWY_SET(SSSE3, get),            \
  QUERN_HWY_SET(SSE2, get),             \
  QUERN_HWY_SET(SVE2_128, get),         \
  QUERN_HWY_SET(SVE_256, get),          \
  QUERN_HWY_SET(SVE2, get),             \
  QUERN_HWY_SET(SVE, get),              \
  QUERN_HWY_SET(NEON_BF16, get),        \
  QUERN_HWY_SET(NEON, get),             \
  QUERN_HWY_SET(NEON_WITHOUT_AES, get), \
  QUERN_HWY_ONLY_SET(get)
// clang-format on

#define QUERN_HWY_SET(target, get) \
  { {HWY_##target}, HWY_CHOOSE_##target(get) }

// The one target of an architecture without rows above, or of a binary that
// was compiled for no vectors; else no set.
#define QUERN_HWY_ONLY_SET(get)                                \
  {                                                            \
    {HWY_STATIC_TARGET},                                       \
        ((HWY_ARCH_X86 || HWY_ARCH_ARM) &&                     \
         (HWY_STATIC_TARGET & (HWY_EMU128 | HWY_SCALAR)) == 0) \
            ? nullptr                                          \
            : &HWY_STATIC_DISPATCH(get)                        \
  }

#endif  // QUERN_CORE_KERNEL_SET_H_
