#include "quern/gemm/onednn/matmul_cache.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace quern {
namespace {

MatmulKey Key(int64_t rows) { return {rows, 2, 3, 4, 5}; }

MatmulCache::Kernel Make() { return std::make_shared<const MatmulKernel>(); }

MatmulCache::Kernel MustHit() {
  ADD_FAILURE() << "built again";
  return Make();
}

TEST(MatmulCacheTest, BuildsOnce) {
  MatmulCache cache(4);
  const MatmulCache::Kernel built = cache.Find(Key(1), &Make);
  EXPECT_EQ(cache.Find(Key(1), &MustHit), built);
  EXPECT_EQ(cache.stats().hits, 1);
  EXPECT_EQ(cache.stats().misses, 1);
  EXPECT_EQ(cache.stats().evictions, 0);
}

TEST(MatmulCacheTest, TellsKeysApartByEveryField) {
  MatmulCache cache(8);
  const MatmulKey keys[] = {{1, 1, 1, 1, 1}, {2, 1, 1, 1, 1}, {1, 2, 1, 1, 1},
                            {1, 1, 2, 1, 1}, {1, 1, 1, 2, 1}, {1, 1, 1, 1, 2}};
  for (const MatmulKey& key : keys) cache.Find(key, &Make);
  EXPECT_EQ(cache.stats().misses, 6);
  EXPECT_EQ(cache.size(), 6u);
}

TEST(MatmulCacheTest, DropsWhatWasUsedLongestAgo) {
  MatmulCache cache(3);
  for (const int64_t rows : {1, 2, 3}) cache.Find(Key(rows), &Make);
  cache.Find(Key(1), &MustHit);
  cache.Find(Key(4), &Make);  // drops 2
  EXPECT_EQ(cache.stats().evictions, 1);
  EXPECT_EQ(cache.size(), 3u);
  for (const int64_t rows : {1, 3, 4}) cache.Find(Key(rows), &MustHit);
  int built = 0;
  cache.Find(Key(2), [&] {
    ++built;
    return Make();
  });
  EXPECT_EQ(built, 1);
}

TEST(MatmulCacheTest, AFailureLeavesNoEntry) {
  MatmulCache cache(2);
  const auto fail = []() -> MatmulCache::Kernel {
    throw std::runtime_error("no");
  };
  EXPECT_THROW(cache.Find(Key(1), fail), std::runtime_error);
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_NE(cache.Find(Key(1), &Make), nullptr);
}

// A thread that builds does not hold up one that hits.
TEST(MatmulCacheTest, HitsDoNotWaitForBuilds) {
  MatmulCache cache(2);
  cache.Find(Key(1), &Make);
  cache.Find(Key(2), [&] {
    std::thread([&] { cache.Find(Key(1), &MustHit); }).join();
    return Make();
  });
  EXPECT_EQ(cache.stats().hits, 1);
}

TEST(MatmulCacheTest, WhoBuiltSecondGetsTheFirst) {
  MatmulCache cache(2);
  MatmulCache::Kernel inner;
  const MatmulCache::Kernel outer = cache.Find(Key(1), [&] {
    inner = cache.Find(Key(1), &Make);
    return Make();
  });
  EXPECT_EQ(outer, inner);
  EXPECT_EQ(cache.size(), 1u);
}

TEST(MatmulCacheTest, CountsEveryLookUpOfEightThreads) {
  MatmulCache cache(5);
  std::atomic<int64_t> builds{0};
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 1000; ++i) {
        EXPECT_NE(cache.Find(Key((i * 7 + t) % 9),
                             [&] {
                               ++builds;
                               return Make();
                             }),
                  nullptr);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const OneDnnCacheStats stats = cache.stats();
  EXPECT_EQ(stats.hits + stats.misses, 8000);
  EXPECT_EQ(stats.misses, builds.load());
  EXPECT_EQ(cache.size(), 5u);
  EXPECT_LE(stats.evictions, stats.misses - 5);
}

}  // namespace
}  // namespace quern
