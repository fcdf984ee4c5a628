// Linear weights through the C interface: every format has the bytes of the C++
// function, and refusals have its words.

#include "quern/gemm/testing/weights.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

constexpr int64_t kN = 40, kK = 64;

// A LinearSource in C, with its tensors beside it.
class SourceInC {
 public:
  explicit SourceInC(const LinearSource& source)
      : layout_(WeightLayoutName(source.layout)) {
    source_.layout = layout_.c_str();
    source_.codes = Add(source.codes);
    source_.scales = Add(source.scales);
    source_.zeros = Add(source.zeros);
    source_.g_idx = Add(source.g_idx);
    source_.bias = Add(source.bias);
    source_.block_n = source.block_n;
  }
  const quern_linear_source& get() const { return source_; }

 private:
  const quern_tensor* Add(const AnyTensorView& view) {
    if (view.rank() == 0) return nullptr;
    tensors_.push_back(std::make_unique<TensorInC>(view));
    return tensors_.back()->get();
  }

  std::string layout_;
  std::vector<std::unique_ptr<TensorInC>> tensors_;
  quern_linear_source source_ = {};
};

// `format` is borrowed.
quern_linear_weights_options OptionsOf(const LinearWeightsSpec& spec,
                                       const char* format) {
  quern_linear_weights_options options = {};
  options.size = sizeof(options);
  options.n = spec.n;
  options.k = spec.k;
  options.format = format;
  options.group_size = spec.group_size;
  options.gated = spec.gated ? 1 : 0;
  return options;
}

std::vector<uint8_t> BytesInC(quern_linear_weights* weights) {
  const void* bytes = nullptr;
  size_t count = 0;
  EXPECT_C_OK(quern_linear_weights_bytes(weights, &bytes, &count), weights);
  const auto* const begin = static_cast<const uint8_t*>(bytes);
  return {begin, begin + count};
}

TEST(WeightsInCTest, HaveTheBytesOfCppInEveryFormat) {
  TestRng rng;
  LibraryInC library;
  InlineExecutor executor;
  for (const WeightCase& c : kWeightCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    for (const bool gated : {false, true}) {
      const std::vector<LinearSource> sources = random.CutAt({16});
      const LinearWeights want = random.Pack(sources, executor, gated);
      const LinearWeightsSpec spec = random.Spec(gated);
      const std::string format(WeightFormatName(spec.format));
      const quern_linear_weights_options options =
          OptionsOf(spec, format.c_str());
      const SourceInC first(sources[0]), second(sources[1]);
      const quern_linear_source in_c[] = {first.get(), second.get()};
      quern_linear_weights* weights = nullptr;
      ASSERT_C_OK(quern_linear_weights_pack(library.get(), &options, in_c, 2,
                                            sizeof(in_c[0]), nullptr, &weights),
                  library.get());
      EXPECT_EQ(BytesInC(weights), BytesOf(want));
      EXPECT_EQ(ExplanationOf(weights).rfind(
                    format + " weights, n=40, k=64, bias, ", 0),
                0u)
          << ExplanationOf(weights);
    }
  }
}

TEST(WeightsInCTest, StayInTheirBlocks) {
  LibraryInC library;
  InlineExecutor executor;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(std::string(info.name));
    LinearWeightsSpec spec;
    spec.n = 3;
    spec.k = 256;
    spec.format = WeightFormat::kBlocks;
    spec.block_format = info.format;
    const int64_t row = spec.k / info.values * info.bytes;
    std::vector<uint8_t> codes(static_cast<size_t>(3 * row));
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<uint8_t>(i * 5 % 64);
    }
    LinearSource source;
    source.layout = WeightLayout::kBlocks;
    source.codes = DenseMatrix<const uint8_t>(codes.data(), 3, row);
    const auto want = LinearWeights::Pack(spec, {source}, executor);
    ASSERT_TRUE(want.ok()) << want.status();
    quern_linear_weights_options options = OptionsOf(spec, "blocks");
    const std::string name(info.name);
    options.block_format = name.c_str();
    const SourceInC in_c(source);
    quern_linear_weights* weights = nullptr;
    ASSERT_C_OK(
        quern_linear_weights_pack(library.get(), &options, &in_c.get(), 1,
                                  sizeof(in_c.get()), nullptr, &weights),
        library.get());
    EXPECT_EQ(BytesInC(weights), BytesOf(*want));
  }
}

