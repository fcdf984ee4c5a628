#ifndef QUERN_GEMM_WEIGHTS_CODE_TYPE_H_
#define QUERN_GEMM_WEIGHTS_CODE_TYPE_H_

// Private: codes of weights that kernels decode as they multiply.

#include <cstdint>

namespace quern {

// What a code means.
enum class CodeType : uint8_t {
  kE4M3,  // fp8 e4m3fn
  kI8,    // -128 .. 127
  kI4,    // q - 8, q = 0 .. 15
};

constexpr int64_t BitsOf(CodeType codes) {
  return codes == CodeType::kI4 ? 4 : 8;
}
// The code that means zero.
constexpr uint8_t ZeroCode(CodeType codes) {
  return codes == CodeType::kI4 ? 8 : 0;
}

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_CODE_TYPE_H_
