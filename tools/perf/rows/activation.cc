#include "quern/tools/perf/rows/activation.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/testing/reference_activation.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr absl::string_view kStores[] = {"auto", "cached", "stream"};
constexpr int64_t kMaxDim = int64_t{1} << 24;
// Inputs are in [-kReach, kReach).
constexpr double kReach = 8.0;

struct Named {
  absl::string_view name;
  absl::string_view summary;
  Activation activation;
  GateOrder order = GateOrder::kGateFirst;
  double sparsity = 0.0;
};

constexpr Named kGated[] = {
    {"silu_and_mul", "out[t, i] = silu(x[t, i]) * x[t, d + i]",
     Activation::kSilu},
    {"mul_and_silu", "out[t, i] = x[t, i] * silu(x[t, d + i])",
     Activation::kSilu, GateOrder::kGateSecond},
    {"gelu_and_mul", "out[t, i] = gelu(x[t, i]) * x[t, d + i]",
     Activation::kGelu},
    {"gelu_tanh_and_mul", "out[t, i] = gelu_tanh(x[t, i]) * x[t, d + i]",
     Activation::kGeluTanh},
    {"gelu_and_mul_sparse",
     "gelu_tanh of what stands out by a quantile of 0.95, times x[t, d + i]",
     Activation::kGeluTanh, GateOrder::kGateFirst, 0.95},
    {"swigluoai_and_mul",
     "out[t, i] = quick_gelu(min(x[t, 2 i], 7)) * (clamp(x[t, 2 i + 1]) + 1)",
     Activation::kSwigluOai, GateOrder::kInterleaved},
    {"fatrelu_and_mul", "out[t, i] = fatrelu(x[t, i]) * x[t, d + i]",
     Activation::kFatrelu},
};
constexpr Named kUnary[] = {
    {"silu", "out[t, i] = silu(x[t, i])", Activation::kSilu},
    {"gelu", "out[t, i] = gelu(x[t, i]), by erf", Activation::kGelu},
    {"gelu_new", "out[t, i] = gelu(x[t, i]), by tanh", Activation::kGeluTanh},
    {"gelu_fast", "gelu_new as it is spelled elsewhere", Activation::kGeluTanh},
    {"quick_gelu", "out[t, i] = x[t, i] * sigmoid(1.702 x[t, i])",
     Activation::kQuickGelu},
    {"relu2", "out[t, i] = max(x[t, i], 0)^2", Activation::kRelu2},
    {"xielu", "out[t, i] = xielu(x[t, i])", Activation::kXielu},
};

double Reference(Activation activation, const ActivationParams& p, double v) {
  switch (activation) {
    case Activation::kSilu:
      return ReferenceSilu(v);
    case Activation::kGelu:
      return ReferenceGelu(v);
    case Activation::kGeluTanh:
      return ReferenceGeluTanh(v);
    case Activation::kQuickGelu:
      return ReferenceQuickGelu(v);
    case Activation::kRelu2:
      return ReferenceRelu2(v);
    case Activation::kFatrelu:
      return ReferenceFatrelu(v, double{p.threshold});
    case Activation::kXielu:
      return ReferenceXielu(v, double{p.alpha_p}, double{p.alpha_n},
                            double{p.beta}, double{p.eps});
    default:
      return v;
  }
}

// The worst of activation_spec.h for |v| <= kReach, a product, the output.
double Relative(Activation activation, DType dtype) {
  const bool tanh = activation == Activation::kGeluTanh;
  return (tanh ? 10 + 4 * 50.0 : 64.0) * 0x1p-24 + RelativeRoundoff(dtype);
}
// Where terms cancel: xielu's; 1 + tanh in the reference; a sparse cutoff.
constexpr double kAbsolute = 64 * kReach * kReach * 0x1p-24;

