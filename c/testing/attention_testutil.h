#ifndef QUERN_C_TESTING_ATTENTION_TESTUTIL_H_
#define QUERN_C_TESTING_ATTENTION_TESTUTIL_H_

// Test utility: a KV cache and a schedule of the C interface.

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"

namespace quern {

inline constexpr int64_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 16;
inline constexpr int64_t kPageSize = 16, kPages = 8, kLayers = 2, kLayer = 1;
inline constexpr int64_t kPagesStride = 3;

using Lengths = std::vector<int64_t>;

// A cache, a schedule and the pages of two sequences.
class AttentionInC : public testing::Test {
 protected:
  AttentionInC() {
    EXPECT_C_OK(MakeCache(cache_options_, &cache_), library_.get());
    EXPECT_C_OK(quern_schedule_create(library_.get(), cache_,
                                      &schedule_options_, &schedule_),
                library_.get());
  }

  static quern_kv_cache_options CacheOptions() {
    quern_kv_cache_options options = {};
    options.size = sizeof(options);
    options.dtype = "bf16";
    options.kv_heads = kKvHeads;
    options.head_dim = kHeadDim;
    options.page_size = kPageSize;
    options.num_pages = kPages;
    options.num_layers = kLayers;
    return options;
  }
  static quern_schedule_options ScheduleOptions() {
    quern_schedule_options options = {};
    options.size = sizeof(options);
    options.q_heads = kQueryHeads;
    options.window_left = options.window_right = -1;
    return options;
  }
  quern_status MakeCache(const quern_kv_cache_options& options,
                         quern_kv_cache** cache) {
    return quern_kv_cache_create(library_.get(), &options, cache);
  }

  quern_step StepOf(const Lengths& q_lens, const Lengths& kv_lens) {
    slots_.assign(static_cast<size_t>(std::accumulate(
                      q_lens.begin(), q_lens.end(), int64_t{0})),
                  -9);
    quern_step step = {};
    step.size = sizeof(step);
    step.num_sequences = static_cast<int64_t>(q_lens.size());
    step.q_lens = q_lens.data();
    step.kv_lens = kv_lens.data();
    step.pages = pages_.data();
    step.pages_stride = kPagesStride;
    step.slots = slots_.data();
    step.num_slots = static_cast<int64_t>(slots_.size());
    return step;
  }

  quern_op* Make(const char* name, const std::vector<quern_argument>& of) {
    quern_op* op = nullptr;
    EXPECT_C_OK(quern_op_create(library_.get(), name, nullptr, of.data(),
                                of.size(), &op),
                library_.get());
    return op;
  }

  LibraryInC library_;
  const quern_kv_cache_options cache_options_ = CacheOptions();
  const quern_schedule_options schedule_options_ = ScheduleOptions();
  quern_kv_cache* cache_ = nullptr;
  quern_schedule* schedule_ = nullptr;
  // Two sequences. What follows their pages is not read.
  std::vector<int32_t> pages_ = {6, 1, -7, 0, 5, -7};
  Lengths slots_;
};

}  // namespace quern

#endif  // QUERN_C_TESTING_ATTENTION_TESTUTIL_H_
