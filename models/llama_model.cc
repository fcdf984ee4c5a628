#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/gguf.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/llama_impl.h"
#include "quern/models/llama_loader.h"
#include "quern/models/packed_file.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";

// The rotary embedding of the file's key and, if there are any, factors.
RotaryEmbeddingSpec RotaryOf(const LlamaConfig& c, int64_t context) {
  RotaryEmbeddingSpec rope;
  rope.head_dim = c.head_dim;
  rope.rot_dim = c.rope_dim;
  rope.max_positions = context;
  rope.base = c.rope_base;
  rope.style = c.rope_style;
  if (!c.rope_factors.empty()) {
    // LongRoPE within the original context: frequencies are divided by the
    // short factors, and the magnitude is 1.
    rope.scaling.kind = RotaryScalingKind::kLongRope;
    rope.scaling.original = rope.scaling.target = 2;
    rope.scaling.short_factors = rope.scaling.long_factors = c.rope_factors;
  }
  return rope;
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
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_bytes", options.max_bytes, 0));
  QUERN_ASSIGN_OR_RETURN(m->config, LlamaConfig::Create(file));
  const LlamaConfig& c = m->config;
  m->context = std::min(c.context, options.max_context);
  LlamaLoader loader(file, c, options, executor);
  QUERN_RETURN_IF_ERROR(loader.CheckBytes(m->context));
  bool write_packed = false;
  if (!options.packed_path.empty()) {
    auto packed = PackedFile::Open(options.packed_path);
    write_packed = absl::IsNotFound(packed.status());
    if (!write_packed) {
      QUERN_RETURN_IF_ERROR(packed.status());
      m->packed.emplace(*std::move(packed));
      QUERN_RETURN_IF_ERROR(loader.Adopt(*m->packed));
    }
  }
  m->dtype = loader.rows_dtype();
  m->embedding_dtype = loader.embedding_dtype();

  VocabEmbeddingSpec embed;
  embed.vocab = c.vocab;
  embed.hidden = c.hidden;
  embed.weight_dtype = m->embedding_dtype;
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
  QUERN_ASSIGN_OR_RETURN(m->rope,
                         RotaryEmbeddingPlan::Create(RotaryOf(c, m->context)));
  LogitsSpec logits;
  logits.vocab = c.vocab;
  logits.hidden = c.hidden;
  logits.hidden_dtype = m->dtype;
  logits.soft_cap = c.logit_cap;
  QUERN_ASSIGN_OR_RETURN(m->logits, LogitsPlan::Create(logits));

  QUERN_ASSIGN_OR_RETURN(m->embedding, loader.Embedding());
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    QUERN_ASSIGN_OR_RETURN(LlamaLayer loaded, loader.Layer(layer));
    m->layers.push_back(std::move(loaded));
  }
  QUERN_ASSIGN_OR_RETURN(m->output_norm, loader.OutputNorm());
  QUERN_ASSIGN_OR_RETURN(m->output, loader.Output());
  m->weight_bytes =
      loader.packed_bytes() + static_cast<int64_t>(m->embedding.bytes());
  m->weights = loader.Forms();
  if (write_packed) {
    const absl::Status written = loader.WritePacked(options.packed_path);
    // Another process was faster.
    if (!absl::IsAlreadyExists(written)) QUERN_RETURN_IF_ERROR(written);
  }
  return LlamaModel(std::move(m));
}

const LlamaConfig& LlamaModel::config() const { return impl_->config; }
int64_t LlamaModel::context() const { return impl_->context; }
const std::string& LlamaModel::weights() const { return impl_->weights; }
int64_t LlamaModel::weight_bytes() const { return impl_->weight_bytes; }
int LlamaModel::ranks() const { return 1; }
int LlamaModel::rank() const { return 0; }
int64_t LlamaModel::rank_bytes_per_token() const { return 0; }
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
