#include "quern/core/limits/timer.h"

#include <dirent.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace quern {
namespace {
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return kNaN;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

double Smallest(const std::vector<double>& values) {
  return values.empty() ? kNaN
                        : *std::min_element(values.begin(), values.end());
}

double Largest(const std::vector<double>& values) {
  return values.empty() ? kNaN
                        : *std::max_element(values.begin(), values.end());
}

int64_t RunDelayNanoseconds() {
  // schedstat: nanoseconds running, nanoseconds waiting, slices.
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return 0;
  int64_t total = 0;
  while (const dirent* entry = readdir(tasks)) {
    if (entry->d_name[0] == '.') continue;
    const std::string path =
        std::string("/proc/self/task/") + entry->d_name + "/schedstat";
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr) continue;
    long long running = 0, waiting = 0;
    if (std::fscanf(file, "%lld %lld", &running, &waiting) == 2) {
      total += waiting;
    }
    std::fclose(file);
  }
  closedir(tasks);
  return total;
}

}  // namespace quern
