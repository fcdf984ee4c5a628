#include "attention/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/attention_args.h"
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
#include "core/prefetch.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"

namespace quern {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int64_t kChunkTokens = AttentionSchedule::kChunkTokens;

constexpr auto kGroup = static_cast<int64_t>(kGroupTokens);
static_assert(kChunkTokens == kGroup * static_cast<int64_t>(kChunkGroups),
              "the kernels' chunk is the schedule's");
static_assert(KvLayout::kGroupTokens == kGroup, "nor is a group another");

// Rows in the workspace are a multiple of this apart, in elements: the longest
// vector of any instruction set.
constexpr int64_t kRowAlignment = 64;

// Bytes are widened again for every tile of rows, or once for all in the
// workspace: with more rows than these the latter is faster.
constexpr size_t kByteRows = 8;

// Results for some rows: not yet divided by the sum.
struct PartialRows {
  SoftmaxState* state;
  float* out;
};

// All scratch of one Execute.
struct Scratch {
  // Of `max_block_rows` rows for each worker.
  uint32_t* q;
  const uint8_t** next_q;  // where the next block's queries lie
  float* logits;
  float* weights;
  TokenRange* seen;
  float* slopes;
  float* ahead;
  PartialRows piece;  // of chunks that are merged first
  PartialRows total;  // of all chunks so far
  // Of a chunk for each worker: groups that are not read where they are.
  uint8_t* k;
  uint8_t* v;
  uint8_t* masked_v;
  float* k_scales;  // of the tokens of a chunk
  float* v_scales;
  // Of the work items that leave a partial result.
  PartialRows partials;
};

struct Strides {
  explicit Strides(const KvLayout& kv)
      : q(RoundUp(kv.head_dim(), kRowAlignment)),
        out(RoundUp(kv.v_head_dim(), kRowAlignment)),
        k_group(GroupBytes(kv, kv.head_dim())),
        v_group(GroupBytes(kv, kv.v_head_dim())) {}
  int64_t q;
  int64_t out;
  int64_t k_group;
  int64_t v_group;

 private:
  static int64_t GroupBytes(const KvLayout& kv, int64_t dim) {
    // One byte is widened to two.
    const auto element = static_cast<int64_t>(SizeOf(kv.dtype()));
    return kGroup * RoundUp(dim, 2) * std::max(int64_t{2}, element);
  }
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
  const int64_t groups =
      rows == 0 ? 0 : Product(num_workers, static_cast<int64_t>(kChunkGroups));
  Scratch s;
  s.q = a.template Allocate<uint32_t>("q", Product(rows, strides.q));
  s.next_q = a.template Allocate<const uint8_t*>("next queries", rows);
  s.logits = a.template Allocate<float>("logits", Product(rows, kChunkTokens));
  s.weights = a.template Allocate<float>("weights", Product(rows, 2));
  s.seen = a.template Allocate<TokenRange>("seen", rows);
  s.slopes = a.template Allocate<float>("slopes", rows);
  s.ahead = a.template Allocate<float>("ahead", rows);
  s.piece.state = a.template Allocate<SoftmaxState>("piece state", rows);
  s.piece.out =
      a.template Allocate<float>("piece out", Product(rows, strides.out));
  s.total.state = a.template Allocate<SoftmaxState>("state", rows);
  s.total.out = a.template Allocate<float>("out", Product(rows, strides.out));
  s.k = a.template Allocate<uint8_t>("keys", Product(groups, strides.k_group));
  s.v =
      a.template Allocate<uint8_t>("values", Product(groups, strides.v_group));
  s.masked_v = a.template Allocate<uint8_t>("masked values",
                                            Product(groups, strides.v_group));
  s.k_scales =
      a.template Allocate<float>("key scales", Product(groups, kGroup));
  s.v_scales =
      a.template Allocate<float>("value scales", Product(groups, kGroup));
  s.partials.state = a.template Allocate<SoftmaxState>("partials", partials);
  s.partials.out =
      a.template Allocate<float>("partial out", Product(partials, strides.out));
  return s;
}

// Where the groups of a chunk lie.
struct Groups {
  const uint8_t* k[kChunkGroups];
  const uint8_t* v[kChunkGroups];
};

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
        scratch_(scratch),
        paired_(layout_.in_groups()),
        latent_(layout_.form() == KvForm::kLatent),
        narrow_(SizeOf(layout_.dtype()) == 1) {
    const double scale =
        spec.scale != 0.0f
            ? static_cast<double>(spec.scale)
            : 1.0 / std::sqrt(static_cast<double>(layout_.head_dim()));
    // exp(x) = exp2(log2(e) * x)
    scale_log2e_ = static_cast<float>(std::abs(scale) * 1.4426950408889634);
    sign_ = scale < 0 ? -1.0f : 1.0f;
    const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
    k_step_ = layout_.KOffset(kGroup, 0) * element;
    v_step_ = layout_.VOffset(kGroup, 0) * element;
    soft_cap_log2e_ = spec.soft_cap * kLog2E;
  }

