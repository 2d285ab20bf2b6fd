#include "mpi/agreement.h"

#include <whet/error.h>

#include <algorithm>
#include <charconv>

namespace whet::mpi {
namespace {

constexpr char kBetweenNames = '\x1f', kBetweenFields = '\x1e';

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::boolean:
      return "boolean";
  }
  return "unknown";
}

bool is_given(const ConstView& view) { return view.data != nullptr || !view.sizes.empty(); }

// The shortest text that reads back the same.
std::string text(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

std::string text(const ConstView& view, int own_axis) {
  if (!is_given(view)) return "not given";
  std::string sizes;
  for (std::size_t i = 0; i < view.sizes.size(); ++i) {
    sizes += (i == 0 ? "" : ", ") + (static_cast<int>(i) == own_axis ? "*" : std::to_string(view.sizes[i]));
  }
  return std::string(name_of(view.dtype)) + " (" + sizes + ")";
}

// FNV-1a.
std::uint64_t hash(const std::string& bytes) {
  std::uint64_t h = 0xcbf29ce484222325U;
  for (const char c : bytes) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return h;
}

std::string joined(const Fields& fields) {
  std::string all;
  for (const auto& [name, value] : fields.all()) all += name + kBetweenNames + value + kBetweenFields;
  return all;
}

std::vector<std::pair<std::string, std::string>> parted(const std::string& all) {
  std::vector<std::pair<std::string, std::string>> fields;
  for (std::size_t at = 0; at < all.size();) {
    const std::size_t middle = all.find(kBetweenNames, at), end = all.find(kBetweenFields, middle);
    fields.emplace_back(all.substr(at, middle - at), all.substr(middle + 1, end - middle - 1));
    at = end + 1;
  }
  return fields;
}

[[noreturn]] void refuse(const Group& group, const std::string& problem, const std::string& own) {
  const std::vector<std::string> problems = group.gather_texts(problem);
  const std::vector<std::string> texts = group.gather_texts(own);
  for (std::size_t r = 0; r < problems.size(); ++r) {
    if (!problems[r].empty()) throw Error(problems[r] + " (rank " + std::to_string(r) + ")");
  }
  const auto first = parted(texts.front());
  for (std::size_t r = 1; r < texts.size(); ++r) {
    const auto other = parted(texts[r]);
    for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (other[i] == first[i]) continue;
      throw Error(first[i].first + ": is " + other[i].second + " on rank " + std::to_string(r) + " and " +
                  first[i].second + " on rank 0, must fit");
    }
  }
  throw Error("comm: ranks call different functions");
}

struct Summary {
  std::uint64_t hash;
  std::int64_t keys, queries;
};
constexpr std::int64_t kWrong = -1;  // as the keys of a rank with a problem

}  // namespace

void Fields::add(const std::string& name, const ConstView& view, int own_axis) {
  add(name, text(view, own_axis));
}

void Fields::add(const AttentionOptions& o) {
  if (o.head_rules.empty()) {
    add("rule", o.rule.name());
  } else {
    std::string names;
    for (const Rule& rule : o.head_rules) names += (names.empty() ? "" : " ") + rule.name();
    add("head_rules", names);
  }
  add("normalizer", o.normalizer.name());
  add("scale", o.scale ? text(*o.scale) : std::string("1 / sqrt(D)"));
  add("softcap", text(o.softcap));
  add("sinks", o.sinks);
  add("causal", std::string(o.causal ? "true" : "false"));
  add("align", std::string(o.align == Align::start ? "start" : "end"));
  add("window_left", std::to_string(o.window_left));
  add("window_right", std::to_string(o.window_right));
  std::string lengths;
  for (const std::int64_t n : o.lengths) lengths += (lengths.empty() ? "" : " ") + std::to_string(n);
  // Of a call with one per row, ten thousands of numbers aren't a message.
  add("lengths", o.lengths.size() <= 16 ? (lengths.empty() ? "not given" : lengths)
                                        : std::to_string(o.lengths.size()) + " numbers (hash " +
                                              std::to_string(hash(lengths)) + ")");
  add("dropout", text(o.dropout));
  add("dropout_seed", std::to_string(o.dropout_seed));
}

std::int64_t Cut::first(int rank) const {
  std::int64_t sum = 0;
  for (int r = 0; r < rank; ++r) sum += sizes[static_cast<std::size_t>(r)];
  return sum;
}

std::int64_t Cut::largest() const { return *std::ranges::max_element(sizes); }

Cuts agree(const Group& group, const Fields& fields, const std::string& problem, std::int64_t keys,
           std::int64_t queries) {
  const std::string own = joined(fields);
  const Summary summary{hash(own), problem.empty() ? keys : kWrong, queries};
  const std::vector<Summary> all = group.gather<Summary>(std::span(&summary, 1));
  const bool fits = std::ranges::all_of(
      all, [&](const Summary& s) { return s.keys != kWrong && s.hash == all.front().hash; });
  if (!fits) refuse(group, problem, own);
  Cuts cuts;
  for (const Summary& s : all) {
    cuts.keys.sizes.push_back(s.keys);
    cuts.queries.sizes.push_back(s.queries);
  }
  return cuts;
}

}  // namespace whet::mpi
