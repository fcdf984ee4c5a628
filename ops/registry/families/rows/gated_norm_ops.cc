#include "quern/ops/registry/families/rows/gated_norm_ops.h"

#include <cmath>
#include <cstdint>
#include <optional>

#include "quern/core/communicator.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/norm/mixer2_gated_rms_norm.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/families/rows/gated_norm_declaration.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

absl::Status FillGate(RmsNormGatedSpec& spec, const OpCall& call) {
  spec.gate = !call.has("z")                  ? GateWhen::kNone
              : call.Bool("norm_before_gate") ? GateWhen::kNormFirst
                                              : GateWhen::kGateFirst;
  return absl::OkStatus();
}

using Args = Mixer2GatedRmsNormArgs;

struct Spec : Mixer2GatedRmsNormSpec {
  int64_t columns = 0;            // of this rank
  Communicator* ranks = nullptr;  // null: one rank
  bool norm = true;               // without a weight there is only the gate
};

// One sum of squares for each row and group.
template <typename Allocator>
float* SumsOf(const Spec& spec, Allocator& allocator, int64_t rows) {
  int64_t count = 0;
  if (!CheckedMul(rows, spec.groups, &count)) count = -1;
  return allocator.template Allocate<float>("sums", count);
}

// Element i of a row behind its gate.
float Gated(const Args& a, int64_t row, int64_t i) {
  const float z = ScalarRow(a.z, row)[i];
  return ScalarRow(a.x, row)[i] * (z / (1.0f + std::exp(-z)));
}

void NativeGate(const Spec& spec, const Args& a) {
  for (int64_t row = 0; row < a.x.extent(0); ++row) {
    const ScalarRow out(a.out, row);
    for (int64_t i = 0; i < spec.columns; ++i) out.Set(i, Gated(a, row, i));
  }
}

// Rounds as a framework's operators do: the normalised row to its dtype, and
// then its product with the weight.
void NativeNorm(const Spec& spec, const Args& a, Communicator& ranks,
                Workspace workspace) {
  const int64_t rows = a.x.extent(0), group = spec.hidden / spec.groups;
  const int64_t first = ranks.rank() * spec.columns;
  const auto count = static_cast<float>(group);
  const auto own_sum = [&](int64_t row, int64_t g) {
    double sum = 0.0;
    for (int64_t i = 0; i < spec.columns; ++i) {
      if ((first + i) / group != g) continue;
      sum += double{Gated(a, row, i)} * double{Gated(a, row, i)};
    }
    return sum;
  };
  // No rank has the elements of all others to sum them again.
  const auto inverse_of_huge = [&](int64_t row, int64_t g) {
    if (spec.columns % group != 0) return std::nanf("");
    return static_cast<float>(
        1.0 / std::sqrt(own_sum(row, g) / double{count} + spec.eps));
  };
  float* const sums = SumsOf(spec, workspace, rows);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t g = 0; g < spec.groups; ++g) {
      sums[row * spec.groups + g] = static_cast<float>(own_sum(row, g));
    }
  }
  ranks.AllReduceSum(DenseMatrix(sums, rows, spec.groups));
  const ScalarRow weight(a.weight, 0);
  for (int64_t row = 0; row < rows; ++row) {
    const ScalarRow out(a.out, row);
    for (int64_t i = 0; i < spec.columns; ++i) {
      const int64_t g = (first + i) / group;
      const float sum = sums[row * spec.groups + g];
      out.Set(i,
              Gated(a, row, i) *
                  (std::isinf(sum) ? inverse_of_huge(row, g)
                                   : 1.0f / std::sqrt(sum / count + spec.eps)));
      out.Set(i, out[i] * weight[i]);
    }
  }
}

