#include "quern/ops/registry/embedding_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/index_view.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/parallel/vocab_parallel_embedding.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

constexpr char kEmbedding[] = "vocab_parallel_embedding";
constexpr char kGather[] = "gather_rows";
constexpr char kLogits[] = "logits_processor";

// Shapes of a lookup: indices[count] in table[.., n] give [count, n].
Metas RowsShapes(absl::string_view op, absl::string_view field,
                 const TensorMeta& indices, const TensorMeta& table) {
  if (indices.extents.size() != 1 || table.extents.size() != 2) {
    return InvalidArgument(op, "need indices[n] and a matrix");
  }
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(op, field, indices));
  return std::vector<TensorMeta>{
      {table.dtype, {indices.extents[0], table.extents[1]}}};
}

// Copies row indices[t] to row t, byte by byte, so that any dtype works.
void CopyRows(const AnyTensorView& indices, const AnyTensorView& table,
              const AnyTensorView& out) {
  const IndexView at = IndicesOf(indices);
  const auto size = static_cast<int64_t>(SizeOf(table.dtype()));
  const auto row = [size](const AnyTensorView& v, int64_t i) {
    return v.extent(0) > 1 ? i * v.stride(0) * size : 0;
  };
  const auto* from = static_cast<const char*>(table.data());
  auto* to = static_cast<char*>(out.mutable_data());
  for (int64_t t = 0; t < at.size(); ++t) {
    std::copy_n(from + row(table, at[t]), table.extent(1) * size,
                to + row(out, t));
  }
}

