#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/int4_linear.h"
#include "gtest/gtest.h"
#include "testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Spec = Int4LinearSpec;
using Weights = Int4Weights;

// 8 columns, 64 k, groups of 32, in every layout.
class Int4LinearPlanTest : public testing::Test {
 protected:
  Spec SpecOf(Int4Format format) {
    Spec spec;
    spec.n = 8;
    spec.k = 64;
    spec.group_size = 32;
    spec.format = format;
    return spec;
  }
  Weights WeightsOf(Int4Format format) {
    Weights w;
    w.scales = DenseMatrix(scales_.data(), 2, 8);
    w.zeros = DenseMatrix(words_.data(), 2, 1);
    switch (format) {
      case Int4Format::kPlain:
        w.codes = DenseMatrix(bytes_.data(), 8, 64);
        w.zeros = DenseMatrix(bytes_.data(), 2, 8);
        break;
      case Int4Format::kAwq:
        w.codes = DenseMatrix(words_.data(), 64, 1);
        break;
      case Int4Format::kGptq:
      case Int4Format::kGptqV2:
        w.codes = DenseMatrix(words_.data(), 8, 8);
        break;
      case Int4Format::kQ4_0:
        return {DenseMatrix(bytes_.data(), 8, 36), {}, {}, {}};
      case Int4Format::kQ8_0:
        return {DenseMatrix(bytes_.data(), 8, 68), {}, {}, {}};
    }
    return w;
  }
  absl::Status Create(const Spec& spec, const Weights& w,
                      const AnyTensorView& bias = {}) {
    return Int4LinearPlan::Create(spec, w, bias, executor_).status();
  }
  // change(spec, weights) makes one of them bad.
  template <typename Change>
  void Refuse(Int4Format format, const Change& change, const std::string& words,
              absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    Spec spec = SpecOf(format);
    Weights w = WeightsOf(format);
    EXPECT_EQ(Create(spec, w), absl::OkStatus());
    change(spec, w);
    ExpectRefusal(Create(spec, w), code, words);
  }

  InlineExecutor executor_;
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(1024);
  std::vector<int32_t> words_ = std::vector<int32_t>(128);
  std::vector<float> scales_ = std::vector<float>(64);
};

TEST_F(Int4LinearPlanTest, RefusesABadSpec) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto refuse =
      [&](Int4Format format, auto change, const std::string& words,
          absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
        Refuse(
            format, [&](Spec& s, Weights&) { change(s); }, words, code);
      };
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.n = 0; },
      "int4_linear: n=0; need 1 <= n <= 2147483647");
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.k = int64_t{1} << 31; },
      "k=2147483648; need 1 <= k");
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.a = DType::kI8; }, "a is i8",
      kUnimplemented);
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.c = DType::kI32; }, "c is i32",
      kUnimplemented);
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.format = static_cast<Int4Format>(9); },
      "format=9");
  for (const int64_t size : {0, 8, 24, -2}) {
    refuse(
        Int4Format::kGptq, [&](Spec& s) { s.group_size = size; },
        "group_size=" + std::to_string(size) +
            "; need a multiple of 16, k=64 or more, or -1");
  }
  refuse(
      Int4Format::kQ4_0, [](Spec& s) { s.group_size = 64; },
      "group_size=64; need 32, as q4_0");
  refuse(
      Int4Format::kAwq, [](Spec& s) { s.n = 12; },
      "n=12; awq needs a multiple of 8");
  refuse(
      Int4Format::kGptq, [](Spec& s) { s.k = 60; },
      "k=60; gptq needs a multiple of 8");
  refuse(
      Int4Format::kQ8_0, [](Spec& s) { s.k = 48; },
      "k=48; q8_0 needs a multiple of 32");
}

