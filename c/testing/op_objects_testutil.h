#ifndef QUERN_C_TESTING_OP_OBJECTS_TESTUTIL_H_
#define QUERN_C_TESTING_OP_OBJECTS_TESTUTIL_H_

// Test utility: the objects that the examples of operators have, in C.

#include <map>
#include <string>

#include "quern/c/quern.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/vllm/linear_ops.h"

namespace quern {

// Makes objects in a library, which owns them; each is made once.
class ObjectsInC {
 public:
  // `library` outlives this.
  explicit ObjectsInC(quern_library* library) : library_(library) {}

  // The object for an argument of `op`; null for a type that the C interface
  // does not have. Weights and layouts equal those of C++. Handlers have
  // weights unless the operator makes them. A schedule and metadata are without
  // a step.
  void* For(const std::string& op, const OpObjectRef& ref);

 private:
  quern_linear_weights* WeightsLike(const LinearWeights& weights);
  void* ExpertsLike(const ExpertWeights& experts);
  void* HandlerLike(const OneDnnHandler& handler, bool filled);
  void* Cache();
  void* Schedule();

  quern_library* const library_;
  std::map<const void*, void*> made_;  // by the object of C++
  quern_kv_cache* cache_ = nullptr;
  quern_schedule* schedule_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_C_TESTING_OP_OBJECTS_TESTUTIL_H_
