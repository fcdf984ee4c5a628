#ifndef QUERN_ATTENTION_KERNELS_ATTEND_BYTES_H_
#define QUERN_ATTENTION_KERNELS_ATTEND_BYTES_H_

// What paged_attention_simd.cc asks of attend_bytes_simd.cc, a source of its
// own because it compiles as long as the rest.

#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/dtype.h"

namespace quern {

// PagedAttentionKernels::attend_bytes and serves_bytes.
struct AttendBytes {
  const char* target;  // that of the kernels that load queries for these
  void (*attend)(const ChunkArgs& args);
  bool (*serves)(const ChunkArgs& args);
};

// q: f32, bf16 or f16; kv: i8, f8e4m3 or f8e5m2.
AttendBytes GetAttendBytes(DType q, DType kv);

}  // namespace quern

#endif  // QUERN_ATTENTION_KERNELS_ATTEND_BYTES_H_
