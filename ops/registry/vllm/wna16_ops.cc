#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/registry/vllm/linear.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";
constexpr int64_t kColumns = 16;    // of a row of q_weight
constexpr int64_t kPackFactor = 8;  // codes of a word

struct Spec : LinearWeightsSpec {
  DType x = DType::kF32, out = DType::kF32;
  int64_t blocks = 0, words = 0;  // of q_weight
  int64_t groups = 0;

  LinearSpec linear() const {
    LinearSpec spec;
    spec.a = x;
    spec.c = out;
    return spec;
  }
};

struct Args {
  AnyTensorView x, w, out, scales, zeros, g_idx, bias;
};

// Code i of the words at `words`.
uint8_t CodeOf(const int32_t* words, int64_t i) {
  const auto word = static_cast<uint32_t>(words[i / kPackFactor]);
  return static_cast<uint8_t>(word >> i % kPackFactor * 4 & 15);
}

class Plan {
 public:
  static absl::StatusOr<Plan> Create(const Spec& spec,
                                     LinearProvider provider) {
    // A layer with a single weight shows whether the provider can run it.
    LinearWeightsSpec single = spec;
    single.n = single.k = 1;
    single.group_size = LinearWeightsSpec::kWholeK;
    const uint8_t code = 0;
    const float one = 1;
    LinearSource source;
    source.codes = DenseMatrix<const uint8_t>(&code, 1, 1);
    source.scales = DenseMatrix<const float>(&one, 1, 1);
    InlineExecutor executor;
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                           LinearWeights::Pack(single, {source}, executor));
    QUERN_ASSIGN_OR_RETURN(
        const LinearPlan probe,
        LinearPlanOf(kPlan, provider, spec.linear(), weights));
    Plan plan(spec, provider);
    if (provider != LinearProvider::kReference) plan.target_ = probe.target();
    return plan;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return target_; }
  std::string Explain(int64_t rows) const {
    return native_.has_value() || !plan_.has_value() ? target_
                                                     : plan_->Explain(rows);
  }

  absl::Status Prepare(const Args& a, Executor& executor) {
    plan_.reset();
    native_.reset();
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights, Pack(a, executor));
    if (provider_ == LinearProvider::kReference) {
      QUERN_ASSIGN_OR_RETURN(
          native_, NativeLinear::Create(weights, LinearActivation::kNone));
    }
    QUERN_ASSIGN_OR_RETURN(
        plan_, LinearPlanOf(kPlan, provider_, spec_.linear(), weights));
    prepared_ = a;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& a) const {
    if (!plan_.has_value()) return NoWeights();
    for (const auto& [field, member] : {std::pair("q_weight", &Args::w),
                                        {"scales", &Args::scales},
                                        {"zeros", &Args::zeros},
                                        {"g_idx", &Args::g_idx},
                                        {"bias", &Args::bias}}) {
      if (!SameView(a.*member, prepared_.*member)) {
        return InvalidArgument(kPlan, field, " is not what Prepare was given");
      }
      if ((a.*member).rank() == 0) continue;
      QUERN_RETURN_IF_ERROR(CheckApart(kPlan, field, a.*member, "c", a.out));
    }
    return plan_->CheckArgs(ArgsOf(a));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (!plan_.has_value()) return NoWeights();
    if (native_.has_value()) return 0;
    return plan_->WorkspaceBytes(max_rows, max_workers);
  }

  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (native_.has_value()) return native_->Multiply(a.x, {}, a.out);
    plan_->Execute(ArgsOf(a), workspace, executor);
  }

 private:
  Plan(const Spec& spec, LinearProvider provider)
      : spec_(spec), provider_(provider) {}

  static absl::Status NoWeights() {
    return absl::FailedPreconditionError(
        absl::StrCat(kPlan, ": has no weights; need a call of Prepare before"));
  }
  static LinearArgs ArgsOf(const Args& a) {
    LinearArgs args;
    args.a = a.x;
    args.c = a.out;
    return args;
  }

  // One code to a byte: [n, k] of weights and [groups, n] of zero points.
  std::vector<uint8_t> Codes(const AnyTensorView& w) const {
    std::vector<uint8_t> codes(static_cast<size_t>(spec_.n * spec_.k));
    uint8_t* to = codes.data();
    for (int64_t n = 0; n < spec_.n; ++n) {
      const auto* const words =
          static_cast<const int32_t*>(w.data()) + n / kColumns * w.RowStride();
      for (int64_t k = 0; k < spec_.k; ++k) {
        *to++ = CodeOf(words, k * kColumns + n % kColumns);
      }
    }
    return codes;
  }
  std::vector<uint8_t> Zeros(const AnyTensorView& zeros) const {
    std::vector<uint8_t> codes;
    for (int64_t g = 0; zeros.rank() != 0 && g < spec_.groups; ++g) {
      const auto* const words =
          static_cast<const int32_t*>(zeros.data()) + g * zeros.RowStride();
      for (int64_t n = 0; n < spec_.n; ++n) codes.push_back(CodeOf(words, n));
    }
    return codes;
  }

  absl::StatusOr<LinearWeights> Pack(const Args& a, Executor& executor) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "q_weight", a.w, DType::kI32,
                                     {spec_.blocks, spec_.words}));
    if (a.zeros.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "zeros", a.zeros, DType::kI32,
                                       {spec_.groups, spec_.n / kPackFactor}));
    }
    const std::vector<uint8_t> codes = Codes(a.w), zeros = Zeros(a.zeros);
    std::vector<float> bias;
    if (a.bias.rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kPlan, "bias", a.bias, a.bias.dtype(), {spec_.n}));
      const ScalarRow from(a.bias, 0);
      for (int64_t n = 0; n < spec_.n; ++n) bias.push_back(from[n]);
    }
    LinearSource source;
    source.codes = DenseMatrix<const uint8_t>(codes.data(), spec_.n, spec_.k);
    source.scales = a.scales;
    if (!zeros.empty()) {
      source.zeros =
          DenseMatrix<const uint8_t>(zeros.data(), spec_.groups, spec_.n);
    }
    source.g_idx = a.g_idx;
    if (!bias.empty()) {
      source.bias = DenseVector<const float>(bias.data(), spec_.n);
    }
    return LinearWeights::Pack(spec_, {source}, executor);
  }

  Spec spec_;
  LinearProvider provider_;
  const char* target_ = "scalar";
  std::optional<LinearPlan> plan_;
  std::optional<NativeLinear> native_;
  Args prepared_;
};

