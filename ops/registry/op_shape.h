#ifndef QUERN_OPS_REGISTRY_OP_SHAPE_H_
#define QUERN_OPS_REGISTRY_OP_SHAPE_H_

// Shapes and dtypes of an operator's tensors as they stand in its declaration
// (op_declaration.h), and how the metadata of a call fill a plan's Spec.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_call.h"

namespace quern {

// A place in an object: a member, or what a function of the object returns.
template <class Owner, class T>
class OpField {
 public:
  OpField() = default;
  OpField(T Owner::*member) : member_(member) {}
  OpField(T& (*place)(Owner&)) : place_(place) {}

  explicit operator bool() const {
    return member_ != nullptr || place_ != nullptr;
  }
  T& In(Owner& owner) const {
    return place_ != nullptr ? place_(owner) : owner.*member_;
  }

 private:
  T Owner::*member_ = nullptr;
  T& (*place_)(Owner&) = nullptr;
};

// The words of a shape.
enum class OpDimWord : uint8_t { kLeading, kRows, kAny };
inline constexpr OpDimWord kLeading = OpDimWord::kLeading;
inline constexpr OpDimWord kRows = OpDimWord::kRows;
inline constexpr OpDimWord kAny = OpDimWord::kAny;

// The shape or the dtype of another tensor, which the schema has earlier.
struct Like {
  explicit Like(const char* tensor) : tensor(tensor) {}
  const char* tensor;  // a literal
};

template <class Spec>
struct OpDim {
  using Field = OpField<Spec, int64_t>;
  OpDim(OpDimWord word) : word(word) {}
  OpDim(int exactly) : exactly(exactly) {}
  OpDim(int64_t Spec::*member) : field(member) {}
  OpDim(int64_t& (*place)(Spec&)) : field(place) {}
  OpDim(int64_t multiple, Field field) : field(field), multiple(multiple) {}
  // What a function of the Spec says; what it reads is filled by then.
  OpDim(int64_t (*computed)(const Spec&)) : computed(computed) {}

  bool Is(OpDimWord w) const {
    return !field && computed == nullptr && exactly < 0 && word == w;
  }

  OpDimWord word = kAny;
  int64_t exactly = -1;
  Field field;
  int64_t multiple = 1;
  int64_t plus = 0;
  int64_t (*computed)(const Spec&) = nullptr;
};

// `multiple` times a member of the Spec.
template <class Spec>
OpDim<Spec> Times(int64_t multiple, int64_t Spec::*member) {
  return OpDim<Spec>(multiple, member);
}

// A member of the Spec and `more`.
template <class Spec>
OpDim<Spec> Plus(int64_t more, int64_t Spec::*member) {
  OpDim<Spec> dim(member);
  dim.plus = more;
  return dim;
}

template <class Spec>
struct OpShape {
  OpShape() = default;  // not looked at
  OpShape(std::initializer_list<OpDim<Spec>> dims) : dims(dims), given(true) {}
  OpShape(Like like) : like(like.tensor), given(true) {}
  // The other tensor's shape with another last extent.
  OpShape(Like like, int64_t Spec::*last)
      : like(like.tensor), last(last), given(true) {}
  // The shape of a tensor that is returned, as the function says.
  using Compute = std::vector<int64_t> (*)(const Spec&, const OpCall&,
                                           int64_t rows);
  OpShape(Compute compute) : compute(compute), given(true) {}

  bool leading() const { return !dims.empty() && dims[0].Is(kLeading); }

  std::vector<OpDim<Spec>> dims;
  const char* like = nullptr;
  OpField<Spec, int64_t> last;
  Compute compute = nullptr;
  bool given = false;
};

template <class Spec>
struct OpDType {
  using Field = OpField<Spec, DType>;
  OpDType() = default;  // the plan's own business
  OpDType(DType exactly) : exactly(exactly), fixed(true) {}
  OpDType(DType Spec::*member) : fields({member}) {}
  OpDType(DType& (*place)(Spec&)) : fields({place}) {}
  // All of these members have it.
  OpDType(std::initializer_list<Field> fields) : fields(fields) {}
  OpDType(Like like) : like(like.tensor) {}
  // One of these, which all of the members have.
  static OpDType OneOf(std::vector<DType> choices,
                       std::initializer_list<Field> fields = {}) {
    OpDType dtype;
    dtype.choices = std::move(choices);
    dtype.fields = fields;
    return dtype;
  }

  // Another dtype is InvalidArgument and not Unimplemented.
  static OpDType Must(OpDType dtype) {
    dtype.must = true;
    return dtype;
  }

  bool given() const { return fixed || like != nullptr || !fields.empty(); }

  std::vector<Field> fields;
  std::vector<DType> choices;
  const char* like = nullptr;
  DType exactly = DType::kF32;
  bool fixed = false;
  bool must = false;
};

// Indices of states or of tokens, and positions, are i32 or i64.
template <class Spec>
OpDType<Spec> IndexDType() {
  return OpDType<Spec>::OneOf({DType::kI32, DType::kI64});
}

// A Spec that is being filled: which of its members have a value already.
template <class Spec>
class OpSpec {
 public:
  Spec& spec() { return spec_; }

  // Gives the member its first value, or compares it with that.
  template <class T>
  bool Fill(const OpField<Spec, T>& field, T value) {
    T& place = field.In(spec_);
    if (IsSet(&place)) return place == value;
    place = value;
    set_.push_back(&place);
    return true;
  }

