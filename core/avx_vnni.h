#ifndef QUERN_CORE_AVX_VNNI_H_
#define QUERN_CORE_AVX_VNNI_H_

// AVX-VNNI: vpdpbusd on CPUs that have AVX2 and not AVX-512, e.g. Alder Lake to
// Arrow Lake. Highway has no target for them. Kernels that multiply int8 are
// therefore compiled for AVX2 twice, and those with AVX-VNNI (*_avxvnni.cc)
// take the place of the others where HasAvxVnni().
//
// AVX-VNNI-INT8 adds vpdpbssd, which multiplies s8 by s8 (Sierra Forest, Arrow
// Lake). Kernels with it (*_avxvnniint8.cc) come first where HasAvxVnniInt8().

// Whether this compiler knows AVX-VNNI, so that there are such kernels. Those
// of AVX-VNNI-INT8 are compiled with them, although no compiler need know it.
#if defined(__x86_64__) && __has_include(<avxvnniintrin.h>)
#define QUERN_AVX_VNNI 1
#else
#define QUERN_AVX_VNNI 0
#endif

namespace quern {

// The name of this instruction set, beside Highway's: what a plan's target()
// returns where its kernels use AVX-VNNI.
inline constexpr char kAvxVnniTarget[] = "AVX2_VNNI";
inline constexpr char kAvxVnniInt8Target[] = "AVX2_VNNI_INT8";

// Whether kernels with AVX-VNNI take the place of those of AVX2: they were
// compiled, this CPU has AVX-VNNI, and no test forbids it. Says nothing about
// AVX2, which Highway's dispatch has proved before. Thread-safe.
bool HasAvxVnni();

// Plans made from now on by this process may use AVX-VNNI (the default), or may
// not. Like hwy::SetSupportedTargetsForTest, for tests, and for tools whose
// caller asks for one instruction set.
void AllowAvxVnniForTest(bool allowed);

// Whether kernels may use AVX-VNNI-INT8. They may not where they may not use
// AVX-VNNI.
bool HasAvxVnniInt8();
void AllowAvxVnniInt8ForTest(bool allowed);

// Whether this process executes vpdpbssd by software, so that HasAvxVnniInt8()
// is true on a CPU without it. Only testing/emulate_avx_vnni_int8.h says so.
void SetAvxVnniInt8IsEmulated(bool emulated);
bool AvxVnniInt8IsEmulated();

}  // namespace quern

#endif  // QUERN_CORE_AVX_VNNI_H_
