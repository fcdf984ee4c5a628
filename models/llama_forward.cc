#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/llama_impl.h"
#include "quern/models/llama_state_impl.h"
#include "quern/ops/index_view.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";

// One step's rows, each array [max_step_tokens, ...]. Bytes are of the model's
// type, the rest is f32.
struct Activations {
  uint8_t* rows;       // what a matrix multiplies: [max(hidden, q_cols)]
  uint8_t* selected;   // the rows whose logits are wanted: [hidden]
  uint8_t* activated;  // the rows that down multiplies: [ffn]
  uint8_t* queries;    // what attention reads, unless it is in qkv: [q_cols]
  float* x;            // the residual stream: [hidden]
  float* qkv;          // [q_cols + 2 kv_cols]
  float* branch;       // what x gains, where a norm comes between: [hidden]
};

template <typename Allocator>
Activations LayOut(Allocator& a, const LlamaConfig& c, DType dtype, DType query,
                   int64_t t) {
  const auto element = static_cast<int64_t>(SizeOf(dtype));
  const int64_t widest = std::max(c.hidden, c.q_cols());
  Activations s;
  s.rows = a.template Allocate<uint8_t>("rows", t * widest * element);
  s.selected = a.template Allocate<uint8_t>("selected", t * c.hidden * element);
  s.activated = a.template Allocate<uint8_t>("activated", t * c.ffn * element);
  const int64_t queries =
      query == DType::kF32
          ? 0
          : t * c.q_cols() * static_cast<int64_t>(SizeOf(query));
  s.queries = a.template Allocate<uint8_t>("queries", queries);
  s.x = a.template Allocate<float>("x", t * c.hidden);
  s.qkv = a.template Allocate<float>("qkv", t * (c.q_cols() + 2 * c.kv_cols()));
  s.branch =
      a.template Allocate<float>("branch", c.post_norms ? t * c.hidden : 0);
  return s;
}

// The `count` heads of a token, side by side, each divided by its own rms.
void NormaliseHeads(const RmsNormPlan& norm, const AlignedBuffer& weight,
                    float* heads, int64_t count) {
  const int64_t head_dim = norm.spec().hidden;
  const auto rows = DenseMatrix<float>(heads, count, head_dim);
  InlineExecutor here;
  norm.Execute(rows, DenseVector<const float>(weight.data<float>(), head_dim),
               rows, here);
}

}  // namespace

absl::StatusOr<int64_t> LlamaState::Impl::ActivationBytes() const {
  WorkspaceLayout counted;
  LayOut(counted, model->config, model->dtype, full.plan->spec().q_dtype,
         spec.max_step_tokens);
  if (counted.overflow()) {
    return InvalidArgument(kOp, "max_step_tokens=", spec.max_step_tokens,
                           " needs more than 2^63 bytes");
  }
  return counted.bytes();
}

