#include "gemm/onednn/linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/onednn/status.h"
#include "hwy/base.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_threadpool.hpp"

namespace quern {
namespace {

using Desc = dnnl::memory::desc;

constexpr char kOp[] = "onednn_linear";
constexpr size_t kMaxKernels = 64;
constexpr auto kAlign = static_cast<int64_t>(AlignedBuffer::kAlignment);

// Types as oneDNN sees them, which may be wider than the spec's.
struct Types {
  DType a;
  DType b;
  DType c;
};

int64_t SizeInBytes(DType dtype) { return static_cast<int64_t>(SizeOf(dtype)); }

dnnl::memory::data_type ToOneDnn(DType dtype) {
  return dtype == DType::kBF16 ? dnnl::memory::data_type::bf16
                               : dnnl::memory::data_type::f32;
}

const dnnl::engine& Engine() {
  // Never destroyed: plans may outlive the statics of this file.
  static const auto* const engine =
      new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

// While it lives, primitives created on this thread are for one thread. Their
// division of the sums over k then depends on no machine's core count.
class ForOneThread {
 public:
  ForOneThread() {
    dnnl_threadpool_interop_get_max_concurrency(&before_);
    dnnl_threadpool_interop_set_max_concurrency(1);
  }
  ~ForOneThread() { dnnl_threadpool_interop_set_max_concurrency(before_); }
  ForOneThread(const ForOneThread&) = delete;
  ForOneThread& operator=(const ForOneThread&) = delete;

 private:
  int before_ = 1;
};

// What oneDNN generates code for.
struct Problem {
  int64_t rows;
  int64_t cols;
  int64_t k;
  int64_t lda;
  int64_t ldc;

  bool operator==(const Problem& o) const {
    return rows == o.rows && cols == o.cols && k == o.k && lda == o.lda &&
           ldc == o.ldc;
  }
};

// Throws dnnl::error. `weights` may be of format any.
dnnl::matmul::primitive_desc MakePrimitiveDesc(const Problem& p,
                                               const Types& types,
                                               const Desc& weights, bool bias) {
  const ForOneThread one_thread;
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_deterministic(true);
  const Desc a({p.rows, p.k}, ToOneDnn(types.a), dnnl::memory::dims{p.lda, 1});
  const Desc c({p.rows, p.cols}, ToOneDnn(types.c),
               dnnl::memory::dims{p.ldc, 1});
  if (!bias) return {Engine(), a, weights, c, attr};
  const Desc bias_desc({1, p.cols}, dnnl::memory::data_type::f32,
                       dnnl::memory::format_tag::ab);
  return {Engine(), a, weights, bias_desc, c, attr};
}

struct Kernel {
  dnnl::matmul primitive;
  Desc a, b, c, bias, scratch;
};

// oneDNN takes a single row for a column, too, and then divides k otherwise:
// the row would get other bits than in a batch. It runs as two equal ones;
// weights are what a row waits for, not arithmetic.
int64_t RowsToRun(int64_t rows) { return std::max<int64_t>(rows, 2); }

// Wide enough that a primitive's overhead (a microsecond) does not show, narrow
// enough for 16 threads to share one row. A function of n alone, never of the
// threads at hand.
int64_t ColsPerTask(int64_t n) {
  return std::min(n, std::clamp<int64_t>(RoundUp(DivCeil(n, 16), 64), 64,
                                         OneDnnLinearPlan::kMaxCols));
}

absl::Status CheckFloat(const char* field, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kBF16) return absl::OkStatus();
  return InvalidArgument(kOp, field, " is ", DTypeName(dtype),
                         "; need bf16 or f32");
}

// `field` is a matrix of `cols` columns with a stride that oneDNN can hold.
absl::Status CheckMatrix(const std::string& field, const AnyTensorView& view,
                         int64_t cols) {
  if (view.rank() != 2) {
    return InvalidArgument(kOp, field, " has rank ", view.rank(), "; need 2");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat(field, ".extent(1)"),
                                   view.extent(1), cols, "the spec has it"));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, absl::StrCat(field, ".extent(0)"), view.extent(0), 0));
  // The stride of a single row is never used.
  if (view.extent(0) > 1) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, absl::StrCat(field, ".stride(0)"),
                                     view.stride(0), cols,
                                     OneDnnLinearPlan::kMaxExtent));
  }
  if (view.data() == nullptr && view.extent(0) > 0) {
    return InvalidArgument(kOp, field, " has no data");
  }
  return absl::OkStatus();
}

