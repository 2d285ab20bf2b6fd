// Structs to JSON and back from one list of fields each.
//
// A struct has a function fields(object, visit) that calls visit(name, member) for every field, in the order
// of the file; found by its arguments. Everything else, nested as deep as it may be, follows from the types.
#ifndef WHET_RESULTS_JSON_FIELDS_H_
#define WHET_RESULTS_JSON_FIELDS_H_

#include <whet/error.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "results/results.h"

namespace whet::results {

using Json = nlohmann::ordered_json;

// ---- to JSON

template <typename T>
Json write(const T& value);

struct Writer {
  Json& object;

  template <typename T>
  void operator()(const char* name, const T& value) const {
    object[name] = write(value);
  }
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) const {
    if (value) object[name] = write(*value);
  }
};

template <typename T>
struct WriteAs {
  static Json json(const T& value) {
    if constexpr (std::is_class_v<T> && !std::is_same_v<T, std::string> && !std::is_same_v<T, Json>) {
      Json object = Json::object();
      fields(value, Writer{object});
      return object;
    } else {
      return value;  // dump() makes null of what isn't finite
    }
  }
};

template <typename T>
struct WriteAs<std::vector<T>> {
  static Json json(const std::vector<T>& values) {
    Json array = Json::array();
    for (const T& value : values) array.push_back(write(value));
    return array;
  }
};

template <typename... T>
struct WriteAs<std::tuple<T...>> {
  static Json json(const std::tuple<T...>& values) {
    return std::apply([](const auto&... value) { return Json::array({write(value)...}); }, values);
  }
};

template <typename T>
struct WriteAs<ByName<T>> {
  static Json json(const ByName<T>& values) {
    Json object = Json::object();
    for (const auto& [name, value] : values) object[name] = write(value);
    return object;
  }
};

template <typename T>
Json write(const T& value) {
  return WriteAs<T>::json(value);
}

// ---- from JSON: `path` is where the value stands, for errors

template <typename T>
void read(const Json& json, const std::string& path, T& value);

[[noreturn]] inline void fail_to_read(const Json& json, const std::string& path, const char* allowed) {
  const std::string given = json.is_array() ? "a list" : json.is_object() ? "an object" : json.dump();
  throw Error(path + ": is " + given + ", must be " + allowed);
}

struct Reader {
  const Json& object;
  std::string path;

  template <typename T>
  void operator()(const char* name, T& value) const {
    if (!object.contains(name)) throw Error(below(name) + ": is missing");
    read(object.at(name), below(name), value);
  }
  // null is as good as nothing, but for a number that isn't finite.
  template <typename T>
  void operator()(const char* name, std::optional<T>& value) const {
    if (!object.contains(name)) return;
    if (!std::is_same_v<T, double> && object.at(name).is_null()) return;
    read(object.at(name), below(name), value.emplace());
  }
  std::string below(const char* name) const { return path.empty() ? name : path + "." + name; }
};

template <typename T>
struct ReadAs {
  static void value(const Json& json, const std::string& path, T& value) {
    if (!json.is_object()) fail_to_read(json, path.empty() ? "results" : path, "an object");
    fields(value, Reader{json, path});
  }
};

template <>
struct ReadAs<double> {
  static void value(const Json& json, const std::string& path, double& value) {
    if (!json.is_number() && !json.is_null()) fail_to_read(json, path, "a number or null");
    value = json.is_null() ? NAN : json.get<double>();
  }
};

template <>
struct ReadAs<std::uint64_t> {
  static void value(const Json& json, const std::string& path, std::uint64_t& value) {
    const bool whole =
        json.is_number_unsigned() || (json.is_number_integer() && json.get<std::int64_t>() >= 0);
    if (!whole) fail_to_read(json, path, "a whole number of 0 or more");
    value = json.get<std::uint64_t>();
  }
};

template <>
struct ReadAs<std::int64_t> {
  static void value(const Json& json, const std::string& path, std::int64_t& value) {
    std::uint64_t whole = 0;
    read(json, path, whole);
    if (!std::in_range<std::int64_t>(whole)) fail_to_read(json, path, "below 2^63");
    value = static_cast<std::int64_t>(whole);
  }
};

template <>
struct ReadAs<bool> {
  static void value(const Json& json, const std::string& path, bool& value) {
    if (!json.is_boolean()) fail_to_read(json, path, "true or false");
    value = json.get<bool>();
  }
};

template <>
struct ReadAs<std::string> {
  static void value(const Json& json, const std::string& path, std::string& value) {
    if (!json.is_string()) fail_to_read(json, path, "text");
    value = json.get<std::string>();
  }
};

template <>
struct ReadAs<Json> {
  static void value(const Json& json, const std::string& path, Json& value) {
    if (!json.is_object()) fail_to_read(json, path, "an object");
    value = json;
  }
};

template <typename T>
struct ReadAs<std::vector<T>> {
  static void value(const Json& json, const std::string& path, std::vector<T>& values) {
    if (!json.is_array()) fail_to_read(json, path, "a list");
    values.resize(json.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      read(json[i], path + "[" + std::to_string(i) + "]", values[i]);
  }
};

template <typename... T>
struct ReadAs<std::tuple<T...>> {
  static void value(const Json& json, const std::string& path, std::tuple<T...>& values) {
    if (!json.is_array() || json.size() != sizeof...(T)) {
      fail_to_read(json, path, ("a list of " + std::to_string(sizeof...(T)) + " numbers").c_str());
    }
    std::size_t i = 0;
    std::apply([&](auto&... value) { (read(json[i++], path, value), ...); }, values);
  }
};

template <typename T>
struct ReadAs<ByName<T>> {
  static void value(const Json& json, const std::string& path, ByName<T>& values) {
    if (!json.is_object()) fail_to_read(json, path, "an object");
    for (const auto& [name, item] : json.items()) {
      T value{};
      read(item, path + "." + name, value);
      values.set(name, std::move(value));
    }
  }
};

template <typename T>
void read(const Json& json, const std::string& path, T& value) {
  ReadAs<T>::value(json, path, value);
}

}  // namespace whet::results

#endif  // WHET_RESULTS_JSON_FIELDS_H_
