#include "quern/ops/registry/sglang/packing/pack.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

uint64_t Fnv1a(const GuardBuffer<uint8_t>& bytes) {
  const std::vector<uint8_t> v = bytes.ToVector();
  return HashOf(std::string(v.begin(), v.end()));
}

// The formulas of layout.h, byte by byte. plain(n, b) is byte b of the
// row of column n.
std::vector<uint8_t> Formula(
    const SglangLayout& layout,
    const std::function<uint8_t(int64_t n, int64_t b)>& plain,
    const std::vector<int32_t>& compensation) {
  std::vector<uint8_t> want;
  for (int64_t block = 0; block < layout.blocks(); ++block) {
    const int64_t cols = layout.cols(block), n0 = block * 32;
    if (layout.dtype() == DType::kU8) {
      const auto code = [&](int64_t n, int64_t k) {
        return plain(n0 + n, k / 2) >> (k % 2 * 4) & 15;
      };
      for (int64_t j = 0; j < layout.k() / 2; ++j)
        for (int64_t c = 0; c < 16; ++c)
          for (int64_t i = 0; i < 2; ++i)
            want.push_back(static_cast<uint8_t>(code(c, 2 * j + i) |
                                                code(16 + c, 2 * j + i) << 4));
      continue;
    }
    // Bytes of a column that stay together: a pair or a quad.
    const int64_t together = layout.dtype() == DType::kF8E4M3 ? 2 : 4;
    for (int64_t j = 0; j < layout.plain_row_bytes() / together; ++j)
      for (int64_t c = 0; c < cols; ++c)
        for (int64_t i = 0; i < together; ++i)
          want.push_back(plain(n0 + c, j * together + i));
    if (!layout.has_compensation()) continue;
    for (int64_t c = 0; c < cols; ++c)
      for (int shift = 0; shift < 32; shift += 8)
        want.push_back(static_cast<uint8_t>(
            static_cast<uint32_t>(compensation[static_cast<size_t>(n0 + c)]) >>
            shift));
  }
  return want;
}

class SglangPackTest : public IsaTest {
 protected:
  SglangPackPlan PlanFor(DType dtype, int64_t k, int64_t n) {
    const auto layout = SglangLayout::Create(dtype, k, n);
    EXPECT_TRUE(layout.ok()) << layout.status();
    const auto plan = SglangPackPlan::Create(*layout);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }

  template <typename T>
  void ExpectMatchesFormula(Rng& rng, int64_t k, int64_t n, int64_t pad,
                            Edge edge, int64_t shift, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " n=" << n << " k=" << k
                 << " pad=" << pad << " shift=" << shift);
    const SglangPackPlan plan = PlanFor(DTypeOf<T>, k, n);
    const SglangLayout& layout = plan.layout();
    const int64_t row_bytes = layout.plain_row_bytes();
    const int64_t cols = row_bytes / static_cast<int64_t>(sizeof(T));
    StridedMatrix<T> w(n, cols, cols + pad, edge, shift);
    for (int64_t r = 0; r < n; ++r) {
      auto* row = reinterpret_cast<uint8_t*>(w.view().Row(r));
      for (int64_t b = 0; b < row_bytes; ++b) {
        row[b] = static_cast<uint8_t>(rng.Next());
      }
    }
    std::vector<int32_t> compensation;
    for (int64_t i = 0; i < n && layout.has_compensation(); ++i) {
      compensation.push_back(static_cast<int32_t>(rng.Next()));
    }
    const GuardBuffer<int32_t> comp(compensation);
    GuardBuffer<uint8_t> packed(layout.bytes(), edge, shift);
    ASSERT_EQ(plan.CheckArgs(w.view(), comp.view(), packed.data()),
              absl::OkStatus());
    plan.Pack(w.view(), comp.view(), packed.data(), executor);

    const auto plain = [&](int64_t r, int64_t b) {
      return reinterpret_cast<const uint8_t*>(w.view().Row(r))[b];
    };
    const std::vector<uint8_t> want = Formula(layout, plain, compensation);
    ASSERT_EQ(static_cast<int64_t>(want.size()), layout.bytes());
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(+packed[static_cast<int64_t>(i)], +want[i])
          << "byte " << i << " of " << want.size();
    }
  }

  template <typename T>
  void ExpectMatchesFormulaOnAllShapes() {
    TestRng rng;
    InlineExecutor executor;
    int64_t i = 0;
    for (const int64_t n : {16, 32, 48, 64, 80, 96}) {
      if (!SglangLayout::Create(DTypeOf<T>, 32, n).ok()) continue;
      for (const int64_t k : {32, 64, 96, 128, 160, 288, 544}) {
        ExpectMatchesFormula<T>(rng, k, n, i % 5,
                                i % 2 == 0 ? Edge::kEnd : Edge::kBegin, i % 7,
                                executor);
        if (HasFatalFailure()) return;
        ++i;
      }
    }
    const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
    ASSERT_TRUE(pool.ok()) << pool.status();
    ExpectMatchesFormula<T>(rng, 96, 416, 1, Edge::kEnd, 1, **pool);
  }
};
QUERN_INSTANTIATE_ISA_TEST(SglangPackTest);

