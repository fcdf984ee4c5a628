#include "quern/ops/registry/families/rows/embedding_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>

#include "quern/core/communicator.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/parallel/vocab_parallel_embedding.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

// Row rows[t] of the table becomes row t of out.
struct Args {
  AnyTensorView rows, table, out;
};

// Copies row at[t] to row t, byte by byte, so that any dtype works.
void CopyRows(IndexView at, const AnyTensorView& table,
              const AnyTensorView& out) {
  const auto size = static_cast<int64_t>(SizeOf(table.dtype()));
  const auto row = [size](const AnyTensorView& v, int64_t i) {
    return i * v.RowStride() * size;
  };
  const auto* from = static_cast<const char*>(table.data());
  auto* to = static_cast<char*>(out.mutable_data());
  for (int64_t t = 0; t < at.size(); ++t) {
    std::copy_n(from + row(table, at[t]), table.extent(1) * size,
                to + row(out, t));
  }
}

// The table of all ids or, with ranks, the rows that this rank has.
struct EmbeddingSpec : VocabEmbeddingSpec, VocabSpec {
  Communicator* ranks = nullptr;

  absl::StatusOr<VocabShard> Shard() const {
    return VocabShard::Create(*this, ranks->rank(), ranks->size());
  }
};

// A lookup in the whole table, or in that of the ranks.
class Embedding {
 public:
  static absl::StatusOr<Embedding> Create(const EmbeddingSpec& spec) {
    Embedding made(spec);
    if (spec.ranks == nullptr) {
      QUERN_ASSIGN_OR_RETURN(made.whole_, VocabEmbeddingPlan::Create(spec));
      return made;
    }
    QUERN_ASSIGN_OR_RETURN(
        made.shard_,
        VocabParallelEmbeddingPlan::Create(
            {spec, spec.hidden, spec.weight_dtype, spec.out_dtype, spec.scale},
            *spec.ranks));
    return made;
  }
  const EmbeddingSpec& spec() const { return spec_; }
  const char* target() const {
    return whole_.has_value() ? whole_->target() : shard_->target();
  }
  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(
        CheckIndexView("embedding", "ids", a.rows, {kAnyExtent}));
    const IndexView ids = IndicesOf(a.rows);
    return whole_.has_value() ? whole_->CheckArgs(ids, a.table, a.out)
                              : shard_->CheckArgs(ids, a.table, a.out);
  }
  void Execute(const Args& a, Executor& executor) const {
    const IndexView ids = IndicesOf(a.rows);
    if (whole_.has_value()) {
      whole_->Execute(ids, a.table, a.out, executor);
    } else {
      shard_->Execute(ids, a.table, a.out, *spec_.ranks, executor);
    }
  }

 private:
  explicit Embedding(const EmbeddingSpec& spec) : spec_(spec) {}

  EmbeddingSpec spec_;
  // Exactly one is set.
  std::optional<VocabEmbeddingPlan> whole_;
  std::optional<VocabParallelEmbeddingPlan> shard_;
};

absl::Status CheckRanks(EmbeddingSpec& spec, const OpCall& call) {
  spec.ranks = call.Object<Communicator>("ranks");
  if (spec.ranks != nullptr) {
    QUERN_ASSIGN_OR_RETURN(const VocabShard shard, spec.Shard());
    return CheckEqual(call.op(), "rows of weight", spec.vocab, shard.rows(),
                      "the shard has");
  }
  if (spec.original == 0 && spec.added == 0) return absl::OkStatus();
  return InvalidArgument(call.op(), "vocab=", spec.original,
                         ", added=", spec.added,
                         " without ranks; need neither, the table has them");
}

// Writes the rows that the rank has, and -0 in the others, which a sum over
// ranks leaves unchanged.
void CopyShardRows(const VocabShard& shard, float scale, const Args& a) {
  const IndexView at = IndicesOf(a.rows);
  for (int64_t t = 0; t < at.size(); ++t) {
    const int64_t row = shard.RowOf(at[t]);
    const ScalarRow to(a.out, t);
    for (int64_t i = 0; i < a.out.extent(1); ++i) {
      to.Set(i, row < 0 ? -0.0f : scale * ScalarRow(a.table, row)[i]);
    }
  }
}

