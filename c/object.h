#ifndef QUERN_C_OBJECT_H_
#define QUERN_C_OBJECT_H_

// Private to c/. What every handle of quern.h points to: a slot that outlives
// the object in it, so that a destroyed object is recognised and not followed.
//
//   state   users   calls that read the object now
//           held    objects that were made with it and need it
//           flags   exclusive: a call changes or frees it; destroyed: its
//                   owner let go
//
// The object is freed by whoever leaves it destroyed, with no user and no
// holder. The slot goes to the end of a queue and is taken for another object
// once QUERN_REMEMBERED slots stand behind it. The queue is a list through the
// slots, so that nothing is allocated where an object is freed.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/c/caught.h"
#include "quern/c/quern.h"

namespace quern {
namespace c_abi {

enum class Kind : uint32_t {
  kLibrary,
  kExecutor,
  kOp,
  kLinearWeights,
  kKvCache,
  kSchedule,
  kModel,
  kModelState,
  kTokenizer,
  kSampler,
  kOneDnnHandler,
  kSchedulerMetadata,
  kExpertWeights,
  kRotaryScaling,
};
// "linear weights", for sentences.
const char* KindName(Kind kind);

// What a slot holds.
class Object {
 public:
  virtual ~Object() = default;
  virtual std::string Explain() const = 0;
};

class Library;

struct Slot {
  static constexpr uint64_t kMagic = 0x717565726e206f62;

  const uint64_t magic = kMagic;
  std::atomic<Kind> kind{Kind::kLibrary};
  std::atomic<uint64_t> state{0};
  Library* library = nullptr;
  std::unique_ptr<Object> object;  // read only while used or held
  Slot* next_unused = nullptr;     // guarded by the library's mutex
  std::mutex mutex;
  std::string message;  // guarded by mutex
};

// How a call or an object needs another.
enum class Mode : uint8_t {
  kUse,        // for a call that reads it
  kChange,     // for a call that changes it, alone
  kHold,       // for the life of another object
  kUseOfHeld,  // like kUse, by an object that holds it: destroyed or not
};

// One use of an object, ended by the destructor.
class Borrowed {
 public:
  Borrowed() = default;
  Borrowed(Borrowed&& other) noexcept { *this = std::move(other); }
  Borrowed& operator=(Borrowed&& other) noexcept;
  ~Borrowed() { Release(); }

  // Takes `handle` if it is of this kind. InvalidArgument: null, no object, or
  // of another kind. FailedPrecondition: destroyed, or a call on it is in the
  // way. Allocates nothing if it succeeds.
  absl::Status Take(const void* handle, Kind kind, Mode mode);
  absl::Status Take(Slot& slot, Mode mode);
  void Release();

  explicit operator bool() const { return slot_ != nullptr; }
  Slot* slot() const { return slot_; }
  // T is the type of the kind that was taken.
  template <typename T>
  T& As() const {
    return static_cast<T&>(*slot_->object);
  }

 private:
  Slot* slot_ = nullptr;
  Mode mode_ = Mode::kUse;
};

// The slot of a handle; null if there is none. Reads its first bytes.
Slot* SlotOf(const void* handle);

// Keeps the sentence where quern_message finds it, and returns the code. `slot`
// may be null. OK changes nothing.
quern_status Report(Slot* slot, const absl::Status& status);
// Like Report of a ResourceExhausted, but allocates nothing. `slot` may be
// null.
quern_status ReportNoMemory(Slot* slot);

// What a function on one object does: takes the object, of type T, calls
// fn(object), which returns a Status, and reports to the object.
template <typename T, typename Fn>
quern_status CallOn(const void* handle, Kind kind, Mode mode, const Fn& fn) {
  return Contained(
      [&] {
        Borrowed use;
        absl::Status status = use.Take(handle, kind, mode);
        if (status.ok()) status = Caught([&] { return fn(use.As<T>()); });
        return status.ok() ? QUERN_OK : Report(SlotOf(handle), status);
      },
      [&] { return ReportNoMemory(SlotOf(handle)); });
}

// Writes `text` as functions of quern.h that return text do.
size_t CopyText(absl::string_view text, char* out, size_t capacity);

// What refusals say of an object that another library made, and may free.
inline constexpr char kOtherLibrary[] =
    " is of another library; need one of the library that makes this object";

// "quern_x: size=8; need 16, as sizeof(quern_x) is in this version".
absl::Status CheckSize(absl::string_view what, size_t size, size_t want);

// "f: out is null".
absl::Status CheckNotNull(absl::string_view function, absl::string_view what,
                          const void* pointer);

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECT_H_
