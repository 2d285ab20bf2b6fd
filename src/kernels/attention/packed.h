// What PackedShard holds: the keys and values of a shard as PackTile (pack-inl.h) leaves them, for all units
// at once.
#ifndef WHET_KERNELS_ATTENTION_PACKED_H_
#define WHET_KERNELS_ATTENTION_PACKED_H_

#include <whet/shard.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/arguments.h"
#include "kernels/attention/memory.h"

namespace whet {

class PackedShard::Memory {
 public:
  // What decides the bytes of packed keys; values add their own.
  struct Source {
    const void* data = nullptr;
    DType dtype = DType::f32;
    std::int64_t units = 0, keys = 0, size = 0;  // of a vector, as packed
    const void* target = nullptr;                // any address that is another for another SIMD target
    bool operator==(const Source&) const = default;
  };

  // Makes room for keys and, if `v` has data, for values; Error if there are others already.
  void hold(const Source& k, const Source& v, std::int64_t tiles, std::size_t element_bytes) {
    hold(k, keys_, "k", kernels::padded(k.keys) * k.size, element_bytes);
    if (v.data != nullptr) hold(v, values_, "v", tiles * core::kTileKeys * v.size, element_bytes);
    if (!unsafe_) {
      const std::size_t bytes = kernels::array_bytes(1, k.units, tiles);
      unsafe_.emplace(std::span<std::byte>(), bytes);
      std::fill_n(unsafe_->base(), bytes, std::byte{0});
    }
  }

  template <typename T>
  T* keys() const {
    return reinterpret_cast<T*>(keys_.memory->base());
  }
  template <typename T>
  T* values() const {
    return values_.memory ? reinterpret_cast<T*>(values_.memory->base()) : nullptr;
  }
  std::uint8_t* unsafe() const { return reinterpret_cast<std::uint8_t*>(unsafe_->base()); }

  bool has_keys = false, has_values = false;  // packed, not only held

 private:
  struct Part {
    Source source;
    std::optional<kernels::Workspace> memory;
  };

  static void hold(const Source& source, Part& part, const char* name, std::int64_t unit,
                   std::size_t element_bytes) {
    if (part.memory) {
      if (!(part.source == source))
        core::fail(name, "not what `packed` holds; must be the same array in all its calls");
      return;
    }
    part.memory.emplace(std::span<std::byte>(), kernels::array_bytes(element_bytes, source.units, unit));
    part.source = source;
  }

  Part keys_, values_;
  std::optional<kernels::Workspace> unsafe_;
};

}  // namespace whet

#endif  // WHET_KERNELS_ATTENTION_PACKED_H_
