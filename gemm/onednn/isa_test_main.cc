// The main() of a test that ONEDNN_MAX_CPU_ISA caps to one instruction set:
// where this CPU has less, it would repeat the test of what the CPU has, and
// says so instead.

#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "oneapi/dnnl/dnnl.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* cap = std::getenv("ONEDNN_MAX_CPU_ISA");
  const std::map<std::string, dnnl::cpu_isa> isas = {
      {"AVX2", dnnl::cpu_isa::avx2},
      {"AVX512_CORE", dnnl::cpu_isa::avx512_core},
      {"AVX512_CORE_VNNI", dnnl::cpu_isa::avx512_core_vnni},
      {"AVX512_CORE_BF16", dnnl::cpu_isa::avx512_core_bf16}};
  if (cap != nullptr && std::string(cap) != "DEFAULT") {
    const auto isa = isas.find(cap);
    if (isa == isas.end()) {
      std::cerr << "no instruction set of this test: " << cap << "\n";
      return 1;
    }
    if (dnnl::get_effective_cpu_isa() != isa->second) {
      std::cout << "SKIPPED: this CPU has no " << cap << "\n";
      return 0;
    }
  }
  return RUN_ALL_TESTS();
}