// The columns, which q_weight has by blocks of 16.
absl::Status FillColumns(Spec& spec, const OpCall& call) {
  spec.format = WeightFormat::kI4Group;
  QUERN_RETURN_IF_ERROR(CheckRange(call.op(), "columns of input", spec.k, 1,
                                   LinearWeights::kMaxExtent));
  if (!CheckedMul(spec.blocks, kColumns, &spec.n) || spec.n < 1) {
    return InvalidArgument(call.op(), "q_weight has ", spec.blocks,
                           " rows; need 1 or more, of 16 columns each");
  }
  return CheckExtents(call.op(), "q_weight", *call.Tensor("q_weight"),
                      {spec.blocks, 2 * spec.k},
                      ", 2 words for each column of input");
}
int64_t Columns(const Spec& spec) { return spec.n; }
int64_t ZeroWords(const Spec& spec) { return spec.n / kPackFactor; }

absl::Status FillGroups(Spec& spec, const OpCall& call) {
  if (spec.groups < 1 || spec.k % spec.groups != 0) {
    return InvalidArgument(call.op(), "scales has ", spec.groups,
                           " rows; need a divisor of ", spec.k,
                           ", the columns of input");
  }
  spec.group_size = spec.k / spec.groups;
  const int64_t factor = call.Int("pack_factor");
  if (factor == kPackFactor) {
    return LinearWeights::MaxPackedBytes(spec).status();
  }
  return InvalidArgument(call.op(), "pack_factor=", factor,
                         "; need 8, as words have codes of 4 bits");
}

}  // namespace

absl::Status RegisterVllmWna16(OpRegistry& registry) {
  const auto floats = [](std::initializer_list<OpField<Spec, DType>> fields) {
    return OpDType<Spec>::OneOf(
        {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, fields);
  };
  const auto by = [](LinearProvider provider) {
    return [provider](const Spec& spec, const OpCall&) {
      return Plan::Create(spec, provider);
    };
  };
  OpDeclaration<Plan, Spec, Args> op("cpu_gemm_wna16");
  return op
      .In("input", &Args::x, {kRows, &LinearWeightsSpec::k}, floats({&Spec::x}))
      .Word("a", "input")
      .In("q_weight", &Args::w, {&Spec::blocks, &Spec::words}, DType::kI32)
      .Then(&FillColumns)
      .InOut("output", &Args::out, nullptr, {kRows, &Columns},
             floats({&Spec::out}))
      .Word("c", "output")
      .In("scales", &Args::scales, {&Spec::groups, &Columns}, floats({}))
      .Maybe("zeros", &Args::zeros, {&Spec::groups, &ZeroWords}, DType::kI32)
      .Maybe("g_idx", &Args::g_idx, {&LinearWeightsSpec::k}, DType::kI32)
      .Maybe("bias", &Args::bias, {&Columns}, floats({}))
      .Attr("pack_factor", kPackFactor)
      .Then(&FillGroups)
      .Attr("isa_hint", std::string("vec"))
      .Provider("simd", by(LinearProvider::kSimd))
      .Provider("onednn", by(LinearProvider::kOneDnn))
      .Provider("reference", by(LinearProvider::kReference))
      .Layer()
      .Example({{"input", {4, 32}},
                {"q_weight", {2, 64}, DType::kI32},
                {"output", {4, 32}},
                {"scales", {2, 32}},
                {"zeros", {2, 4}, DType::kI32},
                {"bias", {32}}})
      .AddTo(registry);
}

}  // namespace quern
