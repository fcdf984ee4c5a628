#include "quern/ops/registry/vllm/experts/experts_ops.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/experts.h"
#include "quern/ops/registry/vllm/experts/experts.h"
#include "quern/ops/registry/vllm/experts/experts_layout.h"

namespace quern {
namespace {

constexpr char kPlan[] = "experts";

struct Spec : ExpertsSpec {
  int64_t experts = 0, hidden = 0;
  int64_t wide = 0;   // rows of w13, twice those of w2's columns
  int64_t inter = 0;  // columns of w2
  DType weights = DType::kF32;
  ExpertsIsa isa = ExpertsIsa::kVec;
  bool skip_weighted = false;

  bool alternates() const {
    return activation == LinearActivation::kSwigluOaiAndMul;
  }
  WeightFormat format() const {
    return weights == DType::kI8 ? WeightFormat::kI8Channel
                                 : FormatOfFloats(weights);
  }
  // w13, or w2.
  ExpertsLayout layout(bool first) const {
    return {first ? wide : hidden, first ? hidden : inter,
            ExpertsPairOf(isa, weights)};
  }
};

struct Args {
  AnyTensorView out, x, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias;
  AnyTensorView weights, ids;
};

// One of the two matrices of all experts.
struct Matrices {
  bool first;
  AnyTensorView codes, scales, bias;  // scales and bias: rank 0 for none

  const char* name() const { return first ? "w13" : "w2"; }
};
Matrices FirstOf(const Args& a) {
  return {true, a.w13, a.w13_scale, a.w13_bias};
}
Matrices SecondOf(const Args& a) {
  return {false, a.w2, a.w2_scale, a.w2_bias};
}

// Where row n of w13 goes: the gate and then up.
int64_t PlaceOf(int64_t n, int64_t rows, bool alternates) {
  return alternates ? n % 2 * (rows / 2) + n / 2 : n;
}

// Row `e` of [experts, n] as f32 in the order of PlaceOf; empty for no tensor.
std::vector<float> Reordered(const AnyTensorView& v, int64_t e,
                             bool alternates) {
  std::vector<float> row;
  if (v.rank() == 0) return row;
  const int64_t n = v.extent(1);
  row.resize(static_cast<size_t>(n));
  const ScalarRow from(v, e);
  for (int64_t i = 0; i < n; ++i) {
    row[static_cast<size_t>(PlaceOf(i, n, alternates))] = from[i];
  }
  return row;
}

template <typename T>
void UnpackAs(const ExpertsLayout& layout, const void* packed, bool alternates,
              void* plain) {
  const auto* const from = static_cast<const T*>(packed);
  auto* const to = static_cast<T*>(plain);
  for (int64_t n = 0; n < layout.n; ++n) {
    T* const row = to + PlaceOf(n, layout.n, alternates) * layout.k;
    for (int64_t i = 0; i < layout.k; ++i) row[i] = from[layout.At(n, i)];
  }
}

// What each matrix is packed as.
LinearWeightsSpec PackedSpec(const Spec& spec, bool first) {
  LinearWeightsSpec to;
  to.n = spec.layout(first).n;
  to.k = spec.layout(first).k;
  to.format = spec.format();
  to.gated = first;
  return to;
}

// The matrix of each expert, packed for our kernels.
absl::StatusOr<std::vector<LinearWeights>> PackEach(const Spec& spec,
                                                    const Matrices& m,
                                                    Executor& executor) {
  const bool alternates = m.first && spec.alternates();
  const ExpertsLayout layout = spec.layout(m.first);
  const auto size = static_cast<int64_t>(SizeOf(spec.weights));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer plain,
                         AlignedBuffer::Create(layout.n * layout.k * size));
  const LinearWeightsSpec to = PackedSpec(spec, m.first);
  std::vector<LinearWeights> packed;
  for (int64_t e = 0; e < spec.experts; ++e) {
    const void* const from = static_cast<const char*>(m.codes.data()) +
                             e * layout.n * layout.k * size;
    const auto unpack = size == 1   ? &UnpackAs<uint8_t>
                        : size == 2 ? &UnpackAs<uint16_t>
                                    : &UnpackAs<uint32_t>;
    unpack(layout, from, alternates, plain.data());
    const std::vector<float> scales = Reordered(m.scales, e, alternates);
    const std::vector<float> bias = Reordered(m.bias, e, alternates);
    LinearSource source;
    source.codes =
        AnyTensorView(spec.weights, static_cast<const void*>(plain.data()), 2,
                      {layout.n, layout.k}, {layout.k, 1});
    if (!scales.empty()) source.scales = DenseVector(scales.data(), layout.n);
    if (!bias.empty()) source.bias = DenseVector(bias.data(), layout.n);
    QUERN_ASSIGN_OR_RETURN(LinearWeights weights,
                           LinearWeights::Pack(to, {source}, executor));
    packed.push_back(std::move(weights));
  }
  return packed;
}

// A single expert with a single weight, which shows whether our kernels can run
// what the spec asks for.
absl::StatusOr<ExpertWeights> Probe(const Spec& spec) {
  InlineExecutor executor;
  ExpertWeights weights;
  const float zeros[2] = {}, ones[2] = {1, 1};
  for (const bool first : {true, false}) {
    LinearWeightsSpec to;
    to.n = first ? 2 : 1;
    to.k = 1;
    to.format = spec.format();
    to.gated = first;
    LinearSource source;
    source.codes = AnyTensorView(spec.weights, static_cast<const void*>(zeros),
                                 2, {to.n, 1}, {1, 1});
    if (to.format == WeightFormat::kI8Channel) {
      source.scales = DenseVector<const float>(ones, to.n);
    }
    QUERN_ASSIGN_OR_RETURN(const LinearWeights packed,
                           LinearWeights::Pack(to, {source}, executor));
    (first ? weights.gate_up : weights.down).push_back(packed);
  }
  return weights;
}

class Experts {
 public:
  template <bool kNative>
  static absl::StatusOr<Experts> Create(const Spec& spec, const OpCall&) {
    QUERN_ASSIGN_OR_RETURN(const ExpertWeights weights, Probe(spec));
    QUERN_ASSIGN_OR_RETURN(const ExpertsPlan probe,
                           ExpertsPlan::Create(spec, weights));
    return Experts(spec, kNative, kNative ? "scalar" : probe.target());
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return target_; }
  std::string Explain(int64_t rows) const {
    return is_native_ || !plan_.has_value() ? target_ : plan_->Explain(rows);
  }

