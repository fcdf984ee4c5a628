#ifndef QUERN_CORE_ALIGNED_BUFFER_H_
#define QUERN_CORE_ALIGNED_BUFFER_H_

// The one owning type of the library: bytes, aligned, move-only, uninitialised.
//
// From kHugePageBytes on it asks the kernel for 2 MiB pages and is aligned to
// them, and has an inaccessible page before and after. Streaming KV pages or
// packed weights through 4 KiB pages is limited by the translation buffers to
// 50-60 % of DRAM speed; with 2 MiB pages the same kernel reached 80-94 % (Zen
// 5, 2026).

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace quern {

class AlignedBuffer {
 public:
  static constexpr size_t kAlignment = 64;            // a cache line, a vector
  static constexpr size_t kHugePageBytes = 2u << 20;  // the x86-64 huge page

  // Owns nothing: data() is null, bytes() is 0.
  AlignedBuffer() = default;

  // ResourceExhausted if the memory cannot be had; InvalidArgument if
  // bytes < 0. Zero bytes give an empty buffer. The contents are unspecified.
  static absl::StatusOr<AlignedBuffer> Create(int64_t bytes);

  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  ~AlignedBuffer();

  size_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }

  // The memory as elements of T. kAlignment serves every T.
  template <typename T = uint8_t>
  T* data() {
    static_assert(alignof(T) <= kAlignment, "over-aligned type");
    return static_cast<T*>(data_);
  }
  template <typename T = uint8_t>
  const T* data() const {
    static_assert(alignof(T) <= kAlignment, "over-aligned type");
    return static_cast<const T*>(data_);
  }

  // Bytes that lie in huge pages now, as the kernel tells. Pages exist from
  // the first write on, so ask after the buffer was filled. Reads
  // /proc/self/smaps: for statistics, not for a loop. 0 where unknown.
  size_t HugePageBytes() const;

 private:
  AlignedBuffer(void* data, size_t bytes, size_t mapped_bytes)
      : data_(data), bytes_(bytes), mapped_bytes_(mapped_bytes) {}
  void Free();

  void* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_bytes_ = 0;  // writable bytes of the mapping; 0: from the heap
};

}  // namespace quern

#endif  // QUERN_CORE_ALIGNED_BUFFER_H_
