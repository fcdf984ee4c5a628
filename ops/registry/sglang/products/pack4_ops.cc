#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/products/product_ops.h"

namespace quern {
namespace {

constexpr char kPlan[] = "pack";
constexpr int64_t kCols = 32;

// ---- convert_scale_packed

struct ScaleSpec {
  std::vector<int64_t> extents;
};
struct ScaleArgs {
  AnyTensorView scale, out;
};

class ScalePlan {
 public:
  static absl::StatusOr<ScalePlan> Create(const ScaleSpec& spec) {
    return ScalePlan(spec);
  }
  const char* target() const { return "scalar"; }
  absl::Status CheckArgs(const ScaleArgs& a) const {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "scale", a.scale, DType::kU8, spec_.extents));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kPlan, "out", a.out, DType::kU8, spec_.extents));
    QUERN_RETURN_IF_ERROR(CheckDense(kPlan, "scale", a.scale));
    return CheckDense(kPlan, "out", a.out);
  }
  void Execute(const ScaleArgs& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t groups = spec_.extents.back();
    const auto* const from = static_cast<const uint8_t*>(a.scale.data());
    auto* const to = static_cast<uint8_t*>(a.out.mutable_data());
    executor.ParallelFor(RowsOf(a.scale) / kCols, [&](int64_t block, int) {
      for (int64_t i = 0; i < kCols * groups; ++i) {
        to[block * kCols * groups + i] =
            from[(block * kCols + i % kCols) * groups + i / kCols];
      }
    });
  }

 private:
  explicit ScalePlan(const ScaleSpec& spec) : spec_(spec) {}
  ScaleSpec spec_;
};

absl::Status FillScale(ScaleSpec& spec, const OpCall& call) {
  spec.extents = call.Tensor("scale")->extents;
  const size_t rank = spec.extents.size();
  if ((rank == 2 || rank == 3) && spec.extents[rank - 2] % kCols == 0) {
    return LeadingRows(call.op(), "scale", *call.Tensor("scale")).status();
  }
  return InvalidArgument(call.op(), "scale is ",
                         PrintMeta(*call.Tensor("scale")),
                         "; need [n, groups] or [experts, n, groups] for a "
                         "multiple of 32 rows n");
}

absl::Status AddScale(OpRegistry& registry) {
  return OpDeclaration<ScalePlan, ScaleSpec, ScaleArgs>("convert_scale_packed")
      .In("scale", &ScaleArgs::scale, {}, OpDType<ScaleSpec>::Must(DType::kU8))
      .Then(&FillScale)
      .Out("out", &ScaleArgs::out, Like("scale"), DType::kU8)
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"scale", {32, 2}, DType::kU8}})
      .AddTo(registry);
}

// ---- convert_weight_packed_scale_zp

// One tensor for each, or one of each expert, of k rows and n columns.
struct WordsSpec {
  TensorMeta weight, qzeros, scales;
  bool gptq = false;
  int64_t experts = 1, k = 0, n = 0, groups = 0, block = 0;
  std::vector<int64_t> codes, grouped;  // extents of what is returned
};
struct WordsArgs {
  AnyTensorView weight, qzeros, scales, out0, out1, out2;
};

class WordsPlan {
 public:
  static absl::StatusOr<WordsPlan> Create(const WordsSpec& spec) {
    return WordsPlan(spec);
  }
  const char* target() const { return "scalar"; }
  absl::Status CheckArgs(const WordsArgs& a) const {
    const struct {
      const char* name;
      const AnyTensorView& view;
      const TensorMeta want;
      bool out;
    } all[] = {{"weight", a.weight, spec_.weight, false},
               {"qzeros", a.qzeros, spec_.qzeros, false},
               {"scales", a.scales, spec_.scales, false},
               {"out0", a.out0, {DType::kU8, spec_.codes}, true},
               {"out1", a.out1, {DType::kI8, spec_.grouped}, true},
               {"out2", a.out2, {DType::kF32, spec_.grouped}, true}};
    for (const auto& tensor : all) {
      QUERN_RETURN_IF_ERROR(
          tensor.out ? CheckOutput(kPlan, tensor.name, tensor.view,
                                   tensor.want.dtype, tensor.want.extents)
                     : CheckInput(kPlan, tensor.name, tensor.view,
                                  tensor.want.dtype, tensor.want.extents));
      QUERN_RETURN_IF_ERROR(CheckDense(kPlan, tensor.name, tensor.view));
      for (int i = 0; tensor.out && i < 3; ++i) {
        QUERN_RETURN_IF_ERROR(CheckApart(kPlan, all[i].name, all[i].view,
                                         tensor.name, tensor.view));
      }
    }
    return absl::OkStatus();
  }
  void Execute(const WordsArgs& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t blocks = spec_.n / kCols;
    executor.ParallelFor(spec_.experts * blocks, [&](int64_t task, int) {
      PackBlock(a, task / blocks, task % blocks * kCols, task);
    });
  }

