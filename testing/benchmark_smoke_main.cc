// main() for the smoke test of a benchmark: runs each case once and fails if
// one reports an error (Google Benchmark's own main does not) or none ran.

#include <cstdio>
#include <vector>

#include "benchmark/benchmark.h"

namespace {

class StrictReporter : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      ++runs_;
      if (run.skipped == benchmark::internal::SkippedWithError) ++errors_;
    }
    benchmark::ConsoleReporter::ReportRuns(runs);
  }
  int runs() const { return runs_; }
  int errors() const { return errors_; }

 private:
  int runs_ = 0;
  int errors_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  benchmark::SetDefaultTimeUnit(benchmark::kMicrosecond);
  std::vector<char*> args(argv, argv + argc);
  char once[] = "--benchmark_min_time=1x";
  args.insert(args.begin() + 1, once);  // arguments given come later and win
  auto count = static_cast<int>(args.size());
  args.push_back(nullptr);
  benchmark::Initialize(&count, args.data());
  if (benchmark::ReportUnrecognizedArguments(count, args.data())) return 2;
  StrictReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  std::printf("%d runs, %d errors\n", reporter.runs(), reporter.errors());
  return reporter.runs() > 0 && reporter.errors() == 0 ? 0 : 1;
}
