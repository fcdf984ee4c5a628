// How many vectors the registers of an instruction set hold.

// clang-format off
#if defined(QUERN_CORE_REGISTERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CORE_REGISTERS_INL_H_
#undef QUERN_CORE_REGISTERS_INL_H_
#else
#define QUERN_CORE_REGISTERS_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {

// Whether there are 32 vector registers rather than 16: with AVX-512, at any
// vector length. Arm has 32 as well, but no tile has been measured there, so it
// has the tiles of 16 until then.
constexpr bool kManyRegisters = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3;

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