 private:
  explicit WordsPlan(const WordsSpec& spec) : spec_(spec) {}

  // Code i of eight of a word.
  static int Nibble(const AnyTensorView& words, int64_t word, int i) {
    return static_cast<const uint32_t*>(words.data())[word] >> 4 * i & 15;
  }
  // AWQ keeps column 8 w + {0, 2, 4, 6, 1, 3, 5, 7}[i] of n in place i.
  static int PlaceOfAwq(int64_t c) {
    return static_cast<int>(c % 2 * 4 + c % 8 / 2);
  }
  int CodeOf(const WordsArgs& a, int64_t e, int64_t k, int64_t c) const {
    if (spec_.gptq) {
      return Nibble(a.weight, (e * spec_.k + k) / 8 * spec_.n + c,
                    static_cast<int>(k % 8));
    }
    return Nibble(a.weight, ((e * spec_.k + k) * spec_.n + c) / 8,
                  PlaceOfAwq(c));
  }
  int ZeroOf(const WordsArgs& a, int64_t e, int64_t g, int64_t c) const {
    const int64_t word = ((e * spec_.groups + g) * spec_.n + c) / 8;
    return spec_.gptq ? Nibble(a.qzeros, word, static_cast<int>(c % 8)) + 1
                      : Nibble(a.qzeros, word, PlaceOfAwq(c));
  }

  // Columns [n0, n0 + 32) of expert e, which are number `at` of all blocks.
  void PackBlock(const WordsArgs& a, int64_t e, int64_t n0, int64_t at) const {
    auto* const zeros = static_cast<int8_t*>(a.out1.mutable_data());
    auto* const scales = static_cast<float*>(a.out2.mutable_data());
    for (int64_t g = 0; g < spec_.groups; ++g) {
      for (int64_t c = 0; c < kCols; ++c) {
        const int64_t to = (at * spec_.groups + g) * kCols + c;
        zeros[to] = static_cast<int8_t>(ZeroOf(a, e, g, n0 + c));
        scales[to] = ScalarRow(a.scales, e * spec_.groups + g)[n0 + c];
      }
    }
    const int64_t depth = spec_.k / spec_.block;
    const int64_t block_bytes = 16 * spec_.block + 4 * kCols;
    for (int64_t b = 0; b < depth; ++b) {
      uint8_t* const to = static_cast<uint8_t*>(a.out0.mutable_data()) +
                          (at * depth + b) * block_bytes;
      std::memset(to, 0, static_cast<size_t>(block_bytes));
      for (int64_t c = 0; c < kCols; ++c) {
        int32_t sum = 0;
        for (int64_t i = 0; i < spec_.block; ++i) {
          const int64_t k = b * spec_.block + i;
          const int code = CodeOf(a, e, k, n0 + c);
          sum += code - ZeroOf(a, e, k / (spec_.k / spec_.groups), n0 + c);
          uint8_t& byte = to[i / 4 * 64 + (c / 16 * 8 + c % 8) * 4 + i % 4];
          byte = static_cast<uint8_t>(byte | code << (c % 16 < 8 ? 0 : 4));
        }
        std::memcpy(to + 16 * spec_.block + 4 * c, &sum, sizeof(sum));
      }
    }
  }

  WordsSpec spec_;
};

