// Packs one weight matrix with Quern, as an engine would at load time, and runs
// operators of this repository in the place of Quern's relu2 and rms_norm,
// alone and in the model that it is given.
//
// Usage: main MODEL.gguf

#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/check.h"
#include "model.h"
#include "ops/registry/op_registry.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/registry/families/rows/activation_ops.h"
#include "quern/ops/registry/families/rows/norm_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
#include "testing/data.h"

namespace {

// Returns whether `provider` runs relu2 and rms_norm under `policy`, with
// correct results.
bool OpsRunBy(const quern::OpRegistry& registry, const char* policy,
              const char* provider, quern::Executor& executor) {
  auto parsed = quern::OpPolicy::Parse(policy);
  if (!parsed.ok()) return false;
  const quern::OpDispatcher ops(registry, *parsed);
  const quern::TensorMeta row = {quern::DType::kF32, {1, 3}};
  const auto relu2 = ops.Make("relu2", {{"x", row}});
  const auto norm = ops.Make(
      "rms_norm", {{"x", row},
                   {"weight", quern::TensorMeta{quern::DType::kF32, {3}}},
                   {"eps", 0}});
  if (!Check(relu2.status()) || !Check(norm.status())) return false;
  const std::vector<float> x = {-2.0f, 2.0f, 2.0f}, weight = {1, 1, 0.5f};
  std::vector<float> squares(3), normed(3);
  const quern::AnyTensorView input = quern::DenseMatrix(x.data(), 1, 3);
  std::vector<quern::AnyTensorView> tensors;
  if (!Check(relu2->Bind(
          {{"x", input}, {"out", quern::DenseMatrix(squares.data(), 1, 3)}},
          tensors))) {
    return false;
  }
  relu2->op->Execute(tensors, executor);
  if (!Check(norm->Bind({{"x", input},
                         {"weight", quern::DenseVector(weight.data(), 3)},
                         {"out", quern::DenseMatrix(normed.data(), 1, 3)}},
                        tensors))) {
    return false;
  }
  norm->op->Execute(tensors, executor);
  std::printf("relu2 and rms_norm under \"%s\": %s, %s\n", policy,
              relu2->provider.c_str(), norm->provider.c_str());
  return relu2->provider == provider && norm->provider == provider &&
         squares == std::vector<float>{0.0f, 4.0f, 4.0f} &&
         normed == std::vector<float>{-1.0f, 1.0f, 0.5f};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: main MODEL.gguf\n");
    return 2;
  }
  const int64_t n = 33, k = 130;  // not a multiple of any block size
  const std::vector<int8_t> weights = Ones(n, k);

  const auto layout = quern::VnniLayout::Create(quern::DType::kI8, k, n);
  if (!Check(layout.status())) return 1;
  quern::VnniPackSpec spec;
  spec.layout = *layout;
  const auto plan = quern::VnniPackPlan::Create(spec);
  auto packed = quern::AlignedBuffer::Create(layout->bytes());
  if (!Check(plan.status()) || !Check(packed.status())) return 1;
  const auto executor = quern::HwyExecutor::CreateForThisMachine();
  plan->Pack(quern::DenseMatrix<const int8_t>(weights.data(), n, k),
             packed->data(), *executor);
  std::printf("packed %lld x %lld int8 weights into %lld bytes with %s\n",
              static_cast<long long>(n), static_cast<long long>(k),
              static_cast<long long>(layout->bytes()), plan->target());

  quern::OpRegistry registry;
  if (!Check(quern::RegisterActivationOps(registry)) ||
      !Check(quern::RegisterNormOps(registry)) ||
      !OpsRunBy(registry, "all", "simd", *executor) ||
      !Check(OverrideOps(registry)) ||
      !OpsRunBy(registry, "all", "mine", *executor) ||
      !OpsRunBy(registry, "none,+relu2,+rms_norm", "mine", *executor) ||
      !OpsRunBy(registry, "none", "reference", *executor)) {
    std::fprintf(stderr, "operators do not run as the policy says\n");
    return 1;
  }
  if (!ModelRunsOps(argv[1], *executor)) {
    std::fprintf(stderr, "the model does not run them as the policy says\n");
    return 1;
  }
  return 0;
}
