#ifndef QUERN_C_TVM_FFI_STATE_H_
#define QUERN_C_TVM_FFI_STATE_H_

// Private to libquern_tvm_ffi.so: what its functions keep between calls, for
// the process and for each thread.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "quern/c/quern.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {
namespace tvm_ffi {

// Why a call is refused. tvm_ffi.cc catches it, because no exception may leave
// a function of the library.
class Refusal : public std::runtime_error {
 public:
  // `kind` is the name of a Python exception, and lives as long as the process.
  Refusal(const char* kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  const char* kind() const { return kind_; }

 private:
  const char* kind_;
};

// Throws the refusal of `object`, with its sentence, unless `status` is OK.
void Require(quern_status status, const void* object);

// The schema of one operator, and what its function takes.
struct Signature {
  std::string name;
  bool exists = false;  // in the libquern.so that was loaded
  OpSchema schema;
  std::vector<std::string> outs;  // "out", or "out0", "out1"
  size_t least = 0;  // number of arguments without those at the end
  size_t most = 0;   // number of arguments that may be left out
};

// The executor that calls use, null for the calling thread, and how often it
// was set. Another set may have another number of workers.
struct Workers {
  quern_executor* executor;
  uint64_t set;
};

// What all threads share.
struct Shared {
  Shared();

  // Replaces the executor. A call that is running meanwhile may be refused,
  // because the executor that it began with was destroyed.
  void SetWorkers(int32_t count);
  Workers workers() const {
    // In this order a call never has an old executor under a new number.
    const uint64_t set = times_set_;
    return {executor_, set};
  }

  quern_library* library = nullptr;
  std::vector<Signature> signatures;  // in the order of ops.inc
  // Held from a call on the library until its sentence was read, because other
  // threads' calls leave theirs in the same place.
  std::mutex of_library;

 private:
  std::atomic<uint64_t> times_set_{1};
  std::atomic<quern_executor*> executor_{nullptr};
};

// The state of the process. The first call makes it, and it is never freed,
// because threads that end after main still destroy their operators.
Shared& TheShared();

// An operator that was made, destroyed with this value.
struct Plan {
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { quern_destroy(op); }

  std::string key;
  quern_op* op = nullptr;
  int64_t rows = 0;
  int64_t bytes = 0;       // of workspace, with these workers:
  uint64_t sized_for = 0;  // Workers::set; 0: not known yet
  bool prepared_by_each = false;
};

// What a thread keeps.
struct Thread {
  Thread() = default;
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread();

  // Makes the workspace at least this large.
  void Grow(size_t need);

  std::list<Plan> plans;  // the last used first
  void* workspace = nullptr;
  size_t bytes = 0;
  // The arguments of one call. They stay allocated, so that a call without
  // strings that finds its plan allocates nothing.
  std::string key;
  std::vector<quern_argument> arguments;
  std::vector<quern_operand> operands;
  std::vector<std::unique_ptr<std::string>> texts;
};

// The state of the calling thread. Throws a Refusal where the thread is ending
// and the state is gone already: in a destructor of another thread_local
// object, or of a static one.
Thread& TheThread();

}  // namespace tvm_ffi
}  // namespace quern

#endif  // QUERN_C_TVM_FFI_STATE_H_
