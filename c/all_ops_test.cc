// Every operator of the registry, made and run through the C interface: its
// bits, its bytes of workspace and its refusals are those of the C++ operator.

#include "quern/ops/registry/all_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/arguments_testutil.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/example_testutil.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

class AllOpsInCTest : public IsaTest {
 protected:
  AllOpsInCTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  void Compare(const std::string& name, const NamedArgs& args,
               const std::vector<quern_argument>& arguments);

  // Weights as the library adopts them; null for any other object.
  void* Adopted(const OpObjectRef& ref) {
    if (std::string(ref.type) != "LinearWeights") return nullptr;
    const auto* const weights = static_cast<const LinearWeights*>(ref.object);
    quern_linear_weights* adopted = nullptr;
    EXPECT_C_OK(
        quern_linear_weights_adopt(library_.get(), weights->bytes().data(),
                                   weights->bytes().size(), &adopted),
        library_.get());
    return adopted;
  }

  OpRegistry registry_;
  LibraryInC library_;
  std::set<std::string> ran_;  // operators that Compare has executed
};
QUERN_INSTANTIATE_ISA_TEST(AllOpsInCTest);

// One operator of either interface, with tensors of its own.
struct Side {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<AnyTensorView> views;
  std::vector<std::string> names;
};

Side MakeSide(const OpSchema& schema, const std::vector<OpArg>& args,
              const std::vector<TensorMeta>& returns) {
  Side side;
  std::vector<const TensorMeta*> metas;
  for (size_t i = 0; i < args.size(); ++i) {
    if (schema.params[i].type != OpType::kTensor) continue;
    metas.push_back(std::get_if<TensorMeta>(&args[i]));
    side.names.push_back(schema.params[i].name);
  }
  for (size_t i = 0; i < returns.size(); ++i) {
    metas.push_back(&returns[i]);
    side.names.push_back(returns.size() == 1 ? "out"
                                             : "out" + std::to_string(i));
  }
  side.bytes.resize(metas.size());
  for (size_t i = 0; i < metas.size(); ++i) {
    side.views.emplace_back();
    if (metas[i] == nullptr) continue;
    side.bytes[i] = Filled(*metas[i], static_cast<int64_t>(i));
    side.views[i] = ViewOf(*metas[i], side.bytes[i]);
  }
  return side;
}

void AllOpsInCTest::Compare(const std::string& name, const NamedArgs& args,
                            const std::vector<quern_argument>& arguments) {
  const OpDispatcher ops(registry_, OpPolicy());
  const auto made = ops.Make(name, args);
  quern_op* op = nullptr;
  const quern_status status =
      quern_op_create(library_.get(), name.c_str(), nullptr, arguments.data(),
                      arguments.size(), &op);
  ASSERT_EQ(status, static_cast<quern_status>(made.status().code()));
  if (!made.ok()) {
    EXPECT_EQ(MessageOf(library_.get()), made.status().message());
    EXPECT_EQ(op, nullptr);
    return;
  }
  if (made->provider == "simd") {
    EXPECT_RAN_ON(*made->op);
  }
  const OpSchema& schema = registry_.Find(name)->schema;
  const auto arranged = ArrangeArgs(schema, args);
  const auto returns = registry_.InferShapes(name, args);
  ASSERT_TRUE(arranged.ok() && returns.ok());
  Side cpp = MakeSide(schema, *arranged, *returns);
  Side c = MakeSide(schema, *arranged, *returns);

  std::vector<std::unique_ptr<TensorInC>> tensors;
  std::vector<quern_operand> operands;
  for (size_t i = 0; i < c.views.size(); ++i) {
    tensors.push_back(std::make_unique<TensorInC>(c.views[i]));
    operands.push_back({c.names[i].c_str(),
                        c.views[i].rank() == 0 ? nullptr : tensors[i]->get(),
                        0});
  }
  InlineExecutor executor;
  const absl::Status prepared = made->op->Prepare(cpp.views, executor);
  ASSERT_EQ(quern_op_prepare(op, operands.data(), operands.size(), nullptr),
            static_cast<quern_status>(prepared.code()));

  const auto bytes = made->WorkspaceBytes(cpp.views, 1);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  int64_t rows = -1, made_rows = -1;
  ASSERT_C_OK(quern_op_rows(op, operands.data(), operands.size(), &rows), op);
  ASSERT_C_OK(quern_op_rows(op, nullptr, 0, &made_rows), op);
  EXPECT_EQ(rows, made_rows);
  int64_t bytes_in_c = -1;
  ASSERT_C_OK(quern_op_workspace_bytes(op, rows, nullptr, &bytes_in_c), op);
  EXPECT_EQ(bytes_in_c, *bytes);

  const absl::Status checked = made->CheckArgs(cpp.views);
  auto memory = AlignedBuffer::Create(*bytes);
  ASSERT_TRUE(memory.ok());
  const quern_status ran =
      quern_op_execute(op, operands.data(), operands.size(), memory->data(),
                       memory->bytes(), nullptr);
  ASSERT_EQ(ran, static_cast<quern_status>(checked.code())) << MessageOf(op);
  if (!checked.ok()) {
    EXPECT_EQ(MessageOf(op), checked.message());
    return;
  }
  made->op->Execute(cpp.views, Workspace(*memory), executor);
  ran_.insert(name);
  for (size_t i = 0; i < c.bytes.size(); ++i) {
    EXPECT_EQ(c.bytes[i], cpp.bytes[i]) << c.names[i];
  }
  EXPECT_EQ(ExplanationOf(op).rfind(name + " of " + made->provider, 0), 0u)
      << ExplanationOf(op);
  EXPECT_C_OK(quern_destroy(op), op);
}

