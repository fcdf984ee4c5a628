#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "models/gguf.h"
#include "models/llama.h"
#include "models/llama_config.h"
#include "models/llama_impl.h"
#include "models/llama_matrix.h"
#include "ops/embedding/vocab_embedding.h"
#include "ops/logits/logits.h"
#include "ops/norm/rms_norm.h"
#include "ops/rope/rotary_embedding.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";

DType WeightsDType(const GgufFile& file, LlamaWeights weights) {
  if (weights == LlamaWeights::kBF16 || weights == LlamaWeights::kInt8) {
    return DType::kBF16;
  }
  if (weights == LlamaWeights::kF32) return DType::kF32;
  for (const GgufTensor& tensor : file.tensors()) {
    const bool narrow = tensor.type == GgufTensorType::kBF16 ||
                        tensor.type == GgufTensorType::kQ8_0;
    if (tensor.rows() > 1 && !narrow) return DType::kF32;  // not a norm
  }
  return DType::kBF16;
}

// Reads tensors and makes linear layers of them, telling how far it is.
class Loader {
 public:
  Loader(const GgufFile& file, DType dtype, const LlamaOptions& options,
         Executor& executor)
      : file_(file), dtype_(dtype), options_(options), executor_(executor) {
    for (const GgufTensor& tensor : file.tensors()) total_ += tensor.bytes;
  }

  // The rows of `names`, one tensor after another, as `dtype`.
  absl::StatusOr<AlignedBuffer> Read(const std::vector<std::string>& names,
                                     DType dtype) {
    int64_t elements = 0;
    for (const std::string& name : names) {
      QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file_.FindTensor(name));
      elements += tensor->elements;
    }
    QUERN_ASSIGN_OR_RETURN(
        AlignedBuffer buffer,
        AlignedBuffer::Create(elements * static_cast<int64_t>(SizeOf(dtype))));
    int64_t begin = 0;
    for (const std::string& name : names) {
      QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file_.FindTensor(name));
      if (dtype == DType::kBF16) {
        QUERN_RETURN_IF_ERROR(
            ReadTensor(*tensor, buffer.data<BFloat16>() + begin));
      } else {
        QUERN_RETURN_IF_ERROR(
            ReadTensor(*tensor, buffer.data<float>() + begin));
      }
      begin += tensor->elements;
    }
    return buffer;
  }

  // y[n] = W x[k] + b, with the rows of `names` as W; those of `biases`, if
  // there are any, as b.
  absl::StatusOr<LlamaMatrix> Linear(
      const std::vector<std::string>& names, int64_t n, int64_t k,
      const LlamaMatrix::Output& y = {},
      const std::vector<std::string>& biases = {}) {
    const bool int8 = options_.weights == LlamaWeights::kInt8;
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer weights,
                           Read(names, int8 ? DType::kF32 : dtype_));
    QUERN_ASSIGN_OR_RETURN(const AlignedBuffer values,
                           Read(biases, DType::kF32));
    AnyTensorView bias;
    if (!biases.empty()) {
      bias = DenseVector<const float>(values.data<float>(), n);
    }
    auto matrix =
        int8 ? LlamaMatrix::CreateInt8(
                   DenseMatrix<const float>(weights.data<float>(), n, k), bias,
                   dtype_, y, executor_)
             : LlamaMatrix::Create(DenseAny(dtype_, weights.data(), n, k), bias,
                                   y, executor_);
    if (matrix.ok()) packed_bytes_ += matrix->packed_bytes();
    return matrix;
  }

  DType dtype() const { return dtype_; }
  int64_t packed_bytes() const { return packed_bytes_; }

 private:
  // In pieces, so that progress shows within a large tensor too.
  template <typename T>
  absl::Status ReadTensor(const GgufTensor& tensor, T* out) {
    const int64_t step =
        std::max<int64_t>(1, options_.progress_elements / tensor.cols());
    for (int64_t row = 0; row < tensor.rows(); row += step) {
      const int64_t rows = std::min(step, tensor.rows() - row);
      QUERN_RETURN_IF_ERROR(file_.ReadRows(
          tensor, row,
          absl::MakeSpan(out + row * tensor.cols(),
                         static_cast<size_t>(rows * tensor.cols()))));
      if (options_.progress) {
        // An embedding that is the output matrix too may be read twice.
        options_.progress(
            std::min(total_,
                     done_ + tensor.bytes / tensor.rows() * (row + rows)),
            total_);
      }
    }
    done_ += tensor.bytes;
    return absl::OkStatus();
  }

  const GgufFile& file_;
  DType dtype_;
  const LlamaOptions& options_;
  Executor& executor_;
  int64_t done_ = 0, total_ = 0;
  int64_t packed_bytes_ = 0;
};