NamedArgs EmbeddingExample(DType dtype) {
  return {{"ids", TensorMeta{DType::kI32, {4}}},
          {"weight", TensorMeta{dtype, {128, 64}}}};
}
// The spec for the shard of this rank.
absl::StatusOr<VocabParallelEmbeddingSpec> ParallelSpec(
    const TensorMeta& weight, const Communicator& ranks, const VocabSpec& vocab,
    double scale, DType out) {
  VocabParallelEmbeddingSpec spec;
  spec.scale = static_cast<float>(scale);
  spec.vocab = vocab;
  spec.hidden = weight.extents[1];
  spec.weight_dtype = weight.dtype;
  spec.out_dtype = out;
  QUERN_ASSIGN_OR_RETURN(
      const VocabShard shard,
      VocabShard::Create(spec.vocab, ranks.rank(), ranks.size()));
  QUERN_RETURN_IF_ERROR(CheckEqual(kEmbedding, "rows of weight",
                                   weight.extents[0], shard.rows(),
                                   "the shard has"));
  return spec;
}
Metas EmbeddingShapes(const TensorMeta& ids, const TensorMeta& weight,
                      Communicator* ranks, int64_t vocab, int64_t added,
                      int64_t padding, double scale,
                      const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(std::vector<TensorMeta> shapes,
                         RowsShapes(kEmbedding, "ids", ids, weight));
  QUERN_ASSIGN_OR_RETURN(shapes[0].dtype, DTypeOr(kEmbedding, "out_dtype",
                                                  out_dtype, weight.dtype));
  if (ranks != nullptr) {
    QUERN_RETURN_IF_ERROR(ParallelSpec(weight, *ranks, {vocab, added, padding},
                                       scale, shapes[0].dtype)
                              .status());
  } else if (vocab != 0 || added != 0) {
    return InvalidArgument(kEmbedding, "vocab=", vocab, ", added=", added,
                           " without ranks; need neither, the table has them");
  }
  return shapes;
}
// Writes the rows that the rank has, and -0 in the others, which a sum over
// ranks leaves unchanged.
void CopyShardRows(const VocabShard& shard, float scale,
                   const AnyTensorView& ids, const AnyTensorView& weight,
                   const AnyTensorView& out) {
  const IndexView at = IndicesOf(ids);
  for (int64_t t = 0; t < at.size(); ++t) {
    const int64_t row = shard.RowOf(at[t]);
    const ScalarRow to(out, t);
    for (int64_t i = 0; i < out.extent(1); ++i) {
      to.Set(i, row < 0 ? -0.0f : scale * ScalarRow(weight, row)[i]);
    }
  }
}
void NativeEmbedding(const VocabEmbeddingSpec& spec, Tensors t) {
  if (spec.scale == 1 && spec.weight_dtype == spec.out_dtype) {
    return CopyRows(t[0], t[1], t[2]);  // NaN keeps its bits
  }
  const IndexView at = IndicesOf(t[0]);
  for (int64_t i = 0; i < at.size(); ++i) {
    const ScalarRow from(t[1], at[i]), to(t[2], i);
    for (int64_t j = 0; j < spec.hidden; ++j) to.Set(j, spec.scale * from[j]);
  }
}
template <bool kNative>
Bound ParallelEmbedding(const TensorMeta& weight, Communicator& ranks,
                        const VocabSpec& vocab, double scale, DType out) {
  QUERN_ASSIGN_OR_RETURN(const VocabParallelEmbeddingSpec spec,
                         ParallelSpec(weight, ranks, vocab, scale, out));
  QUERN_ASSIGN_OR_RETURN(const VocabParallelEmbeddingPlan plan,
                         VocabParallelEmbeddingPlan::Create(spec, ranks));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kEmbedding, t, 3));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kEmbedding, "ids", t[0], {kAnyExtent}));
    return plan.CheckArgs(IndicesOf(t[0]), t[1], t[2]);
  };
  Communicator* const all = &ranks;
  if (kNative) {
    return std::unique_ptr<BoundOp>(
        new BoundCalls("scalar", check, [plan, all](Tensors t, Executor&) {
          CopyShardRows(plan.shard(), plan.spec().scale, t[0], t[1], t[2]);
          all->AllReduceSum(t[2]);
        }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan.target(), check, [plan, all](Tensors t, Executor& e) {
        plan.Execute(IndicesOf(t[0]), t[1], t[2], *all, e);
      }));
}
template <bool kNative>
Bound Embedding(const TensorMeta& ids, const TensorMeta& weight,
                Communicator* ranks, int64_t vocab, int64_t added,
                int64_t padding, double scale, const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> shapes,
                         EmbeddingShapes(ids, weight, ranks, vocab, added,
                                         padding, scale, out_dtype));
  const DType out = shapes[0].dtype;
  if (ranks != nullptr) {
    return ParallelEmbedding<kNative>(weight, *ranks, {vocab, added, padding},
                                      scale, out);
  }
  VocabEmbeddingSpec spec;
  spec.vocab = weight.extents[0];
  spec.hidden = weight.extents[1];
  spec.weight_dtype = weight.dtype;
  spec.out_dtype = out;
  spec.scale = static_cast<float>(scale);
  QUERN_ASSIGN_OR_RETURN(const VocabEmbeddingPlan plan,
                         VocabEmbeddingPlan::Create(spec));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kEmbedding, t, 3));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kEmbedding, "ids", t[0], {kAnyExtent}));
    return plan.CheckArgs(IndicesOf(t[0]), t[1], t[2]);
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check,
        [spec](Tensors t, Executor&) { NativeEmbedding(spec, t); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan.target(), check, [plan](Tensors t, Executor& e) {
        plan.Execute(IndicesOf(t[0]), t[1], t[2], e);
      }));
}

