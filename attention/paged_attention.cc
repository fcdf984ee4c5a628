#include "attention/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/attention_spec.h"
#include "attention/paged_attention_kernels.h"
#include "attention/schedule.h"
#include "cache/head_rows.h"
#include "cache/kv_layout.h"
#include "cache/page_table.h"
#include "core/check.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"

namespace quern {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int64_t kChunkTokens = AttentionSchedule::kChunkTokens;

// Rows in the workspace are a multiple of this apart, in elements: the longest
// vector of any instruction set.
constexpr int64_t kRowAlignment = 64;
static_assert(kChunkTokens % kRowAlignment == 0, "rows of logits");

// Results for some rows: not yet divided by the sum.
struct PartialRows {
  SoftmaxState* state;
  float* out;
};

// All scratch of one Execute.
struct Scratch {
  // Of `max_block_rows` rows for each worker.
  float* q;
  float* logits;
  PartialRows chunk;  // of the chunk at hand
  PartialRows piece;  // of chunks that are merged first
  PartialRows total;  // of all chunks so far
  // Of the work items that leave a partial result.
  PartialRows partials;
};

struct Strides {
  explicit Strides(const KvLayout& kv)
      : q(RoundUp(kv.head_dim(), kRowAlignment)),
        out(RoundUp(kv.v_head_dim(), kRowAlignment)) {}
  int64_t q;
  int64_t out;
};

// a * b, or a negative number, which WorkspaceLayout counts as overflow.
int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  return CheckedMul(a, b, &product) ? product : -1;
}

template <typename Allocator>
Scratch LayOut(Allocator& a, const Strides& strides,
               const AttentionSchedule& schedule, int64_t num_workers) {
  const int64_t rows = Product(schedule.max_block_rows(), num_workers);
  const int64_t partials = schedule.partial_rows();
  Scratch s;
  s.q = a.template Allocate<float>("q", Product(rows, strides.q));
  s.logits = a.template Allocate<float>("logits", Product(rows, kChunkTokens));
  s.chunk.state = a.template Allocate<SoftmaxState>("chunk state", rows);
  s.chunk.out =
      a.template Allocate<float>("chunk out", Product(rows, strides.out));
  s.piece.state = a.template Allocate<SoftmaxState>("piece state", rows);
  s.piece.out =
      a.template Allocate<float>("piece out", Product(rows, strides.out));
  s.total.state = a.template Allocate<SoftmaxState>("state", rows);
  s.total.out = a.template Allocate<float>("out", Product(rows, strides.out));
  s.partials.state = a.template Allocate<SoftmaxState>("partials", partials);
  s.partials.out =
      a.template Allocate<float>("partial out", Product(partials, strides.out));
  return s;
}

// One Execute: its arguments, and the steps of its tasks.
class Step {
 public:
  Step(const AttentionSpec& spec, const PagedAttentionKernels& kernels,
       const PagedAttentionArgs& args, const Strides& strides,
       const Scratch& scratch)
      : spec_(spec),
        layout_(spec.kv),
        kernels_(kernels),
        args_(args),
        strides_(strides),
        scratch_(scratch) {
    const double scale =
        spec.scale != 0.0f
            ? static_cast<double>(spec.scale)
            : 1.0 / std::sqrt(static_cast<double>(layout_.head_dim()));
    // exp(x) = exp2(log2(e) * x)
    scale_log2e_ = static_cast<float>(scale * 1.4426950408889634);
  }

  void Work(const AttentionWork& work, int worker) const {
    LoadQueries(work.block, worker);
    const PartialRows total = OfWorker(scratch_.total, worker);
    const PartialRows piece = OfWorker(scratch_.piece, worker);
    const bool whole = work.partial == kNoPartial;
    if (whole) Clear(Rows(work.block), total);
    int64_t partial = work.partial;
    for (int32_t c = work.chunk_begin; c < work.chunk_end;) {
      const int32_t end = AttentionSchedule::PieceEnd(
          c, work.chunk_end, c == args_.schedule.FirstChunk(work.block));
      if (whole) {
        ComputePiece(work.block, c, end, worker, piece);
        MergeRows(Rows(work.block), piece, total);
      } else {
        ComputePiece(work.block, c, end, worker, Partial(partial));
        partial += Rows(work.block);
      }
      c = end;
    }
    if (whole) Store(work.block, 0, Rows(work.block), total);
  }