// Operators whose tensors are slots, lengths or zero points, which the fill
// above is not.
bool TakesBooks(const OpSchema& schema) {
  for (const OpParam& param : schema.params) {
    for (const char* name :
         {"slot_mapping", "req_to_token", "cu_seqlens_q", "w_zeros"}) {
      if (param.name == name) return true;
    }
  }
  return false;
}

TEST_P(AllOpsInCTest, HaveTheBitsAndTheRefusalsOfCpp) {
  std::set<std::string> all, only_made, not_made;
  for (const std::string& name : registry_.Names()) {
    const OpDefinition& op = *registry_.Find(name);
    all.insert(name);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(name + " " + std::string(DTypeName(dtype)));
      const NamedArgs args = op.example(dtype);
      ArgumentsInC arguments;
      if (!arguments.Add(
              args, [&](const OpObjectRef& ref) { return Adopted(ref); })) {
        not_made.insert(name);
      } else if (TakesBooks(op.schema)) {
        only_made.insert(name);
        quern_op* made = nullptr;
        EXPECT_C_OK(quern_op_create(library_.get(), name.c_str(), nullptr,
                                    arguments.list.data(),
                                    arguments.list.size(), &made),
                    library_.get());
      } else {
        Compare(name, args, arguments.list);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_EQ(only_made, (std::set<std::string>{
                           "assign_draft_cache_locs_contiguous_cpu",
                           "assign_extend_cache_locs_cpu",
                           "assign_req_to_token_pool_cpu",
                           "build_draft_decode_metadata_cpu",
                           "compute_slot_mapping_kernel_impl",
                           "concat_and_cache_mla_cpu",
                           "cpu_attn_reshape_and_cache",
                           "decode_attention_cpu",
                           "extend_attention_cpu",
                           "flash_attn_varlen_func",
                           "int4_scaled_mm_cpu",
                           "varlen_attention",
                       }));
  // attention_test.cc runs write_kv and paged_attention. The others take
  // objects that the C interface does not have.
  EXPECT_EQ(not_made, (std::set<std::string>{
                          "cpu_attention_with_kv_cache",
                          "cpu_attn_get_scheduler_metadata",
                          "create_onednn_mm",
                          "create_onednn_mm_handler",
                          "create_onednn_scaled_mm",
                          "create_onednn_scaled_mm_handler",
                          "fused_experts_cpu",
                          "fused_moe",
                          "get_scheduler_metadata",
                          "modular_fused_moe",
                          "multi_head_latent_attention",
                          "onednn_mm",
                          "onednn_scaled_mm",
                          "paged_attention",
                          "sample",
                          "transformers_fused_moe",
                          "unquantized_fused_moe",
                          "write_kv",
                      }));
  // The rest ran in one dtype at least, but for those that both interfaces
  // refuse: a scale is negative, and numbers are no tokens, slots or starts of
  // lists. Tests of their own run them.
  for (const auto& left_out : {only_made, not_made, ran_}) {
    for (const std::string& name : left_out) all.erase(name);
  }
  EXPECT_EQ(all, (std::set<std::string>{
                     "adjust_logits",
                     "chunk_gated_delta_rule_cpu",
                     "copy_and_expand_eagle_inputs_kernel_impl",
                     "eagle_prepare_inputs_padded_kernel_impl",
                     "expand_kernel_impl",
                     "expand_to_tokens",
                     "fill_accept_out_cache_loc_cpu",
                     "fill_bonus_tokens_cpu",
                     "fused_sigmoid_gating_delta_rule_update_cpu",
                     "fused_sigmoid_gating_delta_rule_update_spec_cpu",
                     "rejection_greedy_sample_kernel_impl",
                     "rejection_random_sample_kernel_impl",
                     "rejection_sample",
                     "rejection_sample_greedy",
                     "rotate_input_ids_cpu",
                     "sample_recovered_tokens",
                     "sample_recovered_tokens_kernel_impl",
                     "static_quant_fp8",
                     "static_scaled_int8_quant",
                     "store_cache_cpu",
                     "verify_tree_greedy_cpu",
                 }));
}

}  // namespace
}  // namespace quern