NamedArgs GatherExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {128, 64}}},
          {"rows", TensorMeta{DType::kI32, {4}}}};
}
Metas GatherShapes(const TensorMeta& x, const TensorMeta& rows) {
  return RowsShapes(kGather, "rows", rows, x);
}
template <bool kNative>
Bound Gather(const TensorMeta& x, const TensorMeta& rows) {
  QUERN_RETURN_IF_ERROR(GatherShapes(x, rows).status());
  LogitsSpec spec;
  spec.vocab = 1;
  spec.hidden = x.extents[1];
  spec.hidden_dtype = x.dtype;
  QUERN_ASSIGN_OR_RETURN(const LogitsPlan plan, LogitsPlan::Create(spec));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kGather, t, 3));
    QUERN_RETURN_IF_ERROR(CheckIndexView(kGather, "rows", t[1], {kAnyExtent}));
    return plan.CheckSelectArgs(t[0], IndicesOf(t[1]), t[2]);
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check,
        [](Tensors t, Executor&) { CopyRows(t[1], t[0], t[2]); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan.target(), check, [plan](Tensors t, Executor&) {
        plan.SelectRows(t[0], IndicesOf(t[1]), t[2]);
      }));
}

NamedArgs LogitsExample(DType dtype) {
  return {{"logits", TensorMeta{dtype, {4, 64}}},
          {"soft_cap", 2.0},
          {"scale", 0.5}};
}
Metas LogitsShapes(const MutatedMeta& logits, double, double) {
  if (logits.extents.size() == 2) return std::vector<TensorMeta>();
  return InvalidArgument(kLogits, "logits have rank ", logits.extents.size(),
                         "; need 2");
}
// Stores the result of every step, which rounds it to the dtype.
void NativeLogits(const LogitsSpec& spec, const ScalarRow& row) {
  for (int64_t i = 0; i < spec.vocab; ++i) {
    if (spec.soft_cap > 0) {
      row.Set(i, row[i] / spec.soft_cap);
      row.Set(i, static_cast<float>(std::tanh(static_cast<double>(row[i]))));
      row.Set(i, row[i] * spec.soft_cap);
    }
    if (spec.scale != 1) row.Set(i, row[i] * spec.scale);
  }
}
template <bool kNative>
Bound Logits(const MutatedMeta& logits, double soft_cap, double scale) {
  QUERN_RETURN_IF_ERROR(LogitsShapes(logits, soft_cap, scale).status());
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kLogits, "logits", logits.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  LogitsSpec spec;
  spec.vocab = logits.extents[1];
  spec.hidden = 1;
  spec.logits_dtype = logits.dtype;
  spec.soft_cap = static_cast<float>(soft_cap);
  spec.scale = static_cast<float>(scale);
  QUERN_ASSIGN_OR_RETURN(const LogitsPlan plan, LogitsPlan::Create(spec));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kLogits, t, 1));
    return plan.CheckArgs(t[0]);
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(
        new BoundCalls("scalar", check, [spec](Tensors t, Executor&) {
          for (int64_t r = 0; r < t[0].extent(0); ++r) {
            NativeLogits(spec, ScalarRow(t[0], r));
          }
        }));
  }
  return std::unique_ptr<BoundOp>(new BoundCalls(
      plan.target(), check,
      [plan](Tensors t, Executor& e) { plan.Execute(t[0], e); }));
}

}  // namespace

absl::Status RegisterEmbeddingOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&EmbeddingShapes>(
      "vocab_parallel_embedding(Tensor ids, Tensor weight, "
      "Communicator? ranks, int vocab=0, int added=0, int padding=64, "
      "float scale=1.0, str out_dtype=\"\") -> Tensor",
      &EmbeddingExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&Embedding<false>>(kEmbedding, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Embedding<true>>(kEmbedding, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&GatherShapes>(
      "gather_rows(Tensor x, Tensor rows) -> Tensor", &GatherExample));
  QUERN_RETURN_IF_ERROR(r.Add<&Gather<false>>(kGather, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Gather<true>>(kGather, kReference));
  QUERN_RETURN_IF_ERROR(
      r.Define<&LogitsShapes>("logits_processor(Tensor(a0!) logits, "
                              "float soft_cap=0.0, float scale=1.0) -> ()",
                              &LogitsExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&Logits<false>>(kLogits, kSimd));
  return r.Add<&Logits<true>>(kLogits, kReference);
}

}  // namespace quern
