#ifndef QUERN_ATTENTION_SCHEDULE_MAKESPAN_H_
#define QUERN_ATTENTION_SCHEDULE_MAKESPAN_H_

// How well a schedule fills its workers, by its own costs: what a machine with
// that many cores would take, computed on any machine.

#include "quern/attention/schedule.h"

namespace quern {

struct AttentionMakespan {
  double ideal = 0;   // all work items in one piece, divided by the workers
  double work = 0;    // until the last share is done
  double merges = 0;  // from there until the last merge is done

  double total() const { return work + merges; }
  double ratio() const { return ideal == 0 ? 1 : total() / ideal; }
};

// `workers` of equal speed that take the shares in order, each as it gets free,
// and then the merges.
AttentionMakespan SimulateMakespan(const AttentionSchedule& schedule,
                                   int workers);

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_MAKESPAN_H_