class ActAndMulOp final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    ActAndMulSpec spec;
    for (const Named& named : kGated) {
      if (named.name != args.op()) continue;
      spec.activation = named.activation;
      spec.order = named.order;
      spec.sparsity = named.sparsity;
    }
    QUERN_ASSIGN_OR_RETURN(const int64_t rows, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(spec.d, args.Int("d", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const std::string stores,
                           args.Choice("stores", kStores));
    if (stores == "cached") spec.stores = Stores::kCached;
    if (stores == "stream") spec.stores = Stores::kStream;
    spec.x_dtype = spec.out_dtype = dtype;
    QUERN_ASSIGN_OR_RETURN(ActAndMulPlan plan, ActAndMulPlan::Create(spec));
    return absl::WrapUnique<Op>(new ActAndMulOp(std::move(plan), rows));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("rows=", rows_, " d=", d());
    info.dtype = std::string(DTypeName(dtype()));
    info.isa = plan_.target();
    info.SetTraffic(2 * static_cast<double>(out_bytes()),
                    static_cast<double>(out_bytes()));
    // silu is five: negate, exp, add, divide, multiply.
    info.flops = 5.0 * static_cast<double>(rows_ * d());
    return info;
  }

  int64_t set_bytes() const override { return 3 * out_bytes(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, 2 * out_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, out_bytes()));
    WithType(dtype(), [this](auto type) {
      FillReals<decltype(type)>(-kReach, kReach, x_);
    });
    return plan_.CheckArgs(X(0), Out(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(X(set), Out(set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const ActAndMulSpec& spec = plan_.spec();
    return JudgeRows(
        ActAndMulName(spec), dtype(), out_, rows_, d(),
        Relative(spec.activation, dtype()), executor,
        [&](int64_t row) { return Want(row); }, kAbsolute * kReach);
  }

 private:
  ActAndMulOp(ActAndMulPlan plan, int64_t rows)
      : plan_(std::move(plan)), rows_(rows) {}

  std::vector<double> Want(int64_t row) {
    const ActAndMulSpec& spec = plan_.spec();
    const auto x = Doubles(dtype(), x_, row * 2 * d(), 2 * d());
    std::vector<double> gate, up, want;
    for (int64_t i = 0; i < 2 * d(); ++i) {
      bool is_gate = (i < d()) == (spec.order == GateOrder::kGateFirst);
      if (spec.order == GateOrder::kInterleaved) is_gate = i % 2 == 0;
      (is_gate ? gate : up).push_back(x[static_cast<size_t>(i)]);
    }
    if (spec.sparsity > 0) {
      gate = ReferenceExcess(gate, NormalQuantile(spec.sparsity));
    }
    for (size_t i = 0; i < gate.size(); ++i) {
      if (spec.activation == Activation::kSwigluOai) {
        want.push_back(ReferenceSwigluOai(gate[i], up[i],
                                          double{spec.params.alpha},
                                          double{spec.params.limit}));
      } else {
        want.push_back(Reference(spec.activation, spec.params, gate[i]) *
                       up[i]);
      }
    }
    return want;
  }

  int64_t d() const { return plan_.spec().d; }
  DType dtype() const { return plan_.spec().x_dtype; }
  int64_t out_bytes() const {
    return rows_ * d() * static_cast<int64_t>(SizeOf(dtype()));
  }
  AnyTensorView X(int64_t set) {
    return Matrix(dtype(), x_.at(set), rows_, 2 * d());
  }
  AnyTensorView Out(int64_t set) {
    return Matrix(dtype(), out_.at(set), rows_, d());
  }

  ActAndMulPlan plan_;
  int64_t rows_;
  SetBuffer x_, out_;
};

class UnaryOp final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    ActivationSpec spec;
    for (const Named& named : kUnary) {
      if (named.name == args.op()) spec.activation = named.activation;
    }
    QUERN_ASSIGN_OR_RETURN(const int64_t rows, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(spec.hidden, args.Int("hidden", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kFloatDTypes));
    spec.x_dtype = spec.out_dtype = dtype;
    QUERN_ASSIGN_OR_RETURN(ActivationPlan plan, ActivationPlan::Create(spec));
    return absl::WrapUnique<Op>(new UnaryOp(std::move(plan), rows));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("rows=", rows_, " hidden=", hidden());
    info.dtype = std::string(DTypeName(dtype()));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(bytes()), static_cast<double>(bytes()));
    info.flops = 4.0 * static_cast<double>(rows_ * hidden());
    return info;
  }

  int64_t set_bytes() const override { return 2 * bytes(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, bytes()));
    WithType(dtype(), [this](auto type) {
      FillReals<decltype(type)>(-kReach, kReach, x_);
    });
    return plan_.CheckArgs(View(x_, 0), View(out_, 0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(View(x_, set), View(out_, set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const ActivationSpec& spec = plan_.spec();
    return JudgeRows(
        ActivationName(spec.activation), dtype(), out_, rows_, hidden(),
        Relative(spec.activation, dtype()), executor,
        [&](int64_t row) {
          std::vector<double> want =
              Doubles(dtype(), x_, row * hidden(), hidden());
          for (double& v : want) v = Reference(spec.activation, spec.params, v);
          return want;
        },
        kAbsolute);
  }

 private:
  UnaryOp(ActivationPlan plan, int64_t rows)
      : plan_(std::move(plan)), rows_(rows) {}

  int64_t hidden() const { return plan_.spec().hidden; }
  DType dtype() const { return plan_.spec().x_dtype; }
  int64_t bytes() const {
    return rows_ * hidden() * static_cast<int64_t>(SizeOf(dtype()));
  }
  AnyTensorView View(SetBuffer& buffer, int64_t set) {
    return Matrix(dtype(), buffer.at(set), rows_, hidden());
  }

  ActivationPlan plan_;
  int64_t rows_;
  SetBuffer x_, out_;
};

}  // namespace

std::vector<OpEntry> ActivationOps() {
  std::vector<OpEntry> ops;
  for (const Named& named : kGated) {
    ops.push_back({named.name,
                   named.summary,
                   {{"dtype", "bf16", "f32, bf16 or f16, of x and out"},
                    {"rows", "4096", "tokens"},
                    {"d", "14336", "columns of out"},
                    {"stores", "auto", "auto, cached or stream"}},
                   &ActAndMulOp::Create});
  }
  for (const Named& named : kUnary) {
    ops.push_back({named.name,
                   named.summary,
                   {{"dtype", "bf16", "f32, bf16 or f16, of x and out"},
                    {"rows", "4096", "tokens"},
                    {"hidden", "14336", "elements of a row"}},
                   &UnaryOp::Create});
  }
  return ops;
}

}  // namespace quern
