#include "quern/testing/no_alloc.h"

#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QUERN_SANITIZER_OWNS_MALLOC 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define QUERN_SANITIZER_OWNS_MALLOC 1
#endif
#endif
#ifndef QUERN_SANITIZER_OWNS_MALLOC
#define QUERN_SANITIZER_OWNS_MALLOC 0
#endif

namespace quern {
namespace {

// Plain atomics: thread_local storage of a shared library may itself allocate.
// One scope at a time: scopes do not nest.
std::atomic<int> scopes{0};
std::atomic<pthread_t> owner{};
std::atomic<int64_t> all_threads{0};
std::atomic<int64_t> owner_thread{0};
std::atomic<size_t> first_bytes{0};

void CountAllocation(size_t bytes) {
  if (scopes.load(std::memory_order_relaxed) == 0) return;
  if (all_threads.fetch_add(1, std::memory_order_relaxed) == 0) {
    first_bytes.store(bytes, std::memory_order_relaxed);
  }
  if (pthread_equal(pthread_self(), owner.load(std::memory_order_relaxed))) {
    owner_thread.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace
}  // namespace quern

#if QUERN_SANITIZER_OWNS_MALLOC

extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*malloc_hook)(const volatile void*, size_t),
    void (*free_hook)(const volatile void*));

namespace quern {
namespace {

void OnMalloc(const volatile void*, size_t bytes) { CountAllocation(bytes); }
void OnFree(const volatile void*) {}
const int kInstalled =
    __sanitizer_install_malloc_and_free_hooks(OnMalloc, OnFree);

}  // namespace
}  // namespace quern

#else

// glibc's own entry points: what malloc and the others are aliases of.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  quern::CountAllocation(bytes);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  quern::CountAllocation(count * bytes);
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  quern::CountAllocation(bytes);
  return __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  quern::CountAllocation(bytes);
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  quern::CountAllocation(bytes);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** result, size_t alignment, size_t bytes) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 ||
      alignment == 0) {
    return EINVAL;
  }
  quern::CountAllocation(bytes);
  void* data = __libc_memalign(alignment, bytes);
  if (data == nullptr) return ENOMEM;
  *result = data;
  return 0;
}
}  // extern "C"

#endif  // QUERN_SANITIZER_OWNS_MALLOC

namespace quern {

NoAllocScope::NoAllocScope() {
  owner.store(pthread_self(), std::memory_order_relaxed);
  Forgive();
  scopes.fetch_add(1);
}

NoAllocScope::~NoAllocScope() {
  scopes.fetch_sub(1);
  EXPECT_EQ(count(), 0) << "allocations where there must be none, "
                        << count_in_this_thread()
                        << " of them in this thread; the first was of "
                        << first_bytes.load() << " bytes";
}

int64_t NoAllocScope::count() const { return all_threads.load(); }
int64_t NoAllocScope::count_in_this_thread() const {
  return owner_thread.load();
}

void NoAllocScope::Forgive() {
  all_threads.store(0);
  owner_thread.store(0);
  first_bytes.store(0);
}

}  // namespace quern
