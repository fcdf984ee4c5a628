#include "quern/ops/registry/all_ops.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

// Quantised bytes, int8 or e4m3.
struct CodeBytes {
  // Maps a code to an integer; codes compare as the values that they stand for.
  int Ordered(size_t i) const {
    const int code = bytes[i];
    if (dtype == DType::kI8) return code < 128 ? code : code - 256;
    return code < 128 ? code : 128 - code;
  }
  DType dtype = DType::kI8;
  std::vector<uint8_t> bytes;
};

class AllOpsTest : public IsaTest {
 protected:
  AllOpsTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  void Execute(const MadeOp& made, const std::vector<AnyTensorView>& tensors) {
    BoundOp& op = *made.op;
    ASSERT_EQ(op.Prepare(tensors, executor_), absl::OkStatus());
    ASSERT_EQ(made.CheckArgs(tensors), absl::OkStatus());
    const auto bytes = made.WorkspaceBytes(tensors, 1);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_TRUE(memory.ok());
    const Workspace workspace(*memory);
    EXPECT_NO_ALLOCATION(op.Execute(tensors, workspace, executor_));
  }

  OpRegistry registry_;
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(AllOpsTest);

// Whether an operator takes the state of a step, a KvLayout or a handler, reads
// slots, lengths or lists of tokens, which random numbers are not, or
// multiplies int8, fp8 or 4-bit codes, several matrices in a row, or weights
// that it packs from tensors (w13, q_weight), whose products the bounds below
// do not cover. Such operators have tests of their own. Those of speculation
// alone have i64 in their examples.
bool TakesBooks(const OpSchema& schema, const NamedArgs& example) {
  for (const auto& [name, arg] : example) {
    const auto* const meta = std::get_if<TensorMeta>(&arg);
    if (meta != nullptr && meta->dtype == DType::kI64) return true;
    for (const char* book : {"slot_mapping", "req_to_token", "scales2",
                             "cu_seqlens", "cu_seqlens_q", "bitmask", "w_zeros",
                             "w_kc", "w2", "w13", "q_weight"}) {
      if (name == book) return true;
    }
  }
  for (const OpParam& param : schema.params) {
    for (const char* object : {"AttentionStep", "KvLayout", "OneDnnHandler",
                               "SamplingStep", "SchedulerMetadata"}) {
      if (param.object == object) return true;
    }
  }
  return false;
}

// For every operator, simd on this instruction set must agree with the
// reference within 16-bit rounding.
TEST_P(AllOpsTest, SimdAgreesWithTheReference) {
  TestRng rng;
  const OpDispatcher ops(registry_, OpPolicy());
  for (const std::string& name : registry_.Names()) {
    const OpDefinition& op = *registry_.Find(name);
    if (TakesBooks(op.schema, op.example(DType::kF32))) continue;
    // Copies have plain loops alone, and a given scale is above 0.
    if (op.implementations[0].provider == OpRegistry::kReference ||
        name == "static_scaled_int8_quant" ||
        name == "static_scaled_fp8_quant") {
      continue;
    }
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(name + " " + std::string(DTypeName(dtype)));
      const NamedArgs args = op.example(dtype);
      const auto made = ops.Make(name, args);
      if (absl::IsUnimplemented(made.status())) continue;
      ASSERT_TRUE(made.ok()) << made.status();
      EXPECT_EQ(made->provider, "simd");
      EXPECT_RAN_ON(*made->op);
      // The layers of mixer_ops.h have no reference, and run alone.
      const bool compared =
          op.implementations.back().provider == OpRegistry::kReference;
      const auto reference =
          ops.MakeFrom(compared ? "reference" : "simd", name, args);
      ASSERT_TRUE(reference.ok()) << reference.status();

      // simd and reference have separate memory, because some tensors are
      // written.
      std::vector<AnyTensorView> tensors[2];
      std::vector<std::unique_ptr<AnyMatrix>> memory;
      std::vector<std::unique_ptr<std::vector<int32_t>>> indices;
      std::vector<std::unique_ptr<CodeBytes>> codes;
      const auto add = [&](const TensorMeta& meta) {
        int64_t count = 1;
        for (const int64_t extent : meta.extents) count *= extent;
        AnyTensorView::Dims extents{}, strides{};
        int64_t stride = 1;
        for (size_t d = meta.extents.size(); d-- > 0;) {
          extents[d] = meta.extents[d];
          strides[d] = stride;
          stride *= extents[d];
        }
        // The scale of static_quant_fp8 must be positive.
        const bool positive =
            name == "static_quant_fp8" && tensors[0].size() == 1;
        const auto values =
            ToDoubles(UniformReals(rng, count, positive ? 0.01 : -3, 3));
        for (auto& list : tensors) {
          void* data = nullptr;
          if (meta.dtype == DType::kI32) {
            indices.push_back(std::make_unique<std::vector<int32_t>>());
            for (int64_t i = 0; i < count; ++i) {
              constexpr int32_t kSome[] = {3, 0, 17, 127, 64};
              indices.back()->push_back(kSome[i % 5]);
            }
            data = indices.back()->data();
          } else if (SizeOf(meta.dtype) == 1) {
            codes.push_back(std::make_unique<CodeBytes>());
            codes.back()->dtype = meta.dtype;
            codes.back()->bytes.resize(static_cast<size_t>(count), 0x55);
            data = codes.back()->bytes.data();
          } else {
            memory.push_back(std::make_unique<AnyMatrix>(meta.dtype, values, 1,
                                                         count, count));
            data = memory.back()->view().mutable_data();
          }
          list.emplace_back(meta.dtype, data,
                            static_cast<int>(meta.extents.size()), extents,
                            strides);
        }
      };
      const auto arranged = ArrangeArgs(op.schema, args);
      ASSERT_TRUE(arranged.ok());
      for (size_t i = 0; i < arranged->size(); ++i) {
        if (const auto* meta = std::get_if<TensorMeta>(&(*arranged)[i])) {
          add(*meta);
        } else if (op.schema.params[i].type == OpType::kTensor) {
          for (auto& list : tensors) list.emplace_back();  // optional, omitted
        }
      }
      const auto shapes = registry_.InferShapes(name, args);
      ASSERT_TRUE(shapes.ok()) << shapes.status();
      EXPECT_EQ(static_cast<int>(shapes->size()), op.schema.returns);
      for (const TensorMeta& meta : *shapes) add(meta);
      Execute(*made, tensors[0]);
      Execute(*reference, tensors[1]);

      // Error bounds: chains of up to 8 roundings of numbers up to 16; for
      // linear layers and convolutions, sums of 64 products up to 9 and one
      // rounding of a result below 256.
      const bool sums = absl::StrContains(name, "linear") ||
                        absl::StrContains(name, "lm_head") ||
                        name == "conv2d" || name == "conv3d";
      const double bound = dtype == DType::kBF16  ? (sums ? 1.0 : 0.5)
                           : dtype == DType::kF16 ? (sums ? 0.125 : 0.06)
                           : sums                 ? 64 * 64 * 9 * 0x1p-24
                                                  : 3e-5;
      for (size_t i = 0; i + 1 < memory.size(); i += 2) {
        EXPECT_TRUE(
            AllClose(memory[i]->doubles(), memory[i + 1]->doubles(), bound));
      }
      // Codes may differ by one where a quotient is near a tie.
      for (size_t i = 0; i + 1 < codes.size(); i += 2) {
        for (size_t j = 0; j < codes[i]->bytes.size(); ++j) {
          EXPECT_NEAR(codes[i]->Ordered(j), codes[i + 1]->Ordered(j), 1) << j;
        }
      }
    }
  }
}

