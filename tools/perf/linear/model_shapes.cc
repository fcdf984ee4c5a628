#include "quern/tools/perf/linear/model_shapes.h"

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace quern {
namespace {

// Keys of the config.json that is published with the weights, under its names.
struct DenseConfig {
  int64_t num_hidden_layers;
  int64_t hidden_size;
  int64_t num_attention_heads;
  int64_t num_key_value_heads;
  int64_t head_dim;  // where there is no such key: hidden_size / heads
  int64_t intermediate_size;
  int64_t vocab_size;
};

std::vector<LinearShape> Dense(const DenseConfig& c) {
  const int64_t layers = c.num_hidden_layers;
  const int64_t q = c.num_attention_heads * c.head_dim;
  const int64_t kv = c.num_key_value_heads * c.head_dim;
  return {
      {"qkv", c.hidden_size, q + 2 * kv, layers},
      {"attn_out", q, c.hidden_size, layers},
      {"gate_up", c.hidden_size, 2 * c.intermediate_size, layers},
      {"down", c.intermediate_size, c.hidden_size, layers},
      {"lm_head", c.hidden_size, c.vocab_size, 1},
  };
}

// huggingface.co/meta-llama/Meta-Llama-3-8B
constexpr DenseConfig kLlama3_8B = {32, 4096, 32, 8, 128, 14336, 128256};

// huggingface.co/Qwen/Qwen3-8B
constexpr DenseConfig kQwen3_8B = {36, 4096, 32, 8, 128, 12288, 151936};

// huggingface.co/google/gemma-2-9b. lm_head is the embedding table.
constexpr DenseConfig kGemma2_9B = {42, 3584, 16, 8, 256, 14336, 256000};

// huggingface.co/deepseek-ai/DeepSeek-V2-Lite: multi-head latent attention
// without a low rank for q; one layer is dense, the others have experts. An
// expert sees the tokens that are routed to it: m is theirs.
std::vector<LinearShape> DeepSeekV2Lite() {
  constexpr int64_t num_hidden_layers = 27, first_k_dense_replace = 1;
  constexpr int64_t hidden_size = 2048, vocab_size = 102400;
  constexpr int64_t num_attention_heads = 16, kv_lora_rank = 512;
  constexpr int64_t qk_nope_head_dim = 128, qk_rope_head_dim = 64;
  constexpr int64_t v_head_dim = 128, intermediate_size = 10944;
  constexpr int64_t n_routed_experts = 64, n_shared_experts = 2;
  constexpr int64_t moe_intermediate_size = 1408;

  constexpr int64_t all = num_hidden_layers, dense = first_k_dense_replace;
  constexpr int64_t moe = all - dense, experts = moe * n_routed_experts;
  constexpr int64_t shared = n_shared_experts * moe_intermediate_size;
  return {
      {"q", hidden_size,
       num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), all},
      {"kv_a", hidden_size, kv_lora_rank + qk_rope_head_dim, all},
      {"kv_b", kv_lora_rank,
       num_attention_heads * (qk_nope_head_dim + v_head_dim), all},
      {"attn_out", num_attention_heads * v_head_dim, hidden_size, all},
      {"dense_gate_up", hidden_size, 2 * intermediate_size, dense},
      {"dense_down", intermediate_size, hidden_size, dense},
      {"router", hidden_size, n_routed_experts, moe},
      {"expert_gate_up", hidden_size, 2 * moe_intermediate_size, experts},
      {"expert_down", moe_intermediate_size, hidden_size, experts},
      {"shared_gate_up", hidden_size, 2 * shared, moe},
      {"shared_down", shared, hidden_size, moe},
      {"lm_head", hidden_size, vocab_size, 1},
  };
}

}  // namespace

const std::vector<ModelShapes>& AllModelShapes() {
  static const auto* const models = new std::vector<ModelShapes>{
      {"llama3_8b", Dense(kLlama3_8B)},
      {"qwen3_8b", Dense(kQwen3_8B)},
      {"gemma2_9b", Dense(kGemma2_9B)},
      {"deepseek_v2_lite", DeepSeekV2Lite()},
  };
  return *models;
}

const ModelShapes* FindModelShapes(absl::string_view name) {
  for (const ModelShapes& model : AllModelShapes()) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

}  // namespace quern