const void* RowOf(const AnyTensorView& view, int64_t row) {
  return static_cast<const uint8_t*>(view.data()) +
         row * view.stride(0) * SizeInBytes(view.dtype());
}

void Widen(const BFloat16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = hwy::F32FromBF16(from[i]);
}

void Narrow(const float* from, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = hwy::BF16FromF32(from[i]);
}

[[noreturn]] void Fail(const absl::Status& status) {
  CheckFailed(std::string(status.message()).c_str(), __FILE__, __LINE__);
}

}  // namespace

struct OneDnnLinearPlan::State {
  OneDnnLinearSpec spec;
  Types types;
  bool has_bias = false;
  int64_t cols = 0;        // of each column task but the last
  int64_t num_tasks = 0;   // column tasks
  int64_t task_bytes = 0;  // from one's packed weights to the next's
  Desc packed[2];          // of each column task but the last; of the last
  AlignedBuffer weights;
  AlignedBuffer bias;

  // Newest first.
  mutable std::mutex mutex;
  mutable std::list<std::pair<Problem, std::shared_ptr<const Kernel>>> kernels;

  bool widens_a() const { return types.a != spec.a; }
  bool narrows_c() const { return types.c != spec.c; }
  // Whether c goes through scratch. oneDNN 3.7.2 writes a c of one column as if
  // its stride were 1 (2026).
  bool Stages(int64_t rows, int64_t width) const {
    return narrows_c() || rows == 1 || width == 1;
  }
  int64_t ColsOf(int64_t task) const {
    return std::min(cols, spec.n - task * cols);
  }
  const Desc& PackedOf(int64_t task) const {
    return packed[task + 1 == num_tasks];
  }

  absl::Status ChooseTypes(DType weights_dtype);
  absl::Status Try(const Types& candidate, bool any_kernel);
  absl::Status Pack(const AnyTensorView& from, Executor& executor);
  std::shared_ptr<const Kernel> Find(const Problem& problem,
                                     int64_t task) const;
};

// Leaves `types` and `packed` for `candidate`, or refuses.
absl::Status OneDnnLinearPlan::State::Try(const Types& candidate,
                                          bool any_kernel) {
  std::string name;
  QUERN_RETURN_IF_ERROR(CatchOneDnn(kOp, [&] {
    for (const int64_t task : {int64_t{0}, num_tasks - 1}) {
      const int64_t width = ColsOf(task);
      Desc weights_desc({spec.k, width}, ToOneDnn(candidate.b),
                        dnnl::memory::format_tag::any);
      // The largest block chooses the layout; smaller ones must take it.
      for (const int64_t rows : {kMaxRows, int64_t{16}, RowsToRun(1)}) {
        const auto pd = MakePrimitiveDesc({rows, width, spec.k, spec.k, spec.n},
                                          candidate, weights_desc, has_bias);
        weights_desc = pd.weights_desc();
        if (absl::StartsWith(pd.impl_info_str(), "ref")) {
          name = pd.impl_info_str();
        }
      }
      packed[task + 1 == num_tasks] = weights_desc;
    }
  }));
  if (!name.empty() && !any_kernel) {
    return Unimplemented(kOp, "only oneDNN's reference kernel ", name);
  }
  types = candidate;
  return absl::OkStatus();
}

absl::Status OneDnnLinearPlan::State::ChooseTypes(DType weights_dtype) {
  // f32 by bf16 is not asked for, though oneDNN 3.7.2 has it: with packed
  // weights and k > 1024 its answers are wrong (avx512_core, Zen 5, 2026).
  constexpr DType kWide = DType::kF32;
  const bool narrow = spec.a == DType::kBF16 && weights_dtype == DType::kBF16;
  absl::Status status;
  for (const DType operand : {DType::kBF16, kWide}) {
    if (operand == DType::kBF16 && !narrow) continue;
    for (const DType c : {spec.c, kWide}) {
      const bool last = operand == kWide && c == kWide;
      status = Try({operand, operand, c}, last);
      if (status.ok() || !absl::IsUnimplemented(status)) return status;
    }
  }
  return status;
}