  // Reads the metadata of the tensor `name`. InvalidArgument says what is
  // needed.
  absl::Status Read(const OpCall& call, absl::string_view name,
                    const TensorMeta& meta, const OpShape<Spec>& shape,
                    const OpDType<Spec>& dtype) {
    if (shape.like != nullptr && dtype.like != nullptr &&
        absl::string_view(shape.like) == dtype.like) {
      return CheckMeta(call.op(), name, meta, *call.Tensor(shape.like),
                       absl::StrCat(", as ", shape.like, " is"));
    }
    QUERN_RETURN_IF_ERROR(ReadShape(call, name, meta, shape));
    return ReadDType(call, name, meta, dtype);
  }

  // The metadata of a tensor that is returned. kRows and kLeading are `rows`.
  TensorMeta Returned(const OpCall& call, const OpShape<Spec>& shape,
                      const OpDType<Spec>& dtype, int64_t rows) {
    TensorMeta meta;
    if (shape.like != nullptr) {
      meta.extents = call.Tensor(shape.like)->extents;
      if (shape.last) meta.extents.back() = shape.last.In(spec_);
    }
    if (shape.compute != nullptr)
      meta.extents = shape.compute(spec_, call, rows);
    for (const OpDim<Spec>& dim : shape.dims) {
      meta.extents.push_back(ExtentOf(dim, rows));
    }
    meta.dtype = DTypeOf(call, dtype);
    return meta;
  }

 private:
  bool IsSet(const void* place) const {
    for (const void* other : set_) {
      if (other == place) return true;
    }
    return false;
  }

  int64_t ExtentOf(const OpDim<Spec>& dim, int64_t unknown) {
    if (dim.exactly >= 0) return dim.exactly;
    if (dim.computed != nullptr) return dim.computed(spec_);
    if (!dim.field) return unknown;
    int64_t extent = 0;
    const bool fits = CheckedMul(dim.multiple, dim.field.In(spec_), &extent) &&
                      CheckedAdd(extent, dim.plus, &extent);
    // No tensor has so many elements.
    return fits ? extent : std::numeric_limits<int64_t>::max();
  }

  DType DTypeOf(const OpCall& call, const OpDType<Spec>& dtype) {
    if (dtype.like != nullptr) return call.Tensor(dtype.like)->dtype;
    if (!dtype.fields.empty()) return dtype.fields[0].In(spec_);
    return dtype.exactly;
  }

  // "[n, 64]", where n is what any tensor of that rank may have.
  std::string PrintShape(const OpShape<Spec>& shape) {
    std::string text = "[";
    for (const OpDim<Spec>& dim : shape.dims) {
      const bool known = dim.exactly >= 0 || dim.computed != nullptr ||
                         (dim.field && IsSet(&dim.field.In(spec_))) ||
                         (dim.Is(kRows) && rows_ >= 0);
      absl::StrAppend(&text, text.size() > 1 ? ", " : "");
      if (known) {
        absl::StrAppend(&text, ExtentOf(dim, rows_));
      } else {
        absl::StrAppend(&text, dim.Is(kLeading) ? ".." : "n");
      }
    }
    return text + "]";
  }

  absl::Status ReadShape(const OpCall& call, absl::string_view name,
                         const TensorMeta& meta, const OpShape<Spec>& shape) {
    if (!shape.given) return absl::OkStatus();
    if (shape.like != nullptr) {
      return CheckExtents(call.op(), name, meta,
                          call.Tensor(shape.like)->extents,
                          absl::StrCat(", as ", shape.like, " is"));
    }
    const size_t leading = shape.leading() ? 1 : 0;
    const size_t rank = shape.dims.size() - leading, have = meta.extents.size();
    if (leading == 1 && have < rank) {
      return InvalidArgument(call.op(), name, " has rank ", have,
                             "; need at least ", rank);
    }
    bool fits = leading == 1 || have == rank;
    for (size_t i = 0; fits && i < rank; ++i) {
      const OpDim<Spec>& dim = shape.dims[leading + i];
      const int64_t extent = meta.extents[have - rank + i];
      if (dim.exactly >= 0) fits = extent == dim.exactly;
      if (dim.computed != nullptr) fits = extent == dim.computed(spec_);
      if (dim.Is(kRows)) {
        if (rows_ < 0) rows_ = extent;
        fits = extent == rows_;
      }
      if (!dim.field) continue;
      if (extent % dim.multiple != 0) {
        return InvalidArgument(call.op(), name, " is ", PrintMeta(meta),
                               "; need a multiple of ", dim.multiple, " for ",
                               extent);
      }
      fits = extent >= dim.plus &&
             Fill(dim.field, (extent - dim.plus) / dim.multiple);
    }
    if (fits) return absl::OkStatus();
    return InvalidArgument(call.op(), name, " is ", PrintMeta(meta), "; need ",
                           PrintShape(shape));
  }

  absl::Status ReadDType(const OpCall& call, absl::string_view name,
                         const TensorMeta& meta, const OpDType<Spec>& dtype) {
    if (!dtype.choices.empty()) {
      QUERN_RETURN_IF_ERROR(
          CheckDTypeIn(call.op(), name, meta.dtype, dtype.choices));
    }
    bool fits = !dtype.fields.empty();
    for (const OpField<Spec, DType>& field : dtype.fields) {
      fits = Fill(field, meta.dtype) && fits;
    }
    if (fits || !dtype.given()) return absl::OkStatus();
    const DType want = DTypeOf(call, dtype);
    if (!dtype.fields.empty() && !dtype.must) {
      return CheckDTypeIn(call.op(), name, meta.dtype, {want});
    }
    if (meta.dtype == want) return absl::OkStatus();
    return InvalidArgument(
        call.op(), name, " is ", PrintMeta(meta), "; need ", DTypeName(want),
        dtype.like == nullptr ? "" : absl::StrCat(", as ", dtype.like, " is"));
  }

  Spec spec_;
  std::vector<const void*> set_;
  int64_t rows_ = -1;  // of the first tensor with kRows
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_SHAPE_H_
