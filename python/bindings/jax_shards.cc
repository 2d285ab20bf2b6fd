// Attention over keys that several devices hold (whet/shard.h), for JAX. Between these calls the program
// gathers what they return: "gathered" holds the records of a row from every device, in the order of devices,
// and all of them merge it to the same bits.
//
// JAX has no float64 unless jax_enable_x64 is set. So a record is an array of uint32, two for each of its
// numbers; sums of weighted values and masses are in the type of the arithmetic.

#include <whet/rule.h>
#include <whet/shard.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "jax_batch.h"
#include "jax_call.h"

namespace whet_python {

namespace {

using whet::BetaSearchState;
using whet::RowScale;
using whet::RowState;
using whet::RowSums;
using whet::WeighedRow;

constexpr std::int64_t kDone = 2;  // the stage of a search

// What devices exchange for the gradient of a row: those of its GradientSums that softmax has, and its mass.
struct GatheredSums {
  double wg, wdg, wd, wdd, ties, mass;

  whet::GradientSums sums() const { return {.wg = wg, .wdg = wdg, .wd = wd, .wdd = wdd, .ties = ties}; }
};

GatheredSums add(const GatheredSums& a, const GatheredSums& b) {
  return {a.wg + b.wg, a.wdg + b.wdg, a.wd + b.wd, a.wdd + b.wdd, a.ties + b.ties, a.mass + b.mass};
}

// ---- Rows

// The rules of a call, by the row in the order of attention's rows.
class Rules {
 public:
  Rules(const Call& call, const Array& records)
      : heads_(records.size_from_end(3)), queries_(records.size_from_end(2)) {
    for (const auto name : split(call.attribute<std::string_view>("rules"), ';')) {
      rules_.push_back(whet::Rule::parse(name));
    }
  }

  const whet::Rule& of(std::size_t row) const {
    return rules_[rules_.size() == 1 ? 0 : row / std::size_t(queries_) % std::size_t(heads_)];
  }

