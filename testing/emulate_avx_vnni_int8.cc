#include "quern/testing/emulate_avx_vnni_int8.h"

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "quern/core/avx_vnni.h"
#include "quern/core/check.h"

#if QUERN_AVX_VNNI && defined(__linux__)
#define QUERN_EMULATES 1
#include <ucontext.h>
#else
#define QUERN_EMULATES 0
#endif

namespace quern {
namespace {

std::atomic<int64_t> emulated{0};

#if QUERN_EMULATES

// vpdpbssd sums, a, b with registers of 128 or 256 bits.
struct SignedQuads {
  size_t sums, a, b;
  size_t lanes;
};

constexpr size_t kInstructionBytes = 5;

// C4, then ~R ~X ~B 00010, then 0 ~vvvv L 11, then 50, then 11 reg rm: R and
// reg are the number of sums, vvvv that of a, B and rm that of b.
bool Decode(const uint8_t* at, SignedQuads* to) {
  if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x83) != 3 ||
      at[3] != 0x50 || at[4] < 0xC0) {
    return false;
  }
  to->sums = (~at[1] >> 7 & 1) << 3 | (at[4] >> 3 & 7);
  to->a = ~at[2] >> 3 & 15;
  to->b = (~at[1] >> 5 & 1) << 3 | (at[4] & 7);
  to->lanes = (at[2] & 4) != 0 ? 8 : 4;
  return true;
}

// The registers of a thread in the frame of its signal, in the standard form of
// XSAVE: the lower halves of ymm, then what Linux says of the frame, then which
// parts are there, then the upper halves.
class Frame {
 public:
  explicit Frame(void* registers) : bytes_(static_cast<uint8_t*>(registers)) {}

  // Whether it holds the upper halves, too.
  bool HasYmm() const {
    constexpr uint32_t kMagic = 0x46505853;  // FP_XSTATE_MAGIC1
    return Read<uint32_t>(464) == kMagic &&
           (Read<uint64_t>(464 + 8) & kYmmPart) != 0;
  }
  void Get(size_t i, uint8_t (&ymm)[32]) const {
    std::memcpy(ymm, bytes_ + kXmm + 16 * i, 16);
    std::memset(ymm + 16, 0, 16);
    if ((Read<uint64_t>(kParts) & kYmmPart) == 0) return;  // all are zeros
    std::memcpy(ymm + 16, bytes_ + kUpper + 16 * i, 16);
  }
  void Set(size_t i, const uint8_t (&ymm)[32]) {
    std::memcpy(bytes_ + kXmm + 16 * i, ymm, 16);
    const auto parts = Read<uint64_t>(kParts);
    if ((parts & kYmmPart) == 0) std::memset(bytes_ + kUpper, 0, 256);
    std::memcpy(bytes_ + kUpper + 16 * i, ymm + 16, 16);
    const uint64_t now = parts | kXmmPart | kYmmPart;
    std::memcpy(bytes_ + kParts, &now, sizeof now);
  }

 private:
  static constexpr size_t kXmm = 160, kParts = 512, kUpper = 576;
  static constexpr uint64_t kXmmPart = 2, kYmmPart = 4;

  template <typename T>
  T Read(size_t offset) const {
    T value;
    std::memcpy(&value, bytes_ + offset, sizeof value);
    return value;
  }

  uint8_t* bytes_;
};

// Beyond its lanes the register becomes zeros. Whatever AVX-512 has above 256
// bits stays, because kernels for AVX2 never look there.
void Execute(const SignedQuads& quads, Frame& frame) {
  uint8_t a[32], b[32], old[32], now[32] = {};
  frame.Get(quads.a, a);
  frame.Get(quads.b, b);
  frame.Get(quads.sums, old);
  for (size_t lane = 0; lane < quads.lanes; ++lane) {
    uint32_t sum;
    std::memcpy(&sum, old + 4 * lane, sizeof sum);
    for (size_t i = 4 * lane; i < 4 * lane + 4; ++i) {
      const int product = static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[i]);
      sum += static_cast<uint32_t>(product);
    }
    std::memcpy(now + 4 * lane, &sum, sizeof sum);
  }
  frame.Set(quads.sums, now);
}

struct sigaction former = {};
// EmulateAvxVnniInt8 tries whether emulation works, and what it has found.
volatile std::sig_atomic_t trying = 0, has_no_ymm = 0;

// The attribute is for qemu 7.2, which calls handlers with the stack as it is.
__attribute__((force_align_arg_pointer)) void OnIllegalInstruction(
    int /*signal*/, siginfo_t* /*info*/, void* context) {
  mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  Frame frame(machine.fpregs);
  greg_t& next = machine.gregs[REG_RIP];
  const auto* at = reinterpret_cast<const uint8_t*>(next);
  const bool can = machine.fpregs != nullptr && frame.HasYmm();
  SignedQuads quads;
  // Often the instruction behind it is another.
  while (Decode(at, &quads) && (can || trying != 0)) {
    if (can) {
      Execute(quads, frame);
    } else {
      has_no_ymm = 1;
    }
    emulated.fetch_add(1, std::memory_order_relaxed);
    at += kInstructionBytes;
  }
  if (at == reinterpret_cast<const uint8_t*>(next)) {
    // Another illegal instruction. It is executed again, and is not ours then.
    sigaction(SIGILL, &former, nullptr);
    return;
  }
  next = reinterpret_cast<greg_t>(at);
}

// One vpdpbssd of 8 x 4 products that differ, in sums that are not zero.
__attribute__((target("avx2"))) bool IsRight() {
  int8_t a[32], b[32];
  int32_t sums[8], want[8];
  for (int i = 0; i < 32; ++i) {
    a[i] = static_cast<int8_t>(4 * i - 64);
    b[i] = static_cast<int8_t>(-7 * i);
  }
  for (int lane = 0; lane < 8; ++lane) {
    want[lane] = sums[lane] = 1000 * lane;
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) want[lane] += a[i] * b[i];
  }
  asm volatile(
      "vmovdqu (%0), %%ymm2\n\tvmovdqu (%1), %%ymm1\n\tvmovdqu (%2), %%ymm3\n\t"
      ".byte 0xC4, 0xE2, 0x6F, 0x50, 0xD9\n\t"
      "vmovdqu %%ymm3, (%2)"
      :
      : "r"(a), "r"(b), "r"(sums)
      : "memory", "xmm1", "xmm2", "xmm3");
  return std::memcmp(sums, want, sizeof want) == 0;
}

bool Install() {
  if (HasAvxVnniInt8() || !__builtin_cpu_supports("avx2")) {
    return HasAvxVnniInt8();
  }
  struct sigaction action = {};
  action.sa_sigaction = &OnIllegalInstruction;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  QUERN_CHECK(sigaction(SIGILL, &action, &former) == 0);
  trying = 1;
  const bool right = IsRight();
  trying = 0;
  emulated = 0;
  if (has_no_ymm != 0) {
    sigaction(SIGILL, &former, nullptr);
    std::printf(
        "AVX2_VNNI_INT8 IS NOT TESTED: this CPU does not have it, and a signal "
        "does not get the registers of 256 bits here, which emulation needs\n");
    return false;
  }
  QUERN_CHECK(right && "the emulated instruction");
  SetAvxVnniInt8IsEmulated(true);
  return true;
}

#endif  // QUERN_EMULATES

}  // namespace

bool EmulateAvxVnniInt8() {
#if QUERN_EMULATES
  static const bool kWorks = Install();
  return kWorks;
#else
  return false;
#endif
}

int64_t EmulatedInstructions() { return emulated; }

}  // namespace quern