TEST_P(SglangPackTest, MatchesFormulaBf16) {
  ExpectMatchesFormulaOnAllShapes<BFloat16>();
}
TEST_P(SglangPackTest, MatchesFormulaF16) {
  ExpectMatchesFormulaOnAllShapes<Float16>();
}
TEST_P(SglangPackTest, MatchesFormulaF8) {
  ExpectMatchesFormulaOnAllShapes<Float8E4M3>();
}
TEST_P(SglangPackTest, MatchesFormulaInt8) {
  ExpectMatchesFormulaOnAllShapes<int8_t>();
}
TEST_P(SglangPackTest, MatchesFormula4Bit) {
  ExpectMatchesFormulaOnAllShapes<uint8_t>();
}

// The hashes were produced by SGLang's own packing functions, compiled alone
// (commit 2f14d6c6f).
TEST_P(SglangPackTest, ReproducesSglangInt8) {
  const SglangPackPlan plan = PlanFor(DType::kI8, 64, 64);
  std::vector<int8_t> w;
  std::vector<int32_t> compensation;
  for (int n = 0; n < 64; ++n) {
    int32_t sum = 0;
    for (int k = 0; k < 64; ++k) {
      w.push_back(static_cast<int8_t>((7 * n + 3 * k) % 251 - 125));
      sum += w.back();
    }
    compensation.push_back(128 * sum);
  }
  GuardBuffer<uint8_t> packed(plan.layout().bytes());
  InlineExecutor executor;
  plan.Pack(DenseMatrix<const int8_t>(w.data(), 64, 64),
            DenseVector<const int32_t>(compensation.data(), 64), packed.data(),
            executor);
  EXPECT_EQ(packed.size(), 4352);
  EXPECT_EQ(packed[0], 0x83);
  EXPECT_EQ(packed[4], 0x8a);
  EXPECT_EQ(Fnv1a(packed), 0x43784b3c3eb2cb20u);
}

TEST_P(SglangPackTest, ReproducesSglang16BitWithTail) {
  const SglangPackPlan plan = PlanFor(DType::kF16, 32, 48);
  std::vector<Float16> w(48 * 32);
  for (size_t n = 0; n < 48; ++n) {
    for (size_t k = 0; k < 32; ++k) {
      const auto bits = static_cast<uint16_t>(257 * n + 31 * k + 5);
      std::memcpy(&w[n * 32 + k], &bits, sizeof(bits));
    }
  }
  GuardBuffer<uint8_t> packed(plan.layout().bytes());
  InlineExecutor executor;
  plan.Pack(DenseMatrix<const Float16>(w.data(), 48, 32), {}, packed.data(),
            executor);
  EXPECT_EQ(packed.size(), 3072);
  EXPECT_EQ(packed[2048], 0x25);
  EXPECT_EQ(Fnv1a(packed), 0xadd982634baa74ceu);
}

TEST_P(SglangPackTest, ReproducesSglang4Bit) {
  const SglangPackPlan plan = PlanFor(DType::kU8, 64, 32);
  std::vector<uint8_t> w;
  for (int n = 0; n < 32; ++n) {
    for (int k = 0; k < 32; ++k) {
      w.push_back(static_cast<uint8_t>((13 * n + 29 * k + 7) % 256));
    }
  }
  GuardBuffer<uint8_t> packed(plan.layout().bytes());
  InlineExecutor executor;
  plan.Pack(DenseMatrix<const uint8_t>(w.data(), 32, 32), {}, packed.data(),
            executor);
  EXPECT_EQ(packed.size(), 1024);
  EXPECT_EQ(packed[1], 0xd0);
  EXPECT_EQ(Fnv1a(packed), 0x86576dc924db8105u);
}

TEST_P(SglangPackTest, AllocatesNothing) {
  const SglangPackPlan plan = PlanFor(DType::kI8, 96, 64);
  const std::vector<int8_t> w(96 * 64, 3);
  const std::vector<int32_t> compensation(64, 7);
  GuardBuffer<uint8_t> packed(plan.layout().bytes());
  InlineExecutor executor;
  EXPECT_NO_ALLOCATION(
      plan.Pack(DenseMatrix<const int8_t>(w.data(), 64, 96),
                DenseVector<const int32_t>(compensation.data(), 64),
                packed.data(), executor));
}

