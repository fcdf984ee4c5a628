// The shapes of tools/random_model.h.

#include "absl/types/span.h"
#include "quern/tools/random_model.h"

namespace quern {
namespace {

constexpr RandomRecurrence kLfm2Layers = {"rrarrarrarararar", 3};
constexpr RandomRecurrence kTinyLfm2Layers = {"rar", 3};
constexpr RandomRecurrence kGraniteLayers = {"rrrrrarrrr", 4, 4096, 64, 1, 128};
constexpr RandomRecurrence kTinyGraniteLayers = {"rar", 4, 128, 8, 1, 16};
constexpr RandomRecurrence kNoRecurrence = {};
constexpr RandomRecurrence kLfm2MoeLayers = {"rrarrrarrrarrrarrrarrarr", 3};
// Without latents: how many of the first layers are dense.
constexpr RandomLatent kOneDense = {0, 0, 0, 1};
constexpr RandomLatent kTwoDense = {0, 0, 0, 2};
constexpr RandomLatent kLatentLite = {512, 64, 128, 1, 2, 40, 4096, 0.0707f};
// Two matrices of queries, as llama.cpp wants them of all models but
// DeepSeek-V2-Lite, which it knows by its number of layers.
constexpr RandomLatent kTinyLatent = {32, 32, 32, 1, 2, 8, 64, 0.0707f, 96};
// Without recurrent layers: columns of a shared expert.
constexpr RandomRecurrence kSharedOf96 = {"", 0, 0, 0, 0, 0, 0, 0, 96};
constexpr RandomLatent kOneDenseShared = {0, 0, 0, 1, 1};
// Without latents: YaRN alone.
constexpr RandomLatent kYarn32 = {0, 0, 0, 0, 0, 32, 4096};
constexpr RandomLatent kTinyYarn = {0, 0, 0, 0, 0, 8, 64};
constexpr RandomRecurrence kQwen3NextLayers = {"",  4, 4096, 32, 16,
                                               128, 4, 64,   512};
constexpr RandomRecurrence kTinyQwen3NextLayers = {"", 4, 128, 8, 4,
                                                   16, 2, 8,   96};

// Without recurrent layers: how many elements of a head are rotated.
constexpr RandomRecurrence kHalfRotated = {"", 0, 0, 0, 0, 0, 0, 64};
constexpr RandomRecurrence kTinyHalfRotated = {"", 0, 0, 0, 0, 0, 0, 8};

// Shapes from the models' published config.json.
constexpr RandomModelShape kShapes[] = {
    {"tinyllama_1.1b", 22, 2048, 32, 4, 64, 5632, 32000, 2048},
    {"llama3_8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 500000},
    {"llama3.1_8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000, 1e-5f,
     "llama", 0, 8},
    {"qwen3_8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6f, 1e-6f,
     "qwen3"},
    {"qwen2.5_7b", 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6f, 1e-6f,
     "qwen2"},
    {"mixtral_8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e6f, 1e-5f,
     "llama", 0, 0, 8, 2, 14336},
    {"qwen3_30b_a3b", 48, 2048, 32, 4, 128, 6144, 151936, 40960, 1e6f, 1e-6f,
     "qwen3moe", 0, 0, 128, 8, 768},
    {"gemma2_2b", 26, 2304, 8, 4, 256, 9216, 256000, 8192, 10000, 1e-6f,
     "gemma2", 4096},
    {"olmo2_7b", 32, 4096, 32, 32, 128, 11008, 100352, 4096, 500000, 1e-6f,
     "olmo2"},
    {"smollm3_3b", 36, 2048, 16, 4, 128, 11008, 128256, 65536, 5e6f, 1e-6f,
     "smollm3"},
    {"phi4", 40, 5120, 40, 10, 128, 17920, 100352, 16384, 250000, 1e-5f,
     "phi3"},
    {"glm4_9b", 40, 4096, 32, 2, 128, 13696, 151552, 32768, 10000, 1e-5f,
     "glm4", 0, 0, 0, 0, 0, kHalfRotated},
    {"gemma3_4b", 34, 2560, 8, 4, 256, 10240, 262144, 131072, 1e6f, 1e-6f,
     "gemma3", 1024},
    {"exaone4_1.2b", 30, 2048, 32, 8, 64, 4096, 102400, 65536, 1e6f, 1e-5f,
     "exaone4"},
    {"seed_oss_36b", 64, 5120, 80, 8, 128, 27648, 155136, 524288, 1e7f, 1e-6f,
     "seed_oss"},
    {"ernie4.5_0.3b", 18, 1024, 16, 2, 128, 3072, 103424, 131072, 500000, 1e-5f,
     "ernie4_5"},
    {"lfm2_1.2b", 16, 2048, 32, 8, 64, 8192, 65536, 128000, 1e6f, 1e-5f, "lfm2",
     0, 0, 0, 0, 0, kLfm2Layers},
    {"lfm2_8b_a1b", 24, 2048, 32, 8, 64, 7168, 65536, 128000, 1e6f, 1e-5f,
     "lfm2moe", 0, 0, 32, 4, 1792, kLfm2MoeLayers, kTwoDense},
    {"granite3.1_8b", 40, 4096, 32, 8, 128, 12800, 49155, 131072, 1e7f, 1e-5f,
     "granite"},
    {"granite4_h_micro", 40, 2048, 32, 8, 64, 8192, 100352, 131072, 10000,
     1e-5f, "granitehybrid", 0, 0, 0, 0, 0, kGraniteLayers},
    {"deepseek2_lite", 27, 2048, 16, 16, 192, 10944, 102400, 163840, 10000,
     1e-6f, "deepseek2", 0, 0, 64, 6, 1408, kNoRecurrence, kLatentLite},
    {"gpt_oss_20b", 24, 2880, 64, 8, 64, 2880, 201088, 131072, 150000, 1e-5f,
     "gpt-oss", 128, 0, 32, 4, 2880, kNoRecurrence, kYarn32},
    {"qwen3_next_80b_a3b", 48, 2048, 16, 2, 256, 5120, 151936, 262144, 1e7f,
     1e-6f, "qwen3next", 0, 0, 512, 10, 512, kQwen3NextLayers},
    // Small shapes for tests, which take a moment to write and to run.
    {"tiny", 2, 64, 4, 2, 16, 160, 320, 256},
    {"tiny_llama3.1", 2, 64, 4, 2, 16, 160, 320, 256, 500000, 1e-5f, "llama", 0,
     8},
    {"tiny_qwen2", 2, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-6f, "qwen2"},
    {"tiny_qwen3", 2, 64, 4, 2, 32, 160, 320, 256, 1e6f, 1e-6f, "qwen3"},
    {"tiny_mixtral", 2, 64, 4, 2, 16, 96, 320, 256, 1e6f, 1e-5f, "llama", 0, 0,
     4, 2, 96},
    {"tiny_qwen3moe", 2, 64, 4, 2, 32, 160, 320, 256, 1e6f, 1e-6f, "qwen3moe",
     0, 0, 8, 2, 96},
    {"tiny_gemma2", 2, 64, 4, 2, 32, 160, 320, 256, 10000, 1e-6f, "gemma2", 6},
    {"tiny_olmo2", 2, 64, 4, 4, 16, 160, 320, 256, 500000, 1e-6f, "olmo2"},
    {"tiny_smollm3", 4, 64, 4, 2, 16, 160, 320, 256, 5e6f, 1e-6f, "smollm3"},
    {"tiny_phi3", 2, 64, 4, 2, 16, 160, 320, 256, 250000, 1e-5f, "phi3", 6},
    {"tiny_glm4", 2, 64, 4, 2, 16, 160, 320, 256, 10000, 1e-5f, "glm4", 0, 0, 0,
     0, 0, kTinyHalfRotated},
    {"tiny_gemma3", 7, 64, 4, 2, 32, 160, 320, 256, 1e6f, 1e-6f, "gemma3", 6},
    {"tiny_exaone4", 2, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-5f, "exaone4"},
    {"tiny_seed_oss", 2, 64, 4, 2, 16, 160, 320, 256, 1e7f, 1e-6f, "seed_oss"},
    {"tiny_ernie4_5", 2, 64, 4, 2, 16, 160, 320, 256, 500000, 1e-5f,
     "ernie4_5"},
    {"tiny_qwen2vl", 2, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-6f, "qwen2vl"},
    {"tiny_qwen3vl", 2, 64, 4, 2, 32, 160, 320, 256, 5e6f, 1e-6f, "qwen3vl"},
    {"tiny_qwen3vlmoe", 2, 64, 4, 2, 32, 160, 320, 256, 5e6f, 1e-6f,
     "qwen3vlmoe", 0, 0, 8, 2, 96},
    {"tiny_lfm2", 3, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-5f, "lfm2", 0, 0, 0,
     0, 0, kTinyLfm2Layers},
    {"tiny_lfm2moe", 3, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-5f, "lfm2moe", 0,
     0, 8, 2, 96, kTinyLfm2Layers, kOneDense},
    {"tiny_granite", 2, 64, 4, 2, 16, 160, 320, 256, 1e7f, 1e-5f, "granite"},
    {"tiny_granitemoe", 2, 64, 4, 2, 16, 160, 320, 256, 10000, 1e-5f,
     "granitemoe", 0, 0, 8, 2, 160},
    {"tiny_granite4_h", 3, 64, 4, 2, 16, 160, 320, 256, 10000, 1e-5f,
     "granitehybrid", 0, 0, 0, 0, 0, kTinyGraniteLayers},
    {"tiny_deepseek2", 3, 64, 4, 4, 64, 160, 320, 256, 10000, 1e-6f,
     "deepseek2", 0, 0, 8, 3, 96, kNoRecurrence, kTinyLatent},
    {"tiny_qwen2moe", 2, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-6f, "qwen2moe",
     0, 0, 8, 2, 96, kSharedOf96},
    {"tiny_olmoe", 2, 64, 4, 4, 16, 160, 320, 256, 10000, 1e-5f, "olmoe", 0, 0,
     8, 2, 160},
    {"tiny_glm4moe", 3, 64, 4, 2, 16, 160, 320, 256, 1e6f, 1e-5f, "glm4moe", 0,
     0, 8, 2, 96, kTinyHalfRotated, kOneDenseShared},
    {"tiny_hunyuan", 2, 64, 4, 2, 16, 160, 320, 256, 10000, 1e-5f,
     "hunyuan-dense"},
    {"tiny_gpt_oss", 2, 64, 4, 2, 32, 160, 320, 256, 150000, 1e-5f, "gpt-oss",
     6, 0, 8, 2, 96, kNoRecurrence, kTinyYarn},
    {"tiny_qwen3next", 4, 64, 4, 2, 32, 160, 320, 256, 1e6f, 1e-6f, "qwen3next",
     0, 0, 8, 2, 96, kTinyQwen3NextLayers},
};

}  // namespace

absl::Span<const RandomModelShape> RandomModelShapes() { return kShapes; }

}  // namespace quern
