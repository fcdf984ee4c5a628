// Packs one weight matrix with Quern, as an engine would at load time, and runs
// an operator of this repository in the place of Quern's relu2.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/check.h"
#include "ops/registry/op_registry.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/hwy_executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/activation_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
#include "testing/data.h"

namespace {

// Whether `provider` runs relu2 under `policy`, and computes it.
bool Relu2RunsBy(const quern::OpRegistry& registry, const char* policy,
                 const char* provider, quern::Executor& executor) {
  auto parsed = quern::OpPolicy::Parse(policy);
  if (!parsed.ok()) return false;
  const quern::OpDispatcher ops(registry, *parsed);
  const auto made =
      ops.Make("relu2", {{"x", quern::TensorMeta{quern::DType::kF32, {1, 3}}}});
  if (!made.ok()) return false;
  const std::vector<float> x = {-2.0f, 0.5f, 3.0f};
  std::vector<float> out(3);
  const std::vector<quern::AnyTensorView> tensors = {
      quern::DenseMatrix(x.data(), 1, 3), quern::DenseMatrix(out.data(), 1, 3)};
  if (!made->op->CheckArgs(tensors).ok()) return false;
  made->op->Execute(tensors, executor);
  std::printf("relu2 under \"%s\": %s\n", policy, made->provider.c_str());
  return made->provider == provider && out[0] == 0.0f && out[1] == 0.25f &&
         out[2] == 9.0f;
}

}  // namespace

int main() {
  const int64_t n = 33, k = 130;  // neither is a multiple of anything
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
  const absl::Status registered = quern::RegisterActivationOps(registry);
  if (!Check(registered) || !Relu2RunsBy(registry, "all", "simd", *executor) ||
      !Check(OverrideRelu2(registry)) ||
      !Relu2RunsBy(registry, "all", "mine", *executor) ||
      !Relu2RunsBy(registry, "none,+relu2", "mine", *executor) ||
      !Relu2RunsBy(registry, "-relu2", "reference", *executor)) {
    std::fprintf(stderr, "relu2 does not run as the policy says\n");
    return 1;
  }
  return 0;
}
