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
// The latent form of f8e4m3 has KvScaling::kPerBlock: a latent is codes with a
// scale for each block of kScaleBlock elements, and the rest of the key, which
// is rotated, is bf16. Each group of 16 tokens lies together:
//
//   group      { codes, rest, exponents }, 16 * token_bytes() bytes
//   codes      f8e4m3 [v_head_dim / 2][16][2]
//   rest       bf16 [ceil((head_dim - v_head_dim) / 2)][16][2]
//   exponents  u8 [ceil(v_head_dim / kScaleBlock)][16]
//
//   element = code * 2^(exponent - 127); NaN where the exponent is 255
//
// Exponents are kNanExponent or from kMinExponent to kMaxExponent: an element
// is then a finite bf16 number that is not denormal, or NaN, and attention
// widens it exactly. What other exponents mean is unspecified.
//
// The exponents are ue8m0, the scale format of OCP Microscaling Formats 1.0.
// What a token has (512 codes in four blocks of 128, and 64 bf16 that are not
// quantised) is DeepSeek's, as vLLM documents for its cache "fp8_ds_mla"
// (docs.vllm.ai, flashmla_sparse). Scales are f32 there, so that a token takes
// 656 bytes; here it takes 644.
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
  // A power of two for each block of a latent, in the block of keys; write_kv
  // finds them.
  kPerBlock,
};

// "plain", "paired", "latent"; "none", "per_tensor", "per_head",
// "per_token_head", "per_block".
absl::string_view KvFormName(KvForm form);
absl::string_view KvScalingName(KvScaling scaling);

struct KvLayoutSpec {
  DType dtype = DType::kBF16;  // kF32, kBF16, kF16, kI8, kF8E4M3 or kF8E5M2
  int64_t kv_heads = 0;        // >= 1
  int64_t head_dim = 0;        // of a key, >= 1
  int64_t v_head_dim = 0;      // of a value; 0: as head_dim
  int64_t page_size = 0;       // tokens, >= 1
  std::optional<KvForm> form;  // without: KvLayout::AutomaticForm(page_size)
  // The latent form of kF8E4M3 has kPerBlock, and nothing else has it. Types of
  // 2 and 4 bytes have kNone, kI8 has any other, and fp8 has any.
  KvScaling scaling = KvScaling::kNone;
};

class KvLayout {
 public:
  // Tokens of one group of a paired K block.
  static constexpr int64_t kGroupTokens = 16;
  // kPerBlock: elements of a latent that share a scale. The last block of a
  // latent may have fewer.
  static constexpr int64_t kScaleBlock = 128;
  static constexpr uint8_t kMinExponent = 10;   // times 2^-9: 2^-126
  static constexpr uint8_t kMaxExponent = 246;  // times 448: 1.75 * 2^127
  static constexpr uint8_t kNanExponent = 255;

  // Describes nothing: every extent is 0.
  KvLayout() = default;

  // InvalidArgument names the field that is out of range, or says that the form
  // does not go with the page size or the head dims, that the scaling does not
  // go with the type, or that a page is larger than kMaxPageBytes.
  // Unimplemented for other dtypes, and for one byte in the latent form but
  // f8e4m3 with kPerBlock.
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

  // Offsets of an element from the start of its block, in elements; in bytes
  // where the scaling is kPerBlock.
  int64_t KOffset(int64_t token, int64_t dim) const {
    if (form_ == KvForm::kPlain) return token * head_dim_ + dim;
    if (scaling_ == KvScaling::kPerBlock) return OffsetInBlocks(token, dim);
    return token / kGroupTokens * kGroupTokens * k_row() +
           (dim / pair_ * kGroupTokens + token % kGroupTokens) * pair_ +
           dim % pair_;
  }
  int64_t VOffset(int64_t token, int64_t dim) const {
    if (form_ == KvForm::kLatent) return KOffset(token, dim);
    return (token / pair_ * v_head_dim_ + dim) * pair_ + token % pair_;
  }

  // kPerBlock: the offset of the exponent of block `index` of a token's latent
  // from the start of the keys, in bytes.
  int64_t ExponentOffset(int64_t token, int64_t index) const {
    return token / kGroupTokens * kGroupTokens * token_bytes() +
           kGroupTokens * (token_bytes() - scale_blocks() + index) +
           token % kGroupTokens;
  }
  // kPerBlock: blocks of a latent.
  int64_t scale_blocks() const {
    return (v_head_dim_ + kScaleBlock - 1) / kScaleBlock;
  }
  // kPerBlock: bytes of a token's key, its exponents included.
  int64_t token_bytes() const {
    return v_head_dim_ + (head_dim_ - v_head_dim_ + 1) / 2 * 4 + scale_blocks();
  }

  // Elements of one block, padding excluded; bytes where the scaling is
  // kPerBlock.
  int64_t k_elements() const {
    return page_size_ *
           (scaling_ == KvScaling::kPerBlock ? token_bytes() : k_row());
  }
  int64_t v_elements() const {
    return form_ == KvForm::kLatent ? 0 : page_size_ * v_head_dim_;
  }

  // Bytes of one head's keys, or values, within one page, padding included.
  int64_t k_block_bytes() const { return k_block_bytes_; }
  int64_t v_block_bytes() const { return v_block_bytes_; }
  // Bytes of that head's scales for keys, and as many for values; 0 if the page
  // has none, or has them among its keys (kPerBlock).
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
  int64_t OffsetInBlocks(int64_t token, int64_t dim) const {
    const int64_t bytes = dim < v_head_dim_ ? 1 : 2;
    const int64_t first = dim < v_head_dim_ ? 0 : v_head_dim_;
    const int64_t cell =
        (dim - first) / 2 * kGroupTokens + token % kGroupTokens;
    return token / kGroupTokens * kGroupTokens * token_bytes() +
           kGroupTokens * first + (cell * 2 + (dim - first) % 2) * bytes;
  }

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
