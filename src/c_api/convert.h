// What every C function shares: exceptions become status codes, structs of any version become this version's,
// and C arguments become those of C++.
#ifndef WHET_C_API_CONVERT_H_
#define WHET_C_API_CONVERT_H_

#include <whet/c_api.h>
#include <whet/whet.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace whet::c_api {

// Keeps the text for whet_last_error().
whet_status failed(whet_status status, const char* text) noexcept;

// Nothing thrown inside leaves a C function.
template <typename F>
whet_status guarded(F&& body) noexcept {
  try {
    body();
    return WHET_OK;
  } catch (const Error& e) {
    return failed(WHET_INVALID_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return failed(WHET_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(WHET_INTERNAL_ERROR, e.what());
  } catch (...) {
    return failed(WHET_INTERNAL_ERROR, "unknown exception");
  }
}

template <typename T>
T& required(T* given, const char* name) {
  if (given == nullptr) throw Error(std::string(name) + " is null");
  return *given;
}

// Error unless a struct of `given` bytes may be read as one of which this version knows `known`.
void check_struct_size(std::size_t given, std::size_t known, const char* name);
[[noreturn]] void refuse_unknown_field(const char* name);

// The struct as this version knows it, all defaults if null. Fields it lacks are 0, which is their default;
// those beyond what this version knows must be 0. So new fields go to the end, in 8 bytes or pairs of 4, and
// mean the default when they are 0.
template <typename Struct>
Struct known_part(const Struct* given, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct> && offsetof(Struct, struct_size) == 0);
  Struct known{};
  if (given == nullptr) return known;
  const std::size_t size = given->struct_size;
  check_struct_size(size, sizeof(Struct), name);
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const auto is_set = [](unsigned char byte) { return byte != 0; };
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size, is_set)) {
    refuse_unknown_field(name);
  }
  if constexpr (requires { known.reserved; }) {
    if (known.reserved != 0) refuse_unknown_field(name);
  }
  return known;
}

// A number that counts only if its has_ field says so. One given without it was meant to count: Error.
template <typename T>
bool is_set(int32_t has, T value, const char* name) {
  if (has == 0 && value != 0) {
    throw Error(std::string(name) + ": is given, but has_" + name + " is 0, must be 1");
  }
  return has != 0;
}

View view_of(const whet_view* v, const char* name);        // Error if null
View view_if_given(const whet_view* v, const char* name);  // an empty view if null

template <typename T>
std::span<T> span_if_given(T* data, std::size_t size) {
  return data == nullptr ? std::span<T>() : std::span<T>(data, size);
}

// Elements of a C array as the C++ type of the same layout.
template <typename To, typename From>
std::span<To> elements(From* data, std::size_t size, const char* name) {
  static_assert(sizeof(To) == sizeof(From) && alignof(To) == alignof(From));
  if (data == nullptr && size > 0) throw Error(std::string(name) + " is null");
  return {reinterpret_cast<To*>(data), size};
}

Rule rule_of(const char* name);  // none if null
Normalizer normalizer_of(const char* name);
BetaGradient beta_gradient(int32_t hold_beta);
Execution execution_of(const whet_execution* given);

// Statistics that a call writes for `rows` rows. Elements of an older header have fewer fields: they are
// filled from a copy by finish().
class WrittenStats {
 public:
  WrittenStats(whet_row_stats* data, std::size_t element_size, std::size_t rows);
  std::span<RowStats> span() const { return span_; }
  // The caller's elements if they aren't span() itself: the call can't see whether they overlap its arrays.
  std::span<const std::byte> unseen() const { return {short_elements_, copy_.size() * element_size_}; }
  void finish() const;

 private:
  std::byte* short_elements_ = nullptr;
  std::size_t element_size_;
  std::vector<RowStats> copy_;
  std::span<RowStats> span_;
};

}  // namespace whet::c_api

#endif  // WHET_C_API_CONVERT_H_