TEST(AllOpsShapeTest, RefuseWithoutData) {
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  const auto shapes = registry.InferShapes(
      "silu_and_mul", {{"x", TensorMeta{DType::kBF16, {2, 3, 8}}}});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ((*shapes)[0], (TensorMeta{DType::kBF16, {2, 3, 4}}));
  EXPECT_TRUE(absl::StrContains(
      registry
          .InferShapes("silu_and_mul", {{"x", TensorMeta{DType::kF32, {7}}}})
          .status()
          .message(),
      "x is f32[7]; need a multiple of 2"));
  EXPECT_TRUE(absl::StrContains(
      registry
          .InferShapes("rms_norm", {{"x", TensorMeta{DType::kF32, {2, 8}}},
                                    {"weight", TensorMeta{DType::kF32, {7}}}})
          .status()
          .message(),
      "rms_norm: weight is f32[7]; need [8]"));
  const OpDispatcher ops(registry, OpPolicy());
  // A refusal begins with the operator's name, from Make as well.
  for (const char* op : {"silu_and_mul", "gelu_and_mul"}) {
    const NamedArgs odd = {{"x", TensorMeta{DType::kF32, {2, 7}}}};
    const std::string words = std::string(op) + ": x is f32[2, 7]; need";
    EXPECT_TRUE(absl::StrContains(
        registry.InferShapes(op, odd).status().message(), words));
    EXPECT_TRUE(absl::StrContains(ops.Make(op, odd).status().message(), words));
  }
  EXPECT_TRUE(absl::StrContains(
      ops.Make("rms_norm", {{"x", TensorMeta{DType::kF32, {2, 8}}},
                            {"weight", TensorMeta{DType::kF32, {7}}}})
          .status()
          .message(),
      "rms_norm: weight is f32[7]; need [8]"));
  EXPECT_TRUE(absl::StrContains(
      ops.Make("gelu_and_mul_sparse", {{"x", TensorMeta{DType::kF32, {2, 8}}},
                                       {"activation_sparsity", 0.0}})
          .status()
          .message(),
      "activation_sparsity=0; need 0 <"));
  EXPECT_TRUE(absl::StrContains(
      ops.Make("gelu", {{"x", TensorMeta{DType::kF32, {2, 8}}},
                        {"approximate", std::string("fast")}})
          .status()
          .message(),
      "approximate=\"fast\"; need \"none\" or \"tanh\""));
}

