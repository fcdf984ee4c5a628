#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/float_type.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/block_pack.h"
#include "quern/gemm/weights/code_type.h"
#include "quern/gemm/weights/linear_sources.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/code_pack.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
#include "quern/quant/s8s8_compensation.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr int64_t kPanelCols = VnniLayout::kPanelCols;

// Copies a matrix of equal shape and dtype. Rows are divided between the
// workers.
void CopyMatrix(const AnyTensorView& from, const AnyTensorView& to,
                Executor& executor) {
  const auto size = static_cast<int64_t>(SizeOf(from.dtype()));
  executor.ParallelFor(from.extent(0), [&](int64_t row, int /*worker*/) {
    std::memcpy(
        static_cast<char*>(to.mutable_data()) + row * to.stride(0) * size,
        static_cast<const char*>(from.data()) + row * from.stride(0) * size,
        static_cast<size_t>(from.extent(1) * size));
  });
}

// Columns [first, first + count) of a source, from `col` of a part on.
struct Segment {
  size_t source;
  int64_t first, count, col;
};
std::vector<Segment> SegmentsOf(const Columns& columns, int64_t begin,
                                int64_t end) {
  std::vector<Segment> segments;
  for (size_t i = 0; i < columns.sources(); ++i) {
    const int64_t from = std::max(columns.begin(i), begin);
    const int64_t to = std::min(columns.end(i), end);
    if (from < to) {
      segments.push_back({i, from - columns.begin(i), to - from, from - begin});
    }
  }
  return segments;
}

class Packer {
 public:
  Packer(const LinearWeightsSpec& spec, const PackedForm& form,
         absl::Span<const LinearSource> sources,
         const std::vector<int32_t>& order, uint8_t* to, Executor& executor)
      : spec_(spec),
        form_(form),
        sources_(sources),
        order_(order),
        columns_(sources, spec.n),
        to_(to),
        executor_(executor) {}

  absl::Status Run() const {
    if (form_.bias != 0) PackBias();
    switch (spec_.format) {
      case WeightFormat::kBlocks:
        PackBlocks();
        return absl::OkStatus();
      case WeightFormat::kE4M3Block:
        PackE4M3();
        return absl::OkStatus();
      case WeightFormat::kI4Group:
        PackI4();
        return absl::OkStatus();
      case WeightFormat::kI8Group:
        PackRows();
        PackGroupScales();
        return absl::OkStatus();
      default:
        return PackVnni();
    }
  }

 private:
  WeightLayout layout() const { return sources_[0].layout; }
  template <typename T>
  T* Section(int64_t offset) const {
    return reinterpret_cast<T*>(to_ + offset);
  }
  uint8_t* PanelsOfPart(int64_t part) const {
    return to_ + form_.panels + part * form_.part_bytes;
  }

  void PackBias() const {
    for (size_t i = 0; i < sources_.size(); ++i) {
      auto* to = Section<float>(form_.bias) + columns_.begin(i);
      const auto n = static_cast<size_t>(columns_.end(i) - columns_.begin(i));
      if (sources_[i].bias.rank() == 0) {
        std::fill_n(to, n, 0.0f);
      } else {
        std::memcpy(to, sources_[i].bias.data(), n * sizeof(float));
      }
    }
  }

  // ---- floats, and int8 by channel

  absl::Status PackVnni() const {
    for (int64_t part = 0; part < form_.parts; ++part) {
      QUERN_RETURN_IF_ERROR(
          PackVnniPart(part * form_.part_n, PanelsOfPart(part)));
    }
    if (spec_.format != WeightFormat::kI8Channel) return absl::OkStatus();
    for (size_t i = 0; i < sources_.size(); ++i) {
      const AnyTensorView& scales = sources_[i].scales;
      const auto* from = static_cast<const float*>(scales.data());
      auto* to = Section<float>(form_.scales) + columns_.begin(i);
      const int64_t n = columns_.end(i) - columns_.begin(i);
      for (int64_t c = 0; c < n; ++c) {
        to[c] = from[scales.extent(0) == 1 ? 0 : c];
      }
    }
    return SumColumns();
  }

  // Packs each source into its own panels. Where two meet inside one, the part
  // is packed from a copy in plain memory.
  absl::Status PackVnniPart(int64_t first, uint8_t* panels) const {
    const bool nk = layout() == WeightLayout::kNK;
    const std::vector<Segment> segments =
        SegmentsOf(columns_, first, first + form_.part_n);
    const bool apart =
        std::all_of(segments.begin(), segments.end(),
                    [](const Segment& s) { return s.col % kPanelCols == 0; });
    if (apart) {
      for (const Segment& s : segments) {
        QUERN_RETURN_IF_ERROR(PackMatrix(
            Slice(sources_[s.source].codes, s.first, s.count), s.count,
            panels + s.col / kPanelCols * form_.panel_bytes));
      }
      return absl::OkStatus();
    }
    const DType dtype = FloatOrI8(spec_.format);
    const int64_t rows = nk ? form_.part_n : spec_.k;
    const int64_t cols = nk ? spec_.k : form_.part_n;
    QUERN_ASSIGN_OR_RETURN(
        AlignedBuffer copy,
        AlignedBuffer::Create(rows * cols *
                              static_cast<int64_t>(SizeOf(dtype))));
    const AnyTensorView all(dtype, static_cast<void*>(copy.data()), 2,
                            {rows, cols}, {cols, 1});
    for (const Segment& s : segments) {
      CopyMatrix(Slice(sources_[s.source].codes, s.first, s.count),
                 Slice(all, s.col, s.count), executor_);
    }
    return PackMatrix(all, form_.part_n, panels);
  }

