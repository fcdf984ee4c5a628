#include "quern/packing/code_pack.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/math_util.h"
#include "quern/packing/code_layout.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class CodePackTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(CodePackTest);

// Rows of random codes, each at a guard page.
class RandomRows {
 public:
  RandomRows(Rng& rng, int64_t bits, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; ++i) {
      rows_.emplace_back(k, i % 2 == 0 ? Edge::kBegin : Edge::kEnd);
      for (int64_t at = 0; at < k; ++at) {
        const auto byte = static_cast<uint8_t>(rng.Next());
        rows_.back()[at] = bits == 4 ? byte % 16 : byte;
      }
      pointers_.push_back(rows_.back().data());
    }
  }
  const std::vector<const uint8_t*>& pointers() const { return pointers_; }
  int64_t Code(int64_t n, int64_t k) const {
    return pointers_[static_cast<size_t>(n)][k];
  }

 private:
  std::deque<GuardBuffer<uint8_t>> rows_;
  std::vector<const uint8_t*> pointers_;
};

// By the formulas of code_layout.h.
int64_t PackedCode(const CodeLayout& layout, const uint8_t* packed, int64_t n,
                   int64_t k) {
  const uint8_t* panel = packed + n / 16 * layout.panel_bytes();
  const int64_t c = n % 16;
  if (layout.bits() == 8) {
    return panel[k / 4 * 64 + c / 4 * 16 + k % 4 / 2 * 8 + c % 4 * 2 + k % 2];
  }
  const int64_t i = k % 8, bit = 16 * (i % 2) + 4 * (i / 2);
  return panel[k / 8 * 64 + 4 * c + bit / 8] >> bit % 8 & 15;
}

TEST_P(CodePackTest, HasEveryCodeWhereTheLayoutSays) {
  TestRng rng;
  ManyWorkers executor(3);
  for (const int64_t bits : {8, 4}) {
    for (const int64_t n : {1, 3, 4, 15, 16, 17, 40}) {
      for (const int64_t k : {1, 3, 4, 7, 8, 15, 16, 31, 32, 33, 64, 97, 160}) {
        SCOPED_TRACE(testing::Message()
                     << "bits=" << bits << " n=" << n << " k=" << k);
        CodePackSpec spec;
        const auto layout = CodeLayout::Create(bits, k, n);
        ASSERT_EQ(layout.status(), absl::OkStatus());
        spec.layout = *layout;
        spec.fill = static_cast<uint8_t>(bits == 8 ? 0x80 : 9);
        const auto plan = CodePackPlan::Create(spec);
        ASSERT_EQ(plan.status(), absl::OkStatus());
        EXPECT_RAN_ON(*plan);
        const RandomRows rows(rng, bits, n, k);
        GuardBuffer<uint8_t> packed(layout->bytes());
        {
          NoAllocScope none;
          plan->Pack(rows.pointers(), packed.data(), executor);
        }
        for (int64_t column = 0; column < RoundUp(n, int64_t{16}); ++column) {
          for (int64_t i = 0; i < layout->lines() * layout->line_k(); ++i) {
            const int64_t want =
                column < n && i < k ? rows.Code(column, i) : spec.fill;
            ASSERT_EQ(PackedCode(*layout, packed.data(), column, i), want)
                << "column " << column << ", k " << i;
          }
        }
      }
    }
  }
}

TEST(CodePackRefusalTest, NamesWhatIsWrong) {
  CodePackSpec spec;
  ExpectRefusal(CodePackPlan::Create(spec).status(),
                "code_pack: layout is empty");
  spec.layout = *CodeLayout::Create(8, 33, 2);
  // Two codes of 4 bits in one byte once spoiled the codes beside them.
  CodePackSpec of4 = spec;
  of4.layout = *CodeLayout::Create(4, 33, 2);
  of4.fill = 0x88;
  ExpectRefusal(CodePackPlan::Create(of4).status(),
                "code_pack: fill=136; need 0 <= fill <= 15");
  const auto plan = CodePackPlan::Create(spec);
  ASSERT_EQ(plan.status(), absl::OkStatus());
  GuardBuffer<uint8_t> packed(spec.layout.bytes());
  const std::vector<uint8_t> row(33);
  ExpectRefusal(plan->CheckArgs({row.data()}, packed.data()), "rows=1");
  ExpectRefusal(plan->CheckArgs({row.data(), nullptr}, packed.data()),
                "a row is null");
  ExpectRefusal(plan->CheckArgs({row.data(), row.data()}, packed.data() + 1),
                "1 bytes past a cache line");
  EXPECT_EQ(plan->CheckArgs({row.data(), row.data()}, packed.data()),
            absl::OkStatus());
}

}  // namespace
}  // namespace quern
