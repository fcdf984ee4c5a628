#ifndef QUERN_C_LIBRARY_H_
#define QUERN_C_LIBRARY_H_

// Private to c/. The owner of a registry, and of every slot.

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/c/object.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace c_abi {

class Library {
 public:
  static absl::StatusOr<std::unique_ptr<Library>> Create(
      const quern_library_options* options);
  // Frees the library and all objects in it. FailedPrecondition while one is in
  // use.
  static absl::Status Delete(Library& library);

  // The library's own slot, which is its handle.
  Slot& slot() { return slot_; }
  const OpRegistry& registry() const { return registry_; }
  const OpDispatcher& ops() const { return *ops_; }

  // The handle of a new object.
  Slot* Add(Kind kind, std::unique_ptr<Object> object);
  // Takes back the slot of an object that is gone.
  void Recycle(Slot& slot);

 private:
  Library() = default;

  Slot slot_;
  OpRegistry registry_;
  std::unique_ptr<OpDispatcher> ops_;
  std::mutex mutex_;
  std::deque<Slot> slots_;  // guarded by mutex_; they never move
  // Slots whose object is gone, guarded by mutex_: first gone, first taken.
  Slot* first_unused_ = nullptr;
  Slot* last_unused_ = nullptr;
  size_t num_unused_ = 0;
};

// Lets go of an object, for its owner. FailedPrecondition the second time.
absl::Status Destroy(Slot& slot);
// Whether a call uses or frees the object now.
bool InUse(const Slot& slot);
bool IsDestroyed(const Slot& slot);
// Ends the freeing of an object. Its library may be gone as soon as it is told
// so and lets go of its mutex.
void MarkFreed(Slot& slot);

// What the functions that make an object do. `make` is called with the library
// and returns absl::StatusOr<std::unique_ptr<Object>>; the handle goes to
// *handle, which is null after a refusal.
template <typename Handle, typename Make>
quern_status MakeObject(quern_library* library, const char* function, Kind kind,
                        Handle** handle, const Make& make) {
  if (handle != nullptr) *handle = nullptr;
  return Contained(
      [&] {
        Borrowed use;
        absl::Status status = use.Take(library, Kind::kLibrary, Mode::kUse);
        if (status.ok()) status = CheckNotNull(function, "the result", handle);
        if (!status.ok()) return Report(SlotOf(library), status);
        Library& owner = *use.slot()->library;
        status = Caught([&]() -> absl::Status {
          auto made = make(owner);
          if (!made.ok()) return made.status();
          *handle =
              reinterpret_cast<Handle*>(owner.Add(kind, *std::move(made)));
          return absl::OkStatus();
        });
        return Report(use.slot(), status);
      },
      [&] { return ReportNoMemory(SlotOf(library)); });
}

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_LIBRARY_H_
