#include <cstdint>
#include <iterator>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/vllm/experts/experts.h"
#include "quern/ops/registry/vllm/experts/experts_layout.h"

namespace quern {
namespace {

constexpr char kPlan[] = "pack";

struct Spec {
  int64_t experts = 0;
  ExpertsLayout layout;
  DType dtype = DType::kF32;
  ExpertsIsa isa = ExpertsIsa::kVec;
};
struct Args {
  AnyTensorView weight, packed;
};

// Moves elements by their size, a panel of 16 rows after the other.
class Plan {
 public:
  static absl::StatusOr<Plan> Create(const Spec& spec) { return Plan(spec); }
  const Spec& spec() const { return spec_; }
  const char* target() const { return "scalar"; }

  absl::Status CheckArgs(const Args& a) const {
    const int64_t n = spec_.layout.n, k = spec_.layout.k;
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "weight", a.weight, spec_.dtype,
                                     {spec_.experts, n, k}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kPlan, "packed_weight", a.packed,
                                      spec_.dtype, {spec_.experts, n, k}));
    QUERN_RETURN_IF_ERROR(CheckElementsApart(kPlan, "weight", a.weight));
    QUERN_RETURN_IF_ERROR(CheckDense(kPlan, "packed_weight", a.packed));
    return CheckApart(kPlan, "weight", a.weight, "packed_weight", a.packed);
  }

  void Execute(const Args& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (IsEmpty(a.weight)) return;
    switch (SizeOf(spec_.dtype)) {
      case 1:
        return Move<uint8_t>(a, executor);
      case 2:
        return Move<uint16_t>(a, executor);
      default:
        return Move<uint32_t>(a, executor);
    }
  }

 private:
  explicit Plan(const Spec& spec) : spec_(spec) {}

  template <typename T>
  void Move(const Args& a, Executor& executor) const {
    const int64_t k = spec_.layout.k, pair = spec_.layout.pair;
    constexpr int64_t kColumns = ExpertsLayout::kColumns;
    const int64_t panels = spec_.layout.n / kColumns;
    const auto* const from = static_cast<const T*>(a.weight.data());
    auto* const to = static_cast<T*>(a.packed.mutable_data());
    const auto panel = [&](int64_t p) {
      const T* const rows = from + p / panels * a.weight.stride(0) +
                            p % panels * kColumns * a.weight.stride(1);
      T* out = to + p * kColumns * k;
      for (int64_t i = 0; i < k; i += pair) {
        for (int64_t row = 0; row < kColumns; ++row) {
          for (int64_t j = 0; j < pair; ++j) {
            *out++ = rows[row * a.weight.stride(1) + i + j];
          }
        }
      }
    };
    ParallelRows(executor, spec_.experts * panels, 2 * kColumns * k,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t p = begin; p < end; ++p) panel(p);
                 });
  }

  Spec spec_;
};

absl::Status FillLayout(Spec& spec, const OpCall& call) {
  spec.layout.pair = ExpertsPairOf(spec.isa, spec.dtype);
  return CheckExpertsShape(call.op(), "weight", spec.layout);
}

int64_t& RowsOfExpert(Spec& spec) { return spec.layout.n; }
int64_t& ColumnsOfExpert(Spec& spec) { return spec.layout.k; }

NamedArgs Int8Example(DType) {
  return {{"weight", TensorMeta{DType::kI8, {2, 32, 8}}},
          {"packed_weight", TensorMeta{DType::kI8, {2, 32, 8}}}};
}

}  // namespace

absl::Status RegisterVllmPrepackOps(OpRegistry& registry) {
  for (const bool int8 : {false, true}) {
    OpDeclaration<Plan, Spec, Args> op(int8 ? "prepack_moe_weight_int8"
                                            : "prepack_moe_weight");
    const auto dtype = int8 ? OpDType<Spec>::OneOf({DType::kI8}, {&Spec::dtype})
                            : OpDType<Spec>::OneOf({std::begin(kFloatDTypes),
                                                    std::end(kFloatDTypes)},
                                                   {&Spec::dtype});
    op.In("weight", &Args::weight,
          {&Spec::experts, &RowsOfExpert, &ColumnsOfExpert}, dtype)
        .InOut("packed_weight", &Args::packed, nullptr, Like("weight"),
               Like("weight"))
        .Choice<ExpertsIsa>(
            "isa", "vec",
            {{"vec", ExpertsIsa::kVec}, {"amx", ExpertsIsa::kAmx}}, &Spec::isa)
        .Then(&FillLayout)
        .Provider("reference", nullptr)
        .Layer();
    if (int8) {
      op.ExampleOf(&Int8Example);
    } else {
      op.Example({{"weight", {2, 32, 8}}, {"packed_weight", {2, 32, 8}}});
    }
    QUERN_RETURN_IF_ERROR(op.AddTo(registry));
  }
  return absl::OkStatus();
}

}  // namespace quern
