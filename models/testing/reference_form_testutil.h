#ifndef QUERN_MODELS_TESTING_REFERENCE_FORM_TESTUTIL_H_
#define QUERN_MODELS_TESTING_REFERENCE_FORM_TESTUTIL_H_

// The differences between architectures that the oracle of the forward pass
// knows, read from the file itself.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

// Differences between architectures.
struct ReferenceForm {
  bool rope = true;
  int64_t rope_gap = 0;     // each so manyth layer has none; 0: all have it
  double local_base = 0;    // of local layers; 0: as of all others
  double rope_divisor = 1;  // of positions, where local_base is not
  size_t rope_dim = 0;      // elements of a head that rotate
  double eps = 0;           // of every norm
  bool rope_pairs = true;   // (2j, 2j + 1) rotate; else (j, j + dim / 2)
  bool q_bias = false, k_bias = false, v_bias = false;
  // Norms of each head, or of all heads together if the weights have so many.
  bool q_norm = false, k_norm = false;
  bool late_norms = false;  // behind the rotation
  bool pre_norms = true;    // parts take the norm of x, not x
  bool post_attention_norm = false, post_ffw_norm = false;
  bool gelu = false;  // gelu by tanh, instead of silu
  // gpt-oss's gated activation, with alpha 1.702 and limit 7.
  bool swiglu_oai = false;
  // Whether these have an effect where the file has them: attention's sinks,
  // the bias of its last matrix, those of routers and of experts' matrices.
  bool sinks = true, output_bias = true, logit_bias = true, expert_bias = true;
  // YaRN: how much longer the context became, 0 for none, and the context
  // before.
  double yarn_factor = 0, yarn_original = 0;
  bool yarn_truncates = true;
  double embedding_scale = 1, residual_scale = 1, logit_divisor = 1;
  double divisor = 1;                       // of a query's dot products
  double attention_cap = 0, logit_cap = 0;  // 0: none
  size_t experts_used = 0;                  // 0: there are no experts
  bool shared_expert = false;               // with the weight 1
  // How many layers come before the first with experts. Scores of experts by
  // sigmoid instead of softmax; a bias changes which are chosen.
  int64_t leading_dense = 0;
  bool sigmoid_scores = false, router_bias = true;
  double expert_scale = 1;
  bool renormalize = true;  // the weights of a token's experts sum to 1
  int64_t window = 0;       // of local layers; 0: there are none
  // Every so manyth layer is not local; 0: all are local.
  int64_t window_interval = 2;
  std::vector<double> rope_factors;  // divide frequencies; empty: none
  // Tokens that a recurrent layer convolves, and the order of its three parts.
  size_t conv_taps = 0;
  std::array<size_t, 3> gates = {0, 1, 2};
  size_t ssm_groups = 0;
  bool ssm_skip = true;  // d * u is added to a state's output
  // Gated delta nets: heads of keys; 0: there are none. by_turns: the file has
  // each head's gate behind its query, and each key head's a behind its b.
  size_t key_heads = 0;
  bool gates_by_turns = true, betas_by_turns = true;
  bool gates_in_q = false;                        // attn_q.weight has gates
  bool query_gates = false, shared_gate = false;  // and these have an effect
  // Matrices in block formats multiply rows of int8 (DecoderActivations).
  bool int8_rows = false;

