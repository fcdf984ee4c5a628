#include "examples/generate/interrupt.h"

#include <signal.h>

#include <atomic>
#include <mutex>

namespace quern {
namespace {

// Lock-free, so a handler may write it.
std::atomic<int> interrupted{0};
static_assert(std::atomic<int>::is_always_lock_free);

// Guards of several ranks may exist at once; the first one sets the handler.
std::mutex mutex;
int guards = 0;
bool handles = false;

void OnInterrupt(int /*signal*/) { interrupted = 1; }

}  // namespace

InterruptGuard::InterruptGuard() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (guards++ > 0) return;
  struct sigaction former = {};
  if (sigaction(SIGINT, nullptr, &former) != 0 ||
      former.sa_handler != SIG_DFL) {
    return;
  }
  struct sigaction action = {};
  action.sa_handler = &OnInterrupt;
  sigemptyset(&action.sa_mask);
  // The second one finds the default, which ends the process.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  handles = sigaction(SIGINT, &action, nullptr) == 0;
}

InterruptGuard::~InterruptGuard() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (--guards > 0 || !handles) return;
  handles = false;
  signal(SIGINT, SIG_DFL);
}

bool Interrupted() { return interrupted != 0; }

}  // namespace quern
