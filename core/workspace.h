#ifndef QUERN_CORE_WORKSPACE_H_
#define QUERN_CORE_WORKSPACE_H_

// Borrowed scratch in named pieces. A plan writes one function template that
// lists its pieces; WorkspaceLayout counts with it, Workspace hands out with
// it, so the size asked for and the bytes used cannot differ.
//
//   struct Scratch { float* logits; int32_t* order; };
//   template <typename Allocator>
//   Scratch LayOut(Allocator& a, int64_t tokens) {
//     return {a.template Allocate<float>("logits", tokens),
//             a.template Allocate<int32_t>("order", tokens)};
//   }
//   WorkspaceLayout layout;
//   LayOut(layout, tokens);
//   Workspace workspace(memory, bytes);   // bytes >= layout.bytes()
//   Scratch scratch = LayOut(workspace, tokens);

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/math_util.h"

namespace quern {

// Counts. Allocate returns null.
class WorkspaceLayout {
 public:
  template <typename T>
  T* Allocate(const char* /*name*/, int64_t count) {
    int64_t piece = 0;
    overflow_ = overflow_ || count < 0 ||
                !CheckedMul(count, static_cast<int64_t>(sizeof(T)), &piece) ||
                !CheckedAdd(piece, kAlignment - 1, &piece) ||
                !CheckedAdd(bytes_, piece / kAlignment * kAlignment, &bytes_);
    return nullptr;
  }

  // Bytes that the same calls will take from a Workspace.
  int64_t bytes() const { return bytes_; }
  // A count was negative, or the sum does not fit: bytes() means nothing.
  bool overflow() const { return overflow_; }

 private:
  static constexpr int64_t kAlignment = AlignedBuffer::kAlignment;
  int64_t bytes_ = 0;
  bool overflow_ = false;
};

// "workspace too small: "packed rows" needs 4096 bytes, 64 are left"
[[noreturn]] inline void WorkspaceTooSmall(const char* name, size_t wanted,
                                           size_t left) {
  std::fprintf(stderr,
               "workspace too small: \"%s\" needs %zu bytes, %zu are left\n",
               name, wanted, left);
  std::abort();
}

// Hands out. `memory` is aligned to AlignedBuffer::kAlignment, which its owner
// proved. Asking for more than there is aborts and names the piece: whoever
// made the workspace did not ask the plan for its size.
class Workspace {
 public:
  Workspace() = default;
  Workspace(void* memory, size_t bytes)
      : next_(static_cast<uint8_t*>(memory)), left_(bytes) {
    QUERN_DCHECK(
        reinterpret_cast<uintptr_t>(memory) % AlignedBuffer::kAlignment == 0);
  }
  explicit Workspace(AlignedBuffer& buffer)
      : Workspace(buffer.data(), buffer.bytes()) {}

  template <typename T>
  T* Allocate(const char* name, int64_t count) {
    const size_t piece = static_cast<size_t>(
        RoundUp(count * static_cast<int64_t>(sizeof(T)),
                static_cast<int64_t>(AlignedBuffer::kAlignment)));
    if (piece > left_) WorkspaceTooSmall(name, piece, left_);
    T* data = reinterpret_cast<T*>(next_);
    next_ += piece;
    left_ -= piece;
    return data;
  }

  size_t bytes_left() const { return left_; }

 private:
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace quern

#endif  // QUERN_CORE_WORKSPACE_H_