// The norm or the gate alone, by their plans or by plain loops.
class Mixer2 {
 public:
  template <bool kNative>
  static absl::StatusOr<Mixer2> Create(const Spec& spec, const OpCall&) {
    Mixer2 made(spec, kNative);
    if (spec.norm) {
      SelfCommunicator self;
      QUERN_ASSIGN_OR_RETURN(
          made.norm_, Mixer2GatedRmsNormPlan::Create(spec, made.Ranks(self)));
      return made;
    }
    ActAndMulSpec gate;
    gate.d = spec.columns;
    gate.x_dtype = gate.out_dtype = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(made.gate_, ActAndMulPlan::Create(gate));
    return made;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const {
    if (native_) return "scalar";
    return spec_.norm ? norm_->target() : gate_->target();
  }
  absl::Status CheckArgs(const Args& a) const {
    if (spec_.norm) return norm_->CheckArgs(a);
    return gate_->CheckSplitArgs(a.z, a.x, a.out);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (!spec_.norm) return 0;
    if (!native_) return norm_->WorkspaceBytes(max_rows, max_workers);
    WorkspaceLayout layout;
    SumsOf(spec_, layout, max_rows);
    if (!layout.overflow()) return layout.bytes();
    return InvalidArgument("mixer2", "max_rows=", max_rows,
                           "; need fewer than 2^63 bytes of sums");
  }
  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    SelfCommunicator self;
    if (native_) {
      return spec_.norm ? NativeNorm(spec_, a, Ranks(self), workspace)
                        : NativeGate(spec_, a);
    }
    if (spec_.norm) return norm_->Execute(a, workspace, Ranks(self), executor);
    gate_->ExecuteSplit(a.z, a.x, a.out, executor);
  }

 private:
  Mixer2(const Spec& spec, bool native) : spec_(spec), native_(native) {}
  Communicator& Ranks(SelfCommunicator& self) const {
    return spec_.ranks != nullptr ? *spec_.ranks : self;
  }

  Spec spec_;
  bool native_;
  // Exactly one is set.
  std::optional<Mixer2GatedRmsNormPlan> norm_;
  std::optional<ActAndMulPlan> gate_;
};

absl::Status FillHidden(Spec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(call.op(), "n_groups", spec.groups, 1));
  spec.ranks = call.Object<Communicator>("ranks");
  spec.norm = call.has("weight");
  const int64_t size = spec.ranks == nullptr ? 1 : spec.ranks->size();
  if (!spec.norm || CheckedMul(spec.columns, size, &spec.hidden)) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "x has 2^63 columns or more");
}

}  // namespace

absl::Status RegisterGatedNormOps(OpRegistry& registry) {
  using Spec = RmsNormGatedSpec;
  using Args = RmsNormGatedArgs;
  return RmsNormGatedDeclaration("rms_norm_gated")
      .In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::dtype)
      .Maybe("z", &Args::z, Like("x"), Like("x"))
      .In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Attr("eps", 1e-5, &Spec::eps)
      .Attr("group_size", int64_t{0}, &Spec::group)
      .Attr("norm_before_gate", false)
      .Then(&FillGate)
      .Choice<NormGate>("activation", "silu",
                        {{"silu", NormGate::kSilu},
                         {"swish", NormGate::kSilu},
                         {"sigmoid", NormGate::kSigmoid}},
                        &Spec::activation)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .InPlace("z", "out")
      .Takes<&Args::x, &Args::z, &Args::weight, &Args::out>()
      .Reference(&NativeRmsNormGated)
      .Example({{"x", {4, 64}},
                {"z", {4, 64}},
                {"weight", {64}},
                {"group_size", 16}})
      .AddTo(registry);
}

absl::Status RegisterMixer2NormOps(OpRegistry& registry) {
  return OpDeclaration<Mixer2, Spec, Args>("mixer2_gated_rms_norm")
      .In("x", &Args::x, {kLeading, &Spec::columns}, &Spec::dtype)
      .In("gate", &Args::z, Like("x"), Like("x"))
      .Word("z", "gate")
      .Word("groups", "n_groups")
      .Maybe("weight", &Args::weight, {&Spec::columns}, &Spec::weight_dtype)
      .Object<Communicator>("ranks", true)
      .Attr("n_groups", int64_t{1}, &Spec::groups)
      .Then(&FillHidden)
      .Attr("eps", 1e-6, &Spec::eps)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .InPlace("gate", "out")
      .Provider("simd", &Mixer2::Create<false>)
      .Provider("reference", &Mixer2::Create<true>)
      .Example({{"x", {4, 64}},
                {"gate", {4, 64}},
                {"weight", {64}},
                {"n_groups", 2}})
      .AddTo(registry);
}

}  // namespace quern
