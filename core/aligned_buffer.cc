#include "core/aligned_buffer.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/status_macros.h"

namespace quern {
namespace {

absl::Status Exhausted(int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("aligned_buffer: bytes=", bytes, " cannot be allocated"));
}

}  // namespace

absl::StatusOr<AlignedBuffer> AlignedBuffer::Create(int64_t bytes) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast("aligned_buffer", "bytes", bytes, 0));
  if (bytes == 0) return AlignedBuffer();
  // Rounding up must not wrap.
  if (bytes > std::numeric_limits<int64_t>::max() -
                  static_cast<int64_t>(2 * kHugePageBytes)) {
    return Exhausted(bytes);
  }
  const auto size = static_cast<size_t>(bytes);
  if (size < kHugePageBytes) {
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) return Exhausted(bytes);
    return AlignedBuffer(data, size, 0);
  }
  // mmap aligns to 4 KiB: take one huge page more and give back both ends.
  const size_t length =
      (size + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const size_t reserved = length + kHugePageBytes;
  void* mapping = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return Exhausted(bytes);
  const auto begin = reinterpret_cast<uintptr_t>(mapping);
  const uintptr_t aligned =
      (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  if (aligned > begin) munmap(mapping, aligned - begin);
  const uintptr_t tail = begin + reserved - (aligned + length);
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + length), tail);
  void* data = reinterpret_cast<void*>(aligned);
#ifdef MADV_HUGEPAGE
  madvise(data, length, MADV_HUGEPAGE);  // advice: refusal changes only speed
#endif
  return AlignedBuffer(data, size, length);
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  if (this != &other) {
    Free();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  }
  return *this;
}

AlignedBuffer::~AlignedBuffer() { Free(); }

void AlignedBuffer::Free() {
  if (mapped_bytes_ != 0) {
    munmap(data_, mapped_bytes_);
  } else {
    std::free(data_);
  }
}

size_t AlignedBuffer::HugePageBytes() const {
  if (mapped_bytes_ == 0) return 0;
  std::FILE* smaps = std::fopen("/proc/self/smaps", "r");
  if (smaps == nullptr) return 0;
  // A mapping starts with "begin-end perms ..."; its lines follow. The kernel
  // may have merged this one with a neighbour: then the sum is of both, and is
  // cut to what belongs here.
  const auto first = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t last = first + mapped_bytes_;
  size_t huge_bytes = 0;
  bool inside = false;
  char line[512];
  while (std::fgets(line, sizeof(line), smaps) != nullptr) {
    unsigned long begin = 0, end = 0, kib = 0;
    char permissions = 0;
    if (std::sscanf(line, "%lx-%lx %c", &begin, &end, &permissions) == 3) {
      inside = begin < last && first < end;
    } else if (inside &&
               std::sscanf(line, "AnonHugePages: %lu kB", &kib) == 1) {
      huge_bytes += size_t{kib} * 1024;
    }
  }
  std::fclose(smaps);
  return huge_bytes < mapped_bytes_ ? huge_bytes : mapped_bytes_;
}

}  // namespace quern
