// One call of MlaPlan, step by step.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_scratch.h"
#include "quern/ops/parallel_rows.h"

namespace quern {
namespace {

VectorView<const int32_t> ViewOf(absl::Span<const int32_t> numbers) {
  return DenseVector(numbers.data(), static_cast<int64_t>(numbers.size()));
}

// Views of dense pieces of one dtype.
class Pieces {
 public:
  explicit Pieces(DType dtype)
      : dtype_(dtype), element_(static_cast<int64_t>(SizeOf(dtype))) {}

  // [rows, columns] whose rows are `stride` elements apart.
  AnyTensorView Rows(char* data, int64_t rows, int64_t columns,
                     int64_t stride) const {
    return AnyTensorView(dtype_, static_cast<void*>(data), 2, {rows, columns},
                         {stride, 1});
  }
  // [tokens, heads, dim] with these strides, in elements.
  AnyTensorView Heads(char* data, int64_t tokens, int64_t heads, int64_t dim,
                      int64_t token_stride, int64_t head_stride) const {
    return AnyTensorView(dtype_, static_cast<void*>(data), 3,
                         {tokens, heads, dim}, {token_stride, head_stride, 1});
  }
  char* At(char* data, int64_t element) const {
    return data + element * element_;
  }
  // Copies `count` elements from element `from_at` to element `to_at`.
  void Copy(const char* from, int64_t from_at, char* to, int64_t to_at,
            int64_t count) const {
    std::memcpy(to + to_at * element_, from + from_at * element_,
                static_cast<size_t>(count * element_));
  }

 private:
  DType dtype_;
  int64_t element_;
};

void Multiply(const LinearPlan& plan, const AnyTensorView& from,
              const AnyTensorView& to, const Workspace& workspace,
              Executor& executor, const AnyTensorView& residual = {}) {
  LinearArgs args;
  args.a = from;
  args.c = to;
  args.residual = residual;
  plan.Execute(args, workspace, executor);
}

}  // namespace

// q and the rows of the cache, rotated; the new rows are written.
void MlaPlan::Project(const MlaArgs& args, const MlaScratch& s,
                      const Workspace& workspace, Executor& executor) const {
  const MlaSpec& spec = spec_;
  const Pieces pieces(spec.dtype);
  const int64_t tokens = args.x.extent(0), row = spec.latent_row();
  const int64_t head = spec.head_dim(), q_row = spec.heads * head;
  const AnyTensorView q = pieces.Rows(s.q, tokens, q_row, q_row);
  if (layers_.q_a.has_value()) {
    const AnyTensorView q_a =
        pieces.Rows(s.q_a, tokens, spec.q_lora, spec.q_lora);
    Multiply(*layers_.q_a, args.x, q_a, workspace, executor);
    q_norm_.Execute(q_a, args.q_norm, q_a, executor);
    Multiply(layers_.q, q_a, q, workspace, executor);
  } else {
    Multiply(layers_.q, args.x, q, workspace, executor);
  }
  const AnyTensorView rows = pieces.Rows(s.latents, tokens, row, row);
  Multiply(layers_.kv_a, args.x, rows, workspace, executor);
  const AnyTensorView latents = ColumnSlice(rows, 0, spec.kv_lora);
  kv_norm_.Execute(latents, args.kv_norm, latents, executor);
  const AnyTensorView rotated = pieces.Heads(
      pieces.At(s.latents, spec.kv_lora), tokens, 1, spec.rope, row, spec.rope);
  args.rope->ExecuteQk(args.positions,
                       pieces.Heads(pieces.At(s.q, spec.nope), tokens,
                                    spec.heads, spec.rope, q_row, head),
                       rotated, executor);
  WriteKvArgs write;
  write.k = pieces.Heads(s.latents, tokens, 1, spec.kv_lora, row, spec.kv_lora);
  write.v = rotated;
  write.slots = args.schedule.slots();
  write.cache = args.cache;
  write_.Execute(write, executor);
}

void MlaPlan::ExecuteDirect(const MlaArgs& args, const MlaScratch& s,
                            Workspace workspace, Executor& executor) const {
  const MlaSpec& spec = spec_;
  const Pieces pieces(spec.dtype);
  const absl::Span<const int32_t> direct = args.schedule.direct_tokens();
  const auto tokens = static_cast<int64_t>(direct.size());
  const MlaDirectScratch scratch = LayOutMlaDirect(workspace, spec, tokens);
  ParallelRows(executor, tokens, spec.kv_lora, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pieces.Copy(s.latents, direct[static_cast<size_t>(i)] * spec.latent_row(),
                  scratch.latents, i * spec.kv_lora, spec.kv_lora);
    }
  });
  const int64_t kv_head = spec.nope + spec.v_head_dim;
  const int64_t kv_row = spec.heads * kv_head;
  Multiply(*layers_.kv_b,
           pieces.Rows(scratch.latents, tokens, spec.kv_lora, spec.kv_lora),
           pieces.Rows(scratch.kv, tokens, kv_row, kv_row), workspace,
           executor);
  const int64_t head = spec.head_dim(), row = spec.heads * head;
  ParallelRows(executor, tokens, row, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rotated =
          direct[static_cast<size_t>(i)] * spec.latent_row() + spec.kv_lora;
      for (int64_t h = 0; h < spec.heads; ++h) {
        const int64_t to = i * row + h * head;
        pieces.Copy(scratch.kv, i * kv_row + h * kv_head, scratch.keys, to,
                    spec.nope);
        pieces.Copy(s.latents, rotated, scratch.keys, to + spec.nope,
                    spec.rope);
      }
    }
  });
  const int64_t first = args.schedule.direct_begin();
  const int64_t queries = args.schedule.direct().num_tokens();
  const int64_t out_row = spec.heads * spec.v_head_dim;
  VarlenAttentionArgs attend;
  attend.q = pieces.Heads(pieces.At(s.q, first * row), queries, spec.heads,
                          head, row, head);
  attend.k = pieces.Heads(scratch.keys, tokens, spec.heads, head, row, head);
  attend.v = pieces.Heads(pieces.At(scratch.kv, spec.nope), tokens, spec.heads,
                          spec.v_head_dim, kv_row, kv_head);
  attend.schedule = args.schedule.direct();
  attend.out =
      pieces.Heads(pieces.At(s.attended, first * out_row), queries, spec.heads,
                   spec.v_head_dim, out_row, spec.v_head_dim);
  direct_.Execute(attend, workspace, executor);
}