  // The same arithmetic in the same order as Work without partials.
  void Merge(const AttentionMerge& merge, int worker) const {
    const AttentionBlock& block = merge.block;
    const int64_t rows = int64_t{merge.row_end} - merge.row_begin;
    const PartialRows total = OfWorker(scratch_.total, worker);
    Clear(rows, total);
    const absl::Span<const AttentionRun> runs = args_.schedule.Runs(merge);
    const int32_t first = runs.front().chunk_begin;
    PartialRows span = {};
    for (const AttentionRun& run : runs) {
      int64_t partial = run.partial + merge.row_begin;
      for (int32_t c = run.chunk_begin; c < run.chunk_end;) {
        const int32_t end =
            AttentionSchedule::PieceEnd(c, run.chunk_end, c == first);
        const PartialRows piece = Partial(partial);
        if (c == first || AttentionSchedule::IsSpanBegin(c)) {
          span = piece;
        } else {
          MergeRows(rows, piece, span);
        }
        if (AttentionSchedule::IsSpanBegin(end) ||
            end == runs.back().chunk_end) {
          MergeRows(rows, span, total);
        }
        partial += Rows(block);
        c = end;
      }
    }
    Store(block, merge.row_begin, merge.row_end, total);
  }

 private:
  int64_t Rows(const AttentionBlock& block) const {
    return block.q_count() * spec_.group();
  }
  PartialRows At(const PartialRows& rows, int64_t row) const {
    return {rows.state + row, rows.out + row * strides_.out};
  }
  PartialRows Partial(int64_t row) const { return At(scratch_.partials, row); }
  PartialRows OfWorker(const PartialRows& rows, int worker) const {
    return At(rows, FirstRow(worker));
  }
  int64_t FirstRow(int worker) const {
    return worker * args_.schedule.max_block_rows();
  }
  float* Queries(int worker) const {
    return scratch_.q + FirstRow(worker) * strides_.q;
  }
  float* Logits(int worker) const {
    return scratch_.logits + FirstRow(worker) * kChunkTokens;
  }

  void Clear(int64_t rows, const PartialRows& of) const {
    std::fill_n(of.state, rows, SoftmaxState());
    std::fill_n(of.out, rows * strides_.out, 0.0f);
  }

  // fn(row, token, head) for each row of the block: where it is in q and out.
  template <typename Fn>
  void ForEachRow(const AttentionBlock& block, const Fn& fn) const {
    const AttentionSequence& sequence =
        args_.schedule.sequences()[static_cast<size_t>(block.sequence)];
    const int64_t first_head = block.kv_head * spec_.group();
    int64_t row = 0;
    for (int64_t query = block.q_begin; query < block.q_end; ++query) {
      for (int64_t g = 0; g < spec_.group(); ++g) {
        fn(row++, sequence.q_offset + query, first_head + g);
      }
    }
  }

  // fn(keys, page, offset) for the pages that hold the keys [begin, end) of the
  // block's sequence: the first of `keys` is at `offset` of `page`.
  template <typename Fn>
  void ForEachPage(const AttentionBlock& block, int64_t begin, int64_t end,
                   const Fn& fn) const {
    const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
    while (begin < end) {
      const int64_t index = begin / layout_.page_size();
      const int64_t stop = std::min(end, (index + 1) * layout_.page_size());
      fn(begin, stop, pages[static_cast<size_t>(index)],
         begin % layout_.page_size());
      begin = stop;
    }
  }

  // fn(row, rows, tokens): those rows see `tokens` of the keys [begin, end).
  // The later queries see them all, in one call; an earlier one may see some.
  template <typename Fn>
  void ForEachVisible(const AttentionBlock& block, int64_t begin, int64_t end,
                      const Fn& fn) const {
    const int64_t group = spec_.group();
    for (int64_t query = block.q_begin; query < block.q_end; ++query) {
      const int64_t row = (query - block.q_begin) * group;
      const int64_t visible = args_.schedule.VisibleEnd(block, query) - begin;
      if (visible >= end - begin) {
        fn(row, (block.q_end - query) * group, end - begin);
        return;
      }
      if (visible > 0) fn(row, group, visible);
    }
  }

  void LoadQueries(const AttentionBlock& block, int worker) const {
    const auto* q = static_cast<const uint8_t*>(args_.q.data());
    float* rows = Queries(worker);
    ForEachRow(block, [&](int64_t row, int64_t token, int64_t head) {
      kernels_.load_query(q + HeadRowOffsetBytes(args_.q, token, head),
                          static_cast<size_t>(layout_.head_dim()), scale_log2e_,
                          rows + row * strides_.q);
    });
  }