  AnyTensorView Slice(const AnyTensorView& codes, int64_t first,
                      int64_t count) const {
    return layout() == WeightLayout::kNK ? RowSlice(codes, first, count)
                                         : ColumnSlice(codes, first, count);
  }

  absl::Status PackMatrix(const AnyTensorView& from, int64_t n,
                          uint8_t* panels) const {
    VnniPackSpec pack_spec;
    QUERN_ASSIGN_OR_RETURN(
        pack_spec.layout,
        VnniLayout::Create(FloatOrI8(spec_.format), spec_.k, n));
    pack_spec.order =
        layout() == WeightLayout::kNK ? WeightOrder::kNK : WeightOrder::kKN;
    QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack,
                           VnniPackPlan::Create(pack_spec));
    pack.Pack(from, panels, executor_);
    return absl::OkStatus();
  }

  absl::Status SumColumns() const {
    S8S8CompensationSpec sums_spec;
    sums_spec.k = spec_.k;
    sums_spec.n = form_.part_n;
    QUERN_ASSIGN_OR_RETURN(const S8S8CompensationPlan compensation,
                           S8S8CompensationPlan::Create(sums_spec));
    auto* sums = Section<int32_t>(form_.sums);
    for (int64_t part = 0; part < form_.parts; ++part) {
      compensation.FromPanels(
          {reinterpret_cast<const int8_t*>(PanelsOfPart(part)), kPanelCols,
           form_.panel_bytes},
          DenseVector(sums + part * form_.part_n, form_.part_n), executor_);
    }
    for (int64_t n = 0; n < spec_.n; ++n) sums[n] /= 128;  // exact
    return absl::OkStatus();
  }

  // ---- blocks, and codes in groups

  void PackBlocks() const {
    BlockPackSpec pack_spec;
    pack_spec.format = spec_.block_format;
    pack_spec.n = form_.part_n;
    pack_spec.k = spec_.k;
    PackRowsBy(BlockPackPlan::Create(pack_spec));
  }

  // Packs each part from the rows of its columns.
  template <typename Plan>
  void PackRowsBy(const absl::StatusOr<Plan>& plan) const {
    QUERN_CHECK(plan.ok());  // PackedForm has laid it out
    std::vector<const uint8_t*> rows;
    for (const LinearSource& source : sources_) {
      const Rows<uint8_t> of_source(source.codes);
      for (int64_t n = 0; n < ColumnsOf(source); ++n) {
        rows.push_back(of_source[n]);
      }
    }
    const auto n = static_cast<size_t>(form_.part_n);
    for (int64_t part = 0; part < form_.parts; ++part) {
      plan->Pack(
          absl::MakeConstSpan(rows).subspan(static_cast<size_t>(part) * n, n),
          PanelsOfPart(part), executor_);
    }
  }

  template <typename T>
  std::vector<Rows<T>> RowsOf(AnyTensorView LinearSource::*view) const {
    std::vector<Rows<T>> rows;
    for (const LinearSource& source : sources_) rows.emplace_back(source.*view);
    return rows;
  }

  CodeLayout CodesOfPart() const {
    const auto layout = CodeLayout::Create(BitsOf(CodesOf(spec_.format)),
                                           spec_.k, form_.part_n);
    QUERN_CHECK(layout.ok());  // PackedForm has laid it out
    return *layout;
  }

  // code_at(column, k).
  template <typename CodeAt>
  void PackPanels(const CodeAt& code_at) const {
    const CodeLayout part_layout = CodesOfPart();
    for (int64_t part = 0; part < form_.parts; ++part) {
      PackCodes(
          part_layout, ZeroCode(CodesOf(spec_.format)),
          [&](int64_t n) { return columns_.At(part * form_.part_n + n); },
          code_at, PanelsOfPart(part), executor_);
    }
  }

  // The section of scales, or of zeros: value_at(column, g). Panels are divided
  // between the workers, whose memory it becomes: nobody has written to it.
  template <typename ValueAt>
  void PackPerGroup(int64_t section, const ValueAt& value_at) const {
    const int64_t panels = DivCeil(form_.part_n, kPanelCols);
    executor_.ParallelFor(form_.parts * panels, [&](int64_t task, int) {
      const int64_t first = task % panels * kPanelCols;
      const int64_t cols = std::min(kPanelCols, form_.part_n - first);
      Column columns[kPanelCols] = {};
      for (int64_t c = 0; c < cols; ++c) {
        columns[c] = columns_.At(task / panels * form_.part_n + first + c);
      }
      auto* to = Section<float>(section) + task * form_.groups * kPanelCols;
      for (int64_t g = 0; g < form_.groups; ++g, to += kPanelCols) {
        for (int64_t c = 0; c < kPanelCols; ++c) {
          to[c] = c < cols ? value_at(columns[c], g) : 0.0f;
        }
      }
    });
  }

  // Rows of codes, a byte each, one for each column.
  void PackRows() const {
    CodePackSpec pack_spec;
    pack_spec.layout = CodesOfPart();
    pack_spec.fill = ZeroCode(CodesOf(spec_.format));
    PackRowsBy(CodePackPlan::Create(pack_spec));
  }

  void PackE4M3() const {
    PackRows();
    const auto scales = RowsOf<float>(&LinearSource::scales);
    PackPerGroup(form_.scales, [&](const Column& c, int64_t g) {
      return scales[c.source][c.n / sources_[c.source].block_n][g];
    });
  }

  void PackI4() const {
    if (layout() == WeightLayout::kNK && order_.empty()) {
      PackRows();
    } else if (layout() == WeightLayout::kNK) {
      const auto rows = RowsOf<uint8_t>(&LinearSource::codes);
      PackPanels([&](const Column& c, int64_t k) {
        return rows[c.source][c.n][SourceK(k)];
      });
    } else if (layout() == WeightLayout::kAwq) {
      const auto rows = RowsOf<int32_t>(&LinearSource::codes);
      PackPanels([&](const Column& c, int64_t k) {
        return CodeOf(rows[c.source][k][c.n / kWordCodes], AwqCode(c.n));
      });
    } else {
      const auto rows = RowsOf<int32_t>(&LinearSource::codes);
      PackPanels([&](const Column& c, int64_t k) {
        const int64_t from = SourceK(k);
        return CodeOf(rows[c.source][from / kWordCodes][c.n],
                      from % kWordCodes);
      });
    }
    PackGroupScales();
    if (form_.zeros != 0) PackI4Zeros();
  }

  // Returns the k of the sources that becomes row k of the packed codes.
  int64_t SourceK(int64_t k) const {
    return order_.empty() ? k : order_[static_cast<size_t>(k)];
  }

  // Sources may have scales of different types.
  void PackGroupScales() const {
    PackPerGroup(form_.scales, [&](const Column& c, int64_t g) {
      const AnyTensorView& scales = sources_[c.source].scales;
      return WithFloatType(scales.dtype(), [&](auto type) {
        return ToF32(Rows<decltype(type)>(scales)[g][c.n]);
      });
    });
  }

  // Zero points are stored less eight, as the codes are. A source without zero
  // points has zeros there.
  void PackI4Zeros() const {
    const bool awq = layout() == WeightLayout::kAwq;
    const int middle = layout() == WeightLayout::kGptq ? 7 : 8;
    PackPerGroup(form_.zeros, [&](const Column& c, int64_t g) {
      const AnyTensorView& zeros = sources_[c.source].zeros;
      if (zeros.rank() == 0) return 0.0f;
      if (layout() == WeightLayout::kNK) {
        return static_cast<float>(Rows<uint8_t>(zeros)[g][c.n] - 8);
      }
      const int64_t code = awq ? AwqCode(c.n) : c.n % kWordCodes;
      const int32_t word = Rows<int32_t>(zeros)[g][c.n / kWordCodes];
      return static_cast<float>(CodeOf(word, code) - middle);
    });
  }

  static uint8_t CodeOf(int32_t word, int64_t i) {
    return static_cast<uint8_t>(static_cast<uint32_t>(word) >> (4 * i) & 15);
  }
  // Which code of AWQ's words is column c: the inverse of the header's order.
  static int64_t AwqCode(int64_t c) {
    constexpr int64_t kCode[kWordCodes] = {0, 4, 1, 5, 2, 6, 3, 7};
    return kCode[c % kWordCodes];
  }

  const LinearWeightsSpec& spec_;
  const PackedForm& form_;
  absl::Span<const LinearSource> sources_;
  const std::vector<int32_t>& order_;
  Columns columns_;
  uint8_t* to_;
  Executor& executor_;
};

}  // namespace

absl::Status PackSources(const LinearWeightsSpec& spec, const PackedForm& form,
                         absl::Span<const LinearSource> sources,
                         const std::vector<int32_t>& order, uint8_t* to,
                         Executor& executor) {
  return Packer(spec, form, sources, order, to, executor).Run();
}

}  // namespace quern
