#include "quern/c/library.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "quern/core/max_isa.h"
#include "quern/core/status_macros.h"
#include "quern/core/version.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/docs/op_docs.h"

namespace quern {
namespace c_abi {
namespace {

class LibraryObject final : public Object {
 public:
  explicit LibraryObject(size_t ops) : ops_(ops) {}
  std::string Explain() const override {
    return absl::StrCat("Quern ", QUERN_VERSION_STRING, ", ", ops_,
                        " operators");
  }

 private:
  size_t ops_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Library>> Library::Create(
    const quern_library_options* options) {
  OpPolicy policy;
  if (options != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckSize("quern_library_options", options->size,
                                    sizeof(quern_library_options)));
    if (options->policy != nullptr) {
      QUERN_ASSIGN_OR_RETURN(policy, OpPolicy::Parse(options->policy));
    }
  }
  auto library = std::unique_ptr<Library>(new Library);
  QUERN_RETURN_IF_ERROR(RegisterAllOps(library->registry_));
  library->ops_ =
      std::make_unique<OpDispatcher>(library->registry_, std::move(policy));
  library->slot_.library = library.get();
  library->slot_.object =
      std::make_unique<LibraryObject>(library->registry_.Names().size());
  return library;
}

absl::Status Library::Delete(Library& library) {
  Borrowed alone;
  QUERN_RETURN_IF_ERROR(alone.Take(library.slot_, Mode::kChange));
  {
    const std::lock_guard<std::mutex> lock(library.mutex_);
    for (const Slot& slot : library.slots_) {
      if (!InUse(slot)) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("an object of the library, of kind ",
                       KindName(slot.kind.load(std::memory_order_relaxed)),
                       ", is in use by another call; need to wait for it"));
    }
  }
  // Objects that hold others let go of them here, and each is freed once. No
  // slot is added meanwhile.
  for (Slot& slot : library.slots_) Destroy(slot).IgnoreError();
  alone.Release();
  delete &library;
  return absl::OkStatus();
}

Slot* Library::Add(Kind kind, std::unique_ptr<Object> object) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot = nullptr;
  if (num_unused_ > QUERN_REMEMBERED) {
    slot = first_unused_;
    first_unused_ = std::exchange(slot->next_unused, nullptr);
    --num_unused_;
    const std::lock_guard<std::mutex> message_lock(slot->mutex);
    slot->message.clear();
  } else {
    slot = &slots_.emplace_back();
    slot->library = this;
  }
  slot->kind.store(kind, std::memory_order_relaxed);
  slot->object = std::move(object);
  slot->state.store(0, std::memory_order_release);
  return slot;
}

void Library::Recycle(Slot& slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (num_unused_ == 0 ? first_unused_ : last_unused_->next_unused) = &slot;
  last_unused_ = &slot;
  ++num_unused_;
  MarkFreed(slot);
}

}  // namespace c_abi
}  // namespace quern

using quern::OpRegistry;
using quern::c_abi::Borrowed;
using quern::c_abi::Caught;
using quern::c_abi::CheckNotNull;
using quern::c_abi::Contained;
using quern::c_abi::CopyText;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::Mode;
using quern::c_abi::Report;
using quern::c_abi::ReportNoMemory;

extern "C" {

int32_t quern_abi_version(void) { return QUERN_ABI_VERSION; }

const char* quern_version(void) { return QUERN_VERSION_STRING; }

quern_status quern_library_create(const quern_library_options* options,
                                  quern_library** library, char* message,
                                  size_t capacity) {
  CopyText("", message, capacity);
  if (library != nullptr) *library = nullptr;
  return Contained(
      [&] {
        absl::Status status =
            CheckNotNull("quern_library_create", "the result", library);
        if (status.ok()) {
          status = Caught([&]() -> absl::Status {
            auto made = Library::Create(options);
            if (!made.ok()) return made.status();
            *library =
                reinterpret_cast<quern_library*>(&made->release()->slot());
            return absl::OkStatus();
          });
        }
        if (!status.ok()) CopyText(status.message(), message, capacity);
        return Report(nullptr, status);
      },
      [&] {
        CopyText("no memory left", message, capacity);
        return ReportNoMemory(nullptr);
      });
}

quern_status quern_set_max_isa(const char* isa, char* message,
                               size_t capacity) {
  return Contained(
      [&] {
        const absl::Status status =
            Caught([&] { return quern::SetMaxIsa(isa == nullptr ? "" : isa); });
        if (!status.ok()) CopyText(status.message(), message, capacity);
        return Report(nullptr, status);
      },
      [&] {
        CopyText("no memory left", message, capacity);
        return ReportNoMemory(nullptr);
      });
}

size_t quern_ops(const quern_library* library, char* text, size_t capacity) {
  return Contained(
      [&] {
        std::string lines;
        Borrowed use;
        if (use.Take(library, Kind::kLibrary, Mode::kUse).ok()) {
          const OpRegistry& registry = use.slot()->library->registry();
          for (const std::string& name : registry.Names()) {
            absl::StrAppend(&lines, registry.Find(name)->schema.Print(), "\n");
          }
        }
        return CopyText(lines, text, capacity);
      },
      [&] { return CopyText("", text, capacity); });
}

size_t quern_op_doc(const quern_library* library, const char* name, char* text,
                    size_t capacity) {
  return Contained(
      [&] {
        Borrowed use;
        const bool known =
            name != nullptr &&
            use.Take(library, Kind::kLibrary, Mode::kUse).ok() &&
            use.slot()->library->registry().Find(name) != nullptr;
        return CopyText(known ? quern::OpDoc(name) : absl::string_view(), text,
                        capacity);
      },
      [&] { return CopyText("", text, capacity); });
}

}  // extern "C"
