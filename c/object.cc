#include "quern/c/object.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "quern/c/library.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {
namespace {

constexpr uint64_t kUser = 1;
constexpr uint64_t kHolder = uint64_t{1} << 31;
constexpr uint64_t kExclusive = uint64_t{1} << 62;
constexpr uint64_t kDestroyed = uint64_t{1} << 63;
constexpr uint64_t kUsers = kHolder - 1;
// Whoever frees an object uses it, so that its library is not destroyed
// meanwhile.
constexpr uint64_t kBeingFreed = kDestroyed | kExclusive;

absl::Status InTheWay(const Slot& slot, const char* what) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the ", KindName(slot.kind.load(std::memory_order_relaxed)), " ", what));
}

// The object has no user and no holder any more, and never will.
void Free(Slot& slot) {
  slot.object.reset();
  slot.library->Recycle(slot);
}

}  // namespace

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kLibrary:
      return "library";
    case Kind::kExecutor:
      return "executor";
    case Kind::kOp:
      return "operator";
    case Kind::kLinearWeights:
      return "linear weights";
    case Kind::kKvCache:
      return "KV cache";
    case Kind::kSchedule:
      return "schedule";
    case Kind::kModel:
      return "model";
    case Kind::kModelState:
      return "state of a model";
    case Kind::kTokenizer:
      return "tokenizer";
    case Kind::kSampler:
      return "sampler";
    case Kind::kOneDnnHandler:
      return "oneDNN handler";
    case Kind::kSchedulerMetadata:
      return "scheduler metadata";
    case Kind::kExpertWeights:
      return "expert weights";
    case Kind::kRotaryScaling:
      return "rotary scaling";
  }
  return "object";
}

Borrowed& Borrowed::operator=(Borrowed&& other) noexcept {
  if (this == &other) return *this;
  Release();
  slot_ = std::exchange(other.slot_, nullptr);
  mode_ = other.mode_;
  return *this;
}

absl::Status Borrowed::Take(const void* handle, Kind kind, Mode mode) {
  Slot* const slot = SlotOf(handle);
  if (slot == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        handle == nullptr ? "the object is null" : "the pointer is no object",
        "; need the ", KindName(kind), " that quern.h made"));
  }
  QUERN_RETURN_IF_ERROR(Take(*slot, mode));
  // Only a slot in use keeps its kind.
  const Kind is = slot->kind.load(std::memory_order_relaxed);
  if (is == kind) return absl::OkStatus();
  Release();
  return absl::InvalidArgumentError(absl::StrCat(
      "the object is of kind ", KindName(is), "; need ", KindName(kind)));
}

absl::Status Borrowed::Take(Slot& slot, Mode mode) {
  Release();
  uint64_t state = slot.state.load(std::memory_order_relaxed);
  uint64_t next = 0;
  do {
    if ((state & kDestroyed) != 0 && mode != Mode::kUseOfHeld) {
      return InTheWay(slot, "was destroyed; need one that exists");
    }
    if ((state & kExclusive) != 0) {
      return InTheWay(slot,
                      "is being changed by another call; need to wait for it");
    }
    if (mode == Mode::kChange && (state & kUsers) != 0) {
      return InTheWay(slot,
                      "is in use by another call; need to wait for it, as this "
                      "call changes it");
    }
    next = mode == Mode::kChange ? state | kExclusive
           : mode == Mode::kHold ? state + kHolder
                                 : state + kUser;
  } while (!slot.state.compare_exchange_weak(
      state, next, std::memory_order_acquire, std::memory_order_relaxed));
  slot_ = &slot;
  mode_ = mode;
  return absl::OkStatus();
}

void Borrowed::Release() {
  if (slot_ == nullptr) return;
  Slot& slot = *std::exchange(slot_, nullptr);
  uint64_t state = slot.state.load(std::memory_order_relaxed), left = 0;
  bool last = false;
  do {
    left = mode_ == Mode::kChange ? state & ~kExclusive
           : mode_ == Mode::kHold ? state - kHolder
                                  : state - kUser;
    // Nobody takes a destroyed object, so this value is reached once.
    last = left == kDestroyed;
  } while (!slot.state.compare_exchange_weak(state, last ? kBeingFreed : left,
                                             std::memory_order_acq_rel,
                                             std::memory_order_relaxed));
  if (last) Free(slot);
}