// Operators share plans and functions that refuse, and each is refused by its
// own name.
TEST(AllOpsShapeTest, RefusalsBeginWithTheOperatorsNameAlone) {
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  int64_t refused = 0;
  for (const std::string& name : registry.Names()) {
    const NamedArgs example = registry.Find(name)->example(DType::kF32);
    for (size_t i = 0; i < example.size(); ++i) {
      for (const int change : {0, 1, 2}) {
        NamedArgs args = example;
        auto* const meta = std::get_if<TensorMeta>(&args[i].second);
        if (meta == nullptr) break;
        if (change == 0) meta->extents.clear();
        if (change == 1) meta->extents.back() = 0;
        if (change == 2) meta->dtype = DType::kF8E5M2;
        const absl::Status status = ops.Make(name, args).status();
        if (status.ok()) continue;
        ++refused;
        EXPECT_TRUE(absl::StartsWith(status.message(), name + ": ")) << status;
        const std::string rest(status.message().substr(name.size() + 2));
        const size_t end =
            rest.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789");
        EXPECT_NE(rest.substr(std::min(end, rest.size()), 2), ": ") << status;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

// A kernel that has lost a set (core/sets) still computes, and more slowly.
// These operators have kernels that do not convert bf16.
TEST(AllOpsSetsTest, WhatConvertsBf16HasTheSetForIt) {
  if (SupportedIsas().front().name() != std::string("AVX3_ZEN4")) {
    GTEST_SKIP() << "this CPU has no AVX3_ZEN4";
  }
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  std::set<std::string> without;
  for (const std::string& name : registry.Names()) {
    const OpDefinition& op = *registry.Find(name);
    const auto args = ArrangeArgs(op.schema, op.example(DType::kBF16));
    ASSERT_TRUE(args.ok()) << args.status();
    for (const OpImplementation& implementation : op.implementations) {
      if (implementation.provider != "simd") continue;
      const auto made = implementation.factory(*args);
      if (made.ok() && absl::StartsWith((*made)->target(), "AVX3") &&
          (*made)->target() != std::string("AVX3_ZEN4")) {
        without.insert(name + " " + (*made)->target());
      }
    }
  }
  EXPECT_EQ(without,
            (std::set<std::string>{"conv3d_embed_weight_pack AVX3",
                                   "convert AVX3_DL",
                                   "convert_weight_packed AVX3",
                                   "copy_stub AVX3_DL",
                                   "dynamic_per_token_scaled_fp8_quant AVX3_DL",
                                   "dynamic_scaled_fp8_quant AVX3_DL",
                                   "dynamic_scaled_int8_quant AVX3",
                                   "fused_sigmoid_mul_cpu AVX3",
                                   "gather_rows AVX3",
                                   "int8_scaled_mm_cpu AVX3_DL",
                                   "int8_scaled_mm_with_quant AVX3_DL",
                                   "linear AVX3",
                                   "logits_processor AVX3",
                                   "mxfp4_scaled_mm_cpu AVX3",
                                   "onednn_mm AVX3",
                                   "onednn_scaled_mm AVX3_DL",
                                   "pack_vnni AVX3",
                                   "per_token_quant_int8_cpu AVX3",
                                   "quant_fp8 AVX3_DL",
                                   "quant_int8 AVX3",
                                   "quantize_fp8e4m3_vec AVX3_DL",
                                   "s8s8_compensation AVX3_DL",
                                   "sample_recovered_tokens AVX3",
                                   "sample_recovered_tokens_kernel_impl AVX3",
                                   "sigmoid_mul AVX3",
                                   "static_quant_fp8 AVX3_DL",
                                   "static_scaled_fp8_quant AVX3_DL",
                                   "static_scaled_int8_quant AVX3"}));
}

}  // namespace
}  // namespace quern
