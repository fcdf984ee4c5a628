// Every operator of the driver runs on small shapes and passes its check.

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "quern/core/isa.h"
#include "quern/tools/perf/driver_testutil.h"
#include "quern/tools/perf/json_testutil.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

struct Smoke {
  const char* op;
  const char* keys;
};

// Small shapes that are no multiple of anything.
constexpr Smoke kSmokes[] = {
    {"linear", "--m=3 --n=37 --k=19"},
    {"linear", "--m=17 --n=16 --k=32 --dtype=f32 --out=f32"},
    {"linear", "--m=3 --n=37 --k=19 --kernels=packed,onednn --residual=1"},
    {"linear", "--m=3 --n=38 --k=19 --activation=silu_and_mul --residual=1"},
    {"linear", "--m=5 --n=37 --k=19 --activation=gelu_tanh --out=f16"},
    {"linear", "--m=3 --n=37 --k=96 --weights=q4_0"},
    {"linear", "--m=5 --n=37 --k=512 --weights=q4_k --activations=exact"},
    {"linear", "--m=9 --n=38 --k=512 --weights=q6_k --activation=silu_and_mul"},
    {"scaled_linear", "--m=3 --n=37 --k=19"},
    {"scaled_linear", "--m=17 --n=16 --k=33 --act=tensor --azp=1 --out=f32"},
    {"scaled_linear", "--m=3 --n=38 --k=19 --activation=gelu_and_mul"},
    {"linear", "--m=5 --n=38 --k=19 --activation=swigluoai_and_mul"},
    {"grouped_linear", "--groups=4 --rows=3,0,17 --n=37 --k=19"},
    {"moe", "--tokens=5 --experts=6 --top_k=3 --hidden=38 --inter=19"},
    {"moe",
     "--tokens=3 --experts=5 --top_k=2 --hidden=64 --inter=96 "
     "--weights=int8 --skew=1"},
    {"moe",
     "--tokens=3 --experts=5 --top_k=2 --hidden=64 --inter=96 "
     "--weights=int4 --dtype=f32"},
    {"moe",
     "--tokens=3 --experts=5 --top_k=2 --hidden=64 --inter=96 "
     "--weights=q8_0 --dtype=f16"},
    {"moe",
     "--tokens=3 --experts=5 --top_k=2 --hidden=64 --inter=96 "
     "--weights=fp8_block --block_k=32"},
    {"conv2d",
     "--batch=2 --channels=3 --out=5 --size=13 --kernel=3 --stride=2"},
    {"conv3d", "--batch=2 --channels=3 --out=5 --depth=4 --size=12 --kernel=4"},
    {"fp8_block_linear", "--m=3 --n=37 --k=19"},
    {"fp8_block_linear", "--m=9 --n=37 --k=67 --block_k=32 --dtype=f32"},
    {"fp8_block_linear", "--m=3 --n=38 --k=19 --activation=gelu_tanh_and_mul"},
    {"int4_linear", "--m=3 --n=37 --k=19"},
    {"int4_linear", "--m=9 --n=37 --k=67 --group=32 --zeros=1 --out=f32"},
    {"int4_linear", "--m=3 --n=38 --k=19 --activation=silu_and_mul"},
    {"int4_linear", "--m=3 --n=37 --k=19 --activation=gelu --residual=1"},
    {"int4_linear", "--m=3 --n=37 --k=96 --activations=int8"},
    {"int4_linear",
     "--m=17 --n=38 --k=320 --group=64 --zeros=1 --activations=int8 "
     "--activation=silu_and_mul"},
    {"int8_group_linear", "--m=3 --n=37 --k=96"},
    {"int8_group_linear", "--m=9 --n=38 --k=64 --activation=silu_and_mul"},
    {"convert", "--elements=1"},
    {"convert", "--from=bf16 --to=f32 --elements=37"},
    {"convert", "--from=f32 --to=f8e4m3 --elements=37"},
    {"convert", "--from=f8e5m2 --to=f16 --elements=37"},
    {"pack", "--dtype=bf16 --n=37 --k=19"},
    {"pack", "--dtype=int8 --n=37 --k=19 --source=kn"},
    {"pack", "--dtype=f16 --n=1 --k=1"},
    {"pack", "--weights=q4_k --n=37 --k=512"},
    {"pack", "--weights=q5_0 --n=3 --k=96"},
    {"quantize", "--m=3 --k=37"},
    {"quantize", "--m=3 --k=37 --dtype=f16 --azp=1"},
    {"quantize", "--m=3 --k=37 --dtype=f32 --act=tensor --azp=1"},
    {"rms_norm", "--rows=3 --hidden=37"},
    {"rms_norm", "--rows=3 --hidden=37 --dtype=f32"},
    {"fused_add_rms_norm", "--rows=3 --hidden=37"},
    {"gemma_rms_norm", "--rows=3 --hidden=37 --dtype=f16"},
    {"l2_norm", "--rows=3 --hidden=37"},
    {"layer_norm", "--rows=3 --hidden=37"},
    {"rms_norm_gated", "--rows=3 --hidden=37"},
    {"mixer2_gated_rms_norm", "--rows=3 --hidden=37"},
    {"rotary_embedding", "--rows=3 --hidden=512"},
    {"rms_norm_quant", "--rows=3 --hidden=37"},
    {"fused_add_rms_norm_quant", "--rows=3 --hidden=37"},
    {"rms_norm_static_quant", "--rows=3 --hidden=37"},
    {"fused_add_rms_norm_static_quant", "--rows=3 --hidden=37"},
    {"gather_rows", "--rows=3 --hidden=37"},
    {"quant_fp8", "--rows=3 --hidden=37"},
    {"static_quant_fp8", "--rows=3 --hidden=37"},
    {"quant_int8", "--rows=3 --hidden=37"},
    {"mrope", "--rows=3 --hidden=512"},
    {"dual_chunk_rotary_embedding", "--rows=3 --hidden=512"},
    {"apply_rotary_emb", "--rows=3 --hidden=512"},
    {"vocab_parallel_embedding", "--rows=3 --hidden=37"},
    {"vocab_parallel_embedding", "--rows=3 --hidden=37 --dtype=f16"},
    {"logits_processor", "--rows=3 --hidden=37"},
    {"logits_processor", "--rows=3 --hidden=37 --dtype=bf16"},
    {"sample", "--rows=3 --vocab=700"},
    {"sample", "--rows=3 --vocab=700 --filter=greedy"},
    {"sample", "--rows=3 --vocab=700 --filter=top_k"},
    {"sample", "--rows=3 --vocab=700 --filter=top_p"},
    {"sample", "--rows=3 --vocab=700 --filter=min_p"},
    {"sample", "--rows=3 --vocab=700 --filter=top_n_sigma"},
    {"sample", "--rows=3 --vocab=700 --filter=typical_p"},
    {"adjust_logits", "--rows=3 --vocab=700"},
    {"token_logprobs", "--rows=3 --vocab=700 --top_n=5"},
    {"sigmoid_mul", "--rows=3 --hidden=37"},
    {"sigmoid_mul", "--rows=3 --hidden=37 --dtype=f32"},
    {"silu_and_mul", "--rows=3 --d=37"},
    {"silu_and_mul", "--rows=3 --d=37 --dtype=f32"},
    {"mul_and_silu", "--rows=3 --d=37"},
    {"gelu_and_mul", "--rows=3 --d=37 --dtype=f16"},
    {"gelu_tanh_and_mul", "--rows=3 --d=37"},
    {"gelu_and_mul_sparse", "--rows=3 --d=37"},
    {"swigluoai_and_mul", "--rows=3 --d=37"},
    {"fatrelu_and_mul", "--rows=3 --d=37"},
    {"silu", "--rows=3 --hidden=37"},
    {"gelu", "--rows=3 --hidden=37 --dtype=f16"},
    {"gelu_new", "--rows=3 --hidden=37"},
    {"gelu_fast", "--rows=3 --hidden=37"},
    {"quick_gelu", "--rows=3 --hidden=37"},
    {"relu2", "--rows=3 --hidden=37"},
    {"xielu", "--rows=3 --hidden=37 --dtype=f32"},
    {"router", "--tokens=3 --experts=37 --top_k=5"},
    {"router",
     "--tokens=9 --experts=40 --top_k=3 --dtype=bf16 --score=sigmoid --bias=1 "
     "--groups=4 --top_groups=2"},
    {"sample_recovered_tokens", "--requests=3 --drafts=2 --vocab=37"},
    {"sample_recovered_tokens",
     "--requests=2 --drafts=3 --vocab=37 --draft_probs=0"},
    {"kv_write", "--tokens=37 --kv_heads=2 --head_dim=36 --page_size=16"},
    {"causal_conv1d", "--batch=3 --len=5 --channels=37 --width=3"},
    {"delta_rule", "--batch=2 --len=3 --heads=2 --key_heads=1 --dk=9 --dv=21"},
    {"state_update",
     "--batch=2 --len=3 --heads=2 --head_dim=5 --d_state=19 --mamba=1"},
    {"state_update", "--mamba=1 --state=bf16"},
    {"delta_rule",
     "--batch=2 --len=3 --drafts=2 --heads=2 --key_heads=1 --dk=9 --dv=21"},
    {"delta_rule", "--len=17 --drafts=1 --heads=2 --key_heads=1 --dk=9"},
    {"state_update",
     "--batch=2 --len=3 --drafts=2 --heads=2 --head_dim=5 --d_state=19"},
    {"state_update", "--len=17 --drafts=1 --heads=2 --head_dim=5 --d_state=19"},
    // Prompts, and the smallest of them that goes by chunks.
    {"delta_rule", "--len=37 --heads=2 --key_heads=1 --dk=9 --dv=21 --kda=1"},
    {"state_update", "--len=37 --heads=2 --head_dim=5 --d_state=19 --mamba=1"},
    {"state_update", "--batch=2 --len=16 --heads=2 --head_dim=5 --d_state=19"},
    {"mixer",
     "--batch=3 --len=37 --hidden=40 --heads=4 --groups=2 --head_dim=9 "
     "--d_state=19 --dtype=f32"},
    {"mixer", "--batch=3 --hidden=40 --heads=4 --head_dim=9 --d_state=19"},
    {"mixer",
     "--kind=mamba --batch=2 --len=19 --hidden=40 --head_dim=37 --d_state=5 "
     "--dt_rank=3"},
    {"mixer", "--kind=short_conv --batch=2 --len=5 --hidden=40 --head_dim=37"},
    {"mixer",
     "--kind=gated_delta_net --batch=2 --len=37 --hidden=40 --heads=4 "
     "--groups=2 --head_dim=9 --d_state=12 --state=bf16"},
    {"mixer",
     "--kind=gated_delta_net --batch=2 --hidden=40 --heads=4 --groups=2 "
     "--head_dim=9 --d_state=12 --dtype=f16"},
    {"schedule", "--q_lens=1,40 --kv_lens=100,5000,20000"},
    {"attention",
     "--kv_len=37 --q_heads=6 --kv_heads=2 --head_dim=24 --page_size=5"},
    {"attention",
     "--batch=3 --q_len=7 --kv_len=19 --q_heads=2 --kv_heads=1 --head_dim=16 "
     "--page_size=16 --dtype=f32 --kv=f32"},
    {"attention",
     "--q_len=5 --kv_len=40 --q_heads=6 --kv_heads=2 --head_dim=24 "
     "--page_size=16 --kv=i8 --window=9 --softcap=3"},
    {"attention",
     "--kv_len=40 --q_heads=6 --kv_heads=2 --head_dim=24 --kv=f8e4m3"},
    {"attention",
     "--batch=2 --q_len=29 --kv_len=270 --q_heads=6 --kv_heads=2 "
     "--head_dim=24 --tree=3 --window=15"},
    {"mla", "--q_len=20 --kv_len=260 --heads=2 --latent_dim=20 --tree=2"},
    {"mla",
     "--batch=2 --q_len=2 --kv_len=45 --heads=3 --latent_dim=20 --rope_dim=6 "
     "--page_size=16"},
    {"mla",
     "--q_len=3 --kv_len=300 --heads=2 --latent_dim=132 --rope_dim=7 "
     "--page_size=16 --cache=fp8"},
    {"mla",
     "--kv_len=45 --heads=3 --latent_dim=20 --rope_dim=6 --page_size=16 "
     "--dtype=f32 --cache=fp8"},
    {"mla_layer",
     "--batch=2 --q_len=3 --kv_len=45 --heads=2 --hidden=38 --kv_lora=20 "
     "--nope=9 --rope=6 --v_head_dim=7 --dtype=f32 --cache=fp8"},
    {"mla_layer",
     "--batch=2 --q_len=2 --kv_len=45 --heads=3 --hidden=38 --q_lora=22 "
     "--kv_lora=20 --nope=9 --rope=6 --v_head_dim=7"},
    {"mla_layer",
     "--q_len=40 --kv_len=0 --heads=2 --hidden=38 --kv_lora=20 --nope=9 "
     "--rope=6 --v_head_dim=7 --dtype=f32"},
    {"mla_layer",
     "--q_len=3 --kv_len=3 --heads=2 --hidden=38 --kv_lora=20 --nope=9 "
     "--rope=6 --v_head_dim=7 --dtype=f16 --form=direct"},
    {"varlen_attention",
     "--batch=2 --len=37 --q_heads=6 --kv_heads=2 --head_dim=24"},
    {"varlen_attention",
     "--len=41 --q_heads=2 --kv_heads=2 --head_dim=72 --causal=0 --dtype=f32"},
    {"merge_states", "--tokens=37 --heads=3 --head_dim=19 --dtype=f32"},
    {"merge_states", "--tokens=5 --heads=70 --head_dim=40 --by_head=1"},
    {"all_reduce", "--rows=3 --hidden=37"},
    {"all_reduce", "--rows=1 --hidden=1 --ranks=1 --dtype=f32"},
    {"all_reduce", "--rows=33 --hidden=137 --ranks=3 --dtype=f16"},
};

