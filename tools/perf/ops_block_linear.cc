#include "tools/perf/ops_block_linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/fp8_block_linear.h"
#include "gemm/int4_linear.h"
#include "testing/reference_convert.h"
#include "tools/perf/args.h"
#include "tools/perf/linear_cases.h"
#include "tools/perf/op.h"
#include "tools/perf/op_util.h"

namespace quern {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// Rows that Check compares, all columns of each.
constexpr int64_t kCheckedRows = 16;

AnyTensorView Matrix(DType dtype, void* data, int64_t rows, int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// A weight in double, and the largest magnitude that is summed for it.
struct Weight {
  double value, magnitude;
};

struct Fp8Weights {
  using Plan = Fp8BlockLinearPlan;
  static constexpr char kOp[] = "fp8_block_linear";
  static constexpr char kName[] = "f8e4m3";

  absl::Status Parse(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(spec.block_n, args.Int("block_n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.block_k, args.Int("block_k", 1, 1 << 24));
    return absl::OkStatus();
  }
  int64_t blocks() const { return DivCeil(spec.k, spec.block_k); }
  int64_t scales_count() const {
    return DivCeil(spec.n, spec.block_n) * blocks();
  }
  int64_t bytes() const { return spec.n * spec.k + scales_count() * 4; }
  absl::StatusOr<Plan> Create(Executor& executor) {
    if (codes.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes.Create(1, spec.n * spec.k));
      QUERN_RETURN_IF_ERROR(scales.Create(1, scales_count() * 4));
      FillReals<Float8E4M3>(-4, 4, codes);
      FillReals<float>(0.1, 1, scales);
    }
    return Plan::Create(
        spec, Matrix(DType::kF8E4M3, codes.at(0), spec.n, spec.k),
        Matrix(DType::kF32, scales.at(0), scales_count() / blocks(), blocks()),
        AnyTensorView(), executor);
  }
  Weight At(int64_t n, int64_t k) {
    const double w =
        ToDouble(codes.at<Float8E4M3>(0)[n * spec.k + k]) *
        scales.at<float>(0)[n / spec.block_n * blocks() + k / spec.block_k];
    return {w, std::abs(w)};
  }

  Fp8BlockLinearSpec spec;
  SetBuffer codes, scales;
};

struct Int4Codes {
  using Plan = Int4LinearPlan;
  static constexpr char kOp[] = "int4_linear";
  static constexpr char kName[] = "i4";

  absl::Status Parse(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(spec.group_size, args.Int("group", 16, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(const int64_t with_zeros, args.Int("zeros", 0, 1));
    has_zeros = with_zeros != 0;
    spec.format = Int4Format::kPlain;
    return absl::OkStatus();
  }
  int64_t groups() const { return DivCeil(spec.k, spec.group_size); }
  // As models hold them: scales of 16 bits, zero points of four.
  int64_t bytes() const {
    const int64_t count = groups() * spec.n;
    return spec.n * spec.k / 2 + count * 2 + (has_zeros ? count / 2 : 0);
  }
  absl::StatusOr<Plan> Create(Executor& executor) {
    const int64_t count = groups() * spec.n;
    if (codes.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes.Create(1, spec.n * spec.k));
      QUERN_RETURN_IF_ERROR(zeros.Create(1, count));
      QUERN_RETURN_IF_ERROR(scales.Create(1, count * 2));
      FillReals<Float16>(0.01, 0.1, scales);
      uint64_t state = 1;
      for (SetBuffer* buffer : {&codes, &zeros}) {
        for (int64_t i = 0; i < buffer->bytes(); ++i) {
          state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth
          buffer->at(0)[i] = static_cast<uint8_t>(state >> 60);
        }
      }
    }
    Int4Weights w;
    w.codes = Matrix(DType::kU8, codes.at(0), spec.n, spec.k);
    w.scales = Matrix(DType::kF16, scales.at(0), groups(), spec.n);
    if (has_zeros) w.zeros = Matrix(DType::kU8, zeros.at(0), groups(), spec.n);
    return Plan::Create(spec, w, AnyTensorView(), executor);
  }
  Weight At(int64_t n, int64_t k) {
    const int64_t g = k / spec.group_size * spec.n + n;
    const double s = ToDouble(scales.at<Float16>(0)[g]);
    const int zero = has_zeros ? zeros.at(0)[g] : 8;
    const int code = codes.at(0)[n * spec.k + k];
    return {s * (code - zero), s * (std::abs(code - 8) + std::abs(zero - 8))};
  }

  Int4LinearSpec spec;
  bool has_zeros = false;
  SetBuffer codes, scales, zeros;
};

// Each working set has packed weights of its own.
template <class Weights>
class QuantisedLinear final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = std::make_unique<QuantisedLinear>();
    auto& spec = op->weights_.spec;
    QUERN_ASSIGN_OR_RETURN(spec.a, args.Type("dtype", kTypes));
    QUERN_ASSIGN_OR_RETURN(spec.c, args.Type("out", kTypes));
    QUERN_ASSIGN_OR_RETURN(op->m_, args.Int("m", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec.n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.k, args.Int("k", 1, 1 << 24));
    QUERN_RETURN_IF_ERROR(op->weights_.Parse(args));
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("m=", m_, " n=", n(), " k=", k());
    info.dtype = absl::StrCat(DTypeName(spec().a), "*", Weights::kName, "->",
                              DTypeName(spec().c));
    if (!plans_.empty()) info.isa = plans_.front().target();
    info.SetTraffic(static_cast<double>(weights_.bytes() + a_bytes()),
                    static_cast<double>(c_bytes()));
    info.flops = 2.0 * static_cast<double>(m_) * static_cast<double>(n()) *
                 static_cast<double>(k());
    info.peak_kind = PeakKindOf(spec().a);
    return info;
  }

  int64_t set_bytes() const override {
    return weights_.bytes() + a_bytes() + c_bytes();
  }

  // Each has a plan, whose weights are packed one by one.
  int64_t max_sets() const override { return 4096; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(a_.Create(sets, a_bytes()));
    QUERN_RETURN_IF_ERROR(c_.Create(sets, c_bytes()));
    WithType(spec().a,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, a_); });
    for (int64_t set = 0; set < sets; ++set) {
      QUERN_ASSIGN_OR_RETURN(auto plan, weights_.Create(executor));
      plans_.push_back(std::move(plan));
      QUERN_RETURN_IF_ERROR(plans_.back().CheckArgs(A(set), C(set)));
    }
    QUERN_ASSIGN_OR_RETURN(memory_,
                           AlignedBuffer::Create(plans_.front().WorkspaceBytes(
                               m_, executor.num_workers())));
    return absl::OkStatus();
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(A(set), C(set), Workspace(memory_),
                                             executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    return WithType(spec().a, [&](auto in) {
      return WithType(spec().c, [&](auto out) {
        return Compare<decltype(in), decltype(out)>(executor);
      });
    });
  }

 private:
  const auto& spec() const { return weights_.spec; }
  int64_t n() const { return spec().n; }
  int64_t k() const { return spec().k; }
  int64_t a_bytes() const {
    return m_ * k() * static_cast<int64_t>(SizeOf(spec().a));
  }
  int64_t c_bytes() const {
    return m_ * n() * static_cast<int64_t>(SizeOf(spec().c));
  }
  AnyTensorView A(int64_t set) { return Matrix(spec().a, a_.at(set), m_, k()); }
  AnyTensorView C(int64_t set) { return Matrix(spec().c, c_.at(set), m_, n()); }

  // Rows spread evenly, the last among them, against every column. Each sum is
  // of k rounded products, and of three roundings for each of k / 16 blocks at
  // most, none of more than a unit of the sum of magnitudes.
  template <typename In, typename Out>
  absl::StatusOr<double> Compare(Executor& executor) {
    const int64_t rows = std::min(m_, kCheckedRows);
    const double units = 1.25 * static_cast<double>(k()) + 6;
    Verdict all;
    executor.ParallelFor(n(), [&](int64_t col, int) {
      std::vector<Weight> w;
      for (int64_t i = 0; i < k(); ++i) w.push_back(weights_.At(col, i));
      Verdict mine;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (r + 1) * m_ / rows - 1;
        const In* a = a_.at<In>(0) + row * k();
        double sum = 0, magnitude = 0;
        for (size_t i = 0; i < w.size(); ++i) {
          sum += ToDouble(a[i]) * w[i].value;
          magnitude += std::abs(ToDouble(a[i])) * w[i].magnitude;
        }
        const double bound = magnitude * units * 0x1p-23 +
                             std::abs(sum) * RelativeRoundoff(spec().c);
        const int64_t at = row * n() + col;
        mine.Add(at, ToDouble(c_.at<Out>(0)[at]), sum, bound);
      }
      all.Merge(mine);
    });
    return all.Result(Weights::kOp);
  }

  Weights weights_;
  int64_t m_ = 0;
  SetBuffer a_, c_;
  std::vector<typename Weights::Plan> plans_;
  AlignedBuffer memory_;
};

// Those of the linear operators without impl: there is one.
std::vector<Key> Keys(const std::vector<Key>& of_op) {
  std::vector<Key> keys =
      LinearKeys({{"dtype", "bf16", "f32, bf16 or f16, of a"},
                  {"out", "bf16", "f32, bf16 or f16, of c"}});
  keys.erase(keys.begin());
  keys.insert(keys.end(), of_op.begin(), of_op.end());
  return keys;
}

}  // namespace

std::vector<OpEntry> BlockLinearOps() {
  return {
      {Fp8Weights::kOp,
       "c[m, n] = sum over k of a[m, k] * scale[n / 128, k / 128] * w[n, k]",
       Keys({{"block_n", "128", "columns of a scale"},
             {"block_k", "128", "k of a scale, a multiple of 16"}}),
       &QuantisedLinear<Fp8Weights>::Create, &LinearCases},
      {Int4Codes::kOp,
       "c[m, n] = sum over k of a[m, k] * scale[k / group, n] * (q[n, k] - "
       "zero[k / group, n])",
       Keys({{"group", "128", "k of a scale, a multiple of 16"},
             {"zeros", "0", "1: with zero points; 0: they are 8"}}),
       &QuantisedLinear<Int4Codes>::Create, &LinearCases}};
}

}  // namespace quern