TEST(WeightsInCTest, AreAdoptedWithoutACopy) {
  TestRng rng;
  LibraryInC library;
  const WeightSources random = RealSources(rng, kWeightCases[2], kN, kK);
  const LinearWeights packed = random.Pack();
  quern_linear_weights* weights = nullptr;
  ASSERT_C_OK(quern_linear_weights_adopt(library.get(), packed.bytes().data(),
                                         packed.bytes().size(), &weights),
              library.get());
  const void* bytes = nullptr;
  size_t count = 0;
  ASSERT_C_OK(quern_linear_weights_bytes(weights, &bytes, &count), weights);
  EXPECT_EQ(bytes, packed.bytes().data());
  EXPECT_EQ(count, packed.bytes().size());
  ExpectRefused(quern_linear_weights_bytes(weights, nullptr, &count), weights,
                QUERN_INVALID_ARGUMENT, "bytes is null");
  ExpectRefused(quern_linear_weights_bytes(weights, &bytes, nullptr), weights,
                QUERN_INVALID_ARGUMENT, "num_bytes is null");
  ExpectRefused(
      quern_linear_weights_adopt(library.get(), nullptr, 64, &weights),
      library.get(), QUERN_INVALID_ARGUMENT, "bytes is null");
  EXPECT_EQ(weights, nullptr);
  ExpectRefused(quern_linear_weights_adopt(library.get(), packed.bytes().data(),
                                           8, &weights),
                library.get(), QUERN_INVALID_ARGUMENT, "linear_weights");
}

// The operator keeps weights that were destroyed after it was made.
TEST(WeightsInCTest, OutliveTheirDestructionInAnOperator) {
  LibraryInC library;
  std::vector<float> b(kN * kK), x(kK), out(kN);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 5) - 2;
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 3) - 1;
  TensorInC b_in_c(DType::kF32, b.data(), {kN, kK});
  TensorInC x_in_c(DType::kF32, x.data(), {1, kK});
  TensorInC out_in_c(DType::kF32, out.data(), {1, kN});
  quern_linear_weights_options options = {};
  options.size = sizeof(options);
  options.n = kN;
  options.k = kK;
  quern_linear_source source = {};
  source.codes = b_in_c.get();
  quern_linear_weights* weights = nullptr;
  ASSERT_C_OK(quern_linear_weights_pack(library.get(), &options, &source, 1,
                                        sizeof(source), nullptr, &weights),
              library.get());
  const quern_argument arguments[] = {
      quern_tensor_argument("x", x_in_c.get()),
      quern_object_argument("weights", weights)};
  quern_op* op = nullptr;
  ASSERT_C_OK(
      quern_op_create(library.get(), "linear", nullptr, arguments, 2, &op),
      library.get());
  ASSERT_C_OK(quern_destroy(weights), weights);
  quern_op* second = nullptr;
  ExpectRefused(
      quern_op_create(library.get(), "linear", nullptr, arguments, 2, &second),
      library.get(), QUERN_FAILED_PRECONDITION,
      "linear: weights: the linear weights was destroyed");

  int64_t bytes = 0;
  ASSERT_C_OK(quern_op_workspace_bytes(op, 1, nullptr, &bytes), op);
  ASSERT_GT(bytes, 0);
  GuardBuffer<uint8_t> memory(bytes + QUERN_ALIGNMENT);
  auto* const begin =
      memory.data() +
      (QUERN_ALIGNMENT -
       reinterpret_cast<uintptr_t>(memory.data()) % QUERN_ALIGNMENT);
  const quern_operand operands[] = {{"x", x_in_c.get(), QUERN_READ_ONLY},
                                    {"out", out_in_c.get(), 0}};
  const auto size = static_cast<size_t>(bytes);
  const struct {
    void* workspace;
    size_t bytes;
    const char* words;
  } refusals[] = {{nullptr, size, "workspace has 0 bytes; need "},
                  {begin, size - 1, ", as quern_op_workspace_bytes says"},
                  {begin + 8, size, "workspace is misaligned"}};
  for (const auto& c : refusals) {
    ExpectRefused(
        quern_op_execute(op, operands, 2, c.workspace, c.bytes, nullptr), op,
        QUERN_INVALID_ARGUMENT, c.words);
  }
  // Where a tensor is refused, too, that is what is reported.
  TensorInC narrow(DType::kF32, x.data(), {1, kK - 1});
  quern_operand wrong[] = {operands[0], operands[1]};
  wrong[0].tensor = narrow.get();
  ExpectRefused(quern_op_execute(op, wrong, 2, nullptr, 0, nullptr), op,
                QUERN_INVALID_ARGUMENT, "linear: x is [1, 63]");
  ASSERT_C_OK(quern_op_execute(op, operands, 2, begin, size, nullptr), op);
  for (int64_t n = 0; n < kN; ++n) {
    float want = 0;
    for (int64_t k = 0; k < kK; ++k) want += x[k] * b[n * kK + k];
    EXPECT_EQ(out[static_cast<size_t>(n)], want) << n;
  }
  ExpectRefused(quern_op_workspace_bytes(op, -1, nullptr, &bytes), op,
                QUERN_INVALID_ARGUMENT, "max_rows=-1");
  ExpectRefused(quern_op_workspace_bytes(op, 1, nullptr, nullptr), op,
                QUERN_INVALID_ARGUMENT, "bytes is null");
}