absl::Status FillWords(WordsSpec& s, const OpCall& call) {
  const absl::string_view op = call.op();
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "quant_method_4bit", call.Int("quant_method_4bit"), 0, 1));
  s.gptq = call.Int("quant_method_4bit") == 1;
  s.weight = *call.Tensor("weight");
  s.qzeros = *call.Tensor("qzeros");
  s.scales = *call.Tensor("scales");
  const size_t rank = s.weight.extents.size();
  if (rank < 2 || rank > 3 || s.scales.extents.size() != rank) {
    return InvalidArgument(op, "weight is ", PrintMeta(s.weight),
                           " and scales are ", PrintMeta(s.scales),
                           "; need matrices, or both of experts");
  }
  if (rank == 3) s.experts = s.weight.extents[0];
  s.k = s.weight.extents[rank - 2];
  s.groups = s.scales.extents[rank - 2];
  s.n = s.scales.extents[rank - 1];
  int64_t total = 0;
  if ((s.gptq && !CheckedMul(s.k, 8, &s.k)) || !CheckedMul(s.k, s.n, &total) ||
      !CheckedMul(total, std::max<int64_t>(1, s.experts), &total)) {
    return InvalidArgument(op, "weight has 2^63 codes or more");
  }
  if (s.n < kCols || s.n % kCols != 0 || s.groups < 1 || s.k < s.groups ||
      s.k % s.groups != 0) {
    return InvalidArgument(op, "weight has ", s.k, " x ", s.n, " codes in ",
                           s.groups,
                           " groups; need a multiple of 32 columns, and "
                           "groups of one size");
  }
  s.block = std::min<int64_t>(128, s.k / s.groups);
  if (s.block % 4 != 0 || s.k / s.groups % s.block != 0) {
    return InvalidArgument(op, "weight has groups of ", s.k / s.groups,
                           "; need a multiple of 4, above 128 of 128");
  }
  const auto of = [&](DType dtype, std::initializer_list<int64_t> matrix) {
    TensorMeta meta = {dtype, matrix};
    if (rank == 3) meta.extents.insert(meta.extents.begin(), s.experts);
    return meta;
  };
  QUERN_RETURN_IF_ERROR(CheckMeta(op, "weight", s.weight,
                                  s.gptq ? of(DType::kI32, {s.k / 8, s.n})
                                         : of(DType::kI32, {s.k, s.n / 8}),
                                  s.gptq ? ", GPTQ's words" : ", AWQ's words"));
  QUERN_RETURN_IF_ERROR(
      CheckMeta(op, "qzeros", s.qzeros, of(DType::kI32, {s.groups, s.n / 8})));
  QUERN_RETURN_IF_ERROR(
      CheckMeta(op, "scales", s.scales, of(s.scales.dtype, {s.groups, s.n})));
  s.codes =
      of(DType::kU8, {s.n / kCols, s.k / s.block, 16 * s.block + 4 * kCols})
          .extents;
  s.grouped = of(DType::kI8, {s.n / kCols, s.groups, kCols}).extents;
  return absl::OkStatus();
}
std::vector<int64_t> CodesShape(const WordsSpec& s, const OpCall&, int64_t) {
  return s.codes;
}
std::vector<int64_t> GroupedShape(const WordsSpec& s, const OpCall&, int64_t) {
  return s.grouped;
}

absl::Status AddWords(OpRegistry& registry) {
  const auto words = OpDType<WordsSpec>::OneOf({DType::kI32});
  return OpDeclaration<WordsPlan, WordsSpec, WordsArgs>(
             "convert_weight_packed_scale_zp")
      .In("weight", &WordsArgs::weight, {}, words)
      .In("qzeros", &WordsArgs::qzeros, {}, words)
      .In("scales", &WordsArgs::scales, {},
          OpDType<WordsSpec>::OneOf({DType::kF32, DType::kBF16, DType::kF16}))
      .Need<int64_t>("quant_method_4bit")
      .Then(&FillWords)
      .Out("out0", &WordsArgs::out0, &CodesShape, DType::kU8)
      .Out("out1", &WordsArgs::out1, &GroupedShape, DType::kI8)
      .Out("out2", &WordsArgs::out2, &GroupedShape, DType::kF32)
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"weight", {64, 4}, DType::kI32},
                {"qzeros", {2, 4}, DType::kI32},
                {"scales", {2, 32}},
                {"quant_method_4bit", int64_t{0}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangPack4Ops(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddScale(registry));
  return AddWords(registry);
}

}  // namespace quern
