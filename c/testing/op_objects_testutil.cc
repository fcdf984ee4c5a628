#include "quern/c/testing/op_objects_testutil.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_named.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/vllm/linear_ops.h"

namespace quern {

void* ObjectsInC::For(const std::string& op, const OpObjectRef& ref) {
  const std::string type = ref.type;
  if (type == "KvLayout") return Cache();
  if (type == "AttentionStep") return Schedule();
  void*& found = made_[ref.object];
  if (found != nullptr) return found;
  if (type == "LinearWeights") {
    found = WeightsLike(*static_cast<const LinearWeights*>(ref.object));
  } else if (type == "ExpertWeights") {
    found = ExpertsLike(*static_cast<const ExpertWeights*>(ref.object));
  } else if (type == "OneDnnHandler") {
    found = HandlerLike(*static_cast<const OneDnnHandler*>(ref.object),
                        !absl::StartsWith(op, "create_"));
  } else if (type == "SchedulerMetadata") {
    quern_scheduler_metadata* metadata = nullptr;
    EXPECT_C_OK(quern_scheduler_metadata_create(library_, &metadata), library_);
    found = metadata;
  }
  return found;
}

quern_linear_weights* ObjectsInC::WeightsLike(const LinearWeights& weights) {
  quern_linear_weights* adopted = nullptr;
  EXPECT_C_OK(quern_linear_weights_adopt(library_, weights.bytes().data(),
                                         weights.bytes().size(), &adopted),
              library_);
  return adopted;
}

void* ObjectsInC::ExpertsLike(const ExpertWeights& experts) {
  std::vector<quern_linear_weights*> gate_up, down;
  for (const LinearWeights& w : experts.gate_up) {
    gate_up.push_back(WeightsLike(w));
  }
  for (const LinearWeights& w : experts.down) down.push_back(WeightsLike(w));
  quern_expert_weights* made = nullptr;
  EXPECT_C_OK(quern_expert_weights_create(library_, gate_up.data(), down.data(),
                                          down.size(), &made),
              library_);
  return made;
}

// Examples have weights that are all 1 (OnesForExamples).
void* ObjectsInC::HandlerLike(const OneDnnHandler& like, bool filled) {
  quern_onednn_handler* handler = nullptr;
  EXPECT_C_OK(quern_onednn_handler_create(library_, &handler), library_);
  if (!filled) return handler;
  const LinearWeightsSpec& spec = like.weights.spec();
  const bool scaled = spec.format == WeightFormat::kI8Channel;
  const auto count = static_cast<size_t>(spec.n * spec.k);
  std::vector<float> floats(count, 1);
  std::vector<int8_t> codes(count, 1);
  float one = 1;
  TensorInC b(scaled ? DType::kI8 : DType::kF32,
              scaled ? static_cast<void*>(codes.data()) : floats.data(),
              {spec.k, spec.n});
  TensorInC b_scales(DType::kF32, &one, {1});
  const std::string output_type(DTypeName(like.output_type));
  std::vector<quern_argument> of = {quern_tensor_argument("b", b.get()),
                                    quern_object_argument("handler", handler)};
  std::vector<quern_operand> step = {{"b", b.get(), QUERN_READ_ONLY}};
  if (scaled) {
    of.push_back(quern_tensor_argument("b_scales", b_scales.get()));
    of.push_back(quern_text_argument("output_type", output_type.c_str()));
    of.push_back(
        quern_bool_argument("dynamic_act_quant", like.dynamic_act_quant));
    of.push_back(quern_bool_argument("use_azp", like.use_azp));
    step.push_back({"b_scales", b_scales.get(), QUERN_READ_ONLY});
  }
  quern_op* pack = nullptr;
  EXPECT_C_OK(
      quern_op_create(library_,
                      scaled ? "create_onednn_scaled_mm" : "create_onednn_mm",
                      nullptr, of.data(), of.size(), &pack),
      library_);
  EXPECT_C_OK(quern_op_prepare(pack, step.data(), step.size(), nullptr), pack);
  EXPECT_C_OK(quern_destroy(pack), pack);
  return handler;
}

// The layout of the examples in
// ops/registry/families/attention/attention_ops.cc.
void* ObjectsInC::Cache() {
  if (cache_ != nullptr) return cache_;
  quern_kv_cache_options of = {};
  of.size = sizeof(of);
  of.dtype = "f32";
  of.kv_heads = of.num_layers = 1;
  of.head_dim = of.page_size = 16;
  of.num_pages = 8;
  EXPECT_C_OK(quern_kv_cache_create(library_, &of, &cache_), library_);
  return cache_;
}

void* ObjectsInC::Schedule() {
  if (schedule_ != nullptr) return schedule_;
  Cache();
  quern_schedule_options on = {};
  on.size = sizeof(on);
  on.q_heads = 2;
  on.window_left = on.window_right = -1;
  EXPECT_C_OK(quern_schedule_create(library_, cache_, &on, &schedule_),
              library_);
  return schedule_;
}

}  // namespace quern
