// Sampling through the C interface: the tokens of C++, whatever the executor,
// and what is refused.

#include "quern/ops/sampling/sampler.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/tensor.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

constexpr int64_t kRows = 6, kVocab = 101, kStride = 110;

class SamplerInCTest : public testing::Test {
 protected:
  SamplerInCTest() : logits_(kRows * kStride), tokens_(kRows) {
    TestRng rng;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kVocab; ++i) {
        logits_[r * kStride + i] = static_cast<float>(rng.Uniform(-4, 4));
      }
    }
    logits_in_c_->strides = strides_;
    EXPECT_C_OK(quern_sampler_create(library_.get(), kVocab, &sampler_),
                library_.get());
  }

  quern_status Sample(quern_executor* executor = nullptr) {
    return quern_sampler_sample(sampler_, logits_in_c_.get(), how_.data(),
                                how_.size(), tokens_.data(), executor);
  }

  GuardBuffer<float> logits_;
  GuardBuffer<int32_t> tokens_;
  int64_t strides_[2] = {kStride, 1};
  TensorInC logits_in_c_{DType::kF32, logits_.data(), {kRows, kVocab}};
  std::vector<quern_sampling> how_ =
      std::vector<quern_sampling>(static_cast<size_t>(kRows));
  LibraryInC library_;
  quern_sampler* sampler_ = nullptr;
};

TEST_F(SamplerInCTest, HasTheTokensOfCpp) {
  how_[1] = {0.7f, 0.9f, 0, 11, 5};
  how_[2] = {1.0f, 0, 10, 11, 5};
  how_[3] = {1.3f, 0.5f, 20, 12, 6};
  how_[4] = {0.7f, 1.0f, 0, 11, 6};
  std::vector<SamplingParams> params;
  for (const quern_sampling& how : how_) {
    params.push_back({how.temperature, how.top_k,
                      how.top_p == 0 ? 1.0f : how.top_p, how.seed, how.step});
  }
  const auto plan = SamplerPlan::Create({kVocab});
  ASSERT_TRUE(plan.ok());
  auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(kRows, 1));
  std::vector<int32_t> want(kRows);
  InlineExecutor executor;
  plan->Execute(
      MatrixView<const float>(logits_.data(), {kRows, kVocab}, {kStride, 1}),
      params, absl::MakeSpan(want), Workspace(*memory), executor);
  ASSERT_C_OK(Sample(), sampler_);
  EXPECT_EQ(tokens_.ToVector(), want);
  for (const int32_t workers : {1, 3}) {
    quern_executor* pool = nullptr;
    ASSERT_C_OK(quern_executor_create_pool(library_.get(), workers, &pool),
                library_.get());
    for (int64_t r = 0; r < kRows; ++r) tokens_[r] = -9;
    ASSERT_C_OK(Sample(pool), sampler_);
    EXPECT_EQ(tokens_.ToVector(), want);
  }
  EXPECT_EQ(ExplanationOf(sampler_).rfind("sampler of 101 logits, ", 0), 0u)
      << ExplanationOf(sampler_);
}

TEST_F(SamplerInCTest, HasTheFiltersOfCpp) {
  std::vector<quern_sampling_filters> filters(static_cast<size_t>(kRows));
  for (quern_sampling_filters& f : filters) f.size = sizeof(f);
  filters[1].min_p = 0.2f;
  filters[2].top_n_sigma = 1.5f;
  filters[3].typical_p = 0.5f;
  const auto plan = SamplerPlan::Create({kVocab});
  auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(kRows, 1));
  InlineExecutor executor;
  int other = 0;
  for (uint64_t step = 0; step < 20; ++step) {
    std::vector<SamplingParams> params(static_cast<size_t>(kRows));
    for (size_t r = 0; r < params.size(); ++r) {
      how_[r] = {2.0f, 0, 0, r, step};
      params[r].temperature = 2.0f;
      params[r].seed = r;
      params[r].step = step;
    }
    params[1].min_p = 0.2f;
    params[2].top_n_sigma = 1.5f;
    params[3].typical_p = 0.5f;
    std::vector<int32_t> want(kRows);
    plan->Execute(
        MatrixView<const float>(logits_.data(), {kRows, kVocab}, {kStride, 1}),
        params, absl::MakeSpan(want), Workspace(*memory), executor);
    ASSERT_C_OK(quern_sampler_sample_filtered(
                    sampler_, logits_in_c_.get(), how_.data(), filters.data(),
                    how_.size(), tokens_.data(), nullptr),
                sampler_);
    EXPECT_EQ(tokens_.ToVector(), want);
    ASSERT_C_OK(quern_sampler_sample_filtered(sampler_, logits_in_c_.get(),
                                              how_.data(), nullptr, how_.size(),
                                              tokens_.data(), nullptr),
                sampler_);
    const auto without = tokens_.ToVector();
    ASSERT_C_OK(Sample(), sampler_);
    EXPECT_EQ(tokens_.ToVector(), without);
    other += without != want ? 1 : 0;
  }
  EXPECT_GT(other, 10);
  const auto refused = [&](const char* words) {
    ExpectRefused(quern_sampler_sample_filtered(
                      sampler_, logits_in_c_.get(), how_.data(), filters.data(),
                      how_.size(), tokens_.data(), nullptr),
                  sampler_, QUERN_INVALID_ARGUMENT, words);
  };
  filters[4].min_p = 2;
  refused("min_p=2; need 0 <= min_p <= 1");
  filters[4].min_p = 0;
  filters[5].top_n_sigma = -1;
  refused("top_n_sigma=-1; need finite top_n_sigma >= 0");
  filters[5].top_n_sigma = 0;
  filters[5].typical_p = 1.5f;
  refused("typical_p=1.5; need 0 < typical_p <= 1");
  filters[5].typical_p = 1;
  filters[0].reserved = 1;
  refused("reserved=1");
  filters[0].reserved = 0;
  filters[0].size = 0;
  refused("quern_sampling_filters");
}

