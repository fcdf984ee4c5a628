#ifndef QUERN_TESTING_EMULATE_AVX_VNNI_INT8_H_
#define QUERN_TESTING_EMULATE_AVX_VNNI_INT8_H_

// Runs kernels of AVX2_VNNI_INT8 on CPUs that lack their one instruction,
// vpdpbssd: a handler of SIGILL executes it by software, on the registers that
// Linux gives back to the thread afterwards. The rest of a kernel runs as it
// is. An instruction takes about a microsecond, so shapes are small.
//
//   const bool kHasVpdpbssd = EmulateAvxVnniInt8();  // before main()
//   QUERN_INSTANTIATE_INT8_ISA_TEST(LinearInt8Test);
//
// Only operands in registers are understood, as core/quad_dot-inl.h has them.

#include <cstdint>

namespace quern {

// Whether kernels of AVX2_VNNI_INT8 run in this process from now on: the CPU
// has the instruction, or it is emulated. If neither, because a signal here
// does not get the upper halves of registers, says so on standard output. Ends
// the process if emulation gives wrong sums. Before other threads are started.
bool EmulateAvxVnniInt8();

// How many instructions were emulated so far, by all threads.
int64_t EmulatedInstructions();

}  // namespace quern

#endif  // QUERN_TESTING_EMULATE_AVX_VNNI_INT8_H_
