#include "quern/cache/convert_pages.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPages = 3, kHeads = 2, kPageSize = 32;

KvLayout MakeLayout(KvForm form, DType dtype = DType::kBF16,
                    int64_t head_dim = 5) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = kHeads;
  spec.head_dim = head_dim;
  spec.v_head_dim = head_dim + 2;
  spec.page_size = kPageSize;
  spec.form = form;
  if (dtype == DType::kI8) spec.scaling = KvScaling::kPerTokenHead;
  return KvLayout::Create(spec).value();
}

// k[page, head, token, dim] and v as two tensors.
template <typename T>
KvCacheView Tensors(const KvLayout& layout, T* k, T* v) {
  const auto strides = [&](T* data, int64_t dim) {
    const int64_t head = kPageSize * dim * static_cast<int64_t>(sizeof(T));
    return KvCacheView::Blocks{reinterpret_cast<uint8_t*>(data), kHeads * head,
                               head};
  };
  return KvCacheView(layout, kPages, strides(k, layout.head_dim()),
                     strides(v, layout.v_head_dim()));
}

template <typename T>
void ExpectThereAndBack(int64_t head_dim) {
  SCOPED_TRACE(head_dim);
  TestRng rng;
  const KvLayout plain = MakeLayout(KvForm::kPlain, DTypeOf<T>, head_dim);
  const KvLayout paired = MakeLayout(KvForm::kPaired, DTypeOf<T>, head_dim);
  constexpr int64_t kRows = kPages * kHeads * kPageSize;
  GuardBuffer<T> k(kRows * plain.head_dim()), v(kRows * plain.v_head_dim());
  for (GuardBuffer<T>* tensor : {&k, &v}) {
    for (int64_t i = 0; i < tensor->size(); ++i) {
      const uint64_t bits = rng.Next();
      std::memcpy(&(*tensor)[i], &bits, sizeof(T));
    }
  }
  GuardBuffer<uint8_t> pages(kPages * paired.page_bytes());
  GuardBuffer<float> scales(2 * kRows), scales_back(2 * kRows);
  for (int64_t i = 0; i < scales.size(); ++i) {
    scales[i] = static_cast<float>(i);
  }
  const auto with_scales = [&](KvCacheView view, float* data) {
    if (plain.scaling() == KvScaling::kNone) return view;
    constexpr int64_t kPage = kHeads * kPageSize;
    view.set_scales({data, kPage, kPageSize}, {data + kRows, kPage, kPageSize});
    return view;
  };
  const KvCacheView from =
      with_scales(Tensors(plain, k.data(), v.data()), scales.data());
  const KvCacheView packed(paired, kPages, pages.data());
  ASSERT_TRUE(ConvertPages(from, packed).ok());

  const auto element = static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0, page = 0; page < kPages; ++page) {
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t t = 0; t < kPageSize; ++t, ++i) {
        for (int64_t d = 0; d < paired.k_row(); ++d) {
          T want = {};
          if (d < head_dim) want = k[i * head_dim + d];
          EXPECT_EQ(
              std::memcmp(packed.K(page, head) + paired.KOffset(t, d) * element,
                          &want, sizeof(T)),
              0);
        }
        for (int64_t d = 0; d < paired.v_head_dim(); ++d) {
          EXPECT_EQ(
              std::memcmp(packed.V(page, head) + paired.VOffset(t, d) * element,
                          &v[i * paired.v_head_dim() + d], sizeof(T)),
              0);
        }
        if (plain.scaling() == KvScaling::kNone) continue;
        EXPECT_EQ(packed.KScales(page, head)[t], scales[i]);
        EXPECT_EQ(packed.VScales(page, head)[t], scales[kRows + i]);
      }
    }
  }

  GuardBuffer<T> k_back(k.size()), v_back(v.size());
  ASSERT_TRUE(ConvertPages(packed, with_scales(Tensors(plain, k_back.data(),
                                                       v_back.data()),
                                               scales_back.data()))
                  .ok());
  const auto bytes = [](const GuardBuffer<T>& tensor) {
    return static_cast<size_t>(tensor.size()) * sizeof(T);
  };
  EXPECT_EQ(std::memcmp(k.data(), k_back.data(), bytes(k)), 0);
  EXPECT_EQ(std::memcmp(v.data(), v_back.data(), bytes(v)), 0);
  if (plain.scaling() != KvScaling::kNone) {
    EXPECT_EQ(scales.ToVector(), scales_back.ToVector());
  }
}

