#ifndef QUERN_C_MODEL_HANDLES_TESTUTIL_H_
#define QUERN_C_MODEL_HANDLES_TESTUTIL_H_

// Test utility: handles for random calls, right and wrong ones.

#include <cstdint>
#include <mutex>
#include <vector>

#include "quern/models/gguf/mutate_testutil.h"
#include "quern/testing/data.h"

namespace quern {

// Handles by kind, those of destroyed objects among them. Several threads may
// add and take.
class Handles {
 public:
  enum Kind { kExecutors, kModels, kStates, kTokenizers, kSamplers, kKinds };

  void Add(Kind kind, void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    handles_[kind].push_back(handle);
  }
  // Mostly one of `kind`; now and then any, or null.
  void* Any(Rng& rng, Kind kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t die = rng.Integer(0, 15);
    if (die == 0) return nullptr;
    if (die == 1) kind = static_cast<Kind>(rng.Integer(0, kKinds - 1));
    const std::vector<void*>& some = handles_[kind];
    if (some.empty()) return nullptr;
    // Half of the time the youngest, which is alive.
    return rng.Integer(0, 1) == 0 ? some.back() : some[At(rng, some.size())];
  }

 private:
  std::mutex mutex_;
  std::vector<void*> handles_[kKinds];
};

}  // namespace quern

#endif  // QUERN_C_MODEL_HANDLES_TESTUTIL_H_
