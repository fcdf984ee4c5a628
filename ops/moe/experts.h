#ifndef QUERN_OPS_MOE_EXPERTS_H_
#define QUERN_OPS_MOE_EXPERTS_H_

// The experts of a mixture. A router (ops/moe/router.h) gave each token top_k
// of them and their weights:
//
//   e        = ids[t, j]
//   h[t, j]  = round_x(act(gate_up_e(x[t])))             gemm/epilogue.h
//   y[t, j]  = down_e(h[t, j])                           f32
//   out[t]   = round_out(sum over j of weights[t, j] * y[t, j] + add[t])
//
// gate_up_e and down_e are linear layers (gemm/linear.h) on weights of any
// format, with or without bias. The sum is f32, fused where the CPU can, in the
// order of j, `add` last. A route whose expert is -1 adds nothing, which is how
// ranks divide experts: each has some, and a sum over ranks has all. `add` is
// what a shared expert gives, or a residual.
//
//   activation       columns of gate_up                model
//   kSiluAndMul      gate, then up, `inter` of each    Mixtral, Qwen, DeepSeek
//   kGeluTanhAndMul  gate, then up                     Grok-1
//   kSwigluOaiAndMul gate, then up                     GPT-OSS
//   kSilu, ...       `inter`                           experts without a gate
//
// Llama-4 multiplies the input instead of the result: weight_on_input, with
// top_k = 1, makes out[t] = round_out(y of round_x(weights[t] * x[t]) +
// add[t]).
//
// Each expert's weights are read at most once for 256 of its rows, and not at
// all if no token chose it. Work is divided as gemm/grouped_linear.h says, not
// by expert. Of more than kBlockRoutes routes, tokens go block by block.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/expert_order.h"
#include "quern/ops/moe/experts_kernels.h"

namespace quern {

// Two matrices for each expert, all of one shape and format.
struct ExpertWeights {
  // n = inter, or 2 * inter and packed with gated = true; k = hidden.
  std::vector<LinearWeights> gate_up;
  std::vector<LinearWeights> down;  // n = hidden, k = inter
};

struct ExpertsSpec {
  static constexpr int64_t kMaxTopK = 64;

  int64_t top_k = 0;         // 1 <= top_k <= kMaxTopK
  DType x = DType::kBF16;    // f32, bf16 or f16; h has it, too
  DType out = DType::kBF16;  // f32, bf16 or f16
  LinearActivation activation = LinearActivation::kSiluAndMul;
  bool weight_on_input = false;  // only with top_k = 1
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;
};

struct ExpertsArgs {
  AnyTensorView x;                  // [tokens, hidden], any row stride
  MatrixView<const int32_t> ids;    // [tokens, top_k]: see ExpertOrderArgs
  VectorView<const int32_t> map;    // [all experts], or null: no map
  MatrixView<const float> weights;  // [tokens, top_k], any row stride
  AnyTensorView out;                // [tokens, hidden], any row stride
  // [tokens, hidden] of out's dtype: out itself, or apart from it. Rank 0:
  // none.
  AnyTensorView add = {};
};

class ExpertsPlan {
 public:
  // Routes whose rows are packed and multiplied at once. More would make
  // intermediate results larger, not weights rarer: of 128 experts and 8 for a
  // token, each has 64 rows then.
  static constexpr int64_t kBlockRoutes = 8192;

  // `weights` may be dropped afterwards; bytes that they adopted may not.
  //
  // InvalidArgument: top_k out of range; weight_on_input with top_k > 1; no
  // experts, more than ExpertOrderPlan::kMaxExperts, or another number of down
  // than of gate_up; shapes of down that do not fit those of gate_up; what
  // GroupedLinearPlan::Create refuses. Unimplemented: other dtypes.
  static absl::StatusOr<ExpertsPlan> Create(const ExpertsSpec& spec,
                                            const ExpertWeights& weights);

  const ExpertsSpec& spec() const { return spec_; }
  int64_t experts() const { return gate_up_.groups(); }
  int64_t hidden() const { return gate_up_.k(); }
  int64_t inter() const { return down_.k(); }
  int64_t packed_bytes() const {
    return gate_up_.packed_bytes() + down_.packed_bytes();
  }
  // Instruction set of the kernels, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // What linear layers of so many rows run, see GroupedLinearPlan::Explain.
  std::string Explain(int64_t rows) const;

  // Bytes of workspace that Execute needs for up to max_tokens tokens on up to
  // max_workers workers; they stop growing at kBlockRoutes routes.
  // InvalidArgument: max_tokens < 0, or max_workers outside [1,
  // GroupedLinearPlan::kMaxWorkers].
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // Whether Execute may be called with these: dtypes, shapes, every id, and
  // that out overlaps nothing that is read; `add` may be out itself.
  absl::Status CheckArgs(const ExpertsArgs& args) const;

  // What CheckArgs says of x, out, add and map, before there are routes.
  absl::Status CheckRows(const ExpertsArgs& args) const;

  // Writes the elements of out and nothing else. A token whose routes are all
  // -1 gets `add` + 0, or zeros. Weights may be any number; that of a route
  // which is not -1 makes its token NaN if it is NaN. tokens = 0 does nothing.
  // Allocates nothing; safe to call concurrently with different workspaces.
  // Neither the number of workers nor the other tokens change a bit. A caller
  // that keeps the experts beside a GPU submits it to a BackgroundThread
  // (core/threads/background_thread.h) and waits for it later.
  void Execute(const ExpertsArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  ExpertsPlan(const ExpertsSpec& spec, ExpertOrderPlan order,
              GroupedLinearPlan gate_up, GroupedLinearPlan down);

  struct Scratch;
  template <typename Allocator>
  Scratch LayOut(Allocator& allocator, int64_t tokens, int workers) const;
  void ExecuteBlock(const ExpertsArgs& args, Workspace workspace,
                    Executor& executor) const;
  AnyTensorView ScaleRows(const ExpertsArgs& args, uint8_t* scaled,
                          Executor& executor) const;
  void Combine(const ExpertsArgs& args, const Scratch& scratch,
               Executor& executor) const;

  ExpertsSpec spec_;
  ExpertOrderPlan order_;
  GroupedLinearPlan gate_up_;
  GroupedLinearPlan down_;
  ExpertsKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_MOE_EXPERTS_H_
