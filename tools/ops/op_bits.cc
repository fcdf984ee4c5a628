// Prints what every operator by name computes on its example: the hash of the
// bits of all tensors, for each provider, dtype and instruction set, and the
// schemas. The lines of two commits differ where a change was one of results:
//
//   bazel run -c opt //tools/ops:op_bits >after
//   diff before after
//
// Bits of kernels depend on the instruction set and the compiler, so they are
// compared on one machine and written down nowhere.

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/max_isa.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

// The hash of all tensors after a step.
absl::StatusOr<uint64_t> BitsOf(const OpRegistry& registry,
                                const std::string& name,
                                const std::string& provider, DType dtype) {
  const OpDispatcher ops(registry, OpPolicy());
  const NamedArgs args = registry.Find(name)->example(dtype);
  QUERN_ASSIGN_OR_RETURN(const MadeOp op, ops.MakeFrom(provider, name, args));
  QUERN_ASSIGN_OR_RETURN(const GivenTensors given,
                         GivenTensors::Of(registry, name, args));
  // Each operator has its own elements, whatever stands before it.
  Rng rng(Fnv1a(name.data(), name.size()));
  std::vector<Tensor> tensors;
  std::vector<AnyTensorView> views(given.all);
  for (size_t t = 0; t < given.size(); ++t) {
    const TensorMeta& meta = given.metas[t];
    tensors.emplace_back(meta, DenseStrides(meta.extents), 0);
    tensors.back().Write(SomeElements(rng, meta));
    views[given.places[t]] = tensors.back().View(!given.written[t], false);
  }
  InlineExecutor executor;
  QUERN_RETURN_IF_ERROR(RunStep(op, views, executor));
  uint64_t hash = kFnv1aBasis;
  for (const Tensor& tensor : tensors) {
    const std::vector<uint8_t> bytes = tensor.Read();
    hash = Fnv1a(bytes.data(), bytes.size(), hash);
  }
  return hash;
}

absl::Status PrintAll() {
  OpRegistry registry;
  QUERN_RETURN_IF_ERROR(RegisterAllOps(registry));
  for (const std::string& name : registry.Names()) {
    std::printf("%s\n", registry.Find(name)->schema.Print().c_str());
  }
  const std::vector<std::string> targets = GetCpuInfo().targets;
  for (const std::string& target : targets) {
    QUERN_RETURN_IF_ERROR(SetMaxIsa(target));
    for (const std::string& name : registry.Names()) {
      for (const OpImplementation& made :
           registry.Find(name)->implementations) {
        for (const DType dtype : kFloatDTypes) {
          const std::string provider(made.provider);
          const auto bits = BitsOf(registry, name, provider, dtype);
          std::printf("%s %s %s %s ", target.c_str(), name.c_str(),
                      provider.c_str(), std::string(DTypeName(dtype)).c_str());
          if (bits.ok()) {
            std::printf("%016" PRIx64 "\n", *bits);
          } else {
            std::printf("%s\n",
                        absl::StatusCodeToString(bits.status().code()).c_str());
          }
        }
      }
    }
  }
  return SetMaxIsa("");
}

}  // namespace
}  // namespace quern

int main() {
  const absl::Status status = quern::PrintAll();
  if (status.ok()) return 0;
  std::fprintf(stderr, "op_bits: %s\n", status.ToString().c_str());
  return 1;
}