absl::Status OneDnnLinearPlan::State::Pack(const AnyTensorView& from,
                                           Executor& executor) {
  task_bytes = 0;
  for (const Desc& desc : packed) {
    if (!desc) continue;
    task_bytes = std::max(
        task_bytes, RoundUp(static_cast<int64_t>(desc.get_size()), kAlign));
  }
  int64_t bytes = 0;
  if (!CheckedMul(task_bytes, num_tasks, &bytes)) {
    return InvalidArgument(kOp, "n=", spec.n, ", k=", spec.k,
                           "; the packed weights have more than 2^63 bytes");
  }
  QUERN_ASSIGN_OR_RETURN(weights, AlignedBuffer::Create(bytes));

  const bool by_rows = spec.weight_order == OneDnnLinearSpec::WeightOrder::kNK;
  const int64_t stride = from.stride(0);
  const dnnl::memory::dims strides =
      by_rows ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  std::mutex status_mutex;
  absl::Status status;
  executor.ParallelFor(num_tasks, [&](int64_t task, int) {
    const absl::Status task_status = CatchOneDnn(kOp, [&] {
      const ForOneThread one_thread;
      const int64_t first =
          task * cols * (by_rows ? stride : 1) * SizeInBytes(from.dtype());
      const Desc from_desc({spec.k, ColsOf(task)}, ToOneDnn(from.dtype()),
                           strides);
      // oneDNN takes pointers to what it only reads as mutable ones.
      dnnl::memory plain(from_desc, Engine(),
                         const_cast<uint8_t*>(
                             static_cast<const uint8_t*>(from.data()) + first));
      dnnl::memory result(PackedOf(task), Engine(),
                          weights.data() + task * task_bytes);
      dnnl::stream stream(Engine());
      dnnl::reorder(plain, result).execute(stream, plain, result);
    });
    if (task_status.ok()) return;
    const std::lock_guard<std::mutex> lock(status_mutex);
    status.Update(task_status);
  });
  return status;
}

std::shared_ptr<const Kernel> OneDnnLinearPlan::State::Find(
    const Problem& problem, int64_t task) const {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found =
      std::find_if(kernels.begin(), kernels.end(),
                   [&](const auto& entry) { return entry.first == problem; });
  if (found != kernels.end()) {
    kernels.splice(kernels.begin(), kernels, found);
    return found->second;
  }
  const auto pd = MakePrimitiveDesc(problem, types, PackedOf(task), has_bias);
  const ForOneThread one_thread;
  auto kernel = std::make_shared<const Kernel>(
      Kernel{dnnl::matmul(pd), pd.src_desc(), pd.weights_desc(), pd.dst_desc(),
             has_bias ? pd.bias_desc() : Desc(), pd.scratchpad_desc()});
  if (kernels.size() == kMaxKernels) kernels.pop_back();
  kernels.emplace_front(problem, kernel);
  return kernel;
}

absl::StatusOr<OneDnnLinearPlan> OneDnnLinearPlan::Create(
    const OneDnnLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "k", spec.k, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckFloat("a", spec.a));
  QUERN_RETURN_IF_ERROR(CheckFloat("c", spec.c));
  QUERN_RETURN_IF_ERROR(CheckFloat("weights", weights.dtype()));
  const bool by_rows = spec.weight_order == OneDnnLinearSpec::WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(
      CheckMatrix("weights", weights, by_rows ? spec.k : spec.n));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "weights.extent(0)", weights.extent(0),
                                   by_rows ? spec.n : spec.k,
                                   "the spec has it"));

  auto state = std::make_unique<State>();
  state->spec = spec;
  state->cols = ColsPerTask(spec.n);
  state->num_tasks = DivCeil(spec.n, state->cols);
  state->has_bias = bias.rank() != 0;
  if (state->has_bias) {
    if (bias.rank() != 1) {
      return InvalidArgument(kOp, "bias has rank ", bias.rank(),
                             "; need 1, or 0 for none");
    }
    QUERN_RETURN_IF_ERROR(CheckDType(kOp, "bias", bias.dtype(), DType::kF32));
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "bias.extent(0)", bias.extent(0),
                                     spec.n, "the spec has n"));
    if (bias.data() == nullptr) {
      return InvalidArgument(kOp, "bias has no data");
    }
    QUERN_ASSIGN_OR_RETURN(
        state->bias,
        AlignedBuffer::Create(spec.n * static_cast<int64_t>(sizeof(float))));
    std::memcpy(state->bias.data(), bias.data(), state->bias.bytes());
  }
  QUERN_RETURN_IF_ERROR(state->ChooseTypes(weights.dtype()));
  QUERN_RETURN_IF_ERROR(state->Pack(weights, executor));
  return OneDnnLinearPlan(std::move(state));
}

