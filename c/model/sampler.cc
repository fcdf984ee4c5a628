#include "quern/ops/sampling/sampler.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/c/library.h"
#include "quern/c/object.h"
#include "quern/c/objects/executor.h"
#include "quern/c/quern_model.h"
#include "quern/c/tensor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCreate[] = "quern_sampler_create";
constexpr char kSample[] = "quern_sampler_sample";
constexpr char kFiltered[] = "quern_sampler_sample_filtered";
constexpr size_t kMaxRows = size_t{1} << 31;

static_assert(SamplerPlan::kNoToken == QUERN_NO_TOKEN,
              "quern_model.h has the token of a row without a choice");

SamplingParams ParamsOf(const quern_sampling& sampling) {
  SamplingParams params;
  params.temperature = sampling.temperature;
  params.top_k = sampling.top_k;
  if (sampling.top_p != 0) params.top_p = sampling.top_p;
  params.seed = sampling.seed;
  params.step = sampling.step;
  return params;
}

absl::Status AddFilters(const quern_sampling_filters& filters,
                        SamplingParams& params) {
  QUERN_RETURN_IF_ERROR(CheckSize("quern_sampling_filters", filters.size,
                                  sizeof(quern_sampling_filters)));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kFiltered, "reserved", filters.reserved, 0, 0));
  params.min_p = filters.min_p;
  params.top_n_sigma = filters.top_n_sigma;
  if (filters.typical_p != 0) params.typical_p = filters.typical_p;
  return absl::OkStatus();
}

// The operator `sample`, with the step that it reads and its scratch.
class SamplerObject final : public Object {
 public:
  static absl::StatusOr<std::unique_ptr<Object>> Create(const Library& library,
                                                        int64_t vocab) {
    constexpr int64_t kMaxVocab = std::numeric_limits<int32_t>::max();
    QUERN_RETURN_IF_ERROR(CheckRange(kCreate, "vocab", vocab, 1, kMaxVocab));
    auto sampler = std::unique_ptr<SamplerObject>(new SamplerObject(vocab));
    QUERN_ASSIGN_OR_RETURN(
        sampler->sample_,
        library.ops().Make("sample",
                           {{"logits", TensorMeta{DType::kF32, {1, vocab}}},
                            {"step", &sampler->step_}}));
    return sampler;
  }

  std::string Explain() const override {
    return absl::StrCat("sampler of ", vocab_, " logits, ", sample_.provider,
                        ": ", sample_.op->Explain(1));
  }

  // `filters` is null or has an element for each of `sampling`.
  absl::Status Sample(const quern_tensor& logits,
                      absl::Span<const quern_sampling> sampling,
                      const quern_sampling_filters* filters, int32_t* tokens,
                      quern_executor* handle) {
    params_.clear();
    for (const quern_sampling& row : sampling) params_.push_back(ParamsOf(row));
    for (size_t i = 0; filters != nullptr && i < params_.size(); ++i) {
      QUERN_RETURN_IF_ERROR(AddFilters(filters[i], params_[i]));
    }
    step_.params = params_;
    const auto rows = static_cast<int64_t>(sampling.size());
    AnyTensorView views[] = {AnyTensorView(), DenseVector(tokens, rows)};
    QUERN_RETURN_IF_ERROR(
        SetView("sample", "logits", logits, QUERN_READ_ONLY, views[0]));
    QUERN_RETURN_IF_ERROR(sample_.CheckArgs(views));
    CallExecutor executor;
    QUERN_RETURN_IF_ERROR(executor.Take(handle));
    if (rows == 0) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        sample_.op->WorkspaceBytes(rows, executor.get().num_workers()));
    if (static_cast<int64_t>(scratch_.bytes()) < bytes) {
      QUERN_ASSIGN_OR_RETURN(scratch_, AlignedBuffer::Create(bytes));
    }
    sample_.op->Execute(views, Workspace(scratch_), executor.get());
    return executor.Verdict();
  }

 private:
  explicit SamplerObject(int64_t vocab) : vocab_(vocab) {}

  int64_t vocab_;
  std::vector<SamplingParams> params_;
  SamplingStep step_;  // where sample_ finds params_
  MadeOp sample_;
  AlignedBuffer scratch_;
};

absl::Status Sample(const char* function, SamplerObject& sampler,
                    const quern_tensor* logits, const quern_sampling* sampling,
                    const quern_sampling_filters* filters, size_t num_rows,
                    int32_t* tokens, quern_executor* executor) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(function, "logits", logits));
  if (num_rows > kMaxRows) {
    return InvalidArgument(function, "num_rows=", num_rows, "; need ", kMaxRows,
                           " or fewer");
  }
  if (num_rows > 0) {
    QUERN_RETURN_IF_ERROR(CheckNotNull(function, "sampling", sampling));
    QUERN_RETURN_IF_ERROR(CheckNotNull(function, "tokens", tokens));
  }
  return sampler.Sample(*logits, absl::MakeConstSpan(sampling, num_rows),
                        filters, tokens, executor);
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::c_abi::CallOn;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Mode;
using quern::c_abi::SamplerObject;

extern "C" {

quern_status quern_sampler_create(quern_library* library, int64_t vocab,
                                  quern_sampler** sampler) {
  return MakeObject(library, quern::c_abi::kCreate, Kind::kSampler, sampler,
                    [&](const Library& owner) {
                      return SamplerObject::Create(owner, vocab);
                    });
}

quern_status quern_sampler_sample(quern_sampler* sampler,
                                  const quern_tensor* logits,
                                  const quern_sampling* sampling,
                                  size_t num_rows, int32_t* tokens,
                                  quern_executor* executor) {
  return CallOn<SamplerObject>(
      sampler, Kind::kSampler, Mode::kChange, [&](SamplerObject& object) {
        return quern::c_abi::Sample(quern::c_abi::kSample, object, logits,
                                    sampling, nullptr, num_rows, tokens,
                                    executor);
      });
}

quern_status quern_sampler_sample_filtered(
    quern_sampler* sampler, const quern_tensor* logits,
    const quern_sampling* sampling, const quern_sampling_filters* filters,
    size_t num_rows, int32_t* tokens, quern_executor* executor) {
  return CallOn<SamplerObject>(
      sampler, Kind::kSampler, Mode::kChange, [&](SamplerObject& object) {
        return quern::c_abi::Sample(quern::c_abi::kFiltered, object, logits,
                                    sampling, filters, num_rows, tokens,
                                    executor);
      });
}

}  // extern "C"
