// Continues a text with a Llama-architecture model, in one process. --help
// explains the options.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "examples/generate/generator.h"
#include "examples/generate/options.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/parallel/thread_communicator.h"

namespace quern {
namespace {

constexpr char kProgram[] = "generate";

int Fail(const std::string& sentence) {
  std::fprintf(stderr, "%s: %s\n", kProgram, sentence.c_str());
  return 1;
}

// Runs each rank as a thread with its own executor. Rank 0 leads.
int RunRanks(const GenerateOptions& options, int ranks) {
  const auto group = ThreadCommunicator::CreateGroup(ranks);
  if (!group.ok()) return Fail(std::string(group.status().message()));
  GenerateOptions own = options;
  const int threads = options.threads == 0 ? AvailableCores() : options.threads;
  own.threads = std::clamp(threads / ranks, 1, HwyExecutor::kMaxWorkers);
  // A rank may wait for the others only when all of them exist.
  std::promise<bool> complete;
  const std::shared_future<bool> go = complete.get_future().share();
  std::vector<std::thread> others;
  bool all = true;
  try {
    for (int rank = 1; rank < ranks; ++rank) {
      others.emplace_back(
          [&own, go, c = (*group)[static_cast<size_t>(rank)].get()] {
            if (go.get()) GenerateMain(kProgram, own, c);
          });
    }
  } catch (const std::system_error&) {
    all = false;
  }
  complete.set_value(all);
  const int code = all ? GenerateMain(kProgram, own, (*group)[0].get())
                       : Fail(absl::StrCat("the system refuses ", ranks - 1,
                                           " threads for the ranks"));
  for (std::thread& thread : others) thread.join();
  return code;
}

int Main(int argc, char** argv) {
  absl::StatusOr<GenerateOptions> options = ParseOptions(argc, argv);
  if (options.ok()) {
    if (absl::Status capped = CapIsa(*options); !capped.ok()) options = capped;
  }
  const int ranks = options.ok() ? options->ranks.value_or(1) : 1;
  if (ranks > ThreadCommunicator::kMaxRanks) {
    options = absl::InvalidArgumentError(
        absl::StrCat("--ranks=", ranks, "; need 1 to ",
                     ThreadCommunicator::kMaxRanks, " in one process"));
  } else if (ranks > 1 && !options->help) {
    return RunRanks(*options, ranks);
  }
  return GenerateMain(kProgram, options, nullptr);
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