absl::Status OneDnnLinearPlan::CheckArgs(const AnyTensorView& a,
                                         const AnyTensorView& c) const {
  const OneDnnLinearSpec& spec = state_->spec;
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "a", a.dtype(), spec.a));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "c", c.dtype(), spec.c));
  QUERN_RETURN_IF_ERROR(CheckMatrix("a", a, spec.k));
  QUERN_RETURN_IF_ERROR(CheckMatrix("c", c, spec.n));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "c.extent(0)", c.extent(0), a.extent(0), "a has it"));
  if (c.extent(0) > 0 && !c.writable()) {
    return InvalidArgument(kOp, "c is read-only");
  }
  return absl::OkStatus();
}

void OneDnnLinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                               OneDnnLinearScratch& scratch,
                               Executor& executor) const noexcept {
  QUERN_DCHECK(CheckArgs(a, c).ok());
  const State& state = *state_;
  const int64_t m = a.extent(0), k = state.spec.k;
  if (m == 0) return;
  const int64_t tail_rows = m % kMaxRows;

  // [is it the tail of the rows][is it the last column task]; null if unused.
  std::shared_ptr<const Kernel> kernels[2][2];
  // Bytes of scratch: oneDNN's own and c, of each worker.
  int64_t kernel_bytes = 0, c_bytes = 0;
  const absl::Status status = CatchOneDnn(kOp, [&] {
    for (const bool tail : {false, true}) {
      const int64_t rows = tail ? tail_rows : kMaxRows;
      if (rows == 0 || rows > m) continue;
      for (const bool last : {false, true}) {
        const int64_t task = last ? state.num_tasks - 1 : 0;
        if (!last && state.num_tasks == 1) continue;
        const int64_t width = state.ColsOf(task);
        Problem problem{RowsToRun(rows), width, k, k, width};
        if (rows > 1 && !state.widens_a()) problem.lda = a.stride(0);
        if (!state.Stages(rows, width)) {
          problem.ldc = c.stride(0);
        } else {
          c_bytes = std::max(c_bytes,
                             problem.rows * width * SizeInBytes(state.types.c));
        }
        kernels[tail][last] = state.Find(problem, task);
        kernel_bytes = std::max(
            kernel_bytes,
            static_cast<int64_t>(kernels[tail][last]->scratch.get_size()));
      }
    }
  });
  if (!status.ok()) Fail(status);

  // Scratch: rows of `a` for all workers, widened or one doubled; then each
  // worker's own.
  const int64_t block_rows = RowsToRun(std::min(m, kMaxRows));
  const int64_t a_rows =
      state.widens_a() ? block_rows : (tail_rows == 1 ? RowsToRun(1) : 0);
  const int64_t a_bytes =
      RoundUp(a_rows * k * SizeInBytes(state.types.a), kAlign);
  kernel_bytes = RoundUp(kernel_bytes, kAlign);
  c_bytes = RoundUp(c_bytes, kAlign);
  const int64_t worker_bytes = kernel_bytes + c_bytes;
  const int64_t bytes = a_bytes + executor.num_workers() * worker_bytes;
  if (static_cast<int64_t>(scratch.buffer_.bytes()) < bytes) {
    scratch.buffer_ = AlignedBuffer();
    auto buffer = AlignedBuffer::Create(bytes);
    if (!buffer.ok()) Fail(buffer.status());
    scratch.buffer_ = *std::move(buffer);
  }
  uint8_t* const memory = scratch.buffer_.data();
  // One row block and one column task; `first` is the block's row in a and c.
  const auto run = [&](int64_t first, const void* a_rows, int64_t task,
                       int worker) {
    const bool tail = first + kMaxRows > m;
    const bool last = task + 1 == state.num_tasks;
    const Kernel& kernel = *kernels[tail][last];
    const int64_t rows = tail ? tail_rows : kMaxRows;
    const int64_t width = state.ColsOf(task), column = task * state.cols;
    uint8_t* const own = memory + a_bytes + worker * worker_bytes;
    uint8_t* const staged_c = own + kernel_bytes;
    const bool stages = state.Stages(rows, width);
    uint8_t* const c_out =
        static_cast<uint8_t*>(c.mutable_data()) +
        (first * c.stride(0) + column) * SizeInBytes(c.dtype());
    const absl::Status run_status = CatchOneDnn(kOp, [&] {
      const dnnl::engine& engine = Engine();
      std::unordered_map<int, dnnl::memory> args;
      args.emplace(DNNL_ARG_SRC,
                   dnnl::memory(kernel.a, engine, const_cast<void*>(a_rows)));
      args.emplace(DNNL_ARG_WEIGHTS,
                   dnnl::memory(kernel.b, engine,
                                const_cast<uint8_t*>(state.weights.data()) +
                                    task * state.task_bytes));
      args.emplace(DNNL_ARG_DST,
                   dnnl::memory(kernel.c, engine, stages ? staged_c : c_out));
      if (state.has_bias) {
        args.emplace(DNNL_ARG_BIAS,
                     dnnl::memory(kernel.bias, engine,
                                  const_cast<float*>(state.bias.data<float>()) +
                                      column));
      }
      if (kernel.scratch.get_size() > 0) {
        args.emplace(DNNL_ARG_SCRATCHPAD,
                     dnnl::memory(kernel.scratch, engine, own));
      }
      kernel.primitive.execute(dnnl::stream(engine), args);
    });
    if (!run_status.ok()) Fail(run_status);
    if (!stages) return;
    const int64_t c_stride = c.stride(0) * SizeInBytes(c.dtype());
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* const from =
          staged_c + r * width * SizeInBytes(state.types.c);
      uint8_t* const to = c_out + r * c_stride;
      if (state.narrows_c()) {
        Narrow(reinterpret_cast<const float*>(from), width,
               reinterpret_cast<BFloat16*>(to));
      } else {
        std::memcpy(to, from,
                    static_cast<size_t>(width * SizeInBytes(c.dtype())));
      }
    }
  };

  if (!state.widens_a()) {
    if (tail_rows == 1) {
      const auto row_bytes =
          static_cast<size_t>(k * SizeInBytes(state.types.a));
      std::memcpy(memory, RowOf(a, m - 1), row_bytes);
      std::memcpy(memory + row_bytes, RowOf(a, m - 1), row_bytes);
    }
    // Rows fastest: a worker keeps its weights in cache over the row blocks.
    const int64_t blocks = DivCeil(m, kMaxRows);
    executor.ParallelFor(blocks * state.num_tasks, [&](int64_t index,
                                                       int worker) {
      const int64_t first = index % blocks * kMaxRows;
      const bool doubled = first + 1 == m;
      run(first, doubled ? memory : RowOf(a, first), index / blocks, worker);
    });
    return;
  }
  auto* const wide_a = reinterpret_cast<float*>(memory);
  for (int64_t first = 0; first < m; first += kMaxRows) {
    const int64_t rows = std::min(kMaxRows, m - first);
    executor.ParallelFor(RowsToRun(rows), [&](int64_t row, int) {
      const int64_t from = first + std::min(row, rows - 1);
      Widen(static_cast<const BFloat16*>(RowOf(a, from)), k, wide_a + row * k);
    });
    executor.ParallelFor(state.num_tasks, [&](int64_t task, int worker) {
      run(first, wide_a, task, worker);
    });
  }
}

