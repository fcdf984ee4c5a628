#ifndef QUERN_TOOLS_PERF_LIMITS_KERNELS_H_
#define QUERN_TOOLS_PERF_LIMITS_KERNELS_H_

// The loops whose speed is called the limit of this machine. Private to limits.

#include <cstddef>
#include <cstdint>

namespace quern {

// Dot products read their operands from a buffer of this size: half an L1.
constexpr size_t kOperandBytes = 16 << 10;
// Memory loops work on whole blocks: eight of the widest vectors.
constexpr size_t kLimitBlockBytes = 512;

// steps times: c[i, j] += dot(a[i], b[j]) on a register tile, operands from L1
// as in a matrix product. The result depends on every step.
struct DotKernel {
  double (*run)(size_t steps, const uint8_t* operands);
  double ops_per_step;  // multiplications plus additions
};

struct LimitKernels {
  const char* target;
  // All loads; `prefetch_bytes` ahead, 0: by the hardware alone. The result
  // depends on every byte.
  uint64_t (*read)(const uint8_t* data, size_t bytes, size_t prefetch_bytes);
  // Non-temporal stores.
  void (*write)(uint8_t* data, size_t bytes);
  // Loads and non-temporal stores.
  void (*copy)(const uint8_t* from, uint8_t* to, size_t bytes,
               size_t prefetch_bytes);
  DotKernel f32;   // operands f32
  DotKernel bf16;  // operands bf16, sums f32
  DotKernel i8;    // operands u8 and s8, sums i32
};

LimitKernels GetLimitKernels();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LIMITS_KERNELS_H_