absl::StatusOr<LlamaLayer> LoadLayer(Loader& loader, const LlamaConfig& c,
                                     int64_t layer) {
  const auto name = [layer](absl::string_view part) {
    return absl::StrCat("blk.", layer, ".", part, ".weight");
  };
  std::vector<std::string> biases;
  if (c.qkv_bias) {
    for (const char* part : {"attn_q", "attn_k", "attn_v"}) {
      biases.push_back(absl::StrCat("blk.", layer, ".", part, ".bias"));
    }
  }
  const auto norm = [&](absl::string_view part) {
    return loader.Read({name(part)}, DType::kF32);
  };
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer attn_norm, norm("attn_norm"));
  QUERN_ASSIGN_OR_RETURN(
      LlamaMatrix qkv,
      loader.Linear({name("attn_q"), name("attn_k"), name("attn_v")},
                    c.q_cols() + 2 * c.kv_cols(), c.hidden, {}, biases));
  AlignedBuffer q_norm, k_norm, post_attn_norm, post_ffn_norm;
  if (c.head_norms) {
    QUERN_ASSIGN_OR_RETURN(q_norm, norm("attn_q_norm"));
    QUERN_ASSIGN_OR_RETURN(k_norm, norm("attn_k_norm"));
  }
  QUERN_ASSIGN_OR_RETURN(
      LlamaMatrix attn_out,
      loader.Linear({name("attn_output")}, c.hidden, c.q_cols()));
  if (c.post_norms) {
    QUERN_ASSIGN_OR_RETURN(post_attn_norm, norm("post_attention_norm"));
    QUERN_ASSIGN_OR_RETURN(post_ffn_norm, norm("post_ffw_norm"));
  }
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer ffn_norm, norm("ffn_norm"));
  QUERN_ASSIGN_OR_RETURN(
      LlamaMatrix gate_up,
      loader.Linear({name("ffn_gate"), name("ffn_up")}, 2 * c.ffn, c.hidden,
                    {loader.dtype(), c.activation}));
  QUERN_ASSIGN_OR_RETURN(LlamaMatrix down,
                         loader.Linear({name("ffn_down")}, c.hidden, c.ffn));
  return LlamaLayer{std::move(attn_norm), std::move(qkv),
                    std::move(q_norm),    std::move(k_norm),
                    std::move(attn_out),  std::move(post_attn_norm),
                    std::move(ffn_norm),  std::move(gate_up),
                    std::move(down),      std::move(post_ffn_norm)};
}

}  // namespace

AnyTensorView DenseAny(DType dtype, void* data, int64_t rows, int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

LlamaModel::LlamaModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LlamaModel::LlamaModel(LlamaModel&&) noexcept = default;
LlamaModel& LlamaModel::operator=(LlamaModel&&) noexcept = default;
LlamaModel::~LlamaModel() = default;

absl::StatusOr<LlamaModel> LlamaModel::Create(const GgufFile& file,
                                              const LlamaOptions& options,
                                              Executor& executor) {
  auto m = std::make_unique<Impl>();
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "max_context", options.max_context, 1));
  QUERN_ASSIGN_OR_RETURN(m->config, LlamaConfig::Create(file));
  const LlamaConfig& c = m->config;
  m->context = std::min(c.context, options.max_context);
  m->dtype = WeightsDType(file, options.weights);
  m->weights = options.weights == LlamaWeights::kInt8 ? DType::kI8 : m->dtype;

  VocabEmbeddingSpec embed;
  embed.vocab = c.vocab;
  embed.hidden = c.hidden;
  embed.weight_dtype = m->dtype;
  embed.scale = c.embedding_scale;
  QUERN_ASSIGN_OR_RETURN(m->embed, VocabEmbeddingPlan::Create(embed));
  RmsNormSpec norm;
  norm.hidden = c.hidden;
  norm.eps = c.norm_eps;
  norm.out_dtype = m->dtype;
  QUERN_ASSIGN_OR_RETURN(m->norm, RmsNormPlan::Create(norm));
  norm.out_dtype = DType::kF32;
  if (c.post_norms) {
    QUERN_ASSIGN_OR_RETURN(m->post_norm, RmsNormPlan::Create(norm));
  }
  if (c.head_norms) {
    norm.hidden = c.head_dim;
    QUERN_ASSIGN_OR_RETURN(m->head_norm, RmsNormPlan::Create(norm));
  }
  RotaryEmbeddingSpec rope;
  rope.head_dim = c.head_dim;
  rope.rot_dim = c.rope_dim;
  rope.max_positions = m->context;
  rope.base = c.rope_base;
  rope.style = c.rope_style;
  QUERN_ASSIGN_OR_RETURN(m->rope, RotaryEmbeddingPlan::Create(rope));
  LogitsSpec logits;
  logits.vocab = c.vocab;
  logits.hidden = c.hidden;
  logits.hidden_dtype = m->dtype;
  logits.soft_cap = c.logit_cap;
  QUERN_ASSIGN_OR_RETURN(m->logits, LogitsPlan::Create(logits));

  Loader loader(file, m->dtype, options, executor);
  QUERN_ASSIGN_OR_RETURN(m->embedding,
                         loader.Read({"token_embd.weight"}, m->dtype));
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    QUERN_ASSIGN_OR_RETURN(LlamaLayer loaded, LoadLayer(loader, c, layer));
    m->layers.push_back(std::move(loaded));
  }
  QUERN_ASSIGN_OR_RETURN(m->output_norm,
                         loader.Read({"output_norm.weight"}, DType::kF32));
  QUERN_ASSIGN_OR_RETURN(
      m->output, loader.Linear({HasOutputWeight(file) ? "output.weight"
                                                      : "token_embd.weight"},
                               c.vocab, c.hidden));
  m->weight_bytes =
      loader.packed_bytes() + static_cast<int64_t>(m->embedding.bytes());
  return LlamaModel(std::move(m));
}

const LlamaConfig& LlamaModel::config() const { return impl_->config; }
int64_t LlamaModel::context() const { return impl_->context; }
DType LlamaModel::weights_dtype() const { return impl_->weights; }
int64_t LlamaModel::weight_bytes() const { return impl_->weight_bytes; }
const char* LlamaModel::target() const { return impl_->norm->target(); }

std::string LlamaModel::Explain() const {
  // What runs; why is after the semicolon.
  const auto kernel = [this](int64_t m) {
    const std::string text = impl_->layers[0].gate_up.Explain(m);
    return text.substr(0, text.find(';'));
  };
  return absl::StrCat("operators: Highway ", target(),
                      "; matrices: ", kernel(1), " (one row), ", kernel(256),
                      " (256 rows)");
}

}  // namespace quern