void NativeWhole(const EmbeddingSpec& spec, const Args& a) {
  const IndexView at = IndicesOf(a.rows);
  if (spec.scale == 1 && spec.weight_dtype == spec.out_dtype) {
    return CopyRows(at, a.table, a.out);  // NaN keeps its bits
  }
  for (int64_t t = 0; t < at.size(); ++t) {
    const ScalarRow from(a.table, at[t]), to(a.out, t);
    for (int64_t i = 0; i < spec.hidden; ++i) to.Set(i, spec.scale * from[i]);
  }
}
absl::StatusOr<std::function<void(const Args&)>> NativeOf(
    const EmbeddingSpec& spec) {
  if (spec.ranks == nullptr) {
    return [spec](const Args& a) { NativeWhole(spec, a); };
  }
  QUERN_ASSIGN_OR_RETURN(const VocabShard shard, spec.Shard());
  return [spec, shard](const Args& a) {
    CopyShardRows(shard, spec.scale, a);
    spec.ranks->AllReduceSum(a.out);
  };
}

absl::Status AddEmbedding(OpRegistry& registry) {
  using Spec = EmbeddingSpec;
  return OpDeclaration<Embedding, Spec, Args>("vocab_parallel_embedding")
      .In("ids", &Args::rows, {kRows}, IndexDType<Spec>())
      .In("weight", &Args::table, {&Spec::vocab, &Spec::hidden},
          &Spec::weight_dtype)
      .Object<Communicator>("ranks", true)
      .Attr("vocab", int64_t{0}, &Spec::original)
      .Attr("added", int64_t{0}, &Spec::added)
      .Attr("padding", int64_t{64}, &Spec::padding)
      .Then(&CheckRanks)
      .Attr("scale", 1.0, &Spec::scale)
      .DTypeAttr("out_dtype", Like("weight"), &Spec::out_dtype)
      .Out("out", &Args::out, {kRows, &Spec::hidden}, &Spec::out_dtype)
      .Layer()
      .ReferenceOf(&NativeOf)
      .Example({{"ids", {4}, DType::kI32}, {"weight", {128, 64}}})
      .AddTo(registry);
}

absl::Status CheckSelect(const LogitsPlan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(CheckIndexView("gather", "rows", a.rows, {kAnyExtent}));
  return plan.CheckSelectArgs(a.table, IndicesOf(a.rows), a.out);
}
void Select(const LogitsPlan& plan, const Args& a, Workspace, Executor&) {
  plan.SelectRows(a.table, IndicesOf(a.rows), a.out);
}

absl::Status AddGather(OpRegistry& registry) {
  using Spec = LogitsSpec;
  return OpDeclaration<LogitsPlan, Spec, Args>("gather_rows")
      .In("x", &Args::table, {kAny, &Spec::hidden}, &Spec::hidden_dtype)
      .Word("hidden", "x")
      .In("rows", &Args::rows, {kRows}, IndexDType<Spec>())
      .Given(&Spec::vocab, int64_t{1})
      .Out("out", &Args::out, {kRows, &Spec::hidden}, Like("x"))
      .Calls(&CheckSelect, &Select)
      .Reference([](const Spec&, const Args& a) {
        CopyRows(IndicesOf(a.rows), a.table, a.out);
      })
      .Example({{"x", {128, 64}}, {"rows", {4}, DType::kI32}})
      .AddTo(registry);
}

struct LogitsArgs {
  AnyTensorView logits;
};

// Stores the result of every step, which rounds it to the dtype.
void NativeLogitsRow(const LogitsSpec& spec, const ScalarRow& row) {
  for (int64_t i = 0; i < spec.vocab; ++i) {
    if (spec.soft_cap > 0) {
      row.Set(i, row[i] / spec.soft_cap);
      row.Set(i, static_cast<float>(std::tanh(static_cast<double>(row[i]))));
      row.Set(i, row[i] * spec.soft_cap);
    }
    if (spec.scale != 1) row.Set(i, row[i] * spec.scale);
  }
}
void NativeLogits(const LogitsSpec& spec, const LogitsArgs& a) {
  for (int64_t r = 0; r < a.logits.extent(0); ++r) {
    NativeLogitsRow(spec, ScalarRow(a.logits, r));
  }
}

absl::Status AddLogits(OpRegistry& registry) {
  using Spec = LogitsSpec;
  return OpDeclaration<LogitsPlan, Spec, LogitsArgs>("logits_processor")
      .InOut("logits", &LogitsArgs::logits, nullptr, {kRows, &Spec::vocab},
             &Spec::logits_dtype)
      .Word("logits_dtype", "logits")
      .Given(&Spec::hidden, int64_t{1})
      .Attr("soft_cap", 0.0, &Spec::soft_cap)
      .Attr("scale", 1.0, &Spec::scale)
      .Layer()
      .Takes<&LogitsArgs::logits>()
      .Reference(&NativeLogits)
      .Example({{"logits", {4, 64}}, {"soft_cap", 2.0}, {"scale", 0.5}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterEmbeddingOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddEmbedding(registry));
  QUERN_RETURN_IF_ERROR(AddGather(registry));
  return AddLogits(registry);
}

}  // namespace quern