  static ReferenceForm Of(const GgufFile& file, const DecoderConfig& c) {
    const auto f32 = [&](absl::string_view key) {
      return static_cast<double>(*file.GetF32(key));
    };
    const auto architecture = *file.GetString("general.architecture");
    const auto hidden = static_cast<double>(c.hidden);
    ReferenceForm form;
    const bool granite = absl::StartsWith(architecture, "granite");
    form.rope_pairs = granite || architecture == "llama" ||
                      architecture == "smollm3" || architecture == "glm4" ||
                      architecture == "ernie4_5";
    if (architecture == "smollm3") form.rope_gap = 4;
    form.q_bias = form.k_bias = form.v_bias =
        file.HasTensor("blk.0.attn_q.bias");
    form.q_norm = form.k_norm =
        absl::StartsWith(architecture, "qwen3") || architecture == "lfm2moe" ||
        architecture == "lfm2" || architecture == "olmoe" ||
        architecture == "hunyuan-dense" ||
        file.HasTensor("blk.0.attn_q_norm.weight");
    if (architecture == "olmo2" || architecture == "exaone4") {
      form.q_norm = form.k_norm = true;
      form.post_attention_norm = form.post_ffw_norm = true;
      form.pre_norms = false;
    }
    const std::string window =
        absl::StrCat(architecture, ".attention.sliding_window");
    if (architecture == "phi3" && file.Has(window)) {
      form.window = *file.GetInt(window);
      form.window_interval = 0;
    }
    const auto key_of = [&](const char* name) {
      return absl::StrCat(architecture, ".", name);
    };
    if (file.Has(key_of("rope.scaling.type")) &&
        *file.GetString(key_of("rope.scaling.type")) == "yarn") {
      form.yarn_factor = f32(key_of("rope.scaling.factor"));
      form.yarn_original = static_cast<double>(
          *file.GetInt(key_of("rope.scaling.original_context_length")));
    }
    form.late_norms = architecture == "hunyuan-dense";
    form.renormalize = architecture != "qwen2moe" && architecture != "olmoe";
    if (architecture == "glm4moe") {
      form.leading_dense = *file.GetInt(key_of("leading_dense_block_count"));
      form.sigmoid_scores = *file.GetInt(key_of("expert_gating_func")) == 2;
      form.expert_scale = f32(key_of("expert_weights_scale"));
      form.renormalize = *file.GetBool(key_of("expert_weights_norm"));
    }
    if (architecture == "gpt-oss") {
      form.swiglu_oai = true;
      form.yarn_truncates = false;
      form.window = *file.GetInt(window);
    }
    if (architecture == "glm4") {
      form.post_attention_norm = form.post_ffw_norm = true;
    }
    if (absl::StartsWith(architecture, "lfm2")) {
      form.conv_taps = static_cast<size_t>(
          *file.GetInt(absl::StrCat(architecture, ".shortconv.l_cache")));
    }
    if (architecture == "lfm2moe") {
      form.leading_dense = *file.GetInt("lfm2moe.leading_dense_block_count");
      form.sigmoid_scores = *file.GetInt("lfm2moe.expert_gating_func") == 2;
      form.expert_scale = f32("lfm2moe.expert_weights_scale");
    }
    if (file.HasTensor(
            absl::StrCat("blk.", c.layers - 1, ".ffn_gate_inp.weight"))) {
      const std::string used = absl::StrCat(architecture, ".expert_used_count");
      form.experts_used = static_cast<size_t>(*file.GetInt(used));
      form.shared_expert = file.HasTensor(
          absl::StrCat("blk.", c.layers - 1, ".ffn_up_shexp.weight"));
      form.shared_gate = architecture == "qwen2moe" && form.shared_expert;
    }
    const std::string rope =
        absl::StrCat(architecture, ".rope.dimension_count");
    form.rope_dim =
        static_cast<size_t>(file.Has(rope) ? *file.GetInt(rope) : c.head_dim);
    form.eps =
        f32(absl::StrCat(architecture, ".attention.layer_norm_rms_epsilon"));
    form.divisor = std::sqrt(static_cast<double>(c.head_dim));
    if (file.HasTensor("rope_freqs.weight")) {
      const GgufTensor& tensor = **file.FindTensor("rope_freqs.weight");
      std::vector<float> factors(static_cast<size_t>(tensor.elements));
      EXPECT_TRUE(file.ReadRows(tensor, 0, absl::MakeSpan(factors)).ok());
      form.rope_factors.assign(factors.begin(), factors.end());
    }
    if (architecture == "granitehybrid") {
      form.conv_taps =
          static_cast<size_t>(*file.GetInt("granitehybrid.ssm.conv_kernel"));
      form.ssm_groups =
          static_cast<size_t>(*file.GetInt("granitehybrid.ssm.group_count"));
    }
    if (granite) {
      const auto key = [&](const char* name) {
        return absl::StrCat(architecture, ".", name);
      };
      form.rope = *file.GetBool(key("rope.scaling.finetuned"));
      form.embedding_scale = f32(key("embedding_scale"));
      form.residual_scale = f32(key("residual_scale"));
      form.divisor = 1 / f32(key("attention.scale"));
      form.logit_divisor = f32(key("logit_scale"));
    }
    if (architecture == "qwen3next") {
      form.gates_in_q = form.query_gates = true;
      form.shared_gate = form.shared_expert;
      form.conv_taps =
          static_cast<size_t>(*file.GetInt("qwen3next.ssm.conv_kernel"));
      form.key_heads =
          static_cast<size_t>(*file.GetInt("qwen3next.ssm.group_count"));
    }
    if (architecture != "gemma2" && architecture != "gemma3") return form;
    form.post_attention_norm = form.post_ffw_norm = form.gelu = true;
    form.embedding_scale = std::sqrt(hidden);
    form.window = *file.GetInt(window);
    const bool gemma2 = architecture == "gemma2";
    if (c.layers == (gemma2 ? 46 : 62)) {  // the models of 27 billion weights
      form.divisor = std::sqrt(hidden / static_cast<double>(c.q_heads));
    }
    if (!gemma2) {
      form.q_norm = form.k_norm = true;
      form.window_interval = 6;
      form.local_base = f32("gemma3.rope.freq_base_swa");
      if (file.Has("gemma3.rope.scaling.factor")) {
        form.rope_divisor = f32("gemma3.rope.scaling.factor");
      }
      return form;
    }
    form.attention_cap = f32("gemma2.attn_logit_softcapping");
    form.logit_cap = f32("gemma2.final_logit_softcapping");
    return form;
  }
};

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_REFERENCE_FORM_TESTUTIL_H_
