#ifndef QUERN_MODELS_LLAMA_LOADER_H_
#define QUERN_MODELS_LLAMA_LOADER_H_

// Private: reads tensors, and makes matrices of them in the form that the
// options ask for, telling how far it is.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/gguf.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/llama_impl.h"
#include "quern/models/packed_file.h"

namespace quern {

class LlamaLoader {
 public:
  // `file` is what `config` was made of. All must outlive this.
  LlamaLoader(const GgufFile& file, const LlamaConfig& config,
              const LlamaOptions& options, Executor& executor);

  // Element type of the rows that matrices multiply.
  DType rows_dtype() const { return rows_dtype_; }
  DType embedding_dtype() const;

  // ResourceExhausted if a model with a rotary table of `context` positions may
  // take more than options.max_bytes while it is loaded. Reads no tensor.
  absl::Status CheckBytes(int64_t context) const;

  absl::StatusOr<AlignedBuffer> Embedding() {
    return Read({"token_embd.weight"}, embedding_dtype());
  }
  absl::StatusOr<LlamaLayer> Layer(int64_t layer);
  absl::StatusOr<AlignedBuffer> OutputNorm() {
    return Read({"output_norm.weight"}, DType::kF32);
  }
  absl::StatusOr<LinearPlan> Output() { return Matrix(OutputParts()); }

  // Matrices come from this file from now on; it outlives them.
  absl::Status Adopt(const PackedFile& packed);
  // Writes all matrices made so far.
  absl::Status WritePacked(const std::string& path) const;

  // Bytes of the matrices made so far.
  int64_t packed_bytes() const { return packed_bytes_; }
  // Forms of the matrices made so far, such as "bf16" or "f16 and q8_0".
  std::string Forms() const;

 private:
  // y = W x + b with the rows of the tensors `names` as W, one tensor after
  // another, and `biases`, if there are any, as b.
  struct Parts {
    std::vector<std::string> names;
    int64_t n = 0, k = 0;
    std::vector<std::string> biases = {};
    DType y = DType::kF32;
    LinearActivation activation = LinearActivation::kNone;
    bool residual = false;  // whether y is what it was before and W x + b
  };

  struct Int8Rows {
    AlignedBuffer codes, scales;
  };

  static DType RowsOf(const GgufFile& file, LlamaWeights weights);
  // How a matrix is kept.
  WeightFormat FormatOf(const std::vector<std::string>& names) const;

  Parts QkvParts(int64_t layer) const;
  Parts AttnOutParts(int64_t layer) const;
  Parts GateUpParts(int64_t layer) const;
  Parts DownParts(int64_t layer) const;
  Parts OutputParts() const;
  LinearWeightsSpec WeightsOf(const Parts& parts) const;
  // Upper bound of the bytes that `parts` takes once it is packed.
  double PackedBytes(const Parts& parts) const;
  // Bytes that `parts` takes while it is packed, besides PackedBytes.
  double UnpackedBytes(const Parts& parts) const;

  absl::StatusOr<LinearPlan> Matrix(const Parts& parts);
  // The matrix as its tensors have it, packed; or from the file of packed ones.
  absl::StatusOr<LinearWeights> Pack(const Parts& parts);
  absl::StatusOr<LinearWeights> Find(const Parts& parts) const;
  // Identifies the file and how its matrices are kept.
  absl::StatusOr<uint64_t> Source() const;
  absl::StatusOr<Int8Rows> Quantise(MatrixView<const float> w) const;
  // The rows of `names` as `dtype`; as they stand in the file where that is
  // kU8.
  absl::StatusOr<AlignedBuffer> Read(const std::vector<std::string>& names,
                                     DType dtype);
  absl::Status ReadTensor(const GgufTensor& tensor, DType dtype, uint8_t* out);

  const GgufFile& file_;
  const LlamaConfig& config_;
  const LlamaOptions& options_;
  Executor& executor_;
  DType rows_dtype_;
  int64_t done_ = 0, total_ = 0;
  int64_t packed_bytes_ = 0;
  std::vector<WeightFormat> formats_;
  const PackedFile* packed_ = nullptr;
  std::vector<std::pair<std::string, LinearWeights>> made_;  // to be written
};

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_LOADER_H_
