#ifndef QUERN_CACHE_KV_LAYOUT_H_
#define QUERN_CACHE_KV_LAYOUT_H_

// Where the keys and values of a token lie inside a page: a value that travels
// with the cache. The same on every instruction set.
//
//   page[head] = { K block, V block, K scales, V scales },
//                each padded to 64 bytes, scales only for kPerTokenHead
//
//   KvForm::kPlain     K block[token][dim]
//                      V block[token][dim]
//   KvForm::kPaired    K block[token / 16][dim / pair][token % 16][dim % pair]
//                      V block[token / pair][dim][token % pair]
//   KvForm::kLatent    K block as in kPaired, no V block: a value is the first
//                      v_head_dim elements of its key (MLA: the compressed
//                      latent, behind which lies the rotated part)
//
// pair is 2 for types of 1 and 2 bytes, 1 for f32: what one lane of a
// dot-product instruction multiplies, or half of it. A paired block is read
// from its first byte to its last, in both products of attention. Where
// head_dim is odd, the last pair of a key holds a zero that write_kv writes.

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"

namespace quern {

enum class KvForm : uint8_t {
  kPlain,   // any page size; what two separate tensors of a framework hold
  kPaired,  // page_size a multiple of 16
  kLatent,  // likewise; v_head_dim a multiple of 4, and below head_dim
};

// What is stored is round(x / scale); see KvScales.
enum class KvScaling : uint8_t {
  kNone,          // x itself
  kPerTensor,     // one scale for all keys of a layer, one for all values
  kPerHead,       // one of each for every head
  kPerTokenHead,  // one of each for every token and head; write_kv finds them
};

// "plain", "paired", "latent"; "none", "per_tensor", "per_head",
// "per_token_head".
absl::string_view KvFormName(KvForm form);
absl::string_view KvScalingName(KvScaling scaling);

struct KvLayoutSpec {
  DType dtype = DType::kBF16;  // kF32, kBF16, kF16, kI8, kF8E4M3 or kF8E5M2
  int64_t kv_heads = 0;        // >= 1
  int64_t head_dim = 0;        // of a key, >= 1
  int64_t v_head_dim = 0;      // of a value; 0: as head_dim
  int64_t page_size = 0;       // tokens, >= 1
  std::optional<KvForm> form;  // without: KvLayout::AutomaticForm(page_size)
  // kNone for types of 2 and 4 bytes, anything else for kI8, any for fp8.
  KvScaling scaling = KvScaling::kNone;
};

class KvLayout {
 public:
  // Tokens of one group of a paired K block.
  static constexpr int64_t kGroupTokens = 16;

  // Describes nothing: every extent is 0.
  KvLayout() = default;

  // InvalidArgument names the field that is out of range, or says that the form
  // does not go with the page size or the head dims, that the scaling does not
  // go with the type, or that a page is larger than kMaxPageBytes.
  // Unimplemented for other dtypes, and for one byte in the latent form.
  static absl::StatusOr<KvLayout> Create(const KvLayoutSpec& spec);
  static constexpr int64_t kMaxPageBytes = int64_t{1} << 40;

  // What a spec without a form gets: kPaired, which attention reads fastest,
  // where page_size is a multiple of 16, else kPlain.
  static KvForm AutomaticForm(int64_t page_size);

  DType dtype() const { return dtype_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t v_head_dim() const { return v_head_dim_; }
  int64_t page_size() const { return page_size_; }
  KvForm form() const { return form_; }
  KvScaling scaling() const { return scaling_; }

  // 1 or 2, see above; 1 in the plain form.
  int64_t pair() const { return pair_; }
  // Whether keys lie in groups of kGroupTokens tokens.
  bool in_groups() const { return form_ != KvForm::kPlain; }
  // Elements of a stored key: head_dim, rounded up to pairs.
  int64_t k_row() const { return (head_dim_ + pair_ - 1) / pair_ * pair_; }

  // Offsets of an element from the start of its block, in elements.
  int64_t KOffset(int64_t token, int64_t dim) const {
    if (form_ == KvForm::kPlain) return token * head_dim_ + dim;
    return token / kGroupTokens * kGroupTokens * k_row() +
           (dim / pair_ * kGroupTokens + token % kGroupTokens) * pair_ +
           dim % pair_;
  }
  int64_t VOffset(int64_t token, int64_t dim) const {
    if (form_ == KvForm::kLatent) return KOffset(token, dim);
    return (token / pair_ * v_head_dim_ + dim) * pair_ + token % pair_;
  }

  // Elements of one block, padding excluded.
  int64_t k_elements() const { return page_size_ * k_row(); }
  int64_t v_elements() const {
    return form_ == KvForm::kLatent ? 0 : page_size_ * v_head_dim_;
  }

  // Bytes of one head's keys, or values, within one page, padding included.
  int64_t k_block_bytes() const { return k_block_bytes_; }
  int64_t v_block_bytes() const { return v_block_bytes_; }
  // Bytes of that head's scales for keys, and as many for values; 0 if the page
  // has none.
  int64_t scale_block_bytes() const { return scale_block_bytes_; }
  // Bytes of one head within one page: keys, values and both scale blocks.
  int64_t head_bytes() const {
    return k_block_bytes_ + v_block_bytes_ + 2 * scale_block_bytes_;
  }
  // Bytes of one page, all heads.
  int64_t page_bytes() const { return kv_heads_ * head_bytes(); }

  friend bool operator==(const KvLayout& a, const KvLayout& b) {
    return a.dtype_ == b.dtype_ && a.kv_heads_ == b.kv_heads_ &&
           a.head_dim_ == b.head_dim_ && a.v_head_dim_ == b.v_head_dim_ &&
           a.page_size_ == b.page_size_ && a.form_ == b.form_ &&
           a.scaling_ == b.scaling_;
  }
  friend bool operator!=(const KvLayout& a, const KvLayout& b) {
    return !(a == b);
  }

 private:
  DType dtype_ = DType::kF32;
  KvForm form_ = KvForm::kPlain;
  KvScaling scaling_ = KvScaling::kNone;
  int64_t pair_ = 1;
  int64_t kv_heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t v_head_dim_ = 0;
  int64_t page_size_ = 0;
  int64_t k_block_bytes_ = 0;
  int64_t v_block_bytes_ = 0;
  int64_t scale_block_bytes_ = 0;
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_LAYOUT_H_
