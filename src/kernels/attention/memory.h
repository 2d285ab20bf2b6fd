// Scratch memory of a call of attention: one block, cut into pieces.
#ifndef WHET_KERNELS_ATTENTION_MEMORY_H_
#define WHET_KERNELS_ATTENTION_MEMORY_H_

#include <whet/attention.h>
#include <whet/error.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>

namespace whet::kernels {

// Panels of every target divide this, so sizes padded to it suit all of them.
inline constexpr std::int64_t kPad = 64;
inline constexpr std::int64_t padded(std::int64_t n) { return (n + kPad - 1) / kPad * kPad; }
static_assert(padded(kMaxHeadSize) == kMaxHeadSize);  // buffers of kMaxHeadSize hold any padded vector

// a * b * c elements; std::bad_alloc if they don't fit into memory.
inline std::size_t array_bytes(std::size_t element_bytes, std::int64_t a, std::int64_t b = 1,
                               std::int64_t c = 1) {
  std::size_t bytes = element_bytes;
  for (const std::int64_t n : {a, b, c}) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(n), &bytes)) throw std::bad_alloc();
  }
  return bytes;
}

// Hands out pieces of one block of memory. With a null base it only counts.
class Arena {
 public:
  static constexpr std::size_t kLine = 64;

  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <typename T>
  T* take(std::int64_t a, std::int64_t b = 1, std::int64_t c = 1) {
    const std::size_t bytes = array_bytes(sizeof(T), a, b, c);
    const std::size_t at = used_;
    if (__builtin_add_overflow(used_, bytes, &used_) || __builtin_add_overflow(used_, kLine - 1, &used_)) {
      throw std::bad_alloc();
    }
    used_ &= ~(kLine - 1);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

// The call's memory: the caller's workspace, or one allocation.
class Workspace {
 public:
  Workspace(std::span<std::byte> given, std::size_t needed) {
    if (given.empty()) {
      if (needed == 0) return;
      owned_.reset(static_cast<std::byte*>(::operator new(needed, std::align_val_t(Arena::kLine))));
      base_ = owned_.get();
      return;
    }
    if (given.size() < needed + Arena::kLine) {
      throw Error("workspace: has " + std::to_string(given.size()) + " bytes, must have at least " +
                  std::to_string(needed + Arena::kLine));
    }
    void* base = given.data();
    std::size_t space = given.size();
    base_ = static_cast<std::byte*>(std::align(Arena::kLine, needed, base, space));
  }
  std::byte* base() const { return base_; }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(Arena::kLine)); }
  };
  std::unique_ptr<std::byte, Delete> owned_;
  std::byte* base_ = nullptr;
};

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ATTENTION_MEMORY_H_