 private:
  int64_t heads_, queries_;
  std::vector<whet::Rule> rules_;
};

// The rows of the current entries of an array of records.
std::size_t rows_of(const Batch& batch, const Array& records) {
  return std::size_t(batch.entries() * records.size_from_end(3) * records.size_from_end(2));
}

// Numbers of the current entries in the type of the arithmetic, one per row.
std::vector<double> numbers(const Call& call, const Batch& batch, std::string_view name, std::size_t rows) {
  if (call.find(name)->type == ffi::DataType::F64) {
    const auto given = batch.records<double>(name, rows);
    return {given.begin(), given.end()};
  }
  const auto given = batch.records<float>(name, rows);
  return {given.begin(), given.end()};
}

void write_numbers(const Call& call, const Batch& batch, std::string_view name,
                   std::span<const double> from) {
  if (call.find(name)->type == ffi::DataType::F64) {
    std::ranges::copy(from, batch.result<double>(name));
  } else {
    std::ranges::transform(from, batch.result<float>(name), [](double number) { return float(number); });
  }
}

// The gathered records of each row as one, joined in the order of devices.
template <typename T, typename Join>
std::vector<T> joined(const Call& call, const Batch& batch, const Join& join) {
  const Array& gathered = *call.find("gathered");
  const auto rows = std::size_t(gathered.size_from_end(3) * gathered.size_from_end(2));
  std::vector<T> all;
  for (int64_t entry = 0; entry < batch.entries(); ++entry) {
    std::vector<T> own(rows);
    for (int64_t device = 0; device < gathered.size_from_end(4); ++device) {
      const T* from = batch.gathered<T>(entry, device);
      for (std::size_t row = 0; row < rows; ++row) own[row] = join(own[row], from[row]);
    }
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

// ---- Forward

// Calls function(views of q, k, v, the shard, options, number of rows) for each part of the batch. All shards
// have as many keys.
template <typename Function>
void for_each_shard(const Call& call, const Function& function) {
  Batch batch(call);
  const int64_t keys = call.find("key")->size_from_end(3), all = keys * call.attribute<int64_t>("shards");
  for_each_part(
      call, batch,
      [&](auto q, auto k, auto v, auto& options, std::size_t rows) {
        const whet::Shard shard{.first_key = keys * *batch.result<std::int32_t>("shard"),
                                .all_keys = all,
                                .logits = batch.heads_first("logits")};
        function(batch, q, k, v, shard, options, rows);
      },
      all);
}

std::vector<RowScale> scales_of(const Batch& batch, std::size_t rows) {
  std::vector<RowScale> scales;
  for (const WeighedRow& row : batch.records<const WeighedRow>("rows", rows)) {
    scales.push_back({row.max, row.beta});
  }
  return scales;
}

void shard_states(const Call& call) {
  for_each_shard(call, [&](Batch& batch, auto q, auto k, auto, auto& shard, auto& options, std::size_t rows) {
    whet::shard_states(q, k, shard, batch.records<RowState>("states", rows), options);
  });
}

// Where no state decides beta: measured from the maximum of this shard, whose "factor" shard_rows finds.
void shard_partial(const Call& call) {
  const Array& states = *call.find("states");
  const Rules rules(call, states);
  for_each_shard(call,
                 [&](Batch& batch, auto q, auto k, auto v, auto& shard, auto& options, std::size_t rows) {
                   std::vector<double> betas, mass(rows);
                   for (std::size_t row = 0; row < rows; ++row) betas.push_back(rules.of(row).parameter());
                   whet::shard_partial_attention(q, k, v, shard, betas, batch.heads_last("out"),
                                                 batch.records<RowState>("states", rows), mass, options);
                   write_numbers(call, batch, "mass", mass);
                 });
}

// What weights measured from the maximum of a shard are to be multiplied by.
double factor_of(const RowState& own, const RowState& merged, double beta, bool hard) {
  if (own.max == merged.max) return 1;
  if (hard || own.max == -std::numeric_limits<double>::infinity()) return 0;
  return std::exp(beta * (own.max - merged.max));
}

double mean_of(double t, double z) { return std::isfinite(t / z) ? t / z : 0; }

BetaSearchState search_of(const whet::Rule& rule, const RowState& merged) {
  if (!rule.needs_search()) return {.beta = rule.beta(merged), .stage = kDone};
  return whet::BetaSearch(rule, merged).state();
}

// "searching" of every entry: whether a row of it has no beta yet.
void write_searching(const Batch& batch, std::span<const BetaSearchState> searches) {
  const std::size_t each = searches.size() / std::size_t(std::max<int64_t>(batch.entries(), 1));
  for (std::size_t entry = 0; entry < std::size_t(batch.entries()); ++entry) {
    batch.result<bool>("searching")[entry] =
        std::ranges::any_of(searches.subspan(entry * each, each),
                            [](const BetaSearchState& search) { return search.stage != kDone; });
  }
}

// The rows from the states of all devices: with a rule that searches, at the beta of its first step.
void shard_rows(const Call& call) {
  Batch batch(call);
  const Rules rules(call, *call.find("states"));
  const bool hard = call.attribute<std::string_view>("normalizer") == "hard";
  batch.for_each([&] {
    const std::vector<RowState> states = joined<RowState>(call, batch, whet::merge);
    std::ranges::copy(states, batch.result<RowState>("states"));
    std::vector<BetaSearchState> searches;
    std::vector<double> factors;
    for (std::size_t i = 0; i < states.size(); ++i) {
      searches.push_back(search_of(rules.of(i), states[i]));
      batch.records<WeighedRow>("rows", states.size())[i] = {states[i].max, searches[i].beta,
                                                             mean_of(states[i].t, states[i].z)};
    }
    if (call.find("searches")) {
      std::ranges::copy(searches, batch.result<BetaSearchState>("searches"));
      write_searching(batch, searches);
    }
    if (!call.find("factor")) return;
    const std::size_t each = states.size() / std::size_t(std::max<int64_t>(batch.entries(), 1));
    for (std::size_t i = 0; i < states.size(); ++i) {
      const RowState* own =
          batch.gathered<RowState>(int64_t(i / each), *batch.result<const std::int32_t>("shard"));
      factors.push_back(factor_of(own[i % each], states[i], searches[i].beta, hard));
    }
    write_numbers(call, batch, "factor", factors);
  });
}

void shard_sums(const Call& call) {
  for_each_shard(call, [&](Batch& batch, auto q, auto k, auto, auto& shard, auto& options, std::size_t rows) {
    whet::shard_sums(q, k, shard, scales_of(batch, rows), batch.records<RowSums>("sums", rows), options);
  });
}

// One step of every search, with the sums of all devices at the rows that come in.
void shard_step(const Call& call) {
  Batch batch(call);
  const Array& records = *call.find("rows");
  const Rules rules(call, records);
  batch.for_each([&] {
    const std::size_t rows = rows_of(batch, records);
    const std::vector<RowSums> sums =
        joined<RowSums>(call, batch, [](const RowSums& a, const RowSums& b) { return whet::add(a, b); });
    const auto before = batch.records<const WeighedRow>("rows", rows);
    const auto after = batch.records<WeighedRow>("next_rows", rows);
    const auto searches = batch.records<BetaSearchState>("next_searches", rows);
    std::ranges::copy(batch.records<const BetaSearchState>("searches", rows), searches.begin());
    for (std::size_t i = 0; i < rows; ++i) {
      after[i] = before[i];
      if (searches[i].stage == kDone) continue;
      whet::BetaSearch search(rules.of(i), searches[i]);
      search.absorb(sums[i]);
      searches[i] = search.state();
      after[i] = {before[i].max, search.beta(), mean_of(sums[i].t, sums[i].z)};
    }
    write_searching(batch, searches);
  });
}

void shard_attention(const Call& call) {
  for_each_shard(
      call, [&](Batch& batch, auto q, auto k, auto v, auto& shard, auto& options, std::size_t rows) {
        std::vector<double> mass(rows);
        whet::shard_attention(q, k, v, shard, scales_of(batch, rows), batch.heads_last("out"), mass, options);
        write_numbers(call, batch, "mass", mass);
      });
}

// ---- Backward

void write_sums(const Call& call, const Batch& batch, std::span<const whet::GradientSums> sums) {
  const std::vector<double> mass = numbers(call, batch, "mass", sums.size());
  const auto to = batch.records<GatheredSums>("sums", sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const whet::GradientSums& own = sums[i];
    to[i] = {own.wg, own.wdg, own.wd, own.wdd, own.ties, mass[i]};
  }
}

void shard_gradient_sums(const Call& call) {
  for_each_shard(call,
                 [&](Batch& batch, auto q, auto k, auto v, auto& shard, auto& options, std::size_t rows) {
                   std::vector<whet::GradientSums> sums(rows);
                   whet::shard_gradient_sums(q, k, v, batch.heads_last("dout"), shard,
                                             batch.records<const WeighedRow>("rows", rows), sums, options);
                   write_sums(call, batch, sums);
                 });
}

template <typename T>
double product(const T* a, const T* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += double(a[i]) * double(b[i]);
  return sum;
}

// Where beta doesn't move: of GradientSums only wg counts, and that is <dout, sum of weighted values>.
void shard_output_sums(const Call& call) {
  Batch batch(call);
  const Array& records = *call.find("sums");
  const int64_t heads = records.size_from_end(3), queries = records.size_from_end(2);
  batch.for_each([&] {
    const whet::View out = batch.heads_last("out"), dout = batch.heads_last("dout");
    std::vector<whet::GradientSums> sums;
    for (std::size_t row = 0; row < rows_of(batch, records); ++row) {
      const auto query = int64_t(row) % queries, head = int64_t(row) / queries % heads,
                 entry = int64_t(row) / queries / heads;
      const auto offset = [&](const whet::View& view) {
        return entry * view.strides[0] + head * view.strides[1] + query * view.strides[2];
      };
      const auto wg = [&]<typename T>(const T* x, const T* y) {
        return product(x + offset(out), y + offset(dout), out.sizes[3]);
      };
      sums.push_back({.wg = out.dtype == whet::DType::f64
                                ? wg(static_cast<double*>(out.data), static_cast<double*>(dout.data))
                                : wg(static_cast<float*>(out.data), static_cast<float*>(dout.data))});
    }
    write_sums(call, batch, sums);
  });
}

std::vector<whet::RowSlope> slopes_of(const Call& call, const Batch& batch, std::size_t rows) {
  const Rules rules(call, *call.find("states"));
  const std::vector<GatheredSums> all = joined<GatheredSums>(call, batch, add);
  const auto states = batch.records<const RowState>("states", rows);
  const auto weighed = batch.records<const WeighedRow>("rows", rows);
  std::vector<whet::RowSlope> slopes;
  for (std::size_t i = 0; i < rows; ++i) {
    slopes.push_back(whet::row_slope(rules.of(i), states[i], weighed[i], all[i].mass, all[i].sums(),
                                     call.beta_gradient()));
  }
  return slopes;
}

void shard_backward(const Call& call) {
  for_each_shard(
      call, [&](Batch& batch, auto q, auto k, auto v, auto& shard, auto& options, std::size_t rows) {
        whet::shard_backward(q, k, v, batch.heads_last("dout"), shard, slopes_of(call, batch, rows),
                             {.dq = batch.heads_last("dquery"),
                              .dk = batch.heads_last("dkey"),
                              .dv = batch.heads_last("dvalue"),
                              .dbias = batch.heads_first("dbias", "dbias"),
                              .dsinks = batch.heads("dsinks"),
                              .dquery_scale = batch.rows_of_heads("dquery_scale", "dquery_scale")},
                             options);
      });
}

}  // namespace

void add_jax_shards(nb::dict& handlers) {
  handlers["whet_shard_states"] = handler<shard_states>();
  handlers["whet_shard_partial"] = handler<shard_partial>();
  handlers["whet_shard_rows"] = handler<shard_rows>();
  handlers["whet_shard_sums"] = handler<shard_sums>();
  handlers["whet_shard_step"] = handler<shard_step>();
  handlers["whet_shard_attention"] = handler<shard_attention>();
  handlers["whet_shard_gradient_sums"] = handler<shard_gradient_sums>();
  handlers["whet_shard_output_sums"] = handler<shard_output_sums>();
  handlers["whet_shard_backward"] = handler<shard_backward>();
}

}  // namespace whet_python
