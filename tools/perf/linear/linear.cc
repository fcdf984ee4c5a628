#include "quern/tools/perf/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/linear_cases.h"
#include "quern/tools/perf/linear/linear_inputs.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

// Rows that Check compares, all columns of each.
constexpr int64_t kCheckedRows = 16;
constexpr double kUnit = 0x1p-24;

AnyTensorView Matrix(DType dtype, void* data, int64_t rows, int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// A result in double, and how far that of the kernels may be from it.
struct Bounded {
  double value, error;
};

// gemm/epilogue.h, whose bounds these are. No slope exceeds 1.13, and the
// bounds grow with |x|, so they hold at x + error, too.
Bounded Activated(LinearActivation activation, Bounded x) {
  const double far = std::abs(x.value) + x.error;
  const auto inner = [](double v) {
    return 2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
  };
  double value = 0, units = 0;
  switch (activation) {
    case LinearActivation::kNone:
      return x;
    case LinearActivation::kSilu:
    case LinearActivation::kSiluAndMul:
      value = ReferenceSilu(x.value);
      units = 10;
      break;
    case LinearActivation::kGelu:
    case LinearActivation::kGeluAndMul:
      value = ReferenceGelu(x.value);
      units = 16 + std::min(far * far / 2, 110.0);
      break;
    case LinearActivation::kSwigluOaiAndMul:
      value = ReferenceQuickGelu(std::min(x.value, 7.0));
      units = 12 + 1.3 * std::min(1.702 * far, 128.0);
      break;
    default:
      // ReferenceGeluTanh cancels where x is far below zero.
      value = x.value / (1 + std::exp(-inner(x.value)));
      units = 10 + 4 * std::min(inner(far), 110.0);
  }
  const double slope = 1.13 * x.error;
  return {value,
          slope + (std::abs(value) + slope) * units * kUnit + 140 * 0x1p-149};
}

Bounded Product(Bounded a, Bounded b) {
  const double value = a.value * b.value;
  const double error = std::abs(a.value) * b.error +
                       std::abs(b.value) * a.error + a.error * b.error;
  return {value, error + (std::abs(value) + error) * kUnit};
}

// x + residual in f32, rounded once to c.
Bounded Rounded(Bounded x, double residual, DType c) {
  const double value = x.value + residual;
  const double units = RelativeRoundoff(c) + (residual == 0 ? 0 : kUnit);
  // Half of the smallest number, which bounds it where the relative one fails.
  const double smallest = c == DType::kF16 ? 0x1p-25 : 0x1p-134;
  return {value, x.error + (std::abs(value) + x.error) * units + smallest};
}

// Each working set has packed weights of its own.
class Linear final : public Op {
 public:
  template <LinearInputOr (*kInput)(const Args&, const MatrixShape&)>
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = std::make_unique<Linear>();
    QUERN_ASSIGN_OR_RETURN(const MatrixShape shape, MatrixShapeOf(args));
    QUERN_ASSIGN_OR_RETURN(op->input_, kInput(args, shape));
    QUERN_RETURN_IF_ERROR(op->Parse(args));
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("m=", m_, " n=", n(), " k=", k());
    if (is_w8a8()) {
      absl::StrAppend(&info.shape, per_token() ? " token" : " tensor",
                      spec_.zero_points == Int8ZeroPoint::kUsed ? " azp" : "");
    }
    if (spec_.activation != LinearActivation::kNone) {
      absl::StrAppend(&info.shape, " ", LinearActivationName(spec_.activation));
    }
    if (has_residual_) absl::StrAppend(&info.shape, " residual");
    info.dtype =
        absl::StrCat(DTypeName(spec_.a), input_->arrow(), DTypeName(spec_.c));
    if (!plans_.empty()) info.isa = LinearIsa(plans_.front().Explain(m_));
    info.SetTraffic(static_cast<double>(set_bytes() - c_bytes()),
                    static_cast<double>(c_bytes()));
    info.flops = 2.0 * static_cast<double>(m_) * static_cast<double>(n()) *
                 static_cast<double>(k());
    info.peak_kind = !input_->multiplies_int8()  ? PeakKindOf(spec_.a)
                     : input_->has_small_codes() ? PeakKind::kI6
                                                 : PeakKind::kI8;
    return info;
  }

  int64_t set_bytes() const override {
    return input_->bytes() + a_bytes() + (has_residual_ ? 2 : 1) * c_bytes();
  }

  // Each has a plan, whose weights are packed one by one.
  int64_t max_sets() const override { return 4096; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(a_.Create(sets, a_bytes()));
    QUERN_RETURN_IF_ERROR(c_.Create(sets, c_bytes()));
    const double a_max = is_w8a8() ? 2 : 1;
    WithType(spec_.a,
             [&](auto type) { FillReals<decltype(type)>(-a_max, a_max, a_); });
    if (has_residual_) {
      QUERN_RETURN_IF_ERROR(residual_.Create(sets, c_bytes()));
      WithType(spec_.c, [this](auto type) {
        FillReals<decltype(type)>(-1, 1, residual_);
      });
    }
    QUERN_ASSIGN_OR_RETURN(const LinearSource source, input_->Source());
    for (int64_t set = 0; set < sets; ++set) {
      QUERN_ASSIGN_OR_RETURN(
          const LinearWeights weights,
          LinearWeights::Pack(input_->spec(), {source}, executor));
      QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                             LinearPlan::Create(spec_, weights, executor));
      plans_.push_back(std::move(plan));
      QUERN_RETURN_IF_ERROR(plans_.back().CheckArgs(ArgsOf(set)));
      if (set == 0) {
        QUERN_ASSIGN_OR_RETURN(
            const int64_t bytes,
            plans_.front().WorkspaceBytes(m_, executor.num_workers()));
        QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
      }
      Run(set, executor);  // oneDNN generates code
    }
    return absl::OkStatus();
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(ArgsOf(set), Workspace(memory_),
                                             executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    QUERN_ASSIGN_OR_RETURN(const std::vector<CheckedRow> rows,
                           RowsToCheck(executor));
    return WithType(spec_.c, [&](auto out) {
      return Compare<decltype(out)>(rows, executor);
    });
  }

 private:
  absl::Status Parse(const Args& args) {
    name_ = std::string(args.op());
    spec_.kernels = args.Text("kernels");
    QUERN_ASSIGN_OR_RETURN(spec_.a, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(spec_.c, args.Type("out", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(spec_.activation, LinearActivationOf(args));
    QUERN_ASSIGN_OR_RETURN(has_residual_, args.Flag("residual"));
    spec_.residual = has_residual_;
    QUERN_ASSIGN_OR_RETURN(m_, args.Int("m", 1, 1 << 20));
    if (IsGated(spec_.activation) && n() % 2 != 0) {
      return InvalidArgument(name_, "n=", n(), " with --activation=",
                             LinearActivationName(spec_.activation),
                             "; need an even n, of gate and up");
    }
    spec_.activations = input_->activations();
    if (!is_w8a8()) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(const std::string act,
                           args.Choice("act", {"token", "tensor"}));
    QUERN_ASSIGN_OR_RETURN(const bool azp, args.Flag("azp"));
    if (azp) spec_.zero_points = Int8ZeroPoint::kUsed;
    if (act == "tensor") {
      spec_.granularity = Int8Granularity::kPerTensor;
      spec_.a_scale = 1.0f / 64;  // of values in [-2, 2)
      spec_.a_zero_point = azp ? 3 : 0;
    }
    return absl::OkStatus();
  }

  bool is_w8a8() const {
    return input_->spec().format == WeightFormat::kI8Channel;
  }
  bool per_token() const {
    return spec_.granularity == Int8Granularity::kPerToken;
  }
  int64_t n() const { return input_->spec().n; }
  int64_t k() const { return input_->spec().k; }
  int64_t c_columns() const { return ColumnsOfC(spec_.activation, n()); }
  int64_t a_bytes() const {
    return m_ * k() * static_cast<int64_t>(SizeOf(spec_.a));
  }
  int64_t c_bytes() const {
    return m_ * c_columns() * static_cast<int64_t>(SizeOf(spec_.c));
  }
  LinearArgs ArgsOf(int64_t set) {
    LinearArgs args;
    args.a = Matrix(spec_.a, a_.at(set), m_, k());
    args.c = Matrix(spec_.c, c_.at(set), m_, c_columns());
    if (has_residual_) {
      args.residual = Matrix(spec_.c, residual_.at(set), m_, c_columns());
    }
    return args;
  }

  // A row of a in double. W8A8 multiplies what the quantiser makes of it.
  struct CheckedRow {
    int64_t index;
    std::vector<double> a;
  };

  // Rows spread evenly, the last among them.
  absl::StatusOr<std::vector<CheckedRow>> RowsToCheck(Executor& executor) {
    const int64_t count = std::min(m_, kCheckedRows);
    std::optional<Int8QuantizePlan> quantizer;
    std::vector<int8_t> q(static_cast<size_t>(k()));
    if (is_w8a8()) {
      Int8QuantizeSpec spec;
      spec.dtype = spec_.a;
      spec.granularity = spec_.granularity;
      spec.zero_points = spec_.zero_points;
      spec.scale = spec_.a_scale;
      spec.zero_point = spec_.a_zero_point;
      QUERN_ASSIGN_OR_RETURN(quantizer, Int8QuantizePlan::Create(spec));
    }
    std::vector<CheckedRow> rows;
    for (int64_t r = 0; r < count; ++r) {
      CheckedRow row = {(r + 1) * m_ / count - 1, {}};
      const int64_t first = row.index * k();
      WithType(spec_.a, [&](auto type) {
        using T = decltype(type);
        T* a = a_.at<T>(0) + first;
        for (int64_t i = 0; i < k(); ++i) row.a.push_back(ToDouble(a[i]));
        if (!quantizer.has_value()) return;
        float scale = spec_.a_scale;  // its codes are checked by `quantize`
        int32_t zero = spec_.a_zero_point;
        const bool zeros = spec_.zero_points == Int8ZeroPoint::kUsed;
        quantizer->Execute(
            DenseMatrix(a, 1, k()), DenseMatrix(q.data(), 1, k()),
            DenseVector(&scale, per_token() ? 1 : 0),
            DenseVector(&zero, per_token() && zeros ? 1 : 0), executor);
        for (size_t i = 0; i < q.size(); ++i) {
          row.a[i] = double{scale} * (q[i] - zero);
        }
      });
      input_->RoundRow(row.a);
      rows.push_back(std::move(row));
    }
    return rows;
  }

  // Column `col` of the layer before its epilogue.
  std::vector<Bounded> Sums(int64_t col, const std::vector<CheckedRow>& rows) {
    std::vector<LinearInput::Weight> w;
    for (int64_t i = 0; i < k(); ++i) w.push_back(input_->At(col, i));
    std::vector<Bounded> sums;
    for (const CheckedRow& row : rows) {
      double sum = 0, magnitude = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        sum += row.a[i] * w[i].value;
        magnitude += std::abs(row.a[i]) * w[i].magnitude;
      }
      // Sums of integers are exact.
      if (is_w8a8()) magnitude = std::abs(sum);
      sums.push_back({sum, magnitude * input_->relative_error()});
    }
    return sums;
  }

  template <typename Out>
  absl::StatusOr<double> Compare(const std::vector<CheckedRow>& rows,
                                 Executor& executor) {
    Verdict all;
    executor.ParallelFor(c_columns(), [&](int64_t col, int) {
      const std::vector<Bounded> gate = Sums(col, rows);
      std::vector<Bounded> up;
      if (IsGated(spec_.activation)) up = Sums(c_columns() + col, rows);
      if (spec_.activation == LinearActivation::kSwigluOaiAndMul) {
        for (Bounded& u : up) {
          u.value = std::clamp(u.value, -7.0, 7.0) + 1;
          u.error += 8 * kUnit;
        }
      }
      Verdict mine;
      for (size_t r = 0; r < rows.size(); ++r) {
        Bounded want = Activated(spec_.activation, gate[r]);
        if (!up.empty()) want = Product(want, up[r]);
        const int64_t at = rows[r].index * c_columns() + col;
        const double residual =
            has_residual_ ? ToDouble(residual_.at<Out>(0)[at]) : 0.0;
        want = Rounded(want, residual, spec_.c);
        mine.Add(at, ToDouble(c_.at<Out>(0)[at]), want.value, want.error);
      }
      all.Merge(mine);
    });
    return all.Result(name_);
  }

  std::string name_;
  std::unique_ptr<LinearInput> input_;
  LinearSpec spec_;
  int64_t m_ = 0;
  bool has_residual_ = false;
  SetBuffer a_, residual_, c_;
  std::vector<LinearPlan> plans_;
  AlignedBuffer memory_;
};

// A layer on weights that kInput makes; `of_op` are the keys of its own.
template <LinearInputOr (*kInput)(const Args&, const MatrixShape&)>
OpEntry Entry(absl::string_view name, absl::string_view summary,
              absl::string_view dtype_help, const std::vector<Key>& of_op) {
  std::vector<Key> keys =
      LinearKeys({{"dtype", "bf16", dtype_help},
                  {"out", "bf16", "f32, bf16 or f16, of c"}});
  keys.insert(keys.end(), of_op.begin(), of_op.end());
  return {name, summary, keys, &Linear::Create<kInput>, &LinearCases};
}

constexpr char kOfA[] = "f32, bf16 or f16, of a";

}  // namespace

std::vector<OpEntry> LinearOps() {
  return {
      Entry<&FloatOrBlockInput>(
          "linear", "c[m, n] = sum over k of a[m, k] * weights[n, k]",
          "f32, bf16 or f16, of a and weights",
          {{"weights", "", "a block format of GGUF files: q4_k, mxfp4, ..."},
           {"activations", "int8",
            "with block formats: int8 in blocks, or exact"}}),
      Entry<&Int8ChannelInput>(
          "scaled_linear",
          "W8A8: c = round(s[m] * w_s[n] * sum over k of q(a)[m, k] * w[n, k])",
          kOfA,
          {{"act", "token", "scales of a: token or tensor"},
           {"azp", "0", "1: a has zero points"}}),
      Entry<&Fp8BlockInput>(
          "fp8_block_linear",
          "c[m, n] = sum over k of a[m, k] * scale[n / 128, k / 128] * w[n, k]",
          kOfA,
          {{"block_n", "128", "columns of a scale"},
           {"block_k", "128", "k of a scale, a multiple of 16"}}),
      Entry<&Int4LinearInput>(
          "int4_linear",
          "c[m, n] = sum over k of a[m, k] * scale[k / group, n] * (q[n, k] - "
          "zero[k / group, n])",
          kOfA,
          {{"group", "128", "k of a scale, a multiple of 16"},
           {"zeros", "0", "1: with zero points; 0: they are 8"},
           {"activations", "exact", "exact, or int8 in blocks of 32 k"}}),
      Entry<&Int8GroupInput>(
          "int8_group_linear",
          "GGUF's Q8_0: c[m, n] = sum over k of a[m, k] * scale[n, k / 32] * "
          "q[n, k]",
          kOfA, {}),
  };
}

}  // namespace quern
