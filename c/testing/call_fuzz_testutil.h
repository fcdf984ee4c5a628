#ifndef QUERN_C_TESTING_CALL_FUZZ_TESTUTIL_H_
#define QUERN_C_TESTING_CALL_FUZZ_TESTUTIL_H_

// Test utility: random calls on operators, weights, caches, schedules and
// executors, for call_fuzz_test.cc. model_caller_testutil.h has those on
// models.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

class OpCaller {
 public:
  // `running` is told what each call is, before the call.
  using Running = void (*)(const std::string& call);
  explicit OpCaller(Running running);

  // A case: two libraries, some objects, and calls on them. The same seed makes
  // the same calls.
  void RunCase(uint64_t seed, int calls);

  std::map<std::string, int64_t> executed;  // by operator
  int64_t done = 0, refused = 0;

 private:
  enum Kind {
    kExecutors,
    kOps,
    kWeights,
    kCaches,
    kSchedules,
    kHandlers,
    kMetadata,
    kExperts,
    kKinds
  };

  // A tensor with memory of its own, and what that had before the call.
  struct Tensor {
    std::vector<int64_t> shape, strides;
    std::unique_ptr<GuardBuffer<uint8_t>> memory;
    std::vector<uint8_t> before;
    quern_tensor c = {};
    int64_t bytes = 0;               // from the first element to the last
    std::shared_ptr<Tensor> lender;  // the tensor whose memory this shares
  };

  // An operator that was made, with the tensors that it expects.
  struct Made {
    quern_op* op = nullptr;
    std::vector<std::pair<std::string, TensorMeta>> tensors;
    // What Prepare was given, which later executions name again.
    std::vector<std::shared_ptr<Tensor>> prepared;
  };

  bool OneIn(int64_t n) { return rng_.Integer(0, n - 1) == 0; }
  template <typename T>
  const T& Pick(const std::vector<T>& some) {
    return some[At(rng_, some.size())];
  }
  int64_t Edge() {
    constexpr int64_t kEdges[] = {
        -1,        0,        1, 2, 7, 64, INT32_MAX, int64_t{INT32_MAX} + 1,
        INT64_MAX, INT64_MIN};
    return kEdges[At(rng_, std::size(kEdges))];
  }
  int64_t Number(int64_t usual) { return OneIn(16) ? Edge() : usual; }
  template <typename T>
  T Sized() {
    T options = {};
    options.size = OneIn(24) ? static_cast<size_t>(Edge()) : sizeof(T);
    return options;
  }
  template <typename T>
  T* OrNull(T* pointer) {
    return OneIn(24) ? nullptr : pointer;
  }
  quern_library* AnyLibrary() {
    return OneIn(24) ? other_ : OneIn(40) ? nullptr : library_;
  }
  void* Any(int kind) {
    if (OneIn(24)) return nullptr;
    if (OneIn(24)) kind = static_cast<int>(rng_.Integer(0, kKinds - 1));
    const std::vector<void*>& some = handles_[kind];
    if (some.empty()) return nullptr;
    return OneIn(2) ? some.back() : Pick(some);
  }
  template <typename T>
  T* Any(int kind) {
    return static_cast<T*>(Any(kind));
  }

  void Begin(const std::string& call) {
    call_ = call;
    running_(call);
  }
  // Counts what a call on `object` returned. A refusal has a code of quern.h
  // and a sentence. Returns whether the call was done.
  bool Done(quern_status status, const void* object);
  template <typename T>
  bool Keep(bool ok, int kind, T* const& handle) {
    EXPECT_EQ(ok, handle != nullptr) << call_;
    if (ok) handles_[kind].push_back(handle);
    return ok;
  }

  using Texts = std::deque<std::string>;
  using Tensors = std::vector<std::shared_ptr<Tensor>>;

  void MakeGoodObjects();
  void CallAny();
  void CreateExecutor();
  void CreateWeights();
  void CreateCacheAndSchedule();
  void BuildSchedule();
  void CreateNamed();
  quern_argument ArgumentFor(const std::string& op, const OpArg& arg,
                             const char* name, bool hostile, Texts& texts,
                             Tensors& tensors);
  void CreateOp();
  void UseOp(Made& made);
  void TellTexts();
  void Destroy();

  void* WeightsLike(const std::string& op, const LinearWeights& weights);
  void* ExpertsLike(const ExpertWeights& experts);
  void* ObjectFor(const std::string& op, const OpObjectRef& ref);
  // A tensor of this dtype and shape, or, if hostile, of nearly these.
  std::shared_ptr<Tensor> MakeTensor(const TensorMeta& meta, bool hostile);
  void Spoil(Tensor& tensor);
  // Moves the last tensor into the memory of another one, if it fits.
  void Share(const Tensors& tensors);
  static TensorMeta Folded(TensorMeta meta);
  static TensorMeta Batched(TensorMeta meta);
  void Fill(Tensor& tensor, DType dtype);
  DType AnyDType() { return kDTypes[At(rng_, std::size(kDTypes))]; }

  static constexpr DType kDTypes[] = {
      DType::kF32, DType::kBF16, DType::kF16,    DType::kI32,   DType::kI64,
      DType::kI8,  DType::kU8,   DType::kF8E4M3, DType::kF8E5M2};

  const Running running_;
  std::string call_;
  Rng rng_{0};
  OpRegistry registry_;
  std::vector<std::string> names_;
  quern_library* library_ = nullptr;
  quern_library* other_ = nullptr;
  std::vector<void*> handles_[kKinds];
  std::vector<Made> made_;
  std::map<std::string, void*> weights_of_;  // by operator
};

}  // namespace quern

#endif  // QUERN_C_TESTING_CALL_FUZZ_TESTUTIL_H_
