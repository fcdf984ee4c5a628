#include "quern/tools/perf/linear/model_shapes.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

const LinearShape* Find(absl::string_view model, absl::string_view layer) {
  const ModelShapes* shapes = FindModelShapes(model);
  if (shapes == nullptr) return nullptr;
  for (const LinearShape& shape : shapes->layers) {
    if (shape.layer == layer) return &shape;
  }
  return nullptr;
}

TEST(ModelShapesTest, KnowsTheMatricesOfEachModel) {
  struct Want {
    const char* model;
    const char* layer;
    int64_t k, n;
  };
  for (const Want& want :
       std::vector<Want>{{"llama3_8b", "qkv", 4096, 6144},
                         {"llama3_8b", "attn_out", 4096, 4096},
                         {"llama3_8b", "gate_up", 4096, 28672},
                         {"llama3_8b", "down", 14336, 4096},
                         {"llama3_8b", "lm_head", 4096, 128256},
                         {"qwen3_8b", "qkv", 4096, 6144},
                         {"qwen3_8b", "down", 12288, 4096},
                         {"gemma2_9b", "qkv", 3584, 8192},
                         {"gemma2_9b", "attn_out", 4096, 3584},
                         {"gemma2_9b", "lm_head", 3584, 256000},
                         {"deepseek_v2_lite", "q", 2048, 3072},
                         {"deepseek_v2_lite", "kv_a", 2048, 576},
                         {"deepseek_v2_lite", "kv_b", 512, 4096},
                         {"deepseek_v2_lite", "dense_gate_up", 2048, 21888},
                         {"deepseek_v2_lite", "expert_gate_up", 2048, 2816},
                         {"deepseek_v2_lite", "expert_down", 1408, 2048},
                         {"deepseek_v2_lite", "shared_down", 2816, 2048}}) {
    const LinearShape* shape = Find(want.model, want.layer);
    ASSERT_NE(shape, nullptr) << want.model << " " << want.layer;
    EXPECT_EQ(shape->k, want.k) << want.model << " " << want.layer;
    EXPECT_EQ(shape->n, want.n) << want.model << " " << want.layer;
  }
  EXPECT_EQ(FindModelShapes("gpt5"), nullptr);
}

// With the embedding table, where that is not lm_head, these are all the
// parameters but for norms and biases: the size that the model's card gives.
TEST(ModelShapesTest, AddsUpToThePublishedSize) {
  struct Size {
    const char* model;
    int64_t embedding;
    double parameters;
  };
  for (const Size& size : std::vector<Size>{
           {"llama3_8b", int64_t{128256} * 4096, 8.03e9},
           {"qwen3_8b", int64_t{151936} * 4096, 8.19e9},
           {"gemma2_9b", 0, 9.24e9},
           {"deepseek_v2_lite", int64_t{102400} * 2048, 15.7e9}}) {
    const ModelShapes* model = FindModelShapes(size.model);
    ASSERT_NE(model, nullptr) << size.model;
    int64_t parameters = size.embedding;
    for (const LinearShape& shape : model->layers) {
      parameters += shape.k * shape.n * shape.count;
    }
    EXPECT_NEAR(static_cast<double>(parameters) / size.parameters, 1, 0.002)
        << size.model;
  }
}

TEST(ModelShapesTest, NamesAndShapesAreDistinct) {
  std::set<absl::string_view> models;
  for (const ModelShapes& model : AllModelShapes()) {
    EXPECT_TRUE(models.insert(model.name).second) << model.name;
    std::set<absl::string_view> layers;
    std::set<std::pair<int64_t, int64_t>> shapes;
    for (const LinearShape& shape : model.layers) {
      EXPECT_TRUE(layers.insert(shape.layer).second) << shape.layer;
      EXPECT_TRUE(shapes.insert({shape.k, shape.n}).second) << shape.layer;
      EXPECT_GE(shape.count, 1) << shape.layer;
    }
  }
}

}  // namespace
}  // namespace quern
