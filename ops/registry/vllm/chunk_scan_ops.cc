#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
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
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/recurrent.h"
#include "quern/ops/registry/vllm/recurrent.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "mamba_chunk_scan_fwd_cpu";
// The plan holds a number for each.
constexpr int64_t kMaxSequences = 1 << 20;

struct Spec {
  int64_t sequences = 0, heads = 0, head_dim = 0, d_state = 0, groups = 0;
  DType dtype = DType::kF32, bc = DType::kF32;

  StateUpdateSpec update() const {
    StateUpdateSpec spec;
    spec.heads = heads;
    spec.groups = groups;
    spec.head_dim = head_dim;
    spec.d_state = d_state;
    spec.delta = SsmDelta::kPlain;
    spec.bc_dtype = bc;
    return spec;  // f32
  }
};

struct Args {
  AnyTensorView out, states, x, dt, a, b, c, d, z, starts;
};

// Copies of tokens in f32, dense; null where the step has them in f32.
struct Floats {
  float* x;
  float* z;
  float* out;
};

// StateUpdatePlan on the states in their order, in f32.
class Plan {
 public:
  template <bool kNative>
  static absl::StatusOr<Plan> Create(const Spec& spec, const OpCall&) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "sequences", spec.sequences, 0, kMaxSequences));
    QUERN_ASSIGN_OR_RETURN(const StateUpdatePlan update,
                           StateUpdatePlan::Create(spec.update()));
    ConvertSpec widen, narrow;
    widen.from = narrow.to = spec.dtype;
    widen.to = narrow.from = DType::kF32;
    widen.stores = narrow.stores = Stores::kCached;
    QUERN_ASSIGN_OR_RETURN(const ConvertPlan to_f32,
                           ConvertPlan::Create(widen));
    QUERN_ASSIGN_OR_RETURN(const ConvertPlan from_f32,
                           ConvertPlan::Create(narrow));
    return Plan(spec, update, to_f32, from_f32, kNative);
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return native_ ? "scalar" : update_.target(); }

  absl::Status CheckArgs(const Args& a) const {
    const Spec& s = spec_;
    const int64_t tokens = a.x.extent(0);
    const int64_t rows[] = {tokens, s.heads, s.head_dim};
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "x", a.x, s.dtype, {kAnyExtent, s.heads, s.head_dim}));
    if (a.z.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kOp, "z", a.z, s.dtype, rows));
    }
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", a.out, s.dtype, rows));
    for (const auto& [field, v] :
         {std::pair("x", &a.x), {"z", &a.z}, {"out", &a.out}}) {
      if (v->rank() == 0 || s.heads == 1 || tokens == 0 ||
          v->stride(1) == s.head_dim) {
        continue;
      }
      return InvalidArgument(kOp, field, " has heads ", v->stride(1),
                             " apart; need ", s.head_dim,
                             ", where they follow another");
    }
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "dt", a.dt, DType::kF32, {tokens, s.heads}));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kOp, "cu_seqlens", a.starts, {s.sequences + 1}));
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a", a.a, DType::kF32, {s.heads}));
    if (a.d.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kOp, "d", a.d, DType::kF32, {s.heads}));
    }
    for (const auto& [field, v] : {std::pair("b", &a.b), {"c", &a.c}}) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kOp, field, *v, s.bc, {tokens, s.groups, s.d_state}));
    }
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "final_states", a.states, DType::kF32,
                    {s.sequences, s.heads, s.head_dim, s.d_state}));
    for (const auto& [field, v] : {std::pair("x", &a.x),
                                   {"dt", &a.dt},
                                   {"a", &a.a},
                                   {"b", &a.b},
                                   {"c", &a.c},
                                   {"d", &a.d},
                                   {"z", &a.z},
                                   {"cu_seqlens", &a.starts},
                                   {"out", &a.out}}) {
      if (v->rank() == 0) continue;
      QUERN_RETURN_IF_ERROR(
          CheckApart(kOp, field, *v, "final_states", a.states));
      if (v == &a.out) continue;
      QUERN_RETURN_IF_ERROR(CheckApart(kOp, field, *v, "out", a.out));
    }
    return CheckSequences(kOp, BatchOf(a), tokens, s.sequences,
                          /*null_slot=*/-1);
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const {
    int64_t bytes = 0;
    if (!native_) {
      QUERN_ASSIGN_OR_RETURN(bytes,
                             update_.WorkspaceBytes(max_tokens, max_workers));
    }
    WorkspaceLayout layout;
    LayOut(layout, max_tokens);
    layout.Allocate<uint8_t>("scan", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": ", max_tokens, " tokens take 2^63 bytes or more"));
  }

  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t tokens = a.x.extent(0);
    if (tokens == 0) return;
    const Floats floats = LayOut(workspace, tokens);
    if (floats.x != nullptr) {
      to_f32_.Execute(Flat(a.x), Dense(floats.x, tokens), executor);
      if (a.z.rank() != 0) {
        to_f32_.Execute(Flat(a.z), Dense(floats.z, tokens), executor);
      }
      // Tokens of no sequence.
      to_f32_.Execute(Flat(a.out), Dense(floats.out, tokens), executor);
    }
    const StateUpdateArgs args = ArgsOf(a, floats);
    if (native_) {
      NativeStateUpdate(update_.spec(), args);
    } else {
      update_.Execute(args, workspace, executor);
    }
    if (floats.x != nullptr) {
      from_f32_.Execute(Dense(floats.out, tokens), Flat(a.out), executor);
    }
  }

 private:
  Plan(const Spec& spec, const StateUpdatePlan& update,
       const ConvertPlan& to_f32, const ConvertPlan& from_f32, bool native)
      : spec_(spec),
        update_(update),
        to_f32_(to_f32),
        from_f32_(from_f32),
        native_(native),
        slots_(static_cast<size_t>(spec.sequences)) {
    std::iota(slots_.begin(), slots_.end(), 0);
  }

  int64_t columns() const { return spec_.heads * spec_.head_dim; }

  template <typename Allocator>
  Floats LayOut(Allocator& to, int64_t tokens) const {
    int64_t size = 0;
    if (spec_.dtype == DType::kF32) return {nullptr, nullptr, nullptr};
    if (!CheckedMul(tokens, columns(), &size)) size = -1;
    return {to.template Allocate<float>("x", size),
            to.template Allocate<float>("z", size),
            to.template Allocate<float>("out", size)};
  }

  // [tokens, heads, head_dim] as [tokens, heads * head_dim].
  AnyTensorView Flat(const AnyTensorView& v) const {
    const AnyTensorView::Dims extents{v.extent(0), columns()};
    const AnyTensorView::Dims strides{v.stride(0), 1};
    if (v.writable()) return {v.dtype(), v.mutable_data(), 2, extents, strides};
    return {v.dtype(), v.data(), 2, extents, strides};
  }
  AnyTensorView Dense(float* data, int64_t tokens) const {
    return DenseMatrix(data, tokens, columns());
  }
  AnyTensorView Heads(float* data, int64_t tokens) const {
    return AnyTensorView(DType::kF32, static_cast<void*>(data), 3,
                         {tokens, spec_.heads, spec_.head_dim},
                         {columns(), spec_.head_dim, 1});
  }
  SequenceBatch BatchOf(const Args& a) const {
    SequenceBatch batch;
    batch.query_start_loc = IndicesOf(a.starts);
    batch.state_indices =
        DenseVector<const int32_t>(slots_.data(), spec_.sequences);
    return batch;
  }
  StateUpdateArgs ArgsOf(const Args& a, const Floats& floats) const {
    StateUpdateArgs args;
    const int64_t tokens = a.x.extent(0);
    const bool copies = floats.x != nullptr;
    args.state = a.states;
    args.x = copies ? Heads(floats.x, tokens) : a.x;
    args.out = copies ? Heads(floats.out, tokens) : a.out;
    args.z = copies && a.z.rank() != 0 ? Heads(floats.z, tokens) : a.z;
    args.dt = a.dt;
    args.a = a.a;
    args.b = a.b;
    args.c = a.c;
    args.d = a.d;
    args.batch = BatchOf(a);
    return args;
  }

  Spec spec_;
  StateUpdatePlan update_;
  ConvertPlan to_f32_, from_f32_;
  bool native_;
  std::vector<int32_t> slots_;  // 0, 1, 2, ...
};

}  // namespace