const OneDnnLinearSpec& OneDnnLinearPlan::spec() const { return state_->spec; }

size_t OneDnnLinearPlan::packed_bytes() const {
  return state_->weights.bytes();
}

size_t OneDnnLinearPlan::HugePageBytes() const {
  return state_->weights.HugePageBytes();
}

std::string OneDnnLinearPlan::Explain(int64_t m) const {
  const State& state = *state_;
  const Problem problem{RowsToRun(std::min(m, kMaxRows)), state.ColsOf(0),
                        state.spec.k, state.spec.k, state.spec.n};
  std::string text;
  const absl::Status status = CatchOneDnn(kOp, [&] {
    text = MakePrimitiveDesc(problem, state.types, state.PackedOf(0),
                             state.has_bias)
               .impl_info_str();
  });
  if (!status.ok()) return std::string(status.message());
  return absl::StrCat(text, " a=", DTypeName(state.types.a),
                      " b=", DTypeName(state.types.b),
                      " c=", DTypeName(state.types.c));
}

OneDnnLinearPlan::OneDnnLinearPlan(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
OneDnnLinearPlan::OneDnnLinearPlan(OneDnnLinearPlan&&) noexcept = default;
OneDnnLinearPlan& OneDnnLinearPlan::operator=(OneDnnLinearPlan&&) noexcept =
    default;
OneDnnLinearPlan::~OneDnnLinearPlan() = default;

}  // namespace quern
