#ifndef QUERN_CACHE_KV_WRITER_H_
#define QUERN_CACHE_KV_WRITER_H_

// Private: how WriteKvPlan writes the keys and values of a few tokens.

#include <cstddef>
#include <cstdint>

#include "quern/cache/group_kv_kernels.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/write_kv.h"
#include "quern/cache/write_kv_kernels.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Elements of a row of k, or of v: see WriteKvArgs.
int64_t WriteKvRowDim(const KvLayout& layout, bool value);

// Writes runs of tokens. All arguments are those of one WriteKvPlan::Execute
// and outlive the writer.
class KvWriter {
 public:
  // The tokens [token, token + count), which go to the slots from `slot` on:
  // 16 at most, in one page, and in one group where the layout has groups.
  struct Run {
    int64_t token;
    int64_t count;
    int64_t slot;
  };

  // stream: whether whole groups are stored past the caches.
  KvWriter(const WriteKvSpec& spec, const KvWriteKernels& kernels,
           const WriteKvArgs& args, bool stream);

  void Write(const Run& run, int64_t head_begin, int64_t head_end) const {
    for (int64_t head = head_begin; head < head_end; ++head) {
      if (layout_.scaling() == KvScaling::kPerBlock) {
        WriteBlocks(run, head);
        WriteRest(run, head);
        continue;
      }
      WriteSide(run, head, /*value=*/false);
      WriteSide(run, head, /*value=*/true);
    }
  }

 private:
  static constexpr int64_t kGroup = KvLayout::kGroupTokens;
  // Elements of a row that are encoded at once; even. Scratch of a group stays
  // in the L1 cache.
  static constexpr int64_t kChunk = 256;

  // One head's keys, or values, of a run: where they come from and go to.
  struct Side {
    bool rotated;    // keys that are turned on the way
    bool copied;     // bits are copied: no rotation, no other type
    bool to_values;  // the values' block; else the keys'
    int64_t dim;     // elements of a row
    int64_t first;   // of a key, which element a row begins with
    int64_t offset;  // of the first row in its page
    uint8_t* block;
    const uint8_t* rows[kGroup];
    // The same head of the tokens that are likely to come next.
    const uint8_t* ahead[kGroup];
    float inverse[kGroup];  // 1 / scale of each row
  };

  // One head's rows of `from`, of a run and of what is likely to come next.
  void FindRows(const Run& run, int64_t head, const AnyTensorView& from,
                const uint8_t** rows, const uint8_t** ahead) const;

  // KvScaling::kPerBlock: the latents of a run, and what keys have behind them.
  void WriteBlocks(const Run& run, int64_t head) const;
  void WriteRest(const Run& run, int64_t head) const;

  void WriteSide(const Run& run, int64_t head, bool value) const;
  // The elements [d, d + kChunk) of each row, or as many of them as there are.
  void WriteChunk(const Run& run, const Side& side, int64_t d) const;

  // 1 / scale of each row, and the scales, if they are the rows' own.
  void FindInverses(const Run& run, int64_t head, bool value,
                    const uint8_t* const* rows, float* inverse) const;

  // The largest magnitude of each row once it is turned, or NaN.
  void MaxAbsRotated(const Run& run, const uint8_t* const* rows,
                     float* most) const;

  // Elements [begin, begin + count) of a token's key, turned.
  void Rotate(int64_t token, const uint8_t* row, int64_t begin, int64_t count,
              float* to) const;

  // `to` is the cell of the first row's first element, a cell the bytes that a
  // row has in one place, and `pack` what packs such cells.
  void PlaceKeys(const uint8_t* const* codes, int64_t count, size_t bytes,
                 const PackKvKernels& pack, size_t cell, uint8_t* to) const;

  // `to` is the first element of the first row, at `offset` in its page.
  void PlaceValues(const uint8_t* const* codes, int64_t count, size_t bytes,
                   int64_t offset, uint8_t* to) const;

  const WriteKvSpec& spec_;
  const KvLayout& layout_;
  const WriteKvKernels& kernels_;
  const PackKvKernels& pack_;
  const GroupKvKernels& group_;
  const WriteKvKernels& bf16_kernels_;
  const PackKvKernels& bf16_pack_;
  const WriteKvArgs& args_;
  bool stream_;
  int64_t element_;  // bytes of an element of the cache
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_WRITER_H_
