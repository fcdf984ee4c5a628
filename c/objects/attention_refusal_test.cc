// What caches, schedules and steps of the C interface refuse, by tables.

#include <cstdint>
#include <functional>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/attention_testutil.h"
#include "quern/c/testing/c_testutil.h"

namespace quern {
namespace {

using AttentionRefusalTest = AttentionInC;

TEST_F(AttentionRefusalTest, RefusesCaches) {
  struct Case {
    const char* words;
    std::function<void(quern_kv_cache_options&)> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  const Case cases[] = {
      {"quern_kv_cache_options: size=8", [](auto& o) { o.size = 8; }},
      {"dtype is null", [](auto& o) { o.dtype = nullptr; }},
      {"quern_kv_cache_create: dtype=\"int3\"; need one of f32, bf16, f16, "
       "i8, ",
       [](auto& o) { o.dtype = "int3"; }},
      {"dtype=\"i64\"; need one of ", [](auto& o) { o.dtype = "i64"; }},
      {"form=\"round\"; need one of plain, paired, latent",
       [](auto& o) { o.form = "round"; }},
      {"scaling=\"big\"; need one of none, per_token_head",
       [](auto& o) { o.scaling = "big"; }},
      // write_kv and paged_attention have no argument for such scales.
      {"scaling=\"per_head\"; need one of none, per_token_head, per_block",
       [](auto& o) { o.scaling = "per_head"; }},
      {"kv_heads=0", [](auto& o) { o.kv_heads = 0; }},
      {"head_dim=-1", [](auto& o) { o.head_dim = -1; }},
      {"page_size=0", [](auto& o) { o.page_size = 0; }},
      {"num_pages=-1", [](auto& o) { o.num_pages = -1; }},
      {"num_layers=-1", [](auto& o) { o.num_layers = -1; }},
      {"kv_cache", [](auto& o) { o.num_pages = int64_t{1} << 62; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_kv_cache_options options = CacheOptions();
    c.spoil(options);
    quern_kv_cache* cache = cache_;
    ExpectRefused(MakeCache(options, &cache), library_.get(), c.code, c.words);
    EXPECT_EQ(cache, nullptr);
  }
  quern_kv_cache* cache = nullptr;
  ExpectRefused(quern_kv_cache_create(library_.get(), nullptr, &cache),
                library_.get(), QUERN_INVALID_ARGUMENT, "options is null");
  quern_tensor pages;
  for (const int64_t layer : {int64_t{-1}, kLayers}) {
    ExpectRefused(quern_kv_cache_pages(cache_, layer, &pages), cache_,
                  QUERN_INVALID_ARGUMENT, "need 0 <= layer <= 1");
  }
  ExpectRefused(quern_kv_cache_pages(cache_, 0, nullptr), cache_,
                QUERN_INVALID_ARGUMENT, "pages is null");
}

TEST_F(AttentionRefusalTest, RefusesSchedules) {
  struct Case {
    const char* words;
    std::function<void(quern_schedule_options&)> spoil;
  };
  const Case cases[] = {
      {"quern_schedule_options: size=0", [](auto& o) { o.size = 0; }},
      {"q_heads=3", [](auto& o) { o.q_heads = 3; }},
      {"window_left=-2", [](auto& o) { o.window_left = -2; }},
      {"max_sequences=-1", [](auto& o) { o.max_sequences = -1; }},
      {"max_kv_len=-1", [](auto& o) { o.max_kv_len = -1; }},
      {"need both limits", [](auto& o) { o.max_kv_len = 5; }},
  };
  quern_schedule* schedule = nullptr;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_schedule_options options = ScheduleOptions();
    c.spoil(options);
    ExpectRefused(
        quern_schedule_create(library_.get(), cache_, &options, &schedule),
        library_.get(), QUERN_INVALID_ARGUMENT, c.words);
    EXPECT_EQ(schedule, nullptr);
  }
  ExpectRefused(
      quern_schedule_create(library_.get(), cache_, nullptr, &schedule),
      library_.get(), QUERN_INVALID_ARGUMENT, "options is null");
  ExpectRefused(quern_schedule_create(library_.get(), nullptr,
                                      &schedule_options_, &schedule),
                library_.get(), QUERN_INVALID_ARGUMENT, "the object is null");

  quern_library* other = nullptr;
  ASSERT_EQ(quern_library_create(nullptr, &other, nullptr, 0), QUERN_OK);
  ExpectRefused(
      quern_schedule_create(other, cache_, &schedule_options_, &schedule),
      other, QUERN_INVALID_ARGUMENT, "cache is of another library");
  const quern_argument layout = quern_object_argument("layout", cache_);
  quern_op* op = nullptr;
  ExpectRefused(quern_op_create(other, "write_kv", nullptr, &layout, 1, &op),
                other, QUERN_INVALID_ARGUMENT, "layout is of another library");
  EXPECT_EQ(quern_destroy(other), QUERN_OK);
}

TEST_F(AttentionRefusalTest, RefusesSteps) {
  struct Case {
    const char* words;
    std::function<void(quern_step&)> spoil;
  };
  static constexpr int64_t kNegative[] = {-1, 1}, kLong[] = {49, 1};
  static constexpr int32_t kNoSuchPage[] = {6, 8, 0, 0, 5, 0};
  const Case cases[] = {
      {"quern_step: size=0", [](auto& s) { s.size = 0; }},
      {"reserved=1", [](auto& s) { s.reserved = 1; }},
      {"num_sequences=-1", [](auto& s) { s.num_sequences = -1; }},
      {"num_sequences=4; need 0", [](auto& s) { s.num_sequences = 4; }},
      {"q_lens is null", [](auto& s) { s.q_lens = nullptr; }},
      {"kv_lens is null", [](auto& s) { s.kv_lens = nullptr; }},
      {"pages is null", [](auto& s) { s.pages = nullptr; }},
      {"pages_stride=-1", [](auto& s) { s.pages_stride = -1; }},
      {"q_lens=-1", [](auto& s) { s.q_lens = kNegative; }},
      {"kv_lens=-1", [](auto& s) { s.kv_lens = kNegative; }},
      {"kv_lens=49; need 0 <= kv_lens <= 40",
       [](auto& s) { s.kv_lens = kLong; }},
      {"page", [](auto& s) { s.pages_stride = 1; }},
      {"page", [](auto& s) { s.pages = kNoSuchPage; }},
      {"num_slots=1; need 2, as q_lens sum to",
       [](auto& s) { s.num_slots = 1; }},
      {"num_workers=-1", [](auto& s) { s.workers = -1; }},
  };
  quern_schedule_options options = ScheduleOptions();
  options.max_sequences = 3;
  options.max_kv_len = 40;
  quern_schedule* schedule = nullptr;
  ASSERT_C_OK(
      quern_schedule_create(library_.get(), cache_, &options, &schedule),
      library_.get());
  const Lengths q_lens = {1, 1}, kv_lens = {18, 4};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_step step = StepOf(q_lens, kv_lens);
    ASSERT_C_OK(quern_schedule_build(schedule, &step), schedule);
    c.spoil(step);
    ExpectRefused(quern_schedule_build(schedule, &step), schedule,
                  QUERN_INVALID_ARGUMENT, c.words);
    EXPECT_EQ(ExplanationOf(schedule).rfind("schedule of 0 sequences", 0), 0u);
  }
  ExpectRefused(quern_schedule_build(schedule, nullptr), schedule,
                QUERN_INVALID_ARGUMENT, "step is null");
  ExpectRefused(
      quern_schedule_build(reinterpret_cast<quern_schedule*>(cache_), nullptr),
      cache_, QUERN_INVALID_ARGUMENT, "of kind KV cache; need schedule");
}

}  // namespace
}  // namespace quern
