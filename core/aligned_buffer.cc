#include "quern/core/aligned_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

absl::Status Exhausted(int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("aligned_buffer: bytes=", bytes, " cannot be allocated"));
}

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

absl::StatusOr<AlignedBuffer> AlignedBuffer::Create(int64_t bytes) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast("aligned_buffer", "bytes", bytes, 0));
  if (bytes == 0) return AlignedBuffer();
  // Rounding up must not wrap.
  if (bytes > std::numeric_limits<int64_t>::max() -
                  static_cast<int64_t>(3 * kHugePageBytes)) {
    return Exhausted(bytes);
  }
  const auto size = static_cast<size_t>(bytes);
  if (size < kHugePageBytes) {
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) return Exhausted(bytes);
    return AlignedBuffer(data, size, 0);
  }
  // mmap aligns to 4 KiB: reserve one huge page more and give back both ends,
  // but for a page on either side. Those keep this mapping from being merged
  // with a neighbour, whose huge pages HugePageBytes would count as well.
  const size_t length =
      (size + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const size_t page = PageBytes();
  const size_t reserved = length + kHugePageBytes + 2 * page;
  void* mapping =
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return Exhausted(bytes);
  const auto begin = reinterpret_cast<uintptr_t>(mapping);
  const uintptr_t aligned =
      (begin + page + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  if (mprotect(reinterpret_cast<void*>(aligned), length,
               PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, reserved);
    return Exhausted(bytes);
  }
  if (aligned - page > begin) munmap(mapping, aligned - page - begin);
  const uintptr_t end = aligned + length + page;
  if (begin + reserved > end) {
    munmap(reinterpret_cast<void*>(end), begin + reserved - end);
  }
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
    const size_t page = PageBytes();
    munmap(static_cast<uint8_t*>(data_) - page, mapped_bytes_ + 2 * page);
  } else {
    std::free(data_);
  }
}

size_t AlignedBuffer::HugePageBytes() const {
  if (mapped_bytes_ == 0) return 0;
  std::FILE* smaps = std::fopen("/proc/self/smaps", "r");
  if (smaps == nullptr) return 0;
  // A mapping starts with "begin-end perms ..."; its lines follow. The pages
  // around this one keep it a mapping of its own.
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