  // `following`: what this worker does next, or null.
  void Work(const AttentionWork& work, const AttentionWork* following,
            int worker) const {
    const AttentionBlock& block = work.block;
    LoadQueries(block, worker);
    const bool whole = work.partial == kNoPartial;
    const PartialRows total = OfWorker(scratch_.total, worker);
    if (work.chunk_begin == work.chunk_end) Clear(Rows(block), total);
    Groups groups = {}, next;
    Locate(work, work.chunk_begin, &groups);
    int64_t partial = work.partial;
    for (int32_t c = work.chunk_begin; c < work.chunk_end;) {
      const int32_t begin = c;
      const int32_t end = AttentionSchedule::PieceEnd(
          c, work.chunk_end, c == args_.schedule.FirstChunk(block));
      // The first piece is the total so far.
      const PartialRows piece = !whole ? Partial(partial)
                                : c == work.chunk_begin
                                    ? total
                                    : OfWorker(scratch_.piece, worker);
      for (; c < end; ++c) {
        next = groups;
        const AttentionBlock* next_block = nullptr;
        if (c + 1 < work.chunk_end) {
          Locate(work, c + 1, &next);
        } else if (following != nullptr) {
          Locate(*following, following->chunk_begin, &next);
          next_block = &following->block;
        }
        ComputeChunk(block, c, worker, groups, next, next_block, c == begin,
                     piece);
        groups = next;
      }
      if (!whole) {
        partial += Rows(block);
      } else if (begin != work.chunk_begin) {
        MergeRows(Rows(block), piece, total);
      }
    }
    if (whole) Store(block, 0, Rows(block), total);
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
  const AttentionSequence& SequenceOf(const AttentionBlock& block) const {
    return args_.schedule.sequences()[static_cast<size_t>(block.sequence)];
  }

  void Clear(int64_t rows, const PartialRows& of) const {
    std::fill_n(of.state, rows, SoftmaxState());
    std::fill_n(of.out, rows * strides_.out, 0.0f);
  }

  // fn(row, token, head) for each row of the block: where it is in q and out.
  template <typename Fn>
  void ForEachRow(const AttentionBlock& block, const Fn& fn) const {
    const AttentionSequence& sequence = SequenceOf(block);
    const int64_t first_head = block.kv_head * spec_.group();
    int64_t row = 0;
    for (int64_t query = block.q_begin; query < block.q_end; ++query) {
      for (int64_t g = 0; g < spec_.group(); ++g) {
        fn(row++, sequence.q_offset + query, first_head + g);
      }
    }
  }

  void LoadQueries(const AttentionBlock& block, int worker) const {
    const auto* q = static_cast<const uint8_t*>(args_.q.data());
    uint32_t* rows = scratch_.q + FirstRow(worker) * strides_.q;
    ForEachRow(block, [&](int64_t row, int64_t token, int64_t head) {
      kernels_.load_query(q + HeadRowOffsetBytes(args_.q, token, head),
                          static_cast<size_t>(layout_.head_dim()), sign_,
                          rows + row * strides_.q);
    });
  }

  // The queries of the block, if there is one, as what to fetch.
  void SetNextQueries(const AttentionBlock* block, int worker,
                      ChunkArgs* c) const {
    c->next_q = nullptr;
    c->next_q_rows = 0;
    c->next_q_bytes = 0;
    if (block == nullptr) return;
    const auto* q = static_cast<const uint8_t*>(args_.q.data());
    const uint8_t** rows = scratch_.next_q + FirstRow(worker);
    ForEachRow(*block, [&](int64_t row, int64_t token, int64_t head) {
      rows[row] = q + HeadRowOffsetBytes(args_.q, token, head);
    });
    c->next_q = rows;
    c->next_q_rows = static_cast<size_t>(Rows(*block));
    c->next_q_bytes =
        static_cast<size_t>(layout_.head_dim()) * SizeOf(args_.q.dtype());
  }

  // Tokens of the chunk that the block's sequence has.
  int64_t TokensOf(const AttentionBlock& block, int64_t chunk) const {
    return std::min(kChunkTokens,
                    SequenceOf(block).kv_len - chunk * kChunkTokens);
  }

  // Where the groups of a chunk of the item lie in their pages, if they lie
  // there as the kernels want them.
  void Locate(const AttentionWork& work, int64_t chunk, Groups* groups) const {
    if (!paired_ || chunk >= work.chunk_end) return;
    const AttentionBlock& block = work.block;
    const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
    const int64_t page_size = layout_.page_size();
    const int64_t tokens = TokensOf(block, chunk);
    int64_t index = chunk * kChunkTokens / page_size;
    int64_t offset = chunk * kChunkTokens % page_size;
    for (int64_t t = 0; t < tokens; t += kGroup) {
      const int64_t page = pages[static_cast<size_t>(index)];
      groups->k[t / kGroup] =
          args_.kv.K(page, block.kv_head) + offset / kGroup * k_step_;
      groups->v[t / kGroup] =
          args_.kv.V(page, block.kv_head) + offset / kGroup * v_step_;
      offset += kGroup;
      if (offset == page_size) {
        offset = 0;
        ++index;
      }
    }
  }

  // Copies what Locate cannot point to: a group of plain rows, values that are
  // part of their keys, and a group with slots beyond the sequence's tokens,
  // whose values must not be looked at.
  void Stage(const AttentionBlock& block, int64_t chunk, int64_t group,
             int worker, const Groups& next, Groups* groups) const {
    const int64_t tokens = TokensOf(block, chunk) - group * kGroup;
    const auto i = static_cast<size_t>(group);
    const int64_t slot = worker * static_cast<int64_t>(kChunkGroups) + group;
    uint8_t* k = scratch_.k + slot * strides_.k_group;
    uint8_t* v = scratch_.v + slot * strides_.v_group;
    const int64_t k_count = kGroup * RoundUp(layout_.head_dim(), 2);
    const int64_t v_count = kGroup * layout_.v_head_dim();
    const auto v_head_dim = static_cast<size_t>(layout_.v_head_dim());
    if (latent_) {
      kernels_.stage_latent_v(groups->k[i], v_head_dim, v);
    } else if (paired_ && narrow_) {
      kernels_.widen(groups->k[i], next.k[i], static_cast<size_t>(k_count), k);
      kernels_.widen(groups->v[i], next.v[i], static_cast<size_t>(v_count), v);
      groups->k[i] = k;
    } else if (paired_) {
      if (tokens >= kGroup) return;
      std::memcpy(v, groups->v[i],
                  static_cast<size_t>(v_count) * SizeOf(layout_.dtype()));
    } else {
      // Bytes are widened where they lie, from the second half to both.
      uint8_t* k_to = narrow_ ? k + k_count : k;
      uint8_t* v_to = narrow_ ? v + v_count : v;
      const uint8_t* k_rows[kGroupTokens];
      const uint8_t* v_rows[kGroupTokens];
      const auto element = static_cast<int64_t>(SizeOf(layout_.dtype()));
      const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
      const int64_t first = chunk * kChunkTokens + group * kGroup;
      int64_t index = first / layout_.page_size();
      int64_t offset = first % layout_.page_size();
      for (int64_t t = 0; t < kGroup; ++t) {
        // The last one stands in for those that are missing.
        const int64_t page = pages[static_cast<size_t>(index)];
        k_rows[t] = args_.kv.K(page, block.kv_head) +
                    layout_.KOffset(offset, 0) * element;
        v_rows[t] = args_.kv.V(page, block.kv_head) +
                    layout_.VOffset(offset, 0) * element;
        if (t + 1 < tokens && ++offset == layout_.page_size()) {
          offset = 0;
          ++index;
        }
      }
      kernels_.stage_k(k_rows, static_cast<size_t>(layout_.head_dim()), k_to);
      kernels_.stage_v(v_rows, v_head_dim, v_to);
      if (narrow_) {
        kernels_.widen(k_to, k_to, static_cast<size_t>(k_count), k);
        kernels_.widen(v_to, v_to, static_cast<size_t>(v_count), v);
      }
      groups->k[i] = k;
    }
    groups->v[i] = v;
    if (tokens < kGroup) {
      kernels_.mask_v({0, static_cast<uint32_t>(tokens)}, v_head_dim, v);
    }
  }

  // The block against one chunk of its sequence's keys.
  void ComputeChunk(const AttentionBlock& block, int64_t chunk, int worker,
                    Groups groups, const Groups& next,
                    const AttentionBlock* next_block, bool first,
                    const PartialRows& result) const {
    const int64_t tokens = TokensOf(block, chunk);
    ChunkArgs c;
    c.rows = static_cast<size_t>(Rows(block));
    c.q = scratch_.q + FirstRow(worker) * strides_.q;
    c.q_stride = static_cast<size_t>(strides_.q);
    c.head_dim = static_cast<size_t>(layout_.head_dim());
    c.v_head_dim = static_cast<size_t>(layout_.v_head_dim());
    c.scale_log2e = scale_log2e_;
    c.logits = scratch_.logits + FirstRow(worker) * kChunkTokens;
    c.weights = scratch_.weights + FirstRow(worker) * 2;
    c.soft_cap_log2e = soft_cap_log2e_;
    c.slopes = nullptr;
    c.ahead = nullptr;
    c.k_scales = nullptr;
    c.v_scales = nullptr;
    if (!args_.alibi_slopes.empty()) SetSlopes(block, chunk, worker, &c);
    SetScales(block, chunk, worker, &c);
    c.first = first;
    c.state = result.state;
    c.out = result.out;
    c.out_stride = static_cast<size_t>(strides_.out);

    // What each row sees, any, and all of them.
    TokenRange* seen = scratch_.seen + FirstRow(worker);
    TokenRange any = {static_cast<uint32_t>(tokens), 0};
    TokenRange all = {0, static_cast<uint32_t>(tokens)};
    c.seen = seen;
    const auto clip = [&](int64_t token) {
      return static_cast<uint32_t>(
          std::max(int64_t{0}, std::min(tokens, token - chunk * kChunkTokens)));
    };
    for (int64_t query = block.q_begin; query < block.q_end; ++query) {
      const TokenRange range = {clip(args_.schedule.VisibleBegin(block, query)),
                                clip(args_.schedule.VisibleEnd(block, query))};
      seen = std::fill_n(seen, spec_.group(), range);
      all.begin = std::max(all.begin, range.begin);
      all.end = std::min(all.end, range.end);
      if (range.begin >= range.end) continue;
      any.begin = std::min(any.begin, range.begin);
      any.end = std::max(any.end, range.end);
    }

    bool finite = true;
    const int64_t begin = any.begin / kGroup;
    const int64_t end = DivCeil(int64_t{any.end}, kGroup);
    const auto is_mixed = [&](int64_t group) {
      return group * kGroup < all.begin ||
             std::min(tokens, (group + 1) * kGroup) > all.end;
    };
    // Every row sees all of each group that any sees.
    const bool whole = all.begin <= begin * kGroup && all.end >= end * kGroup;
    const bool tiled = latent_ && whole;
    const bool bytes = narrow_ && paired_ && whole && c.rows <= kByteRows &&
                       kernels_.attend_bytes != nullptr;
    c.latent_tile =
        tiled ? scratch_.v + worker * static_cast<int64_t>(kChunkGroups) *
                                 strides_.v_group
              : nullptr;
    for (int64_t group = begin; group < end && !tiled && !bytes; ++group) {
      Stage(block, chunk, group, worker, next, &groups);
      if (is_mixed(group)) {
        finite = finite &&
                 kernels_.finite_v(groups.v[group],
                                   static_cast<size_t>(layout_.v_head_dim()));
      }
    }
    std::copy_n(groups.k, kChunkGroups, c.k);
    std::copy_n(groups.v, kChunkGroups, c.v);
    // Staging has fetched what it will read next.
    SetNextQueries(next_block, worker, &c);
    const bool staged = !paired_ || (narrow_ && !bytes);
    std::copy_n(staged ? groups.k : next.k, kChunkGroups, c.next_k);
    std::copy_n(staged || latent_ ? groups.v : next.v, kChunkGroups, c.next_v);
    if (finite) {
      (bytes ? kernels_.attend_bytes : kernels_.attend)(c);
      return;
    }
    // A weight of 0 times NaN is not 0: each row by itself, with zeros for what
    // it does not see.
    const int64_t slot = worker * static_cast<int64_t>(kChunkGroups);
    uint8_t* masked = scratch_.masked_v + slot * strides_.v_group;
    const size_t rows = c.rows;
    // Where it lies in its page, it has no more than that.
    const int64_t v_bytes =
        kGroup * layout_.v_head_dim() *
        std::max(int64_t{2}, static_cast<int64_t>(SizeOf(layout_.dtype())));
    c.rows = 1;
    for (size_t row = 0; row < rows; ++row) {
      for (int64_t group = begin; group < end; ++group) {
        if (!is_mixed(group)) continue;
        uint8_t* to = masked + group * strides_.v_group;
        std::memcpy(to, groups.v[group], static_cast<size_t>(v_bytes));
        const auto from = static_cast<uint32_t>(group * kGroup);
        const TokenRange keep = {std::max(c.seen->begin, from) - from,
                                 std::max(c.seen->end, from) - from};
        kernels_.mask_v(keep, c.v_head_dim, to);
        c.v[group] = to;
      }
      kernels_.attend(c);
      c.q += c.q_stride;
      ++c.seen;
      ++c.state;
      if (c.slopes != nullptr) {
        ++c.slopes;
        ++c.ahead;
      }
      c.out += c.out_stride;
    }
  }

  // ALiBi: slope * (the key's position - the query's).
  void SetSlopes(const AttentionBlock& block, int64_t chunk, int worker,
                 ChunkArgs* c) const {
    const AttentionSequence& s = SequenceOf(block);
    float* slopes = scratch_.slopes + FirstRow(worker);
    float* ahead = scratch_.ahead + FirstRow(worker);
    c->slopes = slopes;
    c->ahead = ahead;
    ForEachRow(block, [&](int64_t row, int64_t token, int64_t head) {
      const int64_t position = s.kv_len - s.q_len + (token - s.q_offset);
      slopes[row] = args_.alibi_slopes[static_cast<size_t>(head)] * kLog2E;
      ahead[row] = static_cast<float>(chunk * kChunkTokens - position);
    });
  }

  // What stored keys and values are to be multiplied by. One scale for all keys
  // goes into that of the logits, one for all values into Store.
  void SetScales(const AttentionBlock& block, int64_t chunk, int worker,
                 ChunkArgs* c) const {
    if (layout_.scaling() == KvScaling::kNone) return;
    if (layout_.scaling() != KvScaling::kPerTokenHead) {
      c->scale_log2e *= *args_.kv.KScales(0, block.kv_head);
      return;
    }
    const int64_t slot = worker * kChunkTokens;
    float* k = scratch_.k_scales + slot;
    float* v = scratch_.v_scales + slot;
    c->k_scales = k;
    c->v_scales = v;
    const absl::Span<const int32_t> pages = args_.pages.Pages(block.sequence);
    const int64_t tokens = TokensOf(block, chunk);
    for (int64_t t = 0; t < kChunkTokens; ++t) {
      k[t] = v[t] = 0.0f;
      if (t >= tokens) continue;
      const int64_t token = chunk * kChunkTokens + t;
      const int64_t page =
          pages[static_cast<size_t>(token / layout_.page_size())];
      const int64_t offset = token % layout_.page_size();
      k[t] = args_.kv.KScales(page, block.kv_head)[offset];
      v[t] = args_.kv.VScales(page, block.kv_head)[offset];
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
    const bool one_scale = layout_.scaling() == KvScaling::kPerTensor ||
                           layout_.scaling() == KvScaling::kPerHead;
    const float v_scale = one_scale && args_.kv.num_pages() > 0
                              ? *args_.kv.VScales(0, block.kv_head)
                              : 1.0f;
    ForEachRow(block, [&](int64_t row, int64_t token, int64_t head) {
      if (row < begin || row >= end) return;
      SoftmaxState state = total.state[row - begin];
      // A sink is a key without a value: it only adds to the sum.
      if (!args_.sinks.empty()) {
        const float sink = args_.sinks[static_cast<size_t>(head)] * kLog2E;
        if (state.sum == 0.0f) {
          state.max = sink;
          state.sum = 1.0f;  // the output is 0
        } else {
          state.sum += std::exp2(sink - state.max);
        }
      }
      kernels_.store(state.sum, v_scale,
                     total.out + (row - begin) * strides_.out,
                     static_cast<size_t>(layout_.v_head_dim()),
                     out + HeadRowOffsetBytes(args_.out, token, head));
      if (args_.lse.data() == nullptr) return;
      constexpr float kLn2 = 0.693147181f;
      // A sink so much larger than the logits that they vanish.
      *args_.lse.At(token, head) =
          state.sum == 0.0f       ? -std::numeric_limits<float>::infinity()
          : std::isinf(state.sum) ? args_.sinks[static_cast<size_t>(head)]
                                  : (state.max + std::log2(state.sum)) * kLn2;
    });
  }

  static constexpr float kLog2E = 1.44269504f;

  const AttentionSpec& spec_;
  const KvLayout& layout_;
  const PagedAttentionKernels& kernels_;
  const PagedAttentionArgs& args_;
  const Strides& strides_;
  const Scratch& scratch_;
  bool paired_;
  bool latent_;
  bool narrow_;
  float scale_log2e_;
  float sign_;
  // Bytes from a group of keys, or values, to the next of the page.
  int64_t k_step_;
  int64_t v_step_;
  float soft_cap_log2e_;
};

}  // namespace

absl::StatusOr<PagedAttentionPlan> PagedAttentionPlan::Create(
    const AttentionSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
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
  QUERN_RETURN_IF_ERROR(CheckAttentionRows(
      kOp, spec_,
      {schedule, args.q, args.out, args.lse, args.alibi_slopes, args.sinks}));
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
          const absl::Span<const AttentionWork> items =
              schedule.Work(shares[i]);
          for (size_t w = 0; w < items.size(); ++w) {
            step.Work(items[w], w + 1 < items.size() ? &items[w + 1] : nullptr,
                      worker);
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