TEST(WeightsInCTest, AreRefused) {
  LibraryInC library;
  std::vector<float> b(kN * kK);
  TensorInC codes(DType::kF32, b.data(), {kN, kK});
  quern_linear_weights_options options = {};
  quern_linear_source source = {};
  size_t count = 1, source_size = sizeof(source);
  struct Case {
    const char* words;
    std::function<void()> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  const std::vector<Case> cases = {
      {"quern_linear_weights_options: size=0", [&] { options.size = 0; }},
      {"quern_linear_source: size=8", [&] { source_size = 8; }},
      {"num_sources=0; need 1", [&] { count = 0; }},
      {"num_sources=1025; need 1", [&] { count = 1025; }},
      {"codes is null", [&] { source.codes = nullptr; }},
      {"format=\"int3\"; need one of f32, bf16",
       [&] { options.format = "int3"; }},
      {"layout=\"mn\"; need one of nk, kn", [&] { source.layout = "mn"; }},
      {"block_format=\"Q9\"; need one of Q4_0",
       [&] { options.block_format = "Q9"; }},
      {"gated=2", [&] { options.gated = 2; }},
      {"reserved=1", [&] { options.reserved = 1; }},
      {"n=0", [&] { options.n = 0; }},
      {"codes", [&] { options.k = kK + 1; }},
      {"codes has device_type=2", [&] { codes->device.device_type = 2; }},
      {"codes has DLPack type code 3", [&] { codes->dtype.code = 3; },
       QUERN_UNIMPLEMENTED},
      {"codes", [&] { codes->data = nullptr; }},
      {"codes", [&] { codes->byte_offset = 1; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    const quern_tensor kept = *codes.get();
    options = {};
    options.size = sizeof(options);
    options.n = kN;
    options.k = kK;
    source = {};
    source.codes = codes.get();
    count = 1;
    source_size = sizeof(source);
    c.spoil();
    quern_linear_weights* weights = nullptr;
    ExpectRefused(
        quern_linear_weights_pack(library.get(), &options, &source, count,
                                  source_size, nullptr, &weights),
        library.get(), c.code, c.words);
    EXPECT_EQ(weights, nullptr);
    *codes.get() = kept;
  }
  quern_linear_weights* weights = nullptr;
  ExpectRefused(quern_linear_weights_pack(library.get(), nullptr, &source, 1,
                                          sizeof(source), nullptr, &weights),
                library.get(), QUERN_INVALID_ARGUMENT, "options is null");
  options.size = sizeof(options);
  ExpectRefused(quern_linear_weights_pack(library.get(), &options, nullptr, 1,
                                          sizeof(source), nullptr, &weights),
                library.get(), QUERN_INVALID_ARGUMENT, "sources is null");
}

}  // namespace
}  // namespace quern
