#include "quern/tools/perf/linear/grouped_linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/linear_inputs.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

// Rows of each group that Check compares.
constexpr int64_t kCheckedRows = 4;

// Every group has the same values, in memory of its own, and c is f32. Each
// working set has all groups.
class GroupedLinear final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new GroupedLinear);
    QUERN_ASSIGN_OR_RETURN(op->groups_, args.Int("groups", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(op->rows_, args.Ints("rows", 0, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(op->dtype_, args.Type("dtype", kFloatDTypes));
    MatrixShape shape = {};
    QUERN_ASSIGN_OR_RETURN(shape.n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(shape.k, args.Int("k", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(op->input_, FloatInput(args, shape));
    op->offsets_ = {0};
    int64_t rows = 0;
    for (int64_t g = 0; g < op->groups_; ++g) {
      rows += op->RowsOf(g);
      QUERN_RETURN_IF_ERROR(CheckRange(args.op(), "rows of all groups", rows, 0,
                                       GroupedLinearPlan::kMaxRows));
      op->offsets_.push_back(static_cast<int32_t>(rows));
    }
    if (op->rows() == 0) {
      return InvalidArgument(args.op(), "rows is 0 for every group; need one");
    }
    return std::unique_ptr<Op>(std::move(op));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("groups=", groups_, " rows=", rows(), " n=", n(),
                              " k=", k());
    info.dtype = absl::StrCat(DTypeName(dtype_), input_->arrow(), "f32");
    if (!plans_.empty()) info.isa = plans_[0].target();
    info.SetTraffic(static_cast<double>(weight_bytes() + a_bytes()),
                    static_cast<double>(c_bytes()));
    info.flops = 2.0 * static_cast<double>(rows()) * static_cast<double>(n()) *
                 static_cast<double>(k());
    info.peak_kind = PeakKindOf(dtype_);
    return info;
  }

  int64_t set_bytes() const override {
    return weight_bytes() + a_bytes() + c_bytes();
  }
  int64_t max_sets() const override { return 64; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(a_.Create(sets, a_bytes()));
    QUERN_RETURN_IF_ERROR(c_.Create(sets, c_bytes()));
    WithType(dtype_,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, a_); });
    QUERN_ASSIGN_OR_RETURN(const LinearSource source, input_->Source());
    GroupedLinearSpec spec;
    spec.a = dtype_;
    spec.c = DType::kF32;
    for (int64_t set = 0; set < sets; ++set) {
      std::vector<LinearWeights> weights;
      for (int64_t g = 0; g < groups_; ++g) {
        QUERN_ASSIGN_OR_RETURN(
            const LinearWeights packed,
            LinearWeights::Pack(input_->spec(), {source}, executor));
        weights.push_back(packed);
      }
      QUERN_ASSIGN_OR_RETURN(GroupedLinearPlan plan,
                             GroupedLinearPlan::Create(spec, weights));
      plans_.push_back(std::move(plan));
    }
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plans_[0].WorkspaceBytes(rows(), executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
    return plans_[0].CheckArgs(ArgsOf(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(ArgsOf(set), Workspace(memory_),
                                             executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    std::vector<int64_t> checked;
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t count = std::min(RowsOf(g), kCheckedRows);
      for (int64_t i = 0; i < count; ++i) {
        checked.push_back(offsets_[static_cast<size_t>(g)] +
                          (i + 1) * RowsOf(g) / count - 1);
      }
    }
    Verdict all;
    executor.ParallelFor(n(), [&](int64_t col, int) {
      Verdict mine;
      for (const int64_t row : checked) {
        const auto a = Doubles(dtype_, a_, row * k(), k());
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < k(); ++i) {
          const LinearInput::Weight w = input_->At(col, i);
          sum += a[static_cast<size_t>(i)] * w.value;
          magnitude += std::abs(a[static_cast<size_t>(i)]) * w.magnitude;
        }
        mine.Add(
            row * n() + col, double{c_.at<float>(0)[row * n() + col]}, sum,
            magnitude * input_->relative_error() + std::abs(sum) * 0x1p-24);
      }
      all.Merge(mine);
    });
    return all.Result("grouped_linear");
  }

 private:
  // The list of --rows, over and over.
  int64_t RowsOf(int64_t group) const {
    return rows_[static_cast<size_t>(group) % rows_.size()];
  }
  int64_t rows() const { return offsets_.back(); }
  int64_t n() const { return input_->spec().n; }
  int64_t k() const { return input_->spec().k; }
  // Counts the groups that have rows.
  int64_t weight_bytes() const {
    int64_t bytes = 0;
    for (int64_t g = 0; g < groups_; ++g) {
      if (RowsOf(g) > 0) bytes += input_->bytes();
    }
    return bytes;
  }
  int64_t a_bytes() const {
    return rows() * k() * static_cast<int64_t>(SizeOf(dtype_));
  }
  int64_t c_bytes() const { return rows() * n() * 4; }

  GroupedLinearArgs ArgsOf(int64_t set) {
    GroupedLinearArgs args;
    args.a = Matrix(dtype_, a_.at(set), rows(), k());
    args.c = Matrix(DType::kF32, c_.at(set), rows(), n());
    args.offsets = DenseVector<const int32_t>(offsets_.data(), groups_ + 1);
    return args;
  }

  int64_t groups_ = 0;
  std::vector<int64_t> rows_;
  std::vector<int32_t> offsets_;
  DType dtype_ = DType::kBF16;
  std::unique_ptr<LinearInput> input_;
  std::vector<GroupedLinearPlan> plans_;
  SetBuffer a_, c_;
  AlignedBuffer memory_;
};

}  // namespace

OpEntry GroupedLinearOp() {
  return {"grouped_linear",
          "linear layers of one shape, each on rows of its own",
          {{"groups", "32", "layers"},
           {"rows", "8", "rows of each group, or a list of them to repeat"},
           {"n", "2816", "columns of c"},
           {"k", "2048", "columns of a"},
           {"dtype", "bf16", "f32, bf16 or f16, of a and weights"}},
          &GroupedLinear::Create};
}

}  // namespace quern
