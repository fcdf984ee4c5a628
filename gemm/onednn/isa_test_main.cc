// The main() of a test that ONEDNN_MAX_CPU_ISA caps to one instruction set. The
// test fails where oneDNN uses more than the cap. Where the CPU has nothing
// above the cap, the test would only repeat the DEFAULT one, so it prints
// SKIPPED.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace {

// What oneDNN uses without a cap, as a set of bits; 0: unknown. It reads the
// environment once in a process, so another one asks.
unsigned UsedWithoutCap() {
  int ends[2];
  if (pipe(ends) != 0) return 0;
  const pid_t child = fork();
  if (child == 0) {
    unsetenv("ONEDNN_MAX_CPU_ISA");
    const auto used = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    _exit(write(ends[1], &used, sizeof(used)) == sizeof(used) ? 0 : 1);
  }
  close(ends[1]);
  unsigned used = 0;
  int status = 1;
  if (child < 0 || read(ends[0], &used, sizeof(used)) != sizeof(used) ||
      waitpid(child, &status, 0) != child || status != 0) {
    used = 0;
  }
  close(ends[0]);
  return used;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* cap = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (cap == nullptr || std::string(cap) == "DEFAULT") return RUN_ALL_TESTS();
  const std::map<std::string, dnnl::cpu_isa> isas = {
      {"AVX2", dnnl::cpu_isa::avx2},
      {"AVX512_CORE", dnnl::cpu_isa::avx512_core},
      {"AVX512_CORE_VNNI", dnnl::cpu_isa::avx512_core_vnni},
      {"AVX512_CORE_BF16", dnnl::cpu_isa::avx512_core_bf16}};
  const auto isa = isas.find(cap);
  if (isa == isas.end()) {
    std::cerr << "FAILED: unknown ONEDNN_MAX_CPU_ISA=" << cap << "\n";
    return 1;
  }
  const unsigned without_cap = UsedWithoutCap();
  if (without_cap == 0) {
    std::cerr << "FAILED: what oneDNN uses without a cap is unknown\n";
    return 1;
  }
  // The values are sets of bits.
  const auto most = static_cast<unsigned>(isa->second);
  if ((without_cap & ~most) == 0) {
    std::cout << "SKIPPED: this CPU has nothing above " << cap
              << ", so DEFAULT is the same test\n";
    return 0;
  }
  const auto used = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  if ((used & ~most) != 0) {
    std::cerr << "FAILED: oneDNN uses more than ONEDNN_MAX_CPU_ISA=" << cap
              << " allows\n";
    return 1;
  }
  if (used != most) {
    std::cout << "SKIPPED: this CPU has no " << cap << "\n";
    return 0;
  }
  return RUN_ALL_TESTS();
}
