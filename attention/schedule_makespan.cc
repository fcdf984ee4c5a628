#include "quern/attention/schedule_makespan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "quern/attention/schedule.h"

namespace quern {
namespace {

// When the last of `tasks` is done, if workers take them in order.
template <typename Cost>
double LastEnd(int64_t tasks, int workers, const Cost& cost) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free;
  for (int i = 0; i < workers; ++i) free.push(0);
  double last = 0;
  for (int64_t i = 0; i < tasks; ++i) {
    const double end = free.top() + cost(i);
    free.pop();
    free.push(end);
    last = std::max(last, end);
  }
  return last;
}

}  // namespace

AttentionMakespan SimulateMakespan(const AttentionSchedule& schedule,
                                   int workers) {
  AttentionMakespan makespan;
  for (const AttentionWork& work : schedule.work()) {
    makespan.ideal += schedule.Cost(work);
    // A cut block would start once.
    if (work.chunk_begin != schedule.FirstChunk(work.block)) {
      makespan.ideal -= AttentionSchedule::kItemCost;
    }
  }
  makespan.ideal /= workers;
  makespan.work = LastEnd(
      static_cast<int64_t>(schedule.shares().size()), workers, [&](int64_t i) {
        double cost = 0;
        for (const AttentionWork& work :
             schedule.Work(schedule.shares()[static_cast<size_t>(i)])) {
          cost += schedule.Cost(work);
        }
        return cost;
      });
  makespan.merges = LastEnd(
      static_cast<int64_t>(schedule.merges().size()), workers, [&](int64_t i) {
        return schedule.Cost(schedule.merges()[static_cast<size_t>(i)]);
      });
  return makespan;
}

}  // namespace quern
