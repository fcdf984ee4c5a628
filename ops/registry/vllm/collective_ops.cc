#include "quern/ops/registry/vllm/collective_ops.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

constexpr char kPlan[] = "collective";

int64_t RanksOf(const Communicator* ranks) {
  return ranks == nullptr ? 1 : ranks->size();
}

struct SumSpec {
  int64_t columns = 0;
  DType dtype = DType::kF32;
};
struct SumArgs {
  AnyTensorView data;
};

class SumPlan {
 public:
  static absl::StatusOr<SumPlan> Create(const SumSpec& spec,
                                        const OpCall& call) {
    SumPlan plan;
    plan.spec_ = spec;
    plan.ranks_ = call.Object<Communicator>("ranks");
    return plan;
  }
  const char* target() const { return "scalar"; }
  absl::Status CheckArgs(const SumArgs& a) const {
    return CheckOutput(kPlan, "data", a.data, spec_.dtype,
                       {kAnyExtent, spec_.columns});
  }
  void Execute(const SumArgs& a, Executor&) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (ranks_ != nullptr) ranks_->AllReduceSum(a.data);
  }

 private:
  SumSpec spec_;
  Communicator* ranks_ = nullptr;
};

absl::Status AddSum(OpRegistry& registry) {
  return OpDeclaration<SumPlan, SumSpec, SumArgs>("shm_allreduce")
      .InOut("data", &SumArgs::data, nullptr, {kLeading, &SumSpec::columns},
             OpDType<SumSpec>::OneOf(
                 {std::begin(kFloatDTypes), std::end(kFloatDTypes)},
                 {&SumSpec::dtype}))
      .Attr("reduce_op", int64_t{0})
      .Then([](SumSpec&, const OpCall& call) -> absl::Status {
        const int64_t op = call.Int("reduce_op");
        if (op == 0) return absl::OkStatus();
        return InvalidArgument(call.op(), "reduce_op=", op, "; need 0, a sum");
      })
      .Object<Communicator>("ranks", /*optional=*/true)
      .Provider("reference", &SumPlan::Create)
      .Layer()
      .Example({{"data", {4, 64}}})
      .AddTo(registry);
}

struct GatherSpec {
  TensorMeta data, out;
  int64_t rows = 1;   // the dimensions before the one that is gathered
  int64_t bytes = 0;  // of the others
};
struct GatherArgs {
  AnyTensorView data, out;
};

class GatherPlan {
 public:
  static absl::StatusOr<GatherPlan> Create(const GatherSpec& spec,
                                           const OpCall& call) {
    GatherPlan plan;
    plan.spec_ = spec;
    plan.ranks_ = call.Object<Communicator>("ranks");
    return plan;
  }
  const char* target() const { return "scalar"; }
  absl::Status CheckArgs(const GatherArgs& a) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "data", a.data, spec_.data.dtype,
                                     spec_.data.extents));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kPlan, "out", a.out, spec_.out.dtype, spec_.out.extents));
    QUERN_RETURN_IF_ERROR(CheckDense(kPlan, "data", a.data));
    QUERN_RETURN_IF_ERROR(CheckDense(kPlan, "out", a.out));
    return CheckApart(kPlan, "data", a.data, "out", a.out);
  }
  void Execute(const GatherArgs& a, Executor&) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (IsEmpty(a.data)) return;
    const int64_t ranks = RanksOf(ranks_), bytes = spec_.bytes;
    const AnyTensorView shard(DType::kU8, a.data.data(), 2, {spec_.rows, bytes},
                              {bytes, 1});
    const AnyTensorView all(DType::kU8, a.out.mutable_data(), 2,
                            {spec_.rows, ranks * bytes}, {ranks * bytes, 1});
    if (ranks_ == nullptr) return CopyColumns(shard, all);
    ranks_->AllGatherColumns(shard, all, {ranks * bytes, bytes});
  }

 private:
  GatherSpec spec_;
  Communicator* ranks_ = nullptr;
};

// The rows and bytes of data, of which out has each rank's along dimension
// `dim`.
absl::Status FillGather(GatherSpec& spec, const OpCall& call, size_t dim) {
  spec.data = *call.Tensor("data");
  const std::vector<int64_t>& extents = spec.data.extents;
  spec.bytes = static_cast<int64_t>(SizeOf(spec.data.dtype));
  int64_t unused = 0;
  for (size_t d = 0; d < extents.size(); ++d) {
    int64_t& part = d < dim ? spec.rows : spec.bytes;
    if (!CheckedMul(part, extents[d], &part)) {
      return InvalidArgument(call.op(), "data has 2^63 bytes or more");
    }
  }
  const int64_t ranks = RanksOf(call.Object<Communicator>("ranks"));
  if (CheckedMul(spec.bytes, ranks, &unused) &&
      CheckedMul(spec.rows, unused, &unused)) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "data of ", ranks,
                         " ranks has 2^63 bytes or more");
}

using Gather = OpDeclaration<GatherPlan, GatherSpec, GatherArgs>;

absl::Status FillAlong(GatherSpec& spec, const OpCall& call) {
  const TensorMeta& data = *call.Tensor("data");
  const auto rank = static_cast<int64_t>(data.extents.size());
  const int64_t given = call.Int("dim");
  if (given < -rank || given >= rank) {
    return InvalidArgument(call.op(), "dim=", given, "; need ", -rank, " to ",
                           rank - 1, ", as data is ", PrintMeta(data));
  }
  const auto dim = static_cast<size_t>(given < 0 ? given + rank : given);
  QUERN_RETURN_IF_ERROR(FillGather(spec, call, dim));
  spec.out = data;
  int64_t& extent = spec.out.extents[dim];
  // FillGather has multiplied all of them where none is 0.
  if (CheckedMul(extent, RanksOf(call.Object<Communicator>("ranks")),
                 &extent)) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "data has 2^63 elements or more");
}
std::vector<int64_t> OutShape(const GatherSpec& spec, const OpCall&, int64_t) {
  return spec.out.extents;
}
DType& OutDType(GatherSpec& spec) { return spec.out.dtype; }

absl::Status AddAlong(OpRegistry& registry) {
  return Gather("shm_allgather")
      .In("data", &GatherArgs::data)
      .Need<int64_t>("dim")
      .Object<Communicator>("ranks", /*optional=*/true)
      .Then(&FillAlong)
      .Out("out", &GatherArgs::out, &OutShape, &OutDType)
      .Provider("reference", &GatherPlan::Create)
      .Layer()
      .Example({{"data", {4, 64}}, {"dim", int64_t{-1}}})
      .AddTo(registry);
}

absl::Status FillOutput(GatherSpec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(FillGather(spec, call, 0));
  spec.out = spec.data;
  spec.out.extents.insert(spec.out.extents.begin(),
                          RanksOf(call.Object<Communicator>("ranks")));
  return CheckMeta(call.op(), "output", *call.Tensor("output"), spec.out,
                   ", data of each rank");
}

absl::Status AddOutput(OpRegistry& registry) {
  return Gather("shm_all_gather")
      .In("data", &GatherArgs::data)
      .InOut("output", &GatherArgs::out, nullptr)
      .Word("out", "output")
      .Object<Communicator>("ranks", /*optional=*/true)
      .Then(&FillOutput)
      .Provider("reference", &GatherPlan::Create)
      .Layer()
      .Example({{"data", {4, 64}}, {"output", {1, 4, 64}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmCollectiveOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddSum(registry));
  QUERN_RETURN_IF_ERROR(AddAlong(registry));
  return AddOutput(registry);
}

}  // namespace quern