absl::Status RegisterVllmChunkScan(OpRegistry& registry) {
  const auto floats = [](DType Spec::*to) {
    return OpDType<Spec>::OneOf(
        {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {to});
  };
  return OpDeclaration<Plan, Spec, Args>(kOp)
      .InOut("out", &Args::out, nullptr, {kRows, &Spec::heads, &Spec::head_dim},
             floats(&Spec::dtype))
      .InOut("final_states", &Args::states, nullptr,
             {&Spec::sequences, &Spec::heads, &Spec::head_dim, &Spec::d_state},
             DType::kF32)
      .Word("state", "final_states")
      .In("x", &Args::x, Like("out"), Like("out"))
      .In("dt", &Args::dt, {kRows, &Spec::heads}, DType::kF32)
      .In("a", &Args::a, {&Spec::heads}, DType::kF32)
      .In("b", &Args::b, {kRows, &Spec::groups, &Spec::d_state},
          floats(&Spec::bc))
      .In("c", &Args::c, Like("b"), Like("b"))
      .Maybe("d", &Args::d, {&Spec::heads}, DType::kF32)
      .Maybe("z", &Args::z, Like("out"), Like("out"))
      .In("cu_seqlens", &Args::starts, {Plus(1, &Spec::sequences)},
          IndexDType<Spec>())
      .Word("query_start_loc", "cu_seqlens")
      .Provider("simd", &Plan::Create<false>)
      .Provider("reference", &Plan::Create<true>)
      .Layer()
      .Example({{"out", {4, 2, 8}},
                {"final_states", {3, 2, 8, 4}, DType::kF32},
                {"x", {4, 2, 8}},
                {"dt", {4, 2}, DType::kF32},
                {"a", {2}, DType::kF32},
                {"b", {4, 1, 4}},
                {"c", {4, 1, 4}},
                {"d", {2}, DType::kF32},
                {"z", {4, 2, 8}},
                {"cu_seqlens", {4}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace quern