TEST_F(Int4LinearPlanTest, RefusesBadWeights) {
  const auto refuse = [&](Int4Format format, auto change,
                          const std::string& words) {
    Refuse(
        format, [&](Spec&, Weights& w) { change(w); }, words);
  };
  refuse(
      Int4Format::kAwq,
      [&](Weights& w) { w.codes = DenseMatrix(words_.data(), 8, 8); },
      "codes is [8, 8]; need [64, 1]");
  refuse(
      Int4Format::kGptq,
      [&](Weights& w) { w.codes = DenseMatrix(words_.data(), 64, 1); },
      "codes is [64, 1]; need [8, 8]");
  refuse(
      Int4Format::kGptqV2,
      [&](Weights& w) { w.codes = DenseMatrix(bytes_.data(), 8, 8); },
      "codes is u8; need i32");
  refuse(
      Int4Format::kPlain,
      [&](Weights& w) { w.codes = DenseMatrix(words_.data(), 8, 8); },
      "codes is i32; need u8");
  refuse(
      Int4Format::kQ4_0,
      [&](Weights& w) { w.codes = DenseMatrix(bytes_.data(), 8, 34); },
      "codes is [8, 34]; need [8, 36]");
  refuse(
      Int4Format::kGptq,
      [&](Weights& w) { w.scales = DenseMatrix(scales_.data(), 1, 8); },
      "scales is [1, 8]; need [2, 8]");
  refuse(
      Int4Format::kGptq,
      [&](Weights& w) { w.zeros = DenseMatrix(words_.data(), 2, 8); },
      "zeros is [2, 8]; need [2, 1]");
  refuse(
      Int4Format::kQ4_0,
      [&](Weights& w) { w.scales = DenseMatrix(scales_.data(), 2, 8); },
      "scales is given; q4_0 has none");
  refuse(
      Int4Format::kAwq,
      [&](Weights& w) { w.g_idx = DenseVector(words_.data(), 64); },
      "g_idx is given; awq has none");
  refuse(
      Int4Format::kGptq,
      [&](Weights& w) { w.g_idx = DenseVector(words_.data(), 63); },
      "g_idx is [63]; need [64]");
  bytes_[511] = 16;
  Spec spec = SpecOf(Int4Format::kPlain);
  ExpectRefusal(Create(spec, WeightsOf(spec.format)),
                "codes[7, 63]=16; need 15 or less");
  Weights w = WeightsOf(Int4Format::kPlain);
  w.codes = DenseMatrix(bytes_.data() + 512, 8, 64);
  w.zeros = DenseMatrix(bytes_.data() + 496, 2, 8);
  ExpectRefusal(Create(spec, w), "zeros[1, 7]=16; need 15 or less");
  w = WeightsOf(Int4Format::kGptq);
  w.scales = DenseMatrix(bytes_.data(), 2, 8);
  ExpectRefusal(Create(SpecOf(Int4Format::kGptq), w),
                absl::StatusCode::kUnimplemented,
                "scales is u8; need f32 or bf16 or f16");
  // Columns that zeros of eight to a word cannot name.
  spec = SpecOf(Int4Format::kGptq);
  spec.n = 7;
  w = WeightsOf(spec.format);
  w.codes = DenseMatrix(words_.data(), 8, 7);
  w.scales = DenseMatrix(scales_.data(), 2, 7);
  ExpectRefusal(Create(spec, w), "n=7; gptq needs a multiple of 8");
  ExpectRefusal(Create(SpecOf(Int4Format::kQ4_0), WeightsOf(Int4Format::kQ4_0),
                       DenseVector(scales_.data(), 3)),
                "bias is [3]; need [8]");
}

TEST_F(Int4LinearPlanTest, RefusesGroupsOfAnotherSize) {
  std::vector<int32_t> g_idx(64);
  const auto refuse = [&](const std::string& words) {
    Weights w = WeightsOf(Int4Format::kGptq);
    w.g_idx = DenseVector(g_idx.data(), 64);
    ExpectRefusal(Create(SpecOf(Int4Format::kGptq), w), words);
  };
  refuse("g_idx has more than 32 of group 0");
  g_idx[5] = 2;
  refuse("g_idx[5]=2; need 0 <= group < 2");
  g_idx[5] = -1;
  refuse("g_idx[5]=-1; need 0 <= group < 2");
}

TEST_F(Int4LinearPlanTest, RefusesBadArguments) {
  const auto plan = Int4LinearPlan::Create(
      SpecOf(Int4Format::kAwq), WeightsOf(Int4Format::kAwq), {}, executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<BF> a(128), c(16);
  const std::vector<BF> constant(16);
  const AnyTensorView in = DenseMatrix(a.data(), 2, 64);
  EXPECT_EQ(plan->CheckArgs(in, DenseMatrix(c.data(), 2, 8)), absl::OkStatus());
  ExpectRefusal(plan->CheckArgs(in, DenseMatrix(c.data(), 1, 8)),
                "int4_linear: c is [1, 8]; need [2, 8]");
  ExpectRefusal(plan->CheckArgs(in, DenseMatrix(constant.data(), 2, 8)),
                "c is read-only");
  ExpectRefusal(plan->CheckArgs(in, DenseMatrix(a.data(), 2, 8)),
                "c overlaps a");
}

}  // namespace
}  // namespace quern
