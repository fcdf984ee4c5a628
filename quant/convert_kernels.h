#ifndef QUERN_QUANT_CONVERT_KERNELS_H_
#define QUERN_QUANT_CONVERT_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.
// Each kernel handles n consecutive elements of any alignment; in == out is
// allowed where the element sizes agree. With `stream` the stores go around the
// caches wherever `out` can be aligned, and are complete on return.

#include <cstddef>
#include <cstdint>

namespace quern {

// The narrow formats, in the order of the kernel tables.
enum NarrowFormat { kNarrowBF16, kNarrowF16, kNarrowE4M3, kNarrowE5M2 };
constexpr int kNumNarrowFormats = 4;

struct ConvertKernels {
  const char* target;
  // out[i] = in[i] as f32
  void (*decode[kNumNarrowFormats])(const void* in, size_t n, float* out,
                                    bool stream);
  // out[i] = in[i] rounded; |in[i]| first limited to the f32 with these bits.
  void (*encode[kNumNarrowFormats])(const float* in, size_t n,
                                    uint32_t clamp_bits, void* out,
                                    bool stream);
  // out[i] = in[i] * scale
  void (*scale)(const float* in, float scale, size_t n, float* out,
                bool stream);
  // out[i] = in[i] + bias[i]
  void (*add)(const float* in, const float* bias, size_t n, float* out,
              bool stream);
};

// The kernels of the best instruction set this CPU supports.
ConvertKernels GetConvertKernels();

}  // namespace quern

#endif  // QUERN_QUANT_CONVERT_KERNELS_H_
