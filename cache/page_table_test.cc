#include "quern/cache/page_table.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void ExpectRefused(const absl::Status& status, const char* words) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
  EXPECT_THAT(status.message(), HasSubstr(words));
  EXPECT_THAT(status.message(), HasSubstr("page_table: "));
}

TEST(PageTableTest, FindsTheSlotOfEachToken) {
  const std::vector<int64_t> indptr = {0, 2, 2, 5};
  const std::vector<int32_t> ids = {4, 1, 0, 4, 3};
  const PageTable table = PageTable::Build(indptr, ids, 3, 5).value();
  EXPECT_EQ(table.num_sequences(), 3);
  EXPECT_EQ(table.page_size(), 3);
  EXPECT_EQ(table.num_pages(), 5);
  EXPECT_THAT(table.Pages(0), ElementsAre(4, 1));
  EXPECT_THAT(table.Pages(1), ElementsAre());
  EXPECT_THAT(table.Pages(2), ElementsAre(0, 4, 3));
  EXPECT_EQ(table.Capacity(0), 6);
  EXPECT_EQ(table.Capacity(1), 0);
  EXPECT_EQ(table.Slot(0, 0), 12);
  EXPECT_EQ(table.Slot(0, 2), 14);
  EXPECT_EQ(table.Slot(0, 3), 3);
  EXPECT_EQ(table.Slot(2, 8), 11);
}

TEST(PageTableTest, MapsTheNewTokensOfAStepToSlots) {
  const std::vector<int64_t> indptr = {0, 2, 2, 5};
  const std::vector<int32_t> ids = {4, 1, 0, 2, 3};
  const PageTable table = PageTable::Build(indptr, ids, 3, 5).value();
  std::vector<int64_t> slots(5, -7);
  // Tokens 2 and 3 of sequence 0; none; tokens 5, 6, 7 of sequence 2.
  const absl::Status status =
      table.SlotMapping({2, 0, 3}, {4, 0, 8}, absl::MakeSpan(slots));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(slots, ElementsAre(14, 3, 8, 9, 10));
}

TEST(PageTableTest, IsEmptyByDefaultAndWhenBuiltOfNothing) {
  EXPECT_EQ(PageTable().num_sequences(), 0);
  EXPECT_TRUE(PageTable().CheckKvLens({}).ok());
  const PageTableStorage storage;
  EXPECT_EQ(storage.Build(16, 0).value().num_sequences(), 0);
}

TEST(PageTableTest, StorageIsKeptFromStepToStep) {
  PageTableStorage storage;
  const std::vector<int32_t> a = {2, 0}, b = {1};
  storage.Append(a);
  storage.Append(b);
  EXPECT_THAT(storage.Build(4, 3).value().Pages(1), ElementsAre(1));
  EXPECT_NO_ALLOCATION({
    storage.Clear();
    storage.Append(b);
    storage.Append(a);
    storage.Build(4, 3).value();
  });
  EXPECT_THAT(storage.Build(4, 3).value().Pages(1), ElementsAre(2, 0));
}

TEST(PageTableTest, RefusesWhatIsNoTable) {
  constexpr int64_t kBig = int64_t{1} << 40;
  const struct {
    std::vector<int64_t> indptr;
    std::vector<int32_t> ids;
    int64_t page_size;
    int64_t num_pages;
    const char* words;
  } kCases[] = {
      {{}, {}, 16, 4, "indptr is empty"},
      {{1, 1}, {0}, 16, 4, "indptr[0]=1; need 0"},
      {{0, 2, 1}, {0, 1}, 16, 4, "sequence 1: indptr[2]=1; need 2 <= indptr"},
      {{0, 1, 3}, {0, 1}, 16, 4, "sequence 1: indptr[2]=3; need 1 <= indptr"},
      {{0, -1}, {}, 16, 4, "sequence 0: indptr[1]=-1"},
      {{0, 1, 2},
       {0, 4},
       16,
       4,
       "sequence 1: page_ids[1]=4; need 0 <= page < 4"},
      {{0, 1}, {-2}, 16, 4, "sequence 0: page_ids[0]=-2"},
      {{0, 2},
       {3, kNoPage},
       16,
       4,
       "sequence 0: page_ids[1]=-1; need 0 <= page < 4, or -1 for pages "
       "before the first one that the sequence has"},
      {{0, 2, 5},
       {kNoPage, 3, kNoPage, 1, kNoPage},
       16,
       4,
       "sequence 1: page_ids[4]=-1"},
      {{0}, {}, 0, 4, "page_size=0"},
      {{0}, {}, kBig, 4, "page_size=1099511627776"},
      {{0}, {}, 16, -1, "num_pages=-1"},
      {{0}, {}, 16, kBig, "num_pages=1099511627776"},
  };
  for (const auto& c : kCases) {
    ExpectRefused(
        PageTable::Build(c.indptr, c.ids, c.page_size, c.num_pages).status(),
        c.words);
  }
}