  absl::Status Prepare(const Args& a, Executor& executor) {
    plan_.reset();
    native_.reset();
    ExpertWeights weights;
    for (const Matrices& m : {FirstOf(a), SecondOf(a)}) {
      QUERN_RETURN_IF_ERROR(CheckMatrices(m));
      QUERN_ASSIGN_OR_RETURN(std::vector<LinearWeights> each,
                             PackEach(spec_, m, executor));
      (m.first ? weights.gate_up : weights.down) = std::move(each);
    }
    QUERN_ASSIGN_OR_RETURN(plan_, ExpertsPlan::Create(spec_, weights));
    if (is_native_) {
      QUERN_ASSIGN_OR_RETURN(native_, NativeExperts::Create(spec_, weights));
    }
    prepared_ = a;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& a) const {
    if (!plan_.has_value()) return NoWeights();
    for (const auto& [m, was] : {std::pair(FirstOf(a), FirstOf(prepared_)),
                                 std::pair(SecondOf(a), SecondOf(prepared_))}) {
      if (!SameView(m.codes, was.codes) || !SameView(m.scales, was.scales) ||
          !SameView(m.bias, was.bias)) {
        return InvalidArgument(
            kPlan, m.name(),
            ", its scale or its bias is not what Prepare was "
            "given");
      }
      for (const AnyTensorView* v : {&m.codes, &m.scales, &m.bias}) {
        if (v->rank() == 0) continue;
        QUERN_RETURN_IF_ERROR(CheckApart(kPlan, m.name(), *v, "out", a.out));
      }
    }
    constexpr int64_t kAnyMatrix[] = {kAnyExtent, kAnyExtent};
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "topk_weights", a.weights, DType::kF32, kAnyMatrix));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "topk_id", a.ids, DType::kI32, kAnyMatrix));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kPlan, "topk_weights", a.weights, "out", a.out));
    return plan_->CheckArgs(ArgsOf(a));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (!plan_.has_value()) return NoWeights();
    if (native_.has_value()) return native_->WorkspaceBytes();
    return plan_->WorkspaceBytes(max_rows, max_workers);
  }

  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (native_.has_value()) return native_->Run(ArgsOf(a), workspace);
    plan_->Execute(ArgsOf(a), workspace, executor);
  }

 private:
  Experts(const Spec& spec, bool native, const char* target)
      : spec_(spec), is_native_(native), target_(target) {}

  static absl::Status NoWeights() {
    return absl::FailedPreconditionError(
        absl::StrCat(kPlan, ": has no weights; need a call of Prepare before"));
  }

  ExpertsArgs ArgsOf(const Args& a) const {
    static constexpr float kOne = 1;
    ExpertsArgs args = {a.x, a.ids.As<const int32_t, 2>(), {}, {}, a.out, {}};
    // A weight of 1 for each token.
    args.weights =
        spec_.skip_weighted
            ? MatrixView<const float>(&kOne, {a.weights.extent(0), 1}, {0, 1})
            : a.weights.As<const float, 2>();
    return args;
  }

  absl::Status CheckMatrices(const Matrices& m) const {
    const ExpertsLayout layout = spec_.layout(m.first);
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, m.name(), m.codes, spec_.weights,
                                     {spec_.experts, layout.n, layout.k}));
    QUERN_RETURN_IF_ERROR(CheckDense(kPlan, m.name(), m.codes));
    if (m.scales.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "scale", m.scales, DType::kF32,
                                       {spec_.experts, layout.n}));
    }
    if (m.bias.rank() == 0) return absl::OkStatus();
    return CheckInput(kPlan, "bias", m.bias, m.bias.dtype(),
                      {spec_.experts, layout.n});
  }

  Spec spec_;
  bool is_native_;
  const char* target_;
  std::optional<ExpertsPlan> plan_;
  std::optional<NativeExperts> native_;
  Args prepared_;
};

