#ifndef QUERN_GEMM_ONEDNN_STATUS_H_
#define QUERN_GEMM_ONEDNN_STATUS_H_

// oneDNN's exceptions end here.
//
//   QUERN_RETURN_IF_ERROR(CatchOneDnn("linear", [&] { pd = {...}; }));

#include <new>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_debug.h"

namespace quern {

// "op: what (oneDNN status)". Unimplemented and ResourceExhausted keep their
// meaning; everything else is Internal: callers are checked before oneDNN is
// asked, so its other refusals are our mistakes.
inline absl::Status OneDnnStatus(absl::string_view op,
                                 const dnnl::error& error) {
  const auto text = absl::StrCat(op, ": ", error.what(), " (",
                                 dnnl_status2str(error.status), ")");
  switch (error.status) {
    case dnnl_unimplemented:
    case dnnl_last_impl_reached:
      return absl::UnimplementedError(text);
    case dnnl_out_of_memory:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

// Runs fn(), which calls oneDNN.
template <typename Fn>
absl::Status CatchOneDnn(absl::string_view op, const Fn& fn) {
  try {
    fn();
    return absl::OkStatus();
  } catch (const dnnl::error& error) {
    return OneDnnStatus(op, error);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(absl::StrCat(op, ": out of memory"));
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_STATUS_H_