void MlaPlan::ExecuteAbsorbed(const MlaArgs& args, const MlaScratch& s,
                              Workspace workspace, Executor& executor) const {
  const MlaSpec& spec = spec_;
  const Pieces pieces(spec.dtype);
  const MlaSchedule& schedule = args.schedule;
  const absl::Span<const int32_t> absorbed = schedule.absorbed_tokens();
  const auto tokens = static_cast<int64_t>(absorbed.size());
  const int64_t head = spec.head_dim(), row = spec.latent_row();
  const MlaAbsorbedScratch scratch = LayOutMlaAbsorbed(workspace, spec, tokens);
  const int64_t rows = spec.heads * tokens;
  GroupedLinearArgs product;
  product.a = pieces.Rows(s.q, args.x.extent(0) * spec.heads, spec.nope, head);
  product.index = ViewOf(schedule.query_rows());
  product.offsets = ViewOf(schedule.query_ends());
  product.c = pieces.Rows(scratch.queries, rows, spec.kv_lora, row);
  layers_.q_absorb.Execute(product, workspace, executor);
  ParallelRows(executor, rows, spec.rope, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      pieces.Copy(
          s.q, schedule.query_rows()[static_cast<size_t>(r)] * head + spec.nope,
          scratch.queries, r * row + spec.kv_lora, spec.rope);
    }
  });
  PagedAttentionArgs attend;
  attend.q =
      pieces.Heads(scratch.queries, tokens, spec.heads, row, row, tokens * row);
  attend.kv = args.cache;
  attend.pages = schedule.pages();
  attend.schedule = schedule.absorbed();
  attend.out = pieces.Heads(scratch.latents, tokens, spec.heads, spec.kv_lora,
                            spec.kv_lora, tokens * spec.kv_lora);
  attend_.Execute(attend, workspace, executor);
  product.a = pieces.Rows(scratch.latents, rows, spec.kv_lora, spec.kv_lora);
  product.index = {};
  product.c =
      pieces.Rows(scratch.values, rows, spec.v_head_dim, spec.v_head_dim);
  layers_.v_up.Execute(product, workspace, executor);
  const int64_t dim = spec.v_head_dim;
  ParallelRows(executor, tokens, spec.heads * dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t to =
                       absorbed[static_cast<size_t>(i)] * spec.heads * dim;
                   for (int64_t h = 0; h < spec.heads; ++h) {
                     pieces.Copy(scratch.values, (h * tokens + i) * dim,
                                 s.attended, to + h * dim, dim);
                   }
                 }
               });
}

void MlaPlan::Execute(const MlaArgs& args, Workspace workspace,
                      Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t tokens = args.x.extent(0);
  if (tokens == 0) return;
  const MlaScratch scratch = LayOutMla(workspace, spec_, tokens);
  Project(args, scratch, workspace, executor);
  // Absorbed tokens come second: those among direct ones get zeros first.
  if (!args.schedule.direct_tokens().empty()) {
    ExecuteDirect(args, scratch, workspace, executor);
  }
  if (!args.schedule.absorbed_tokens().empty()) {
    ExecuteAbsorbed(args, scratch, workspace, executor);
  }
  const int64_t columns = spec_.heads * spec_.v_head_dim;
  Multiply(layers_.out,
           Pieces(spec_.dtype).Rows(scratch.attended, tokens, columns, columns),
           args.out, workspace, executor, args.residual);
}

}  // namespace quern