  // The block against one chunk of its sequence's keys; writes all of `result`.
  void ComputeChunk(const AttentionBlock& block, int64_t chunk, int worker,
                    const PartialRows& result) const {
    const AttentionSchedule& schedule = args_.schedule;
    const int64_t begin = chunk * kChunkTokens;
    const int64_t end = std::min(begin + kChunkTokens,
                                 schedule.VisibleEnd(block, block.q_end - 1));
    const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
    const auto head_dim = static_cast<size_t>(layout_.head_dim());
    const auto v_head_dim = static_cast<size_t>(layout_.v_head_dim());
    const auto q_stride = static_cast<size_t>(strides_.q);
    const auto out_stride = static_cast<size_t>(strides_.out);
    const auto p_stride = static_cast<size_t>(kChunkTokens);
    const float* q = Queries(worker);
    float* logits = Logits(worker);

    ForEachPage(
        block, begin, end,
        [&](int64_t first, int64_t last, int64_t page, int64_t offset) {
          const uint8_t* k = args_.kv.K(page, block.kv_head) +
                             offset * layout_.head_dim() * element;
          ForEachVisible(
              block, first, last,
              [&](int64_t row, int64_t rows, int64_t tokens) {
                kernels_.logits(
                    q + row * strides_.q, q_stride, static_cast<size_t>(rows),
                    k, head_dim, static_cast<size_t>(tokens),
                    logits + row * kChunkTokens + (first - begin), p_stride);
              });
        });

    std::fill_n(result.out, Rows(block) * strides_.out, 0.0f);
    ForEachRow(block, [&](int64_t row, int64_t /*token*/, int64_t /*head*/) {
      const int64_t query = block.q_begin + row / spec_.group();
      const int64_t visible = schedule.VisibleEnd(block, query) - begin;
      const int64_t tokens =
          std::max(int64_t{0}, std::min(visible, end - begin));
      kernels_.softmax(logits + row * kChunkTokens, static_cast<size_t>(tokens),
                       result.state + row);
    });

    ForEachPage(block, begin, end,
                [&](int64_t first, int64_t last, int64_t page, int64_t offset) {
                  const uint8_t* v = args_.kv.V(page, block.kv_head) +
                                     offset * layout_.v_head_dim() * element;
                  ForEachVisible(
                      block, first, last,
                      [&](int64_t row, int64_t rows, int64_t tokens) {
                        kernels_.values(
                            logits + row * kChunkTokens + (first - begin),
                            p_stride, static_cast<size_t>(rows), v, v_head_dim,
                            static_cast<size_t>(tokens),
                            result.out + row * strides_.out, out_stride);
                      });
                });
  }

  // The chunks [begin, end), one after the other; writes all of `result`.
  void ComputePiece(const AttentionBlock& block, int32_t begin, int32_t end,
                    int worker, const PartialRows& result) const {
    const PartialRows chunk = OfWorker(scratch_.chunk, worker);
    ComputeChunk(block, begin, worker, result);
    for (int32_t c = begin + 1; c < end; ++c) {
      ComputeChunk(block, c, worker, chunk);
      MergeRows(Rows(block), chunk, result);
    }
  }

  void MergeRows(int64_t rows, const PartialRows& part,
                 const PartialRows& total) const {
    for (int64_t row = 0; row < rows; ++row) {
      kernels_.merge(part.state[row], part.out + row * strides_.out,
                     static_cast<size_t>(layout_.v_head_dim()),
                     total.state + row, total.out + row * strides_.out);
    }
  }

  // The rows [begin, end) of the block, the first of them at total's first.
  void Store(const AttentionBlock& block, int64_t begin, int64_t end,
             const PartialRows& total) const {
    auto* out = static_cast<uint8_t*>(args_.out.mutable_data());
    ForEachRow(block, [&](int64_t row, int64_t token, int64_t head) {
      if (row < begin || row >= end) return;
      const SoftmaxState& state = total.state[row - begin];
      kernels_.store(state, total.out + (row - begin) * strides_.out,
                     static_cast<size_t>(layout_.v_head_dim()),
                     out + HeadRowOffsetBytes(args_.out, token, head));
      if (args_.lse.data() != nullptr) {
        constexpr float kLn2 = 0.693147181f;
        *args_.lse.At(token, head) =
            state.sum == 0.0f ? -std::numeric_limits<float>::infinity()
                              : (state.max + std::log2(state.sum)) * kLn2;
      }
    });
  }

  const AttentionSpec& spec_;
  const KvLayout& layout_;
  const PagedAttentionKernels& kernels_;
  const PagedAttentionArgs& args_;
  const Strides& strides_;
  const Scratch& scratch_;
  float scale_log2e_;
};

}  // namespace

absl::StatusOr<PagedAttentionPlan> PagedAttentionPlan::Create(
    const AttentionSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  if (spec.kv.form() != KvForm::kPlain || SizeOf(spec.kv.dtype()) == 1) {
    return Unimplemented(kOp, "kv is ", KvFormName(spec.kv.form()), " ",
                         DTypeName(spec.kv.dtype()),
                         "; need plain f32, bf16 or f16");
  }
  if (spec.window_left != kNoWindow || spec.window_right != kNoWindow) {
    return Unimplemented(kOp, "window_left=", spec.window_left,
                         ", window_right=", spec.window_right,
                         "; need no window");
  }
  return PagedAttentionPlan(
      spec,
      GetPagedAttentionKernels(spec.q_dtype, spec.kv.dtype(), spec.out_dtype));
}

