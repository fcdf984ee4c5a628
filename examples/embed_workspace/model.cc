#include "model.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/check.h"
#include "ops/registry/op_registry.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace {

// The logits that follow three tokens; none if something failed.
std::vector<float> LogitsUnder(const char* policy, const char* path,
                               quern::Executor& executor) {
  quern::OpRegistry registry;
  const auto parsed = quern::OpPolicy::Parse(policy);
  auto file = quern::GgufFile::Open(path);
  if (!Check(quern::RegisterDecoderOps(registry)) ||
      !Check(OverrideNorm(registry)) || !Check(parsed.status()) ||
      !Check(file.status())) {
    return {};
  }
  const quern::OpDispatcher ops(registry, *parsed);
  quern::DecoderOptions options;
  options.weights = quern::DecoderWeights::kF32;
  options.operators = &ops;
  const auto model = quern::Decoder::Create(*file, options, executor);
  if (!Check(model.status())) return {};
  auto state = quern::DecoderState::Create(*model, {});
  if (!Check(state.status())) return {};
  const auto sequence = state->NewSequence();
  const std::vector<int32_t> tokens = {1, 2, 3};
  const auto logits = state->Forward({{*sequence, tokens}},
                                     quern::LogitsOf::kLastTokens, executor);
  if (!Check(logits.status())) return {};
  return {logits->data(), logits->data() + logits->extent(1)};
}

}  // namespace

bool ModelRunsOps(const char* path, quern::Executor& executor) {
  const int64_t before = RowsNormed();
  const std::vector<float> ours = LogitsUnder("all", path, executor);
  const int64_t rows = RowsNormed() - before;
  const std::vector<float> querns = LogitsUnder("-rms_norm", path, executor);
  std::printf("the model's rms_norm: %lld rows by ours, then %lld\n",
              static_cast<long long>(rows),
              static_cast<long long>(RowsNormed() - before - rows));
  if (rows == 0 || RowsNormed() != before + rows || ours.empty() ||
      ours.size() != querns.size()) {
    return false;
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    if (!(std::abs(ours[i] - querns[i]) <= 1e-3f)) return false;  // NaN too
  }
  return true;
}
