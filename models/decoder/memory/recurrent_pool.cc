#include "quern/models/decoder/memory/recurrent_pool.h"

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {

double RecurrentPoolSpec::bytes() const {
  const double window_bytes = static_cast<double>(window) *
                              static_cast<double>(channels) *
                              static_cast<double>(SizeOf(window_dtype));
  const double state_bytes =
      static_cast<double>(heads) * static_cast<double>(rows) *
      static_cast<double>(cols) * static_cast<double>(sizeof(float));
  return static_cast<double>(layers) * static_cast<double>(slots) *
         (window_bytes + state_bytes);
}

template <typename Allocator>
void RecurrentPool::LayOut(Allocator& a) {
  windows_.clear();
  states_.clear();
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    windows_.push_back(
        a.template Allocate<uint8_t>("windows", spec_.slots * window_bytes()));
    states_.push_back(
        a.template Allocate<uint8_t>("states", spec_.slots * state_bytes()));
  }
}

absl::StatusOr<RecurrentPool> RecurrentPool::Create(
    const RecurrentPoolSpec& spec) {
  constexpr double kMostBytes = static_cast<double>(int64_t{1} << 60);
  if (spec.bytes() > kMostBytes) {
    return absl::ResourceExhaustedError(
        "decoder: the memory of recurrent layers needs more than 2^60 bytes");
  }
  RecurrentPool pool;
  pool.spec_ = spec;
  WorkspaceLayout counted;
  pool.LayOut(counted);
  QUERN_ASSIGN_OR_RETURN(pool.memory_, AlignedBuffer::Create(counted.bytes()));
  Workspace memory(pool.memory_);
  pool.LayOut(memory);
  return pool;
}

void RecurrentPool::BeginStep() {
  slots_.clear();
  starts_.assign(1, 0);
  initial_.clear();
}

void RecurrentPool::AddToStep(int32_t sequence, int64_t length, int64_t count) {
  slots_.push_back(sequence);
  starts_.push_back(starts_.back() + count);
  initial_.push_back(length > 0 ? 1 : 0);
}

void RecurrentPool::Fork(int32_t sequence, int32_t branch) noexcept {
  const auto copy = [=](uint8_t* slots, int64_t bytes) {
    if (bytes == 0) return;
    std::memcpy(slots + branch * bytes, slots + sequence * bytes,
                static_cast<size_t>(bytes));
  };
  for (uint8_t* windows : windows_) copy(windows, window_bytes());
  for (uint8_t* states : states_) copy(states, state_bytes());
}

AnyTensorView RecurrentPool::Windows(int64_t layer) const {
  const int64_t n = spec_.channels;
  return AnyTensorView(spec_.window_dtype,
                       static_cast<void*>(windows_[static_cast<size_t>(layer)]),
                       3, {spec_.slots, spec_.window, n},
                       {spec_.window * n, n, 1});
}

AnyTensorView RecurrentPool::States(int64_t layer) const {
  if (spec_.heads == 0) return {};
  const int64_t head = spec_.rows * spec_.cols;
  return AnyTensorView(DType::kF32,
                       static_cast<void*>(states_[static_cast<size_t>(layer)]),
                       4, {spec_.slots, spec_.heads, spec_.rows, spec_.cols},
                       {spec_.heads * head, head, spec_.cols, 1});
}

AnyTensorView RecurrentPool::slots() const {
  return DenseVector<const int32_t>(slots_.data(),
                                    static_cast<int64_t>(slots_.size()));
}
AnyTensorView RecurrentPool::starts() const {
  return DenseVector<const int64_t>(starts_.data(),
                                    static_cast<int64_t>(starts_.size()));
}
AnyTensorView RecurrentPool::initial() const {
  return DenseVector<const uint8_t>(initial_.data(),
                                    static_cast<int64_t>(initial_.size()));
}

}  // namespace quern