TEST(ConvertPagesTest, IsItsOwnInverse) {
  for (const int64_t head_dim : {1, 2, 7, 16}) {
    ExpectThereAndBack<float>(head_dim);
    ExpectThereAndBack<BFloat16>(head_dim);
    ExpectThereAndBack<Float16>(head_dim);
    ExpectThereAndBack<Float8E4M3>(head_dim);
    ExpectThereAndBack<Float8E5M2>(head_dim);
    ExpectThereAndBack<int8_t>(head_dim);
  }
}

TEST(ConvertPagesTest, RefusesWhatDiffersInMoreThanForm) {
  const KvLayout plain = MakeLayout(KvForm::kPlain);
  std::vector<uint8_t> a(static_cast<size_t>(4 * plain.page_bytes()));
  std::vector<uint8_t> b(a.size());
  const auto refusal = [&](const KvLayout& from, int64_t pages, void* to) {
    const absl::Status status =
        ConvertPages(KvCacheView(from, pages, a.data()),
                     KvCacheView(MakeLayout(KvForm::kPaired), 2, to));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(MakeLayout(KvForm::kPlain, DType::kF16), 2, b.data()),
              HasSubstr("differ in more than their form"));
  EXPECT_THAT(refusal(MakeLayout(KvForm::kPlain, DType::kBF16, 6), 2, b.data()),
              HasSubstr("differ in more than their form"));
  EXPECT_THAT(refusal(plain, 3, b.data()),
              HasSubstr("num_pages of `to`=2; need 3"));
  EXPECT_THAT(refusal(plain, 2, nullptr),
              HasSubstr("the keys of the cache are null"));
  EXPECT_TRUE(ConvertPages(KvCacheView(plain, 0, nullptr),
                           KvCacheView(plain, 0, nullptr))
                  .ok());
}

// A value of the latent form is a part of its key: there is no place for one
// that differs.
TEST(ConvertPagesTest, GoesFromTheLatentFormButNotToIt) {
  const auto layout = [](KvForm form) {
    KvLayoutSpec spec;
    spec.dtype = DType::kF32;
    spec.kv_heads = 1;
    spec.head_dim = 6;
    spec.v_head_dim = 4;
    spec.page_size = 16;
    spec.form = form;
    return KvLayout::Create(spec).value();
  };
  const KvLayout latent = layout(KvForm::kLatent);
  const auto floats = [](const KvLayout& of) {
    return std::vector<float>(static_cast<size_t>(of.page_bytes()) / 4);
  };
  std::vector<float> keys = floats(latent), same = keys;
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<float>(i);
  const KvCacheView from(latent, 1, keys.data());
  ASSERT_TRUE(ConvertPages(from, KvCacheView(latent, 1, same.data())).ok());
  EXPECT_EQ(same, keys);
  for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
    SCOPED_TRACE(std::string(KvFormName(form)));
    const KvLayout other = layout(form);
    std::vector<float> pages = floats(other);
    const KvCacheView to(other, 1, pages.data());
    ASSERT_TRUE(ConvertPages(from, to).ok());
    const auto at = [](const uint8_t* block, int64_t offset) {
      float x = 0;
      std::memcpy(&x, block + offset * int64_t{sizeof(float)}, sizeof(float));
      return x;
    };
    for (int64_t t = 0; t < 16; ++t) {
      for (int64_t d = 0; d < 6; ++d) {
        const float want = at(from.K(0, 0), latent.KOffset(t, d));
        EXPECT_EQ(at(to.K(0, 0), other.KOffset(t, d)), want);
        if (d >= 4) continue;
        EXPECT_EQ(at(to.V(0, 0), other.VOffset(t, d)), want);
      }
    }
    const absl::Status status = ConvertPages(to, from);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(),
                HasSubstr("convert_pages: from " +
                          std::string(KvFormName(form)) + " to latent"));
    EXPECT_EQ(same, keys);
  }
}

}  // namespace
}  // namespace quern