TEST(SglangLayoutTest, RefusesWhatSglangRefuses) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 64 * 64;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  struct Case {
    DType dtype;
    int64_t k, n;
    absl::StatusCode code;
    const char* words;
  };
  for (const Case& c : {
           Case{DType::kF32, 32, 32, kUnimplemented, "dtype=f32; need bf16"},
           Case{DType::kBF16, 0, 32, kInvalid, "need n >= 1 and k >= 1"},
           Case{DType::kBF16, 32, 12, kUnimplemented,
                "n=12; SGLang keeps n < 16 unpacked"},
           Case{DType::kBF16, 32, 40, kInvalid, "need n % 16 == 0"},
           Case{DType::kF16, 48, 32, kInvalid, "k % 32 == 0"},
           Case{DType::kF8E4M3, 16, 32, kInvalid, "k % 32 == 0"},
           Case{DType::kI8, 64, 48, kInvalid,
                "sglang_layout: i8 w[n=48, k=64]; need n % 32 == 0"},
           Case{DType::kU8, 64, 16, kInvalid, "need n % 32 == 0"},
           Case{DType::kBF16, kHuge, 32, kInvalid, "fits in int64"},
           Case{DType::kU8, 32, kHuge, kInvalid, "fits in int64"},
       }) {
    const absl::Status status =
        SglangLayout::Create(c.dtype, c.k, c.n).status();
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_NE(std::string(status.message()).find(c.words), std::string::npos)
        << status << "\nlacks: " << c.words;
  }
}

TEST(SglangLayoutTest, IsDense) {
  const auto i8 = SglangLayout::Create(DType::kI8, 64, 96);
  ASSERT_TRUE(i8.ok()) << i8.status();
  EXPECT_EQ(i8->blocks(), 3);
  EXPECT_EQ(i8->block_offset(2), 2 * 32 * 68);
  EXPECT_EQ(i8->compensation_offset(), 32 * 64);
  EXPECT_EQ(i8->bytes(), 96 * 68);
  const auto f16 = SglangLayout::Create(DType::kF16, 64, 48);
  ASSERT_TRUE(f16.ok()) << f16.status();
  EXPECT_EQ(f16->cols(1), 16);
  EXPECT_EQ(f16->bytes(), 48 * 128);
  EXPECT_EQ(SglangLayout::Create(DType::kU8, 64, 32)->bytes(), 32 * 32);
  EXPECT_EQ(SglangLayout().bytes(), 0);
  EXPECT_NE(*i8, *f16);
}

TEST(SglangPackPlanTest, RefusesBadArguments) {
  EXPECT_EQ(SglangPackPlan::Create(SglangLayout()).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto plan =
      SglangPackPlan::Create(*SglangLayout::Create(DType::kI8, 32, 32));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int8_t> w(32 * 32);
  const std::vector<uint8_t> u8(32 * 32);
  const std::vector<int32_t> comp(32);
  std::vector<uint8_t> packed(32 * 36);
  const auto good = DenseMatrix<const int8_t>(w.data(), 32, 32);
  const auto all = DenseVector<const int32_t>(comp.data(), 32);
  EXPECT_EQ(plan->CheckArgs(good, all, packed.data()), absl::OkStatus());

  const auto expect = [](const absl::Status& status, const char* words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
        << status << "\nlacks: " << words;
  };
  expect(plan->CheckArgs(DenseMatrix<const uint8_t>(u8.data(), 32, 32), all,
                         packed.data()),
         "w is u8; need i8");
  expect(plan->CheckArgs(DenseVector<const int8_t>(w.data(), 32), all,
                         packed.data()),
         "rank of w=1");
  expect(plan->CheckArgs(DenseMatrix<const int8_t>(w.data(), 31, 32), all,
                         packed.data()),
         "rows of w=31");
  expect(plan->CheckArgs(DenseMatrix<const int8_t>(w.data(), 32, 31), all,
                         packed.data()),
         "columns of w=31");
  expect(plan->CheckArgs(good, {}, packed.data()), "compensation=0");
  expect(plan->CheckArgs(good, all, nullptr), "null data");
  expect(plan->CheckArgs(MatrixView<const int8_t>(w.data(), {32, 32}, {-5, 1}),
                         all, packed.data()),
         "w has stride -5 in dimension 0; need 0 or more");
  expect(plan->CheckArgs(
             AnyTensorView(DType::kI8, static_cast<const void*>(w.data()), 2,
                           {32, 32}, {64, 2}),
             all, packed.data()),
         "w has stride 2 in dimension 1; need 1");
  for (const int64_t stride : {0, 31}) {
    expect(plan->CheckArgs(
               MatrixView<const int8_t>(w.data(), {32, 32}, {stride, 1}), all,
               packed.data()),
           "in dimension 0; need 32 or more, as its elements must not overlap");
  }
  const auto* inside = reinterpret_cast<const int8_t*>(packed.data() + 1151);
  expect(plan->CheckArgs(DenseMatrix(inside, 32, 32), all, packed.data()),
         "packed overlaps w");
  const auto* comp_inside = reinterpret_cast<const int32_t*>(packed.data());
  expect(
      plan->CheckArgs(good, DenseVector(comp_inside + 287, 32), packed.data()),
      "packed overlaps compensation");
}

}  // namespace
}  // namespace quern