using Op = OpDeclaration<Experts, Spec, Args>;

absl::Status Complete(Spec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(CheckRange(call.op(), "columns of w2", spec.inter, 1,
                                   LinearWeights::kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "rows of w13 for an expert",
                                   spec.wide, 2 * spec.inter,
                                   "twice the columns of w2 are"));
  QUERN_RETURN_IF_ERROR(CheckExpertsShape(call.op(), "w13", spec.layout(true)));
  QUERN_RETURN_IF_ERROR(CheckExpertsShape(call.op(), "w2", spec.layout(false)));
  if (spec.experts < 1 || spec.hidden < 1) {
    return InvalidArgument(call.op(), "w13 is ", PrintMeta(*call.Tensor("w13")),
                           "; need an expert with weights");
  }
  for (const bool first : {true, false}) {
    QUERN_RETURN_IF_ERROR(
        LinearWeights::MaxPackedBytes(PackedSpec(spec, first)).status());
  }
  if (spec.skip_weighted && spec.top_k != 1) {
    return InvalidArgument(call.op(), "skip_weighted is set for ", spec.top_k,
                           " experts of a token; need one expert");
  }
  return absl::OkStatus();
}

absl::Status AddExperts(bool int8, OpRegistry& registry) {
  const auto floats = [](std::initializer_list<OpField<Spec, DType>> fields) {
    return OpDType<Spec>::OneOf(
        {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, fields);
  };
  Op op(int8 ? "cpu_fused_moe_int8" : "cpu_fused_moe");
  op.InOut("output", &Args::out, nullptr, {kRows, &Spec::hidden},
           floats({&Spec::out}))
      .Word("out", "output")
      .In("input", &Args::x, {kRows, &Spec::hidden}, floats({&Spec::x}))
      .Word("x", "input")
      .In("w13", &Args::w13, {&Spec::experts, &Spec::wide, &Spec::hidden},
          int8 ? OpDType<Spec>::OneOf({DType::kI8}, {&Spec::weights})
               : floats({&Spec::weights}))
      .In("w2", &Args::w2, {&Spec::experts, &Spec::hidden, &Spec::inter},
          OpDType<Spec>::Must(Like("w13")));
  if (int8) {
    op.In("w13_scale", &Args::w13_scale, {&Spec::experts, &Spec::wide},
          DType::kF32)
        .In("w2_scale", &Args::w2_scale, {&Spec::experts, &Spec::hidden},
            DType::kF32);
  }
  const auto bias =
      int8 ? OpDType<Spec>(DType::kF32) : OpDType<Spec>::Must(Like("w13"));
  return op
      .Maybe("w13_bias", &Args::w13_bias, {&Spec::experts, &Spec::wide}, bias)
      .Maybe("w2_bias", &Args::w2_bias, {&Spec::experts, &Spec::hidden}, bias)
      .In("topk_weights", &Args::weights, {kRows, &ExpertsSpec::top_k},
          DType::kF32)
      .Word("weights", "topk_weights")
      .In("topk_id", &Args::ids, {kRows, &ExpertsSpec::top_k}, DType::kI32)
      .Word("ids", "topk_id")
      .Attr("skip_weighted", false, &Spec::skip_weighted)
      .Choice<LinearActivation>(
          "act", "silu",
          {{"silu", LinearActivation::kSiluAndMul},
           {"gelu", LinearActivation::kGeluAndMul},
           {"gelu_tanh", LinearActivation::kGeluTanhAndMul},
           {"swigluoai", LinearActivation::kSwigluOaiAndMul}},
          &Spec::activation)
      .Choice<ExpertsIsa>(
          "isa", "vec", {{"vec", ExpertsIsa::kVec}, {"amx", ExpertsIsa::kAmx}},
          &Spec::isa)
      .Then(&Complete)
      .Provider("simd", &Experts::Create<false>)
      .Provider(OpRegistry::kReference, &Experts::Create<true>)
      .ExampleOf([int8](DType dtype) {
        const DType w = int8 ? DType::kI8 : dtype;
        NamedArgs args = {{"output", TensorMeta{dtype, {4, 16}}},
                          {"input", TensorMeta{dtype, {4, 16}}},
                          {"w13", TensorMeta{w, {128, 16, 16}}},
                          {"w2", TensorMeta{w, {128, 16, 8}}},
                          {"topk_weights", TensorMeta{DType::kF32, {4, 2}}},
                          {"topk_id", TensorMeta{DType::kI32, {4, 2}}}};
        if (int8) {
          args.emplace_back("w13_scale", TensorMeta{DType::kF32, {128, 16}});
          args.emplace_back("w2_scale", TensorMeta{DType::kF32, {128, 16}});
        }
        return args;
      })
      .Layer()
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmExpertsOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterVllmPrepackOps(registry));
  QUERN_RETURN_IF_ERROR(AddExperts(/*int8=*/false, registry));
  return AddExperts(/*int8=*/true, registry);
}

}  // namespace quern