void LlamaState::Impl::Run(const PageTable& table, Executor& executor) {
  const LlamaConfig& c = model->config;
  const DType dtype = model->dtype;
  const auto t = static_cast<int64_t>(tokens.size());
  const auto wanted = static_cast<int64_t>(logit_rows.size());
  Workspace memory(activations);
  const DType query_dtype = full.plan->spec().q_dtype;
  const Activations s =
      LayOut(memory, c, dtype, query_dtype, spec.max_step_tokens);

  const auto x = DenseMatrix<float>(s.x, t, c.hidden);
  const auto branch = DenseMatrix<float>(s.branch, t, c.hidden);
  const AnyTensorView normed = DenseAny(dtype, s.rows, t, c.hidden);
  const int64_t qkv_cols = c.q_cols() + 2 * c.kv_cols();
  const auto qkv = DenseMatrix<float>(s.qkv, t, qkv_cols);
  // q, k and v are columns of qkv, as heads.
  const auto heads = [&](int64_t column, int64_t count) {
    return TensorView<float, 3>(s.qkv + column, {t, count, c.head_dim},
                                {qkv_cols, c.head_dim, 1});
  };
  const auto q = heads(0, c.q_heads);
  const auto k = heads(c.q_cols(), c.kv_heads);
  const auto v = heads(c.q_cols() + c.kv_cols(), c.kv_heads);
  const AnyTensorView q_rows =
      MatrixView<const float>(s.qkv, {t, c.q_cols()}, {qkv_cols, 1});
  const AnyTensorView query_rows =
      DenseAny(query_dtype, s.queries, t, c.q_cols());
  const AnyTensorView queries =
      !convert_queries.has_value()
          ? AnyTensorView(q)
          : AnyTensorView(query_dtype, static_cast<const void*>(s.queries), 3,
                          {t, c.q_heads, c.head_dim},
                          {c.q_cols(), c.head_dim, 1});
  const AnyTensorView attended(dtype, static_cast<void*>(s.rows), 3,
                               {t, c.q_heads, c.head_dim},
                               {c.q_cols(), c.head_dim, 1});
  const AnyTensorView attended_rows = DenseAny(dtype, s.rows, t, c.q_cols());
  const AnyTensorView activated = DenseAny(dtype, s.activated, t, c.ffn);
  const IndexView position_view =
      DenseVector<const int64_t>(positions.data(), t);

  const auto weight = [&](const AlignedBuffer& norm) {
    return DenseVector<const float>(norm.data<float>(), c.hidden);
  };

  const auto normalise_heads = [&](const LlamaLayer& l) {
    ParallelRows(executor, t, 2 * qkv_cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        NormaliseHeads(*model->head_norm, l.q_norm, q.At(row, 0, 0), c.q_heads);
        NormaliseHeads(*model->head_norm, l.k_norm, k.At(row, 0, 0),
                       c.kv_heads);
      }
    });
  };
  const auto attend = [&](const LlamaLayer& l, const KvCacheView& kv,
                          const Attention& a) {
    l.qkv.Execute({normed, qkv}, Workspace(scratch), executor);
    if (c.head_norms) normalise_heads(l);
    model->rope->ExecuteQk(position_view, q, k, executor);
    write_kv->Execute({k, v, slots, kv}, executor);
    if (convert_queries.has_value()) {
      convert_queries->Execute(q_rows, query_rows, executor);
    }
    a.plan->Execute({queries, kv, table, a.schedule, attended, {}, {}, {}},
                    Workspace(workspace), executor);
  };
  // x += matrix * rows; then normed = rms_norm(x) by the weight that is next.
  const auto add = [&](const LinearPlan& matrix, const AnyTensorView& rows,
                       const AlignedBuffer& post_norm,
                       const AlignedBuffer& next_norm) {
    if (!c.post_norms) {
      matrix.Execute({rows, x, x}, Workspace(scratch), executor);
      model->norm->Execute(x, weight(next_norm), normed, executor);
      return;
    }
    matrix.Execute({rows, branch}, Workspace(scratch), executor);
    model->post_norm->Execute(branch, weight(post_norm), branch, executor);
    model->norm->ExecuteAdd({branch, weight(next_norm), normed, x, x},
                            executor);
  };

  model->embed->Execute(DenseVector<const int32_t>(tokens.data(), t),
                        DenseAny(model->embedding_dtype,
                                 const_cast<uint8_t*>(model->embedding.data()),
                                 c.vocab, c.hidden),
                        x, executor);
  model->norm->Execute(x, weight(model->layers.front().attn_norm), normed,
                       executor);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const LlamaLayer& l = model->layers[static_cast<size_t>(layer)];
    attend(l, cache.Layer(layer), windowed && c.IsLocal(layer) ? local : full);
    add(l.attn_out, attended_rows, l.post_attn_norm, l.ffn_norm);
    l.gate_up.Execute({normed, activated}, Workspace(scratch), executor);
    add(l.down, activated, l.post_ffn_norm,
        layer + 1 < c.layers
            ? model->layers[static_cast<size_t>(layer + 1)].attn_norm
            : model->output_norm);
  }
  const AnyTensorView selected = DenseAny(dtype, s.selected, wanted, c.hidden);
  model->logits->SelectRows(
      normed, DenseVector<const int64_t>(logit_rows.data(), wanted), selected);
  const auto vocabulary = DenseMatrix(logits.data<float>(), wanted, c.vocab);
  model->output->Execute({selected, vocabulary}, Workspace(scratch), executor);
  model->logits->Execute(vocabulary, executor);
}

}  // namespace quern
