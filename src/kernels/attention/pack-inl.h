// Keys and values as panels, which products read from beginning to end: PanelColumns columns side by side,
// row after row (matmul-inl.h).
//
// Bytes: each element is read once and written once, as T, for all blocks of a unit; beside at least 2 flops
// per element and row of the unit it shows below a hundred rows or so.
#if defined(WHET_KERNELS_ATTENTION_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_PACK_INL_H_
#undef WHET_KERNELS_ATTENTION_PACK_INL_H_
#else
#define WHET_KERNELS_ATTENTION_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/load-inl.h"
#include "kernels/attention/run.h"
#include "kernels/dense/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::kTileKeys;
using kernels::Pass;
using kernels::Shared;

static_assert(kernels::kPad % kMaxPanelColumns == 0);  // padded sizes are whole panels

// Rows of `grid` can be read where they are, as whole panels.
template <typename T>
HWY_INLINE bool IsPanelled(const core::Grid& grid, std::int64_t size) {
  return grid.dtype == kArithmetic<T> && grid.strides[3] == 1 && size % PanelColumns<T>() == 0;
}

// to[i * columns + r] = rows[r][i] for up to four rows and `size` elements.
template <typename T>
HWY_INLINE void TransposeRows(const T* const* rows, std::int64_t count, std::int64_t size, T* to,
                              std::int64_t columns) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == sizeof(float)) {
    const hn::FixedTag<float, 4> d;
    const hn::RepartitionToWide<decltype(d)> dw;
    for (; count == 4 && i + 4 <= size; i += 4, to += 4 * columns) {
      const auto a = hn::LoadU(d, rows[0] + i), b = hn::LoadU(d, rows[1] + i);
      const auto c = hn::LoadU(d, rows[2] + i), e = hn::LoadU(d, rows[3] + i);
      const auto ab_low = hn::BitCast(dw, hn::InterleaveLower(d, a, b));
      const auto ce_low = hn::BitCast(dw, hn::InterleaveLower(d, c, e));
      const auto ab_high = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
      const auto ce_high = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_low, ce_low)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_low, ce_low)), d, to + columns);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_high, ce_high)), d, to + 2 * columns);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_high, ce_high)), d, to + 3 * columns);
    }
  }
#endif
  for (; i < size; ++i, to += columns) {
    for (std::int64_t r = 0; r < count; ++r) to[r] = rows[r][i];
  }
}

// Keys [begin, end) of a grid (k, or v in backward) as panels: element (d, key) at
// to[key / C * C * size + d * C + key % C], C = PanelColumns; keys past the end are 0.
template <typename T>
HWY_NOINLINE void PackTransposed(const core::Grid& grid, const Unit& unit, std::int64_t size,
                                 std::int64_t begin, std::int64_t end, T* to) {
  const std::int64_t columns = PanelColumns<T>(), count = std::min<std::int64_t>(4, columns);
  static constexpr T kZeros[kMaxHeadSize] = {};
  T buffer[4][kMaxHeadSize];
  const T* rows[4];
  for (std::int64_t first = begin; first < end; first += columns) {
    for (std::int64_t c = 0; c < columns; c += count) {
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t key = first + c + r;
        rows[r] = key >= unit.keys() ? kZeros
                                     : VectorOf(grid, unit.sequence.batch, unit.key_head,
                                                unit.sequence.first_key + key, size, buffer[r]);
      }
      TransposeRows(rows, count, size, to + first * size + c, columns);
    }
  }
}

// Values of keys [begin, end) of a tile as panels: element (key, e) at
// to[e / C * C * kTileKeys + (key - begin) * C + e % C]; columns past E are 0.
template <typename T>
HWY_NOINLINE void PackValues(const AttentionRun& run, const Unit& unit, std::int64_t begin, std::int64_t end,
                             T* to) {
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size(), columns = PanelColumns<T>();
  T buffer[kMaxHeadSize];
  for (std::int64_t key = begin; key < end; ++key, to += columns) {
    const T* value =
        VectorOf(run.job.v, unit.sequence.batch, unit.key_head, unit.sequence.first_key + key, size, buffer);
    for (std::int64_t e = 0; e < wide; e += columns) {
      const std::int64_t used = std::clamp<std::int64_t>(size - e, 0, columns);
      std::fill(std::copy_n(value + e, used, to + e * kTileKeys), to + e * kTileKeys + columns, T(0));
    }
  }
}

// Packs tile `tile` of the keys of unit `index` of the wave.
template <typename T>
HWY_INLINE void PackTile(const AttentionRun& run, std::int64_t index, std::int64_t tile) {
  const core::AttentionJob& job = run.job;
  const Unit unit(job, run.first_unit + index);
  const std::int64_t begin = tile * kTileKeys, end = std::min(begin + kTileKeys, unit.keys());
  if (begin >= end) return;
  const Shared<T> shared = kernels::shared_of<T>(run);
  if (!run.has_logits() && !(run.packed != nullptr && run.packed->has_keys)) {
    PackTransposed(job.k, unit, job.shape.key_size, begin, end,
                   shared.keys + index * kernels::padded(run.max_keys) * job.shape.key_size);
  }
  if (shared.values != nullptr && !(run.packed != nullptr && run.packed->has_values)) {
    PackValues(run, unit, begin, end,
               shared.values + (index * run.tiles + tile) * kTileKeys * run.value_size());
  }
  shared.unsafe[index * run.tiles + tile] =
      job.v.data != nullptr && job.options.skip_epsilon > 0 && run.pass == Pass::attention &&
              !IsFinite<T>(job.v, unit, job.shape.value_size, begin, end)
          ? 1
          : 0;
}

// Rows of k or v from key `key` of the unit on, for products with them: where they are if whole panels lie
// there, else converted in `buffer`.
template <typename T>
HWY_INLINE Panel<T> Rows(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t key,
                         std::int64_t end, T* buffer, std::int64_t wide) {
  if (IsPanelled<T>(grid, size)) {
    const std::byte* at = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    return {reinterpret_cast<const T*>(at), grid.strides[2]};
  }
  LoadVectors(grid, unit, size, key, end, buffer, wide);
  return {buffer, wide};
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_PACK_INL_H_
