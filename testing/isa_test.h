#ifndef QUERN_TESTING_ISA_TEST_H_
#define QUERN_TESTING_ISA_TEST_H_

// Runs the tests of a suite once for each instruction set that this CPU has
// and this binary was compiled for, through the public API:
//
//   class RmsNormTest : public IsaTest {};
//   QUERN_INSTANTIATE_ISA_TEST(RmsNormTest);
//
//   TEST_P(RmsNormTest, IsExactOnSmallIntegers) {
//     const auto plan = RmsNormPlan::Create(spec);
//     EXPECT_RAN_ON(*plan);                // plan->target() is isa(), or
//     ...                                  // stands for it (core/isa.h)
//   }
//
// A test that passes without an EXPECT_RAN_ON has proved nothing about its
// instruction set, and fails.
//
// A suite whose kernels multiply int8 (core/avx_vnni.h) has
// QUERN_INSTANTIATE_INT8_ISA_TEST in place of the other: it also runs on
// AVX2_VNNI and AVX2_VNNI_INT8, where the CPU has them, or the test emulates
// the latter (testing/emulate_avx_vnni_int8.h). AVX2 is AVX2 alone in every
// suite.

#include <cstddef>
#include <cstdio>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/isa.h"

namespace quern {

inline constexpr size_t kLeastInstructionSets =
    HWY_ARCH_X86_64 && (HWY_TARGETS & (HWY_TARGETS - 1)) != 0 ? 2 : 1;

// What GoogleTest says of a test's parameter.
inline void PrintTo(const Isa& isa, std::ostream* out) { *out << isa.name(); }

// The instruction sets of this CPU that a suite runs on: with the leaves where
// kernels multiply int8, else Highway's targets alone.
enum class IsaKinds { kHighway, kLeaves };
inline std::vector<Isa> IsasOf(IsaKinds kinds, const std::vector<Isa>& all) {
  std::vector<Isa> isas;
  for (const Isa& isa : all) {
    if (kinds == IsaKinds::kLeaves || isa.leaf == IsaLeaf::kNone) {
      isas.push_back(isa);
    }
  }
  return isas;
}

// Whether an instruction of `isa` is executed by software here.
inline bool IsEmulated(const Isa& isa) {
  return isa == kAvx2VnniInt8 && AvxVnniInt8IsEmulated();
}

// Says in the test's log which instruction sets a suite runs on, and which this
// CPU does not have.
inline void PrintIsas(const char* suite, IsaKinds kinds) {
  const std::vector<Isa> ran = IsasOf(kinds, SupportedIsas());
  std::string names[2];
  for (const Isa& isa : IsasOf(kinds, CompiledIsas())) {
    bool has = false;
    for (const Isa& one : ran) has = has || one == isa;
    std::string& to = names[has ? 0 : 1];
    to += (to.empty() ? "" : ", ") + std::string(isa.name());
    if (has && IsEmulated(isa)) to += " (by emulation)";
  }
  std::printf("%s runs on %s; this CPU does not have: %s\n", suite,
              names[0].c_str(),
              names[1].empty() ? "(it has all)" : names[1].c_str());
}

class IsaTest : public testing::TestWithParam<Isa> {
 public:
  // The name of the instruction set asked for: Highway's, e.g. "AVX3_DL", or
  // one of core/avx_vnni.h.
  const char* isa() const { return GetParam().name(); }
  // Whether sizes must be small, because an instruction takes a microsecond.
  bool emulated() const { return IsEmulated(GetParam()); }

  testing::AssertionResult RanOn(const std::string& target) {
    proved_ = true;
    if (StandsFor(target, isa())) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "ran on " << target << "; asked for " << isa();
  }

 protected:
  void SetUp() override { UseOwnIsa(); }
  void TearDown() override {
    UseTheBestIsa();
    EXPECT_TRUE(proved_ || IsSkipped() || HasFailure())
        << "no EXPECT_RAN_ON: nothing shows that this test ran on " << isa();
  }

  // What make() returns where plans choose this CPU's best instruction set.
  template <typename Make>
  auto OnTheBestIsa(const Make& make) {
    UseTheBestIsa();
    auto made = make();
    UseOwnIsa();
    return made;
  }

 private:
  void UseOwnIsa() { UseIsaForTest(&GetParam()); }
  static void UseTheBestIsa() { UseIsaForTest(nullptr); }

  bool proved_ = false;
};

}  // namespace quern

// `plan` has `const char* target() const`.
#define EXPECT_RAN_ON(plan) EXPECT_TRUE(this->RanOn((plan).target()))

// Also tests that there is more than the baseline to run on: on x86-64 every
// CPU of interest has SSE4 and up. A binary that was compiled for one
// instruction set (--config=avx2only) runs that one.
#define QUERN_INSTANTIATE_ISA_TEST(suite) \
  QUERN_INSTANTIATE_ON_ISAS(suite, quern::IsaKinds::kHighway)
#define QUERN_INSTANTIATE_INT8_ISA_TEST(suite) \
  QUERN_INSTANTIATE_ON_ISAS(suite, quern::IsaKinds::kLeaves)
#define QUERN_INSTANTIATE_ON_ISAS(suite, kinds)                                \
  INSTANTIATE_TEST_SUITE_P(                                                    \
      suite##Group, suite,                                                     \
      testing::ValuesIn(quern::IsasOf(kinds, quern::SupportedIsas())),         \
      [](const testing::TestParamInfo<quern::Isa>& info) {                     \
        return std::string(info.param.name());                                 \
      });                                                                      \
  TEST(suite##Isas, AreNotEmpty) {                                             \
    quern::PrintIsas(#suite, kinds);                                           \
    EXPECT_GE(quern::IsasOf(quern::IsaKinds::kHighway, quern::SupportedIsas()) \
                  .size(),                                                     \
              quern::kLeastInstructionSets);                                   \
  }                                                                            \
  static_assert(true, "semicolon")

#endif  // QUERN_TESTING_ISA_TEST_H_
