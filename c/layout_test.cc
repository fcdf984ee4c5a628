// The layout of every struct of the C interface, for programs that were
// compiled against another release: a struct whose size or last field moves is
// another struct, and needs another QUERN_ABI_VERSION. Structs that begin with
// their size may grow, because another size is refused.

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/quern_tensor.h"

namespace quern {
namespace {

struct Layout {
  const char* name;
  size_t size;
  size_t last;  // offset of the last field
  size_t want_size;
  size_t want_last;
};

#define QUERN_LAYOUT(type, last_field, want_size, want_last)              \
  Layout {                                                                \
#type, sizeof(type), offsetof(type, last_field), want_size, want_last \
  }

TEST(LayoutTest, IsThatOfVersion0) {
  ASSERT_EQ(QUERN_ABI_VERSION, 0);
  ASSERT_EQ(sizeof(void*), 8u);
  const Layout layouts[] = {
      QUERN_LAYOUT(quern_tensor, byte_offset, 48, 40),
      QUERN_LAYOUT(quern_library_options, policy, 16, 8),
      QUERN_LAYOUT(quern_executor_functions, parallel_for, 32, 24),
      QUERN_LAYOUT(quern_argument, value, 24, 16),
      QUERN_LAYOUT(quern_op_options, provider, 16, 8),
      QUERN_LAYOUT(quern_operand, flags, 24, 16),
      QUERN_LAYOUT(quern_linear_weights_options, reserved, 56, 52),
      QUERN_LAYOUT(quern_linear_source, block_n, 56, 48),
      QUERN_LAYOUT(quern_kv_cache_options, num_layers, 80, 72),
      QUERN_LAYOUT(quern_schedule_options, max_kv_len, 48, 40),
      QUERN_LAYOUT(quern_step, reserved, 72, 68),
      QUERN_LAYOUT(quern_rotary_scaling_options, untruncated, 128, 120),
      QUERN_LAYOUT(quern_model_options, cancelled_context, 104, 96),
      QUERN_LAYOUT(quern_model_info, step_tokens, 56, 48),
      QUERN_LAYOUT(quern_model_state_options, max_bytes, 56, 48),
      QUERN_LAYOUT(quern_model_state_info, scratch_bytes, 40, 32),
      QUERN_LAYOUT(quern_model_item, num_tokens, 24, 16),
      QUERN_LAYOUT(quern_model_step, reserved, 32, 28),
      QUERN_LAYOUT(quern_tokenizer_options, num_bytes, 32, 24),
      QUERN_LAYOUT(quern_tokenizer_info, adds_bos, 24, 20),
      QUERN_LAYOUT(quern_sampling, step, 32, 24),
      QUERN_LAYOUT(quern_sampling_filters, reserved, 24, 20),
  };
  for (const Layout& layout : layouts) {
    EXPECT_EQ(layout.size, layout.want_size) << layout.name;
    EXPECT_EQ(layout.last, layout.want_last) << layout.name;
  }
}

// The codes are those of absl::StatusCode, and programs compare with them.
TEST(LayoutTest, CodesKeepTheirNumbers) {
  EXPECT_EQ(QUERN_OK, 0);
  EXPECT_EQ(QUERN_INVALID_ARGUMENT, 3);
  EXPECT_EQ(QUERN_NOT_FOUND, 5);
  EXPECT_EQ(QUERN_PERMISSION_DENIED, 7);
  EXPECT_EQ(QUERN_RESOURCE_EXHAUSTED, 8);
  EXPECT_EQ(QUERN_FAILED_PRECONDITION, 9);
  EXPECT_EQ(QUERN_UNIMPLEMENTED, 12);
  EXPECT_EQ(QUERN_INTERNAL, 13);
  EXPECT_EQ(QUERN_DATA_LOSS, 15);
  EXPECT_EQ(QUERN_CANCELLED, 1);
}

}  // namespace
}  // namespace quern
