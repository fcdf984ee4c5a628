// Every operator with leading dimensions that fold into rows: it has the bits
// of the same operator on matrices, in the workspace that it asks for.

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_matrix_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

// The first extent of a tensor of rows in the examples.
constexpr int64_t kExampleRows = 4;

// The arguments with another number of rows; where `folded`, matrices
// [rows, n] and wider tensors become [rows / 2, 2, n].
NamedArgs WithRows(const NamedArgs& args, int64_t rows, bool folded) {
  NamedArgs changed = args;
  for (auto& [name, arg] : changed) {
    auto* const meta = std::get_if<TensorMeta>(&arg);
    if (meta == nullptr || meta->extents.empty() ||
        meta->extents[0] != kExampleRows) {
      continue;
    }
    std::vector<int64_t>& extents = meta->extents;
    extents[0] = rows;
    if (!folded || extents.size() < 2) continue;
    extents[0] = rows / 2;
    extents.insert(extents.begin() + 1, 2);
  }
  return changed;
}

bool IsFolded(const NamedArgs& example, const NamedArgs& made) {
  for (size_t i = 0; i < made.size(); ++i) {
    const auto* const a = std::get_if<TensorMeta>(&example[i].second);
    const auto* const b = std::get_if<TensorMeta>(&made[i].second);
    if (a != nullptr && b != nullptr && !(*a == *b)) return true;
  }
  return false;
}

class OpMatrixFoldTest : public testing::Test {
 protected:
  // Executes on dense tensors; returns what the tensors have then.
  absl::StatusOr<std::vector<std::vector<uint8_t>>> Run(
      const MadeOp& op, const GivenTensors& given, uint64_t seed) {
    Rng rng(seed);
    std::vector<Tensor> tensors;
    std::vector<AnyTensorView> views(given.all);
    for (size_t t = 0; t < given.size(); ++t) {
      const TensorMeta& meta = given.metas[t];
      tensors.emplace_back(meta, DenseStrides(meta.extents), 0);
      tensors.back().Write(SomeElements(rng, meta));
      views[given.places[t]] = tensors.back().View(false, false);
    }
    QUERN_RETURN_IF_ERROR(RunStep(op, views, executor_));
    std::vector<std::vector<uint8_t>> results;
    for (const Tensor& tensor : tensors) results.push_back(tensor.Read());
    return results;
  }

  void TryFolded(const std::string& name, DType dtype);

  InlineExecutor executor_;
  std::set<std::string> folded_;
};

void OpMatrixFoldTest::TryFolded(const std::string& name, DType dtype) {
  const OpDispatcher ops(AllOps(), OpPolicy());
  const NamedArgs example = AllOps().Find(name)->example(dtype);
  const NamedArgs made = WithRows(example, kExampleRows, true);
  if (!IsFolded(example, made)) return;
  if (name == "shm_allgather") return;  // it is made for one shape
  for (const int64_t rows : {kExampleRows, int64_t{6}, int64_t{2}}) {
    for (const auto& implementation : AllOps().Find(name)->implementations) {
      SCOPED_TRACE(name + " of " + implementation.provider + ": " +
                   std::to_string(rows) + " rows");
      const auto op = ops.MakeFrom(implementation.provider, name, made);
      const auto flat = ops.MakeFrom(implementation.provider, name,
                                     WithRows(example, rows, false));
      if (!op.ok() || !flat.ok()) continue;
      const auto given =
          GivenTensors::Of(AllOps(), name, WithRows(example, rows, true));
      const auto flat_given =
          GivenTensors::Of(AllOps(), name, WithRows(example, rows, false));
      ASSERT_TRUE(given.ok() && flat_given.ok());
      const auto want = Run(*flat, *flat_given, 1);
      if (!want.ok()) continue;
      const auto have = Run(*op, *given, 1);
      ASSERT_TRUE(have.ok()) << have.status();
      EXPECT_EQ(*have, *want);
      folded_.insert(name);
    }
  }
}

TEST_F(OpMatrixFoldTest, FoldedTensorsHaveTheBitsOfMatrices) {
  for (const std::string& name : AllOps().Names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      TryFolded(name, dtype);
      if (HasFatalFailure()) return;
    }
  }
  // Each dimension of the others' tensors has a meaning of its own.
  EXPECT_EQ(folded_, (std::set<std::string>{
                         "activation_lut_bf16",
                         "add_rms_norm",
                         "column_parallel_linear",
                         "convert",
                         "copy_stub",
                         "fatrelu_and_mul",
                         "fp8_scaled_mm_cpu",
                         "fused_add_layernorm_cpu",
                         "fused_add_rms_norm",
                         "fused_add_rms_norm_quant",
                         "fused_add_rms_norm_static_quant",
                         "fused_add_rmsnorm_cpu",
                         "fused_rmsnorm_gated_cpu",
                         "gelu",
                         "gelu_and_mul",
                         "gelu_and_mul_cpu",
                         "gelu_and_mul_sparse",
                         "gelu_fast",
                         "gelu_new",
                         "gelu_quick",
                         "gelu_tanh",
                         "gelu_tanh_and_mul",
                         "gelu_tanh_and_mul_cpu",
                         "gemma3_rmsnorm_cpu",
                         "gemma4_rmsnorm_cpu",
                         "gemma_fused_add_rmsnorm_cpu",
                         "gemma_rms_norm",
                         "gemma_rmsnorm_cpu",
                         "int4_scaled_mm_cpu",
                         "int8_scaled_mm_cpu",
                         "int8_scaled_mm_with_quant",
                         "l2_norm",
                         "l2norm_cpu",
                         "layer_norm",
                         "layernorm_cpu",
                         "linear",
                         "mixer2_gated_rms_norm",
                         "mul_and_silu",
                         "mxfp4_scaled_mm_cpu",
                         "parallel_lm_head",
                         "per_token_quant_int8_cpu",
                         "quant_fp8",
                         "quant_int8",
                         "quick_gelu",
                         "relu2",
                         "replicated_linear",
                         "rms_norm",
                         "rms_norm_gated",
                         "rms_norm_quant",
                         "rms_norm_static_quant",
                         "rmsnorm_cpu",
                         "row_parallel_linear",
                         "shm_allreduce",
                         "sigmoid_mul",
                         "silu",
                         "silu_and_mul",
                         "silu_and_mul_cpu",
                         "static_quant_fp8",
                         "swigluoai_and_mul",
                         "weight_packed_linear",
                         "xielu",
                     }));
}

}  // namespace
}  // namespace quern