TEST(PageTableTest, FirstPagesMayBeMissing) {
  const std::vector<int64_t> indptr = {0, 1, 4, 6};
  const std::vector<int32_t> ids = {0, kNoPage, kNoPage, 2, kNoPage, kNoPage};
  const PageTable table = PageTable::Build(indptr, ids, 4, 3).value();
  EXPECT_TRUE(table.has_missing_pages());
  EXPECT_TRUE(table.HasToken(0, 0));
  EXPECT_FALSE(table.HasToken(1, 0));
  EXPECT_FALSE(table.HasToken(1, 7));
  EXPECT_TRUE(table.HasToken(1, 8));
  EXPECT_FALSE(table.HasToken(2, 7));
  EXPECT_EQ(table.Capacity(1), 12);
  EXPECT_EQ(table.Slot(1, 9), 9);
  EXPECT_TRUE(table.CheckKvLens({4, 12, 8}).ok());

  std::vector<int64_t> slots(3, -7);
  const absl::Status status =
      table.SlotMapping({1, 2, 0}, {4, 10, 8}, absl::MakeSpan(slots));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(slots, ElementsAre(3, 8, 9));
  ExpectRefused(
      table.SlotMapping({0, 3, 0}, {4, 10, 8}, absl::MakeSpan(slots)),
      "sequence 1: its new token 7 lies in page 1 of the sequence, which is "
      "missing; need the pages of all new tokens");

  const PageTable whole = PageTable::Build({0, 1}, {0}, 4, 3).value();
  EXPECT_FALSE(whole.has_missing_pages());
  EXPECT_FALSE(PageTable().has_missing_pages());
}

TEST(PageTableTest, RefusesLengthsThatThePagesDoNotHold) {
  const std::vector<int64_t> indptr = {0, 2, 3};
  const std::vector<int32_t> ids = {0, 1, 2};
  const PageTable table = PageTable::Build(indptr, ids, 16, 3).value();
  EXPECT_TRUE(table.CheckKvLens({32, 0}).ok());
  ExpectRefused(table.CheckKvLens({32, 17}),
                "sequence 1: kv_len=17; need 0 <= kv_len <= 16");
  ExpectRefused(table.CheckKvLens({-1, 0}), "sequence 0: kv_len=-1");
  ExpectRefused(table.CheckKvLens({1}), "kv_lens.size()=1; need 2");
  std::vector<int64_t> slots(3);
  const auto out = absl::MakeSpan(slots);
  EXPECT_TRUE(table.SlotMapping({1, 2}, {1, 16}, out).ok());
  ExpectRefused(table.SlotMapping({1, 2}, {1, 17}, out), "kv_len=17");
  ExpectRefused(table.SlotMapping({3}, {3, 3}, out), "q_lens.size()=1");
  ExpectRefused(table.SlotMapping({1, 4}, {1, 3}, out),
                "sequence 1: q_len=4; need 0 <= q_len <= 3");
  ExpectRefused(table.SlotMapping({-1, 4}, {1, 4}, out),
                "sequence 0: q_len=-1");
  ExpectRefused(table.SlotMapping({1, 1}, {1, 3}, out),
                "slots.size()=3; need 2");
}

TEST(PageTableTest, TakesPaddedTables) {
  // Rows 4 apart, of 3 columns; padding is not read.
  const std::vector<int32_t> padded = {5, 2, -1, 77, 3, 9, 9, 77, 0, 1, 4};
  const MatrixView<const int32_t> table(padded.data(), {3, 3}, {4, 1});
  PageTableStorage storage;
  storage.Append({6});
  const std::vector<int64_t> kv_lens = {17, 0, 48};
  ASSERT_TRUE(storage.SetPadded(table, kv_lens, 16).ok());
  const PageTable pages = storage.Build(16, 6).value();
  EXPECT_EQ(pages.num_sequences(), 3);
  EXPECT_EQ(pages.Pages(0), absl::MakeConstSpan({5, 2}));
  EXPECT_TRUE(pages.Pages(1).empty());
  EXPECT_EQ(pages.Pages(2), absl::MakeConstSpan({0, 1, 4}));
  EXPECT_EQ(pages.Slot(0, 16), 32);
  EXPECT_NO_ALLOCATION((void)storage.SetPadded(table, kv_lens, 16));

  const auto refusal = [&](const std::vector<int64_t>& lens, int64_t size) {
    const absl::Status status = storage.SetPadded(table, lens, size);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({17, 0, 49}, 16),
              HasSubstr("sequence 2: kv_len=49; need 0 <= kv_len, in at most 3 "
                        "pages of 16 tokens"));
  EXPECT_THAT(refusal({17, -1, 4}, 16), HasSubstr("sequence 1: kv_len=-1"));
  EXPECT_THAT(refusal({17, 0}, 16), HasSubstr("table is [3, 3]; need [2"));
  EXPECT_THAT(refusal(kv_lens, 0), HasSubstr("page_size=0"));
  EXPECT_EQ(storage.indptr.size(), 4u);  // as it was
  // An id in use is checked, by Build.
  EXPECT_THAT(storage.Build(16, 5).status().message(),
              HasSubstr("sequence 0: page_ids[0]=5"));
}

}  // namespace
}  // namespace quern
