#include "quern/gemm/weights/block_pack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/math_util.h"
#include "quern/gemm/weights/block_pack_testutil.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class BlockPackTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(BlockPackTest);

// Rows of blocks whose bits are random. Each row lies at a guard page: rows of
// an even number begin behind one, the others end before one.
class RandomRows {
 public:
  RandomRows(Rng& rng, const BlockFormatInfo& info, int64_t n, int64_t k)
      : info_(info) {
    for (int64_t i = 0; i < n; ++i) {
      rows_.emplace_back(k / info.values * info.bytes,
                         i % 2 == 0 ? Edge::kBegin : Edge::kEnd);
      for (int64_t at = 0; at < rows_.back().size(); ++at) {
        rows_.back()[at] = static_cast<uint8_t>(rng.Next());
      }
      pointers_.push_back(rows_.back().data());
    }
  }
  const std::vector<const uint8_t*>& pointers() const { return pointers_; }

  FileColumn column(int64_t n) const {
    return {info_, pointers_[static_cast<size_t>(n)]};
  }

 private:
  const BlockFormatInfo& info_;
  std::deque<GuardBuffer<uint8_t>> rows_;
  std::vector<const uint8_t*> pointers_;
};

TEST_P(BlockPackTest, HasEveryBitOfTheFile) {
  TestRng rng;
  ManyWorkers executor(3);
  for (const BlockFormatInfo& info : BlockFormats()) {
    for (const int64_t n : {1, 3, 4, 15, 16, 17, 40}) {
      // The last is more than one task.
      for (const int64_t blocks : {1, 2, 3, 4, 5, 7, 8, 9, 24, 256 + 8 * 9}) {
        if (blocks * 32 % info.values != 0) continue;
        if (blocks > 24 && n != 3 && n != 17) continue;
        SCOPED_TRACE(testing::Message()
                     << info.name << " n=" << n << " blocks=" << blocks);
        BlockPackSpec spec;
        spec.format = info.format;
        spec.n = n;
        spec.k = 32 * blocks;
        if (blocks % 2 == 1) spec.stream_from_bytes = 0;
        const auto plan = BlockPackPlan::Create(spec);
        ASSERT_EQ(plan.status(), absl::OkStatus());
        EXPECT_RAN_ON(*plan);
        const RandomRows rows(rng, info, n, spec.k);
        const BlockPanels& layout = plan->layout();
        GuardBuffer<uint8_t> packed(layout.bytes());
        plan->Pack(rows.pointers(), packed.data(), executor);
        int64_t wrong = 0;
        for (int64_t column = 0; column < RoundUp(n, int64_t{16}); ++column) {
          for (int64_t record = 0; record < layout.records(); ++record) {
            const FileColumn of_file = rows.column(std::min(column, n - 1));
            ForEachPacked(
                layout, column < n ? &of_file : nullptr, packed.data(), column,
                record, [&](int64_t got, int64_t want, int64_t i) {
                  wrong += got != want;
                  if (got == want || wrong > 1) return;
                  ADD_FAILURE() << got << " instead of " << want << ", column "
                                << column << ", record " << record << ", " << i;
                });
          }
        }
      }
    }
  }
}

TEST_P(BlockPackTest, StoresPastTheCachesAreTheSame) {
  TestRng rng;
  ManyWorkers executor(2);
  for (const BlockFormatInfo& info : BlockFormats()) {
    BlockPackSpec spec;
    spec.format = info.format;
    spec.n = 21;
    spec.k = 768;
    const auto cached = BlockPackPlan::Create(spec);
    spec.stream_from_bytes = 0;
    const auto streamed = BlockPackPlan::Create(spec);
    ASSERT_EQ(cached.status(), absl::OkStatus());
    ASSERT_EQ(streamed.status(), absl::OkStatus());
    EXPECT_RAN_ON(*streamed);
    const RandomRows rows(rng, info, spec.n, spec.k);
    const int64_t bytes = cached->layout().bytes();
    GuardBuffer<uint8_t> a(bytes), b(bytes);
    {
      NoAllocScope none;
      cached->Pack(rows.pointers(), a.data(), executor);
      streamed->Pack(rows.pointers(), b.data(), executor);
    }
    EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(bytes)), 0)
        << info.name;
  }
}

TEST(BlockPackRefusalTest, NamesWhatIsWrong) {
  BlockPackSpec spec;
  spec.format = static_cast<BlockFormat>(5);
  spec.n = 2;
  spec.k = 256;
  ExpectRefusal(BlockPackPlan::Create(spec).status(), "block_pack: format=5");
  spec.format = BlockFormat::kQ4_K;
  spec.k = 32;
  ExpectRefusal(BlockPackPlan::Create(spec).status(),
                "k=32; blocks of Q4_K need a multiple of 256");
  spec.k = 0;
  ExpectRefusal(BlockPackPlan::Create(spec).status(),
                "k=0; need a positive multiple of 256");
  spec.k = 256;
  spec.n = 0;
  ExpectRefusal(BlockPackPlan::Create(spec).status(), "n=0; need 1 or more");
  spec.n = 2;
  spec.stream_from_bytes = -1;
  ExpectRefusal(BlockPackPlan::Create(spec).status(), "stream_from_bytes=-1");
  spec.stream_from_bytes = 0;
  const auto plan = BlockPackPlan::Create(spec);
  ASSERT_EQ(plan.status(), absl::OkStatus());
  GuardBuffer<uint8_t> packed(plan->layout().bytes());
  std::vector<uint8_t> row(144);
  ExpectRefusal(plan->CheckArgs({row.data()}, packed.data()), "rows=1");
  ExpectRefusal(plan->CheckArgs({row.data(), nullptr}, packed.data()),
                "a row is null");
  ExpectRefusal(plan->CheckArgs({row.data(), row.data()}, packed.data() + 1),
                "1 bytes past a cache line");
  ExpectRefusal(plan->CheckArgs({row.data(), row.data()}, nullptr),
                "packed is null");
  EXPECT_EQ(plan->CheckArgs({row.data(), row.data()}, packed.data()),
            absl::OkStatus());
}

}  // namespace
}  // namespace quern
