#ifndef QUERN_MODELS_TESTING_DECODER_FUZZ_TESTUTIL_H_
#define QUERN_MODELS_TESTING_DECODER_FUZZ_TESTUTIL_H_

// Fixture of tests that give hostile files to a decoder, within a limit of
// memory and of time.
//
// RLIMIT_AS limits the process to its current size plus kSpareBytes. An
// allocation that fails should have been refused earlier, and fails the test.
// Under sanitizers, which map terabytes themselves, the limit is not set; the
// test then checks that the sizes which the model and the state report stay
// within max_bytes. Each case has kSecondsOfCase, after which the process
// prints the case and ends.

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/testing/data.h"
#include "quern/testing/sanitized.h"

namespace quern {

inline constexpr int64_t kModelBytes = int64_t{32} << 20;
inline constexpr int64_t kStateBytes = int64_t{32} << 20;
// Memory for model and state, their scratch and logits, copies of the file, and
// freed memory that the allocator keeps.
inline constexpr rlim_t kSpareBytes = rlim_t{256} << 20;
inline constexpr unsigned kSecondsOfCase = kSanitized ? 120 : 20;

// The line that OnAlarm prints.
inline char overtime[256];

inline void OnAlarm(int) {
  size_t size = 0;
  while (overtime[size] != '\0') ++size;
  (void)!write(STDERR_FILENO, overtime, size);
  _exit(1);
}

inline rlim_t MappedBytes() {
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

class DecoderFuzzTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(std::signal(SIGALRM, &OnAlarm), SIG_ERR);
    ASSERT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    if (kSanitized) return;
    rlimit limit = before_;
    limit.rlim_cur = MappedBytes() + kSpareBytes;
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  void TearDown() override {
    alarm(0);
    EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0);
  }

  // Fails for a refusal that came only from a failed allocation.
  static void ExpectRefusedByName(const absl::Status& status) {
    EXPECT_FALSE(absl::StrContains(status.message(), "cannot be allocated"))
        << status;
    EXPECT_GT(status.message().size(), 8u) << status;
  }

  // Loads `bytes` and runs three tokens, by rows of int8 if the index is odd.
  // Returns whether the tokens ran.
  bool Exercise(const std::string& bytes, int64_t index) {
    std::snprintf(overtime, sizeof(overtime),
                  "%s: case %lld of QUERN_TEST_SEED=%llu took more than %u s\n",
                  TestName().c_str(), static_cast<long long>(index),
                  static_cast<unsigned long long>(BaseSeed()), kSecondsOfCase);
    alarm(kSecondsOfCase);
    const bool ran = Run(bytes, index % 2 == 0 ? DecoderActivations::kExact
                                               : DecoderActivations::kInt8);
    alarm(0);
    return ran;
  }

 private:
  bool Run(const std::string& bytes, DecoderActivations activations) {
    // The copy has the exact size, so that a sanitizer notices a read of one
    // byte too many.
    const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
    const auto file = GgufFile::Parse(exact);
    if (!file.ok()) {
      ExpectRefusedByName(file.status());
      return false;
    }
    DecoderOptions options;
    options.max_bytes = kModelBytes;
    options.activations = activations;
    const auto model = Decoder::Create(*file, options, executor_);
    if (!model.ok()) {
      ExpectRefusedByName(model.status());
      return false;
    }
    EXPECT_LE(model->weight_bytes(), kModelBytes);
    EXPECT_LE(model->context(), options.max_context);
    DecoderStateSpec spec;
    spec.max_step_tokens = 4;
    spec.max_bytes = kStateBytes;
    auto state = DecoderState::Create(*model, spec);
    if (!state.ok()) {
      ExpectRefusedByName(state.status());
      return false;
    }
    EXPECT_LE(state->cache_bytes() + state->scratch_bytes(), kStateBytes);
    return Forward(*model, *state);
  }

  bool Forward(const Decoder& model, DecoderState& state) {
    const auto last = static_cast<int32_t>(model.config().vocab - 1);
    std::vector<int32_t> tokens = {0, last, last / 2};
    if (model.context() < 3) tokens.resize(1);
    const auto logits = state.Forward({{*state.NewSequence(), tokens}},
                                      LogitsOf::kAllTokens, executor_);
    if (!logits.ok()) {
      ExpectRefusedByName(logits.status());
      return false;
    }
    EXPECT_EQ(logits->extent(0), static_cast<int64_t>(tokens.size()));
    EXPECT_EQ(logits->extent(1), model.config().vocab);
    return true;
  }

  rlimit before_{};
  InlineExecutor executor_;
};

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_DECODER_FUZZ_TESTUTIL_H_
