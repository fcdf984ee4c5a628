#include "quern/c/tvm_ffi/state.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

namespace quern {
namespace tvm_ffi {
namespace {

constexpr const char* kNames[] = {
#define QUERN_TVM_OP(name) #name,
#include "quern/c/tvm_ffi/ops.inc"
#undef QUERN_TVM_OP
};

const char* KindOf(quern_status status) {
  switch (status) {
    case QUERN_UNIMPLEMENTED:
      return "NotImplementedError";
    case QUERN_RESOURCE_EXHAUSTED:
      return "MemoryError";
    case QUERN_INTERNAL:
    case QUERN_FAILED_PRECONDITION:
      return "RuntimeError";
    default:
      return "ValueError";
  }
}

std::string MessageOf(const void* object) {
  std::string text(quern_message(object, nullptr, 0), '\0');
  quern_message(object, &text[0], text.size() + 1);
  return text;
}

void SetSchema(OpSchema schema, Signature& signature) {
  signature.exists = true;
  const auto returns = static_cast<size_t>(schema.returns);
  for (size_t i = 0; i < returns; ++i) {
    signature.outs.push_back(returns == 1 ? "out" : "out" + std::to_string(i));
  }
  signature.most = signature.least = returns;
  for (const OpParam& param : schema.params) {
    ++signature.most;
    if (!param.optional && !param.default_value.has_value()) {
      signature.least = signature.most;
    }
  }
  signature.schema = std::move(schema);
}

// Its destructor leaves a mark that can still be read afterwards.
thread_local bool thread_has_ended = false;
thread_local Thread the_thread;

}  // namespace

void Require(quern_status status, const void* object) {
  if (status != QUERN_OK) throw Refusal(KindOf(status), MessageOf(object));
}

Shared::Shared() {
  char text[512] = "";
  if (quern_library_create(nullptr, &library, text, sizeof(text)) != QUERN_OK) {
    throw Refusal("RuntimeError", text);
  }
  for (const char* name : kNames) signatures.emplace_back().name = name;
  std::string lines(quern_ops(library, nullptr, 0), '\0');
  quern_ops(library, &lines[0], lines.size() + 1);
  for (size_t begin = 0, end = 0; begin < lines.size(); begin = end + 1) {
    end = std::min(lines.find('\n', begin), lines.size());
    auto schema = OpSchema::Parse(lines.substr(begin, end - begin));
    // A later libquern.so may have types that this parser does not know.
    if (!schema.ok()) continue;
    for (Signature& signature : signatures) {
      if (signature.name != schema->name) continue;
      SetSchema(*std::move(schema), signature);
      break;
    }
  }
}

void Shared::SetWorkers(int32_t count) {
  const std::lock_guard<std::mutex> lock(of_library);
  quern_executor* pool = nullptr;
  if (count > 1) {
    Require(quern_executor_create_pool(library, count, &pool), library);
  }
  quern_destroy(executor_.exchange(pool));
  ++times_set_;
}

Shared& TheShared() {
  static Shared& shared = *new Shared;
  return shared;
}

Thread::~Thread() {
  thread_has_ended = true;
  std::free(workspace);
}

void Thread::Grow(size_t need) {
  if (need <= bytes) return;
  std::free(workspace);
  bytes = 0;
  const size_t rounded =
      (need + QUERN_ALIGNMENT - 1) / QUERN_ALIGNMENT * QUERN_ALIGNMENT;
  workspace = std::aligned_alloc(QUERN_ALIGNMENT, rounded);
  if (workspace == nullptr) throw std::bad_alloc();
  bytes = rounded;
}

Thread& TheThread() {
  if (thread_has_ended) {
    throw Refusal("RuntimeError",
                  "quern: the thread is ending; need a call before its "
                  "thread_local objects are destroyed");
  }
  return the_thread;
}

}  // namespace tvm_ffi
}  // namespace quern