absl::Status Destroy(Slot& slot) {
  uint64_t state = slot.state.load(std::memory_order_relaxed);
  do {
    if ((state & kDestroyed) != 0) {
      return InTheWay(slot, "was destroyed already");
    }
  } while (!slot.state.compare_exchange_weak(
      state, state == 0 ? kBeingFreed : state | kDestroyed,
      std::memory_order_acq_rel, std::memory_order_relaxed));
  if (state == 0) Free(slot);
  return absl::OkStatus();
}

bool InUse(const Slot& slot) {
  return (slot.state.load(std::memory_order_acquire) & (kUsers | kExclusive)) !=
         0;
}

bool IsDestroyed(const Slot& slot) {
  return (slot.state.load(std::memory_order_acquire) & kDestroyed) != 0;
}

void MarkFreed(Slot& slot) {
  slot.state.store(kDestroyed, std::memory_order_release);
}

Slot* SlotOf(const void* handle) {
  if (handle == nullptr ||
      reinterpret_cast<uintptr_t>(handle) % alignof(Slot) != 0) {
    return nullptr;
  }
  auto* const slot = static_cast<Slot*>(const_cast<void*>(handle));
  return slot->magic == Slot::kMagic ? slot : nullptr;
}

quern_status ReportNoMemory(Slot* slot) {
  if (slot != nullptr) {
    const std::lock_guard<std::mutex> lock(slot->mutex);
    // Fits into any string, without memory of its own.
    slot->message = "no memory left";
  }
  return QUERN_RESOURCE_EXHAUSTED;
}

quern_status Report(Slot* slot, const absl::Status& status) {
  if (status.ok()) return QUERN_OK;
  if (slot != nullptr) {
    const std::lock_guard<std::mutex> lock(slot->mutex);
    slot->message = std::string(status.message());
  }
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDataLoss:
      // quern.h has the numbers of absl::StatusCode.
      return static_cast<quern_status>(status.code());
    default:
      return QUERN_INTERNAL;
  }
}

size_t CopyText(absl::string_view text, char* out, size_t capacity) {
  if (out != nullptr && capacity > 0) {
    const size_t copied = std::min(text.size(), capacity - 1);
    if (copied > 0) std::memcpy(out, text.data(), copied);
    out[copied] = '\0';
  }
  return text.size();
}

absl::Status CheckSize(absl::string_view what, size_t size, size_t want) {
  if (size == want) return absl::OkStatus();
  return InvalidArgument(what, "size=", size, "; need ", want, ", as sizeof(",
                         what, ") is in this version");
}

absl::Status CheckNotNull(absl::string_view function, absl::string_view what,
                          const void* pointer) {
  if (pointer != nullptr) return absl::OkStatus();
  return InvalidArgument(function, what, " is null");
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Borrowed;
using quern::c_abi::Contained;
using quern::c_abi::CopyText;
using quern::c_abi::Mode;
using quern::c_abi::Slot;
using quern::c_abi::SlotOf;

extern "C" {

size_t quern_message(const void* object, char* text, size_t capacity) {
  Slot* const slot = SlotOf(object);
  if (slot == nullptr) {
    return CopyText(object == nullptr
                        ? "the object is null; need one that quern.h made"
                        : "the pointer is no object; need one that quern.h "
                          "made",
                    text, capacity);
  }
  const std::lock_guard<std::mutex> lock(slot->mutex);
  if (slot->message.empty() && quern::c_abi::IsDestroyed(*slot)) {
    return CopyText("the object was destroyed; need one that exists", text,
                    capacity);
  }
  return CopyText(slot->message, text, capacity);
}

size_t quern_explain(const void* object, char* text, size_t capacity) {
  return Contained(
      [&] {
        Slot* const slot = SlotOf(object);
        Borrowed use;
        if (slot == nullptr || !use.Take(*slot, Mode::kUse).ok()) {
          return CopyText("", text, capacity);
        }
        return CopyText(slot->object->Explain(), text, capacity);
      },
      [&] { return CopyText("", text, capacity); });
}

quern_status quern_destroy(void* object) {
  if (object == nullptr) return QUERN_OK;
  Slot* const slot = SlotOf(object);
  if (slot == nullptr) return QUERN_INVALID_ARGUMENT;
  return Contained(
      [slot] {
        return Report(slot, &slot->library->slot() == slot
                                ? quern::c_abi::Library::Delete(*slot->library)
                                : quern::c_abi::Destroy(*slot));
      },
      [slot] { return quern::c_abi::ReportNoMemory(slot); });
}

}  // extern "C"
