// whet softmax and whet sharpen: the rows of a .npy file.
#include <whet/error.h>
#include <whet/softmax.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/rules.h"
#include "files/file.h"
#include "files/npy.h"

namespace whet::cli {
namespace {

using namespace files;  // NOLINT(google-build-using-namespace): .npy arrays are this file's subject

using RowFunction = void (*)(ConstView in, View out, const SoftmaxOptions& options,
                             const SoftmaxOutputs& outputs, const Execution& execution);

struct Arguments {
  std::string in, out, stats, mask, lengths;
  std::string rule = "none";
  int axis = -1;
  int threads = 0;
};

// Rows without keys take no bytes in a file, so nothing but this bounds how many a header may claim.
constexpr std::int64_t kMaxRowsWithoutKeys = std::int64_t{1} << 20;

constexpr std::int64_t kStatsFields = 12;
static_assert(sizeof(RowStats) == kStatsFields * sizeof(double), "stats are written as they lie in memory");

[[noreturn]] void wrong_use(const std::string& path, const std::string& problem) {
  throw Error(path + ": " + problem);
}

NpyArray read_rows(const Arguments& arguments) {
  NpyArray in = read_npy(arguments.in);
  if (in.type() == NpyType::boolean || in.type() == NpyType::i64) {
    wrong_use(arguments.in, std::string("holds ") + npy_type_name(in.type()) +
                                "; rows are float32, float64, float16 or bfloat16");
  }
  if (in.sizes().empty()) wrong_use(arguments.in, "is a single number of shape (); a row needs an axis");
  const int dims = static_cast<int>(in.sizes().size());
  if (arguments.axis < -dims || arguments.axis >= dims) {
    wrong_use(arguments.in, "has shape " + npy_shape_text(in.sizes()) + "; --axis is " +
                                std::to_string(arguments.axis) + ", must be " + std::to_string(-dims) +
                                " to " + std::to_string(dims - 1));
  }
  return in;
}

// The axes that count rows: all but the one a row runs along.
std::vector<std::int64_t> row_sizes(const Dims& sizes, int axis) {
  std::vector<std::int64_t> result(sizes.begin(), sizes.end());
  result.erase(result.begin() + (axis < 0 ? axis + static_cast<int>(sizes.size()) : axis));
  return result;
}

std::int64_t count_rows(const NpyArray& in, const std::vector<std::int64_t>& outer, const std::string& path) {
  std::int64_t rows = 1;
  for (const std::int64_t size : outer) rows *= size;  // the reader has excluded an overflow
  if (in.bytes().empty() && rows > kMaxRowsWithoutKeys) {
    wrong_use(path, "has shape " + npy_shape_text(in.sizes()) + ": more than " +
                        std::to_string(kMaxRowsWithoutKeys) + " rows without keys");
  }
  return rows;
}

// The mask with axes of size 1 before its own until it has as many as the rows, as in NumPy.
ConstView broadcast(NpyArray& mask, std::size_t dims, const std::string& path) {
  const std::size_t own = mask.sizes().size();
  if (mask.type() != NpyType::boolean) {
    wrong_use(path,
              std::string("holds ") + npy_type_name(mask.type()) + "; a mask is bool, True where visible");
  }
  if (own > dims) wrong_use(path, "has " + std::to_string(own) + " axes, the rows " + std::to_string(dims));
  std::vector<std::int64_t> sizes(dims, 1), strides(dims, 0);
  std::copy(mask.sizes().begin(), mask.sizes().end(), sizes.end() - static_cast<std::ptrdiff_t>(own));
  const Dims own_strides = mask.strides();
  std::copy(own_strides.begin(), own_strides.end(), strides.end() - static_cast<std::ptrdiff_t>(own));
  return {mask.bytes().data(), DType::boolean, Dims(sizes), Dims(strides)};
}

// One length per row in the order of the rows, whatever the order in the file.
std::vector<std::int64_t> read_lengths(const std::string& path, const std::vector<std::int64_t>& outer) {
  const NpyArray array = read_npy(path);
  if (array.type() != NpyType::i64) {
    wrong_use(path, std::string("holds ") + npy_type_name(array.type()) + "; lengths are int64");
  }
  if (!std::equal(outer.begin(), outer.end(), array.sizes().begin(), array.sizes().end())) {
    wrong_use(path, "has shape " + npy_shape_text(array.sizes()) +
                        ", must be that of the rows without --axis, " + npy_shape_text(Dims(outer)));
  }
  const auto* values = reinterpret_cast<const std::int64_t*>(array.bytes().data());
  std::vector<std::int64_t> lengths(array.bytes().size() / sizeof(std::int64_t));
  const Dims strides = array.strides();
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    std::int64_t rest = static_cast<std::int64_t>(row), offset = 0;
    for (std::size_t i = outer.size(); i-- > 0; rest /= outer[i]) offset += rest % outer[i] * strides[i];
    lengths[row] = values[offset];
  }
  return lengths;
}

// Nothing that is read or written may be overwritten, but IN by OUT.
void check_paths(const Arguments& arguments) {
  const auto check = [](const std::string& output, const char* option, const std::string& other,
                        const char* name) {
    if (output.empty() || other.empty() || !same_file(output, other)) return;
    wrong_use(output, std::string("is ") + name + " too; name another file for " + option);
  };
  check(arguments.out, "OUT", arguments.mask, "--mask");
  check(arguments.out, "OUT", arguments.lengths, "--lengths");
  check(arguments.stats, "--stats", arguments.out, "OUT");
  check(arguments.stats, "--stats", arguments.in, "IN");
  check(arguments.stats, "--stats", arguments.mask, "--mask");
  check(arguments.stats, "--stats", arguments.lengths, "--lengths");
}

// Both outputs are complete on disk before either gets its name.
void write_outputs(const Arguments& arguments, const NpyArray& out, const std::vector<RowStats>& stats,
                   std::vector<std::int64_t> outer) {
  std::optional<OutputFile> stats_file;
  if (!arguments.stats.empty()) {
    outer.push_back(kStatsFields);
    stats_file.emplace(arguments.stats);
    write_npy(*stats_file, NpyType::f64, Dims(outer), std::as_bytes(std::span(stats)));
  }
  OutputFile out_file(arguments.out);
  write_npy(out_file, out.type(), out.sizes(), out.bytes());
  out_file.commit();
  if (stats_file) stats_file->commit();
}

void run(const Arguments& arguments, RowFunction function) {
  SoftmaxOptions options;
  options.rule = rule_named(arguments.rule);
  options.axis = arguments.axis;
  check_paths(arguments);
  NpyArray in = read_rows(arguments);
  const std::vector<std::int64_t> outer = row_sizes(in.sizes(), arguments.axis);
  const std::int64_t rows = count_rows(in, outer, arguments.in);

  std::optional<NpyArray> mask;
  if (!arguments.mask.empty()) {
    mask.emplace(read_npy(arguments.mask));
    options.mask = broadcast(*mask, in.sizes().size(), arguments.mask);
  }
  std::vector<std::int64_t> lengths;
  if (!arguments.lengths.empty()) lengths = read_lengths(arguments.lengths, outer);
  options.lengths = lengths;
  std::vector<RowStats> stats(arguments.stats.empty() ? 0 : static_cast<std::size_t>(rows));

  // Files are written last axis fastest: rows that lie so already are computed where they are.
  std::optional<NpyArray> reordered;
  if (!in.is_contiguous()) reordered.emplace(in.type(), in.sizes());
  NpyArray& out = reordered ? *reordered : in;
  function(in.view(), out.view(), options, {.stats = stats}, {.threads = arguments.threads});
  write_outputs(arguments, out, stats, outer);
}

void add_row_command(CLI::App& app, const char* name, const char* description, const std::string& footer,
                     RowFunction function) {
  CLI::App* command = app.add_subcommand(name, description);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("IN", arguments->in, "Array of float32, float64, float16 or bfloat16 (ml_dtypes)")
      ->type_name("FILE")
      ->required();
  command->add_option("OUT", arguments->out, "Written with the type and shape of IN; may be IN")
      ->type_name("FILE")
      ->required();
  command->add_option("--rule", arguments->rule, "How sharp, see below")
      ->type_name("R")
      ->capture_default_str();
  command->add_option("--stats", arguments->stats, "Write 12 numbers per row here, see below")
      ->type_name("FILE");
  command->add_option("--axis", arguments->axis, "The axis a row runs along; -1 is the last")
      ->type_name("A")
      ->capture_default_str();
  command->add_option("--mask", arguments->mask, "bool array, True = visible; broadcasts to IN as in NumPy")
      ->type_name("FILE");
  command
      ->add_option("--lengths", arguments->lengths,
                   "int64 array: how many first keys of each row are visible")
      ->type_name("FILE");
  command
      ->add_option("--threads", arguments->threads,
                   "1 to 1024, 0 = the default; every number gives the same bits")
      ->type_name("N")
      ->capture_default_str();
  command->footer(footer);
  command->callback([arguments, function] { run(*arguments, function); });
}

constexpr const char* kStatsHelp =
    "\n"
    "Stats, in this order: count, max, log_sum_exp, entropy, varentropy, spread, peak (all at beta = 1),\n"
    "beta, sharp_entropy, sharp_peak, support, threshold (of the weights). Entropies are in nats. They are\n"
    "float64 of the shape of IN with --axis taken out and 12 put at the end. --lengths has the shape of IN "
    "with --axis taken out.\n"
    "\n"
    "Files are .npy. IN must be a regular file; OUT and --stats are replaced whole or not at all. A pipe, a\n"
    "device and what standard output goes to (/dev/stdout) are written as they are: >> appends.\n";

}  // namespace

void add_softmax(CLI::App& app) {
  add_row_command(
      app, "softmax", "Softmax over the rows of a .npy file, sharpened by a rule",
      std::string("Keys with a logit of -inf are not visible: their weight is 0. A row with NaN or\n"
                  "+inf is NaN.\n\n"
                  "Example:\n"
                  "  whet softmax logits.npy weights.npy --rule paper --stats stats.npy\n\n") +
          kRuleHelp + kStatsHelp,
      softmax);
  add_row_command(
      app, "sharpen", "The same for rows that are probabilities already",
      std::string("Each row p becomes p^beta / sum p^beta. Keys of probability 0 are not visible; a\n"
                  "negative one makes its row NaN.\n\n"
                  "Example:\n"
                  "  whet sharpen attention.npy sharper.npy --rule target-peak:0.9\n\n") +
          kRuleHelp + kStatsHelp,
      sharpen);
}

}  // namespace whet::cli