TEST_F(SamplerInCTest, GivesNoTokenWhereThereIsNone) {
  for (int64_t i = 0; i < kVocab; ++i) {
    logits_[2 * kStride + i] = std::numeric_limits<float>::quiet_NaN();
  }
  ASSERT_C_OK(Sample(), sampler_);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_EQ(tokens_[r] == QUERN_NO_TOKEN, r == 2) << r;
  }
  logits_in_c_.get()->shape[0] = 0;
  ASSERT_C_OK(quern_sampler_sample(sampler_, logits_in_c_.get(), nullptr, 0,
                                   nullptr, nullptr),
              sampler_);
}

TEST_F(SamplerInCTest, Refuses) {
  const struct {
    const char* words;
    std::function<void()> spoil;
  } cases[] = {
      {"logits", [&] { logits_in_c_->dtype = c_abi::ToC(DType::kBF16); }},
      {"logits has device_type=2",
       [&] { logits_in_c_->device.device_type = 2; }},
      {"logits has a null shape", [&] { logits_in_c_->shape = nullptr; }},
      {"logits", [&] { logits_in_c_->data = nullptr; }},
      {"logits", [&] { --logits_in_c_->shape[1]; }},
      {"tokens", [&] { --logits_in_c_->shape[0]; }},
      {"tokens", [&] { how_.pop_back(); }},
      {"temperature=-1; need finite temperature >= 0",
       [&] { how_[3].temperature = -1; }},
      {"temperature=",
       [&] { how_[3].temperature = std::numeric_limits<float>::infinity(); }},
      {"top_p=2; need 0 < top_p <= 1", [&] { how_[3].top_p = 2; }},
      {"top_k=-1; need top_k >= 0", [&] { how_[3].top_k = -1; }},
  };
  const quern_tensor good = *logits_in_c_.get();
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    *logits_in_c_.get() = good;
    good.shape[0] = kRows;
    good.shape[1] = kVocab;
    how_.assign(static_cast<size_t>(kRows), {});
    c.spoil();
    ExpectRefused(Sample(), sampler_, QUERN_INVALID_ARGUMENT, c.words);
  }
  *logits_in_c_.get() = good;
  good.shape[0] = kRows;
  how_.assign(static_cast<size_t>(kRows), {});
  const quern_tensor* const logits = logits_in_c_.get();
  ExpectRefused(quern_sampler_sample(sampler_, nullptr, how_.data(), 6,
                                     tokens_.data(), nullptr),
                sampler_, QUERN_INVALID_ARGUMENT, "logits is null");
  ExpectRefused(quern_sampler_sample(sampler_, logits, nullptr, 6,
                                     tokens_.data(), nullptr),
                sampler_, QUERN_INVALID_ARGUMENT, "sampling is null");
  ExpectRefused(
      quern_sampler_sample(sampler_, logits, how_.data(), 6, nullptr, nullptr),
      sampler_, QUERN_INVALID_ARGUMENT, "tokens is null");
  ExpectRefused(quern_sampler_sample(sampler_, logits, how_.data(),
                                     std::numeric_limits<size_t>::max(),
                                     tokens_.data(), nullptr),
                sampler_, QUERN_INVALID_ARGUMENT,
                "num_rows=18446744073709551615; need");
  ExpectRefused(Sample(reinterpret_cast<quern_executor*>(sampler_)), sampler_,
                QUERN_FAILED_PRECONDITION, "the sampler is being changed");
  ASSERT_C_OK(Sample(), sampler_);
}

TEST_F(SamplerInCTest, RefusesVocabularies) {
  for (const int64_t vocab : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    quern_sampler* sampler = sampler_;
    ExpectRefused(quern_sampler_create(library_.get(), vocab, &sampler),
                  library_.get(), QUERN_INVALID_ARGUMENT,
                  absl::StrCat("quern_sampler_create: vocab=", vocab,
                               "; need 1 <= vocab <= 2147483647"));
    EXPECT_EQ(sampler, nullptr);
  }
}

}  // namespace
}  // namespace quern
