#include "quern/attention/shared_prefix.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/page_table.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using Lens = std::vector<int64_t>;
using Pages = std::vector<int32_t>;

// `count` pages from `first` on.
Pages PageRun(int32_t first, int count) {
  Pages pages;
  for (int i = 0; i < count; ++i) pages.push_back(first + i);
  return pages;
}

Pages Join(const std::vector<Pages>& parts) {
  Pages all;
  for (const Pages& part : parts)
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Decode over full pages of 128 tokens.
struct Step {
  explicit Step(const std::vector<Pages>& sequences, int64_t page_size = 128) {
    for (const Pages& pages : sequences) {
      table.Append(pages);
      q_lens.push_back(1);
      kv_lens.push_back(static_cast<int64_t>(pages.size()) * page_size);
    }
    pages = table.Build(page_size, 100000).value();
  }
  SharedPrefixes Find() {
    return SharedPrefixes::Find(pages, q_lens, kv_lens, storage).value();
  }

  PageTableStorage table;
  PageTable pages;
  Lens q_lens, kv_lens;
  SharedPrefixStorage storage;
};

TEST(SharedPrefixTest, GroupsSequencesWithTheSameFirstPages) {
  Step step({Join({PageRun(10, 8), {1}}), PageRun(50, 9),
             Join({PageRun(10, 8), {2, 3}}),
             Join({PageRun(50, 4), PageRun(70, 4)}), PageRun(90, 9)});
  EXPECT_EQ(step.Find().DebugString(),
            "tokens [0, 1024) of sequences 0 2\n"
            "tokens [0, 512) of sequences 1 3\n");
  EXPECT_EQ(step.Find().saved_tokens(), 1024 + 512);
}

// Missing pages look alike, but are not the same pages.
TEST(SharedPrefixTest, LeavesOutSequencesWithoutTheirFirstPages) {
  const Pages missing(8, kNoPage);
  Step step({Join({missing, PageRun(10, 4)}), Join({PageRun(20, 8), {1}}),
             Join({missing, PageRun(10, 4)}), Join({PageRun(20, 8), {2}})});
  EXPECT_EQ(step.Find().DebugString(), "tokens [0, 1024) of sequences 1 3\n");
}

TEST(SharedPrefixTest, ChoosesTheSetsThatSaveMost) {
  const Pages system = PageRun(10, 4);
  const Pages document = PageRun(20, 40), short_document = PageRun(20, 2);
  Step of_a_document({Join({system, document, {1}}), Join({system, {2}}),
                      Join({system, document, {3}})});
  EXPECT_EQ(of_a_document.Find().DebugString(),
            "tokens [0, 5632) of sequences 0 2\n");
  Step of_all({Join({system, short_document, {1}}), Join({system, {2}}),
               Join({system, short_document, {3}})});
  EXPECT_EQ(of_all.Find().DebugString(),
            "tokens [0, 512) of sequences 1 0 2\n");
  // Two documents, each asked twice, under one system prompt.
  Step of_two({Join({system, PageRun(20, 8), {1}}),
               Join({system, PageRun(40, 8), {2}}),
               Join({system, PageRun(20, 8), {3}}),
               Join({system, PageRun(40, 8), {4}})});
  EXPECT_EQ(of_two.Find().DebugString(),
            "tokens [0, 1536) of sequences 0 2\n"
            "tokens [0, 1536) of sequences 1 3\n");
}

TEST(SharedPrefixTest, SharesOnlyWhatAllQueriesSeeInWholeChunks) {
  Step step({PageRun(10, 8), PageRun(10, 8)});
  EXPECT_EQ(step.Find().DebugString(), "tokens [0, 768) of sequences 0 1\n");
  step.q_lens = {1, 500};
  EXPECT_EQ(step.Find().DebugString(), "tokens [0, 512) of sequences 1 0\n");
  step.kv_lens = {1024, 300};
  step.q_lens = {1, 44};
  EXPECT_EQ(step.Find().DebugString(), "tokens [0, 256) of sequences 1 0\n");
  step.q_lens = {1, 45};
  EXPECT_EQ(step.Find().DebugString(), "");
  step.q_lens = {1, 0};  // nothing to compute
  EXPECT_EQ(step.Find().DebugString(), "");
  Step large_pages({{7, 1}, {7, 2}}, 1000);
  EXPECT_EQ(large_pages.Find().DebugString(),
            "tokens [0, 768) of sequences 0 1\n");
  EXPECT_EQ(Step({}).Find().DebugString(), "");
}

// One page, of which the second sees less: it is not between the others.
TEST(SharedPrefixTest, SortsWhatSeesLessOfALargePageApart) {
  Step step({{7, 1}, {7}, {7, 2}}, 1024);
  step.kv_lens = {1025, 257, 1025};
  EXPECT_EQ(step.Find().DebugString(), "tokens [0, 1024) of sequences 0 2\n");
  EXPECT_EQ(step.Find().saved_tokens(), 1024);
}

using SharedFn = std::function<int64_t(int32_t, int32_t)>;

// What the best groups of `set` save: all of it as one, or the sum over the
// subsets that share more.
int64_t MostSaved(const std::vector<int32_t>& set, const SharedFn& shared) {
  if (set.size() < 2) return 0;
  int64_t least = shared(set[0], set[1]);
  for (const int32_t s : set) {
    if (s != set[0]) least = std::min(least, shared(set[0], s));
  }
  std::vector<std::vector<int32_t>> subsets;
  for (const int32_t s : set) {
    const auto of_s = std::find_if(
        subsets.begin(), subsets.end(),
        [&](const auto& subset) { return shared(subset[0], s) > least; });
    if (of_s == subsets.end()) {
      subsets.push_back({s});
    } else {
      of_s->push_back(s);
    }
  }
  int64_t saved = 0;
  for (const auto& subset : subsets) saved += MostSaved(subset, shared);
  return std::max(saved, (static_cast<int64_t>(set.size()) - 1) * least);
}

// In random trees of pages, groups are disjoint, as long as can be and save as
// much as any do; a sequence is left out only where others of its set save more
// without it.
TEST(SharedPrefixTest, HoldsForRandomTables) {
  TestRng rng;
  int64_t found = 0;
  for (int round = 0; round < 400; ++round) {
    constexpr std::array<int64_t, 4> kPageSizes = {128, 256, 384, 1024};
    const int64_t page_size = kPageSizes.at(static_cast<size_t>(round) % 4);
    const int64_t most_pages = page_size > 256 ? 2 : 6;
    std::vector<Pages> sequences;
    const int64_t count = rng.Integer(0, 12);
    for (int64_t s = 0; s < count; ++s) {
      Pages pages;
      if (!sequences.empty() && rng.Integer(0, 3) != 0) {
        const Pages& of = sequences.at(static_cast<size_t>(
            rng.Integer(0, static_cast<int64_t>(sequences.size()) - 1)));
        pages.assign(
            of.begin(),
            of.begin() + rng.Integer(0, static_cast<int64_t>(of.size())));
      }
      const int64_t more = rng.Integer(0, most_pages);
      for (int64_t i = 0; i < more; ++i) {
        pages.push_back(static_cast<int32_t>(rng.Integer(0, 99999)));
      }
      sequences.push_back(pages);
    }
    Step step(sequences, page_size);
    for (size_t s = 0; s < sequences.size(); ++s) {
      step.kv_lens[s] -=
          std::min(step.kv_lens[s], rng.Integer(0, 1) * rng.Integer(0, 1024));
      step.q_lens[s] = std::min(step.kv_lens[s], rng.Integer(0, 200));
    }
    const SharedPrefixes prefixes = step.Find();
    const auto tokens = [&](int32_t s) {
      const auto i = static_cast<size_t>(s);
      return step.q_lens[i] == 0
                 ? 0
                 : (step.kv_lens[i] - step.q_lens[i]) / 256 * 256;
    };
    const auto shared = [&](int32_t a, int32_t b) {
      int64_t t = 0;
      const int64_t most = std::min(tokens(a), tokens(b));
      while (t < most && step.pages.Slot(a, t) == step.pages.Slot(b, t)) ++t;
      return t / 256 * 256;
    };
    std::set<int32_t> grouped;
    for (const PrefixGroup& group : prefixes.groups()) {
      const auto members = prefixes.Members(group);
      ASSERT_GE(members.size(), 2u);
      ASSERT_GT(group.tokens, 0);
      int64_t least = group.tokens + 1;
      for (const int32_t s : members) {
        EXPECT_TRUE(grouped.insert(s).second);
        least =
            std::min(least, s == members[0] ? least : shared(members[0], s));
      }
      EXPECT_EQ(least, group.tokens);
      ++found;
    }
    std::vector<int32_t> all;
    for (int32_t s = 0; s < count; ++s) all.push_back(s);
    EXPECT_EQ(prefixes.saved_tokens(), MostSaved(all, shared));
    for (int32_t a = 0; a < count; ++a) {
      for (int32_t b = 0; b < a; ++b) {
        if (grouped.count(a) != 0 || grouped.count(b) != 0) continue;
        const int64_t common = shared(a, b);
        // Their set was given up for a part of it.
        EXPECT_TRUE(common == 0 ||
                    std::any_of(grouped.begin(), grouped.end(), [&](int32_t g) {
                      return shared(a, g) >= common;
                    }));
      }
    }
  }
  EXPECT_GT(found, 100);
}

TEST(SharedPrefixTest, AllocatesNothingAfterTheFirstStep) {
  Step step({PageRun(10, 8), PageRun(10, 8), PageRun(30, 8), PageRun(30, 8)});
  ASSERT_EQ(step.Find().groups().size(), 2u);
  EXPECT_NO_ALLOCATION(step.Find());
}

TEST(SharedPrefixTest, RefusesLengthsThatMakeNoSense) {
  Step step({PageRun(10, 2), PageRun(20, 2)});
  const struct {
    Lens q_lens, kv_lens;
    const char* words;
  } kCases[] = {
      {{1, 1}, {1}, "kv_lens.size()=1; need 2"},
      {{1}, {1, 1}, "q_lens.size()=1; need 2"},
      {{1, 1}, {1, 257}, "sequence 1: kv_len=257; need 0 <= kv_len <= 256"},
      {{1, 2}, {1, 1}, "sequence 1: q_len=2; need 0 <= q_len <= 1"},
      {{-1, 1}, {1, 1}, "sequence 0: q_len=-1; need 0 <= q_len <= 1"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        SharedPrefixes::Find(step.pages, c.q_lens, c.kv_lens, step.storage)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
}

}  // namespace
}  // namespace quern
