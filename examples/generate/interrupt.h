#ifndef QUERN_EXAMPLES_GENERATE_INTERRUPT_H_
#define QUERN_EXAMPLES_GENERATE_INTERRUPT_H_

// Ctrl-C while a model is loaded: the load is told, so that it removes what it
// has written, and ends. A second Ctrl-C ends the process at once, as ever.

namespace quern {

// While at least one exists, SIGINT makes Interrupted() true in place of ending
// the process. A process that ignores SIGINT goes on doing so.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

// Whether SIGINT has come while an InterruptGuard existed.
bool Interrupted();

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_INTERRUPT_H_