TEST(DriverSmokeTest, EveryOperatorRunsAndPassesItsCheck) {
  for (const Smoke& smoke : kSmokes) {
    const std::string line = std::string(smoke.op) + " " + smoke.keys +
                             " --threads=1 --runs=1 --warm=1 --check=1";
    const Outcome outcome = Perf(line);
    EXPECT_EQ(outcome.exit_code, 0) << line << "\n" << outcome.progress;
    ExpectJsonLines(outcome.out, smoke.op, 1);
    const auto fields =
        FlatJson::Parse(outcome.out.substr(0, outcome.out.find('\n')));
    ASSERT_TRUE(fields.has_value());
    for (const char* name :
         {"bytes", "dram_gbps", "peak_gflops", "of_roof", "max_err"}) {
      EXPECT_NE(fields->at(name), "null") << line << ": " << name;
    }
  }
}

TEST(DriverSmokeTest, EveryOperatorRunsOnTheInstructionSetThatWasAskedFor) {
  const std::string isa = NextBestIsa();
  std::string before;
  for (const Smoke& smoke : kSmokes) {
    if (smoke.op == std::exchange(before, smoke.op)) continue;
    const std::string line = std::string(smoke.op) + " " + smoke.keys +
                             " --threads=1 --runs=1 --warm=1 --isa=" + isa;
    const Outcome outcome = Perf(line);
    EXPECT_EQ(outcome.exit_code, 0) << line << "\n" << outcome.progress;
    const auto fields =
        FlatJson::Parse(outcome.out.substr(0, outcome.out.find('\n')));
    ASSERT_TRUE(fields.has_value()) << line;
    const std::string& ran = fields->at("isa");
    // The schedule has no kernels.
    EXPECT_TRUE(smoke.op == absl::string_view("schedule") ? ran == kNoIsa
                                                          : StandsFor(ran, isa))
        << line << ": " << ran;
  }
}

TEST(DriverSmokeTest, EveryOperatorHasASmokeTest) {
  for (const OpEntry& entry : AllOps()) {
    bool found = false;
    for (const Smoke& smoke : kSmokes) found |= entry.name == smoke.op;
    EXPECT_TRUE(found) << entry.name;
  }
}

}  // namespace
}  // namespace quern
