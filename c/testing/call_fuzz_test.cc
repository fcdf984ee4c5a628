// Random calls through quern.h and quern_named.h with hostile arguments: every
// operator by name, weights, caches, schedules, executors, and handles that
// live, were destroyed, are of another kind, of another library, or null. A
// call is done, or it is refused with a code, a sentence and operands as they
// were. Tensors and workspaces end at pages that may not be touched.
//
//   bazel run -c opt //c/testing:call_fuzz_test -- --seconds=3600 --seed=7
//
// Without flags it is a test of 12 cases. A call that takes a minute ends
// the process. model_fuzz_test.cc does the same for models.

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "quern/c/testing/call_fuzz_testutil.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

constexpr int64_t kCases = 12;  // without --seconds
int64_t seconds_flag = 0;
uint64_t seed_flag = 1;

// What the watchdog prints.
char last_call[256] = "nothing";
void TellTheCall(int) {
  const char* const text = "call_fuzz_test: a call takes a minute: ";
  // What write returns cannot be acted upon here.
  if (write(2, text, std::strlen(text)) < 0) _exit(3);
  if (write(2, last_call, std::strlen(last_call)) < 0) _exit(3);
  std::abort();
}

// Before each call: the watchdog has a minute from now.
void Running(const std::string& call) {
  std::snprintf(last_call, sizeof(last_call), "%s\n", call.c_str());
  alarm(60);
}

TEST(CallFuzzTest, CallsAreDoneOrRefused) {
  std::signal(SIGALRM, &TellTheCall);
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(seconds_flag);
  OpCaller caller(&Running);
  int64_t cases = 0;
  do {
    caller.RunCase(seed_flag + static_cast<uint64_t>(cases), 400);
    ++cases;
  } while (!HasFailure() &&
           (cases < kCases || std::chrono::steady_clock::now() < end));
  alarm(0);
  std::printf(
      "seed %llu: %lld cases, %lld calls done, %lld refused, %zu "
      "operators executed\n",
      static_cast<unsigned long long>(seed_flag), static_cast<long long>(cases),
      static_cast<long long>(caller.done),
      static_cast<long long>(caller.refused), caller.executed.size());
  EXPECT_GT(caller.done, 100 * cases);
  EXPECT_GT(caller.refused, 20 * cases);
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag.rfind("--seconds=", 0) == 0) {
      quern::seconds_flag = std::strtoll(argv[i] + 10, nullptr, 10);
    } else if (flag.rfind("--seed=", 0) == 0) {
      quern::seed_flag = std::strtoull(argv[i] + 7, nullptr, 10);
    } else {
      std::fprintf(stderr, "call_fuzz_test: %s; need --seconds=N or --seed=N\n",
                   argv[i]);
      return 2;
    }
  }
  // What asks for more memory is refused, and does not slow the machine down.
  if (!quern::kSanitized) {
    const rlimit most = {rlim_t{4} << 30, rlim_t{4} << 30};
    if (setrlimit(RLIMIT_AS, &most) != 0) std::perror("setrlimit");
  }
  return RUN_ALL_TESTS();
}