absl::StatusOr<int64_t> PagedAttentionPlan::WorkspaceBytes(
    const AttentionSchedule& schedule, int num_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "num_workers", num_workers, 1));
  WorkspaceLayout layout;
  LayOut(layout, Strides(spec_.kv), schedule, num_workers);
  if (layout.overflow()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": the workspace of ", schedule.partial_rows(),
                     " partial rows and ", num_workers,
                     " workers has more than 2^63 bytes"));
  }
  return layout.bytes();
}

absl::Status PagedAttentionPlan::CheckArgs(
    const PagedAttentionArgs& args) const {
  const KvLayout& layout = spec_.kv;
  const AttentionSchedule& schedule = args.schedule;
  const int64_t tokens = schedule.num_tokens();
  if (tokens > 0) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "schedule.kv_heads",
                                     schedule.kv_heads(), layout.kv_heads(),
                                     "the spec's"));
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "schedule.group", schedule.group(),
                                     spec_.group(), "the spec's"));
  }
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "q", args.q, spec_.q_dtype, tokens,
                                      spec_.q_heads, layout.head_dim()));
  QUERN_RETURN_IF_ERROR(CheckHeadRowsOut(kOp, "out", args.out, spec_.out_dtype,
                                         tokens, spec_.q_heads,
                                         layout.v_head_dim()));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", args.q, "out", args.out));
  if (args.lse.data() != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "lse.extent(0)", args.lse.extent(0),
                                     tokens, "the schedule's tokens"));
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "lse.extent(1)", args.lse.extent(1),
                                     spec_.q_heads, "the spec's q_heads"));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "lse", args.lse, DType::kF32,
                                      {tokens, spec_.q_heads}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", args.q, "lse", args.lse));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "out", args.out, "lse", args.lse));
  }
  if (args.kv.layout() != layout) {
    return InvalidArgument(kOp, "the cache has another layout than the spec");
  }
  QUERN_RETURN_IF_ERROR(CheckCache(kOp, args.kv));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "out", args.out, args.kv));
  if (args.lse.data() != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "lse", args.lse, args.kv));
  }
  const auto sequences = static_cast<int64_t>(schedule.sequences().size());
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "pages.num_sequences",
                                   args.pages.num_sequences(), sequences,
                                   "the schedule's"));
  if (sequences == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "pages.page_size",
                                   args.pages.page_size(), layout.page_size(),
                                   "the layout's"));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "pages.num_pages", args.pages.num_pages(), 0, args.kv.num_pages()));
  for (int64_t s = 0; s < sequences; ++s) {
    if (schedule.sequences()[static_cast<size_t>(s)].right != 0) {
      return Unimplemented(kOp, "sequence ", s, " is not causal");
    }
    const int64_t kv_len = schedule.sequences()[static_cast<size_t>(s)].kv_len;
    if (kv_len > args.pages.Capacity(s)) {
      return InvalidArgument(kOp, "sequence ", s, ": kv_len=", kv_len,
                             "; need kv_len <= ", args.pages.Capacity(s),
                             ", what its pages hold");
    }
  }
  return absl::OkStatus();
}

void PagedAttentionPlan::Execute(const PagedAttentionArgs& args,
                                 Workspace workspace,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK(args.kv.layout() == spec_.kv);
  QUERN_DCHECK(args.q.dtype() == spec_.q_dtype);
  QUERN_DCHECK(args.out.dtype() == spec_.out_dtype);
  const AttentionSchedule& schedule = args.schedule;
  const Strides strides(spec_.kv);
  const Scratch scratch =
      LayOut(workspace, strides, schedule, executor.num_workers());
  const Step step(spec_, kernels_, args, strides, scratch);
  // Each worker takes the next share as it gets free: whatever order the
  // executor has for its tasks, shares are taken longest first.
  std::atomic<size_t> next{0};
  const absl::Span<const AttentionShare> shares = schedule.shares();
  executor.ParallelFor(
      std::min(int64_t{executor.num_workers()},
               static_cast<int64_t>(shares.size())),
      [&](int64_t /*task*/, int worker) {
        for (size_t i = next.fetch_add(1, std::memory_order_relaxed);
             i < shares.size();
             i = next.fetch_add(1, std::memory_order_relaxed)) {
          for (const AttentionWork& work : schedule.Work(shares[i])) {
            step.Work(work, worker);
          }
        }
      });
  executor.ParallelFor(
      static_cast<int64_t>(schedule.merges().size()),
      [&](int64_t task, int worker) {
        step.Merge(schedule.merges()[static_cast<size_t>(task)], worker);
      });
}

}  // namespace quern
