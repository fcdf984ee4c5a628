// What a call through the C interface costs over C++: the smallest rms_norm, by
// the plan, by the operator that has a name, by quern_op_execute, and by
// tvm-ffi's calling convention.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "quern/c/quern.h"
#include "quern/c/tvm_ffi/tvm_ffi.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

extern "C" int __tvm_ffi_rms_norm(void* handle, const quern_tvm_value* args,
                                  int32_t num_args, quern_tvm_value* result);

namespace quern {
namespace {

constexpr int64_t kHidden = 16;

struct Data {
  float x[kHidden], weight[kHidden], out[kHidden];

  Data() {
    for (int64_t i = 0; i < kHidden; ++i) {
      x[i] = i % 2 == 0 ? 3.0f : -3.0f;
      weight[i] = 2.0f;
      out[i] = 0.0f;
    }
  }
  // The root of the mean square is 3, so every result is 2 or -2.
  void Check(benchmark::State& state) const {
    for (int64_t i = 0; i < kHidden; ++i) {
      const float error = out[i] - (i % 2 == 0 ? 2.0f : -2.0f);
      if (!(error * error < 1e-6f)) state.SkipWithError("a wrong result");
    }
  }
};

void BM_Plan(benchmark::State& state) {
  Data data;
  RmsNormSpec spec;
  spec.hidden = kHidden;
  const auto plan = RmsNormPlan::Create(spec);
  if (!plan.ok()) return state.SkipWithError("no plan");
  InlineExecutor executor;
  for (auto _ : state) {
    plan->Execute(DenseMatrix<const float>(data.x, 1, kHidden),
                  DenseVector<const float>(data.weight, kHidden),
                  DenseMatrix(data.out, 1, kHidden), executor);
    benchmark::ClobberMemory();
  }
  data.Check(state);
}
BENCHMARK(BM_Plan);

// The call that quern_op_execute makes, with its checks or without.
void BM_Operator(benchmark::State& state) {
  const bool checked = state.range(0) == 1;
  Data data;
  OpRegistry registry;
  if (!RegisterAllOps(registry).ok()) {
    return state.SkipWithError("no operators");
  }
  const OpDispatcher ops(registry, OpPolicy());
  const auto made =
      ops.Make("rms_norm", {{"x", TensorMeta{DType::kF32, {1, kHidden}}},
                            {"weight", TensorMeta{DType::kF32, {kHidden}}}});
  if (!made.ok()) return state.SkipWithError("no operator");
  InlineExecutor executor;
  for (auto _ : state) {
    const AnyTensorView views[] = {
        DenseMatrix<const float>(data.x, 1, kHidden),
        DenseVector<const float>(data.weight, kHidden),
        DenseMatrix(data.out, 1, kHidden)};
    if (!checked) {
      made->op->Execute(views, Workspace(), executor);
    } else if (!made->CheckAndExecute(views, Workspace(), executor).ok()) {
      state.SkipWithError("refused");
      break;
    }
    benchmark::ClobberMemory();
  }
  data.Check(state);
}
BENCHMARK(BM_Operator)->ArgName("checked")->Arg(0)->Arg(1);

void BM_C(benchmark::State& state) {
  Data data;
  quern_library* library = nullptr;
  if (quern_library_create(nullptr, &library, nullptr, 0) != QUERN_OK) {
    return state.SkipWithError("no library");
  }
  int64_t rows[] = {1, kHidden}, row[] = {kHidden};
  const quern_dtype f32 = quern_dtype_of(QUERN_CODE_FLOAT, 32);
  const quern_tensor x = quern_dense(data.x, f32, 2, rows);
  const quern_tensor weight = quern_dense(data.weight, f32, 1, row);
  const quern_tensor out = quern_dense(data.out, f32, 2, rows);
  const quern_argument arguments[] = {quern_tensor_argument("x", &x),
                                      quern_tensor_argument("weight", &weight)};
  quern_op* op = nullptr;
  quern_executor* executor = nullptr;
  if (quern_op_create(library, "rms_norm", nullptr, arguments, 2, &op) !=
          QUERN_OK ||
      (state.range(0) == 1 &&
       quern_executor_create_pool(library, 1, &executor) != QUERN_OK)) {
    state.SkipWithError("no operator");
  } else {
    const quern_operand operands[] = {{"x", &x, QUERN_READ_ONLY},
                                      {"weight", &weight, QUERN_READ_ONLY},
                                      {"out", &out, 0}};
    for (auto _ : state) {
      if (quern_op_execute(op, operands, 3, nullptr, 0, executor) != QUERN_OK) {
        state.SkipWithError("refused");
        break;
      }
      benchmark::ClobberMemory();
    }
    data.Check(state);
  }
  quern_destroy(library);
}
BENCHMARK(BM_C)->ArgName("pool")->Arg(0)->Arg(1);

// As in C, tensors are described once; a thread finds its plan in each call.
void BM_TvmFfi(benchmark::State& state) {
  Data data;
  int64_t rows[] = {1, kHidden}, row[] = {kHidden};
  const quern_dtype f32 = quern_dtype_of(QUERN_CODE_FLOAT, 32);
  quern_tensor tensors[] = {quern_dense(data.out, f32, 2, rows),
                            quern_dense(data.x, f32, 2, rows),
                            quern_dense(data.weight, f32, 1, row)};
  quern_tvm_value args[3] = {};
  for (int i = 0; i < 3; ++i) {
    args[i].type = QUERN_TVM_DLTENSOR;
    args[i].value.pointer = &tensors[i];
  }
  for (auto _ : state) {
    if (__tvm_ffi_rms_norm(nullptr, args, 3, nullptr) != 0) {
      state.SkipWithError("refused");
      break;
    }
    benchmark::ClobberMemory();
  }
  data.Check(state);
}
BENCHMARK(BM_TvmFfi);

}  // namespace
}  // namespace quern
