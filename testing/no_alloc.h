#ifndef QUERN_TESTING_NO_ALLOC_H_
#define QUERN_TESTING_NO_ALLOC_H_

// Proof that a call allocates nothing, on any thread:
//
//   EXPECT_NO_ALLOCATION(plan.Execute(args, executor));
//
// Linking this library replaces malloc and its family (operator new calls
// them); under the sanitizers, which have replaced them already, it asks to be
// told of each call. mmap is not seen.

#include <cstddef>
#include <cstdint>

namespace quern {

// Counts allocations of the whole process while it lives; the destructor fails
// the running test if there were any. Scopes do not nest. Keep assertions out
// of it: a failing one allocates, and so may a passing one.
class NoAllocScope {
 public:
  NoAllocScope();
  ~NoAllocScope();
  NoAllocScope(const NoAllocScope&) = delete;
  NoAllocScope& operator=(const NoAllocScope&) = delete;

  // Allocations so far: all threads, and of those this thread.
  int64_t count() const;
  int64_t count_in_this_thread() const;

  // Starts again from none, so that the destructor does not complain.
  void Forgive();
};

}  // namespace quern

#define EXPECT_NO_ALLOCATION(...)            \
  do {                                       \
    const ::quern::NoAllocScope quern_scope; \
    __VA_ARGS__;                             \
  } while (false)

#endif  // QUERN_TESTING_NO_ALLOC_H_
