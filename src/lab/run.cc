#include "lab/run.h"

#include <fcntl.h>
#include <sys/file.h>
#include <whet/error.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "files/file.h"
#include "files/json.h"

namespace whet::lab {
namespace {

using files::FileError;
using files::make_folder;
using files::read_text;
using files::write_text;
using Json = nlohmann::ordered_json;

constexpr const char* kConfig = "config.json";
constexpr const char* kCheckpoint = "checkpoint.safetensors";
constexpr const char* kMetrics = "metrics.jsonl";
constexpr const char* kFormat = "whet run 1";

std::string in(const std::string& folder, const char* name) {
  return (std::filesystem::path(folder) / name).string();
}

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

struct Config {
  Recipe recipe;
  std::string edit;
};

Config read_config(const std::string& folder) {
  const std::string path = in(folder, kConfig);
  const Json json = files::read_json(path);
  if (!json.is_object() || json.value("format", Json()) != kFormat || !json.contains("recipe")) {
    throw FileError(path, std::string("is not the config of a run (its format is not '") + kFormat + "')");
  }
  for (const auto& [name, ignored] : json.items()) {
    if (name != "format" && name != "recipe" && name != "edit") {
      throw FileError(path, name + ": is not a field of a run that this whet knows; use a newer whet");
    }
  }
  try {
    return {recipe_from_json(json["recipe"]), json.value("edit", "")};
  } catch (const std::exception& e) {
    throw FileError(path, e.what());
  }
}

void write_config(const std::string& folder, const Config& config) {
  Json json{{"format", kFormat}, {"recipe", to_json(config.recipe)}};
  if (!config.edit.empty()) json["edit"] = config.edit;
  write_text(in(folder, kConfig), json.dump(2) + "\n");
}

// By value: an older whet may have written fewer fields.
bool is_recipe(const std::string& json, const Recipe& recipe) {
  try {
    return recipe_from_json(files::parse_json(json, "recipe")) == recipe;
  } catch (const FileError&) {
    return false;
  } catch (const Error&) {
    return false;
  }
}

// The step a checkpoint was made at, once it is clear that it belongs to this run.
std::int64_t checkpoint_step(const files::Safetensors& content, const Recipe& recipe) {
  const auto text = [&](const char* key) {
    const auto found = content.metadata.find(key);
    return found == content.metadata.end() ? std::string() : found->second;
  };
  if (text("format") != kFormat) throw FileError(content.path, "is not a checkpoint of whet");
  if (!content.verified) {
    throw FileError(content.path, "has no checksum: another program wrote it, or it was altered");
  }
  if (!is_recipe(text("recipe"), recipe)) {
    throw FileError(content.path, "belongs to a run of another recipe than its config.json");
  }
  const Json step = files::parse_json(text("step"), content.path + ": its step");
  if (!step.is_number_integer() || step.get<std::int64_t>() < 0 || step.get<std::int64_t>() > recipe.steps) {
    throw FileError(content.path,
                    "has a step of '" + text("step") + "', must be 0 to " + std::to_string(recipe.steps));
  }
  return step.get<std::int64_t>();
}

files::Safetensors new_checkpoint(const Recipe& recipe, std::int64_t step,
                                  const std::vector<float>& parameters) {
  files::Safetensors content;
  content.metadata = {
      {"format", kFormat}, {"recipe", to_json(recipe).dump()}, {"step", std::to_string(step)}};
  add_parameters(content, "", parameters);
  return content;
}

void write_checkpoint(const std::string& folder, const files::Safetensors& content) {
  files::OutputFile file(in(folder, kCheckpoint));
  files::write_safetensors(file, content);
  file.commit();
}

std::string metrics_text(const std::vector<Metrics>& metrics) {
  std::string text;
  for (const Metrics& line : metrics) {
    text += Json{{"step", line.step}, {"loss", line.loss}, {"accuracy", line.accuracy}}.dump() + "\n";
  }
  return text;
}

// The lines up to `step`, every one of them.
std::vector<Metrics> read_metrics(const std::string& folder, const Recipe& recipe, std::int64_t step) {
  std::vector<Metrics> metrics;
  const std::string path = in(folder, kMetrics);
  std::istringstream lines(step > 0 || exists(path) ? read_text(path) : "");
  std::int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const Json json = files::parse_json(line, path + ": line " + std::to_string(number));
    try {
      const Metrics m{json.at("step").get<std::int64_t>(), json.at("loss").get<double>(),
                      json.at("accuracy").get<double>()};
      if (m.step != std::min(number * kMetricsEvery, recipe.steps)) {
        throw FileError(path, "line " + std::to_string(number) + " is of step " + std::to_string(m.step) +
                                  ", must be " +
                                  std::to_string(std::min(number * kMetricsEvery, recipe.steps)));
      }
      if (m.step <= step) metrics.push_back(m);
    } catch (const Json::exception&) {
      throw FileError(path, "line " + std::to_string(number) + " lacks step, loss or accuracy");
    }
  }
  const std::int64_t last = step == recipe.steps && step % kMetricsEvery != 0 ? 1 : 0;
  if (static_cast<std::int64_t>(metrics.size()) != step / kMetricsEvery + last) {
    throw FileError(path, "lacks lines: it has " + std::to_string(metrics.size()) + " for the " +
                              std::to_string(step) + " steps of the checkpoint");
  }
  return metrics;
}

void save(const std::string& folder, const Recipe& recipe, const TrainingState& state,
          const std::vector<Metrics>& metrics) {
  write_text(in(folder, kMetrics), metrics_text(metrics));
  files::Safetensors content = new_checkpoint(recipe, state.step, state.parameters);
  add_parameters(content, "adam.m.", state.m);
  add_parameters(content, "adam.v.", state.v);
  write_checkpoint(folder, content);
}

bool is_finite(const TrainingState& state) {
  const auto all = [](const std::vector<float>& values) {
    return std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
  };
  return all(state.parameters) && all(state.m) && all(state.v);
}

// Leaves something to look at.
[[noreturn]] void diverge(const std::string& folder, const Recipe& recipe, std::int64_t step) {
  if (!exists(in(folder, kCheckpoint))) save(folder, recipe, initial_state(recipe), {});
  throw Diverged(folder, step);
}

// Held while a run is trained: two processes would write over each other's files.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder)
      : handle_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    // A file system that knows no locks is no reason not to train.
    if (handle_.get() >= 0 && ::flock(handle_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw FileError(folder, "is being trained by another process; wait for it");
    }
  }

 private:
  files::FileHandle handle_;
};

// The state to resume from; a new one if the folder is new.
TrainingState open_run(const std::string& folder, const Recipe& recipe) {
  make_folder(folder);
  if (!exists(in(folder, kConfig))) {
    if (exists(in(folder, kCheckpoint))) {
      throw FileError(folder, "holds a checkpoint but no config.json; name another folder");
    }
    write_config(folder, {recipe, ""});
  }
  const Config config = read_config(folder);
  if (!config.edit.empty())
    throw Error(folder + ": holds weights edited after training (" + config.edit + ")");
  if (config.recipe != recipe) {
    throw Error(folder + ": holds a run of another recipe (" + difference(config.recipe, recipe) +
                "); name another folder, or remove it");
  }
  if (!exists(in(folder, kCheckpoint))) return initial_state(recipe);
  const files::Safetensors content = files::read_safetensors(in(folder, kCheckpoint));
  return {.step = checkpoint_step(content, recipe),
          .parameters = parameters_of(content, ""),
          .m = parameters_of(content, "adam.m."),
          .v = parameters_of(content, "adam.v.")};
}

}  // namespace

void add_parameters(files::Safetensors& content, const std::string& prefix,
                    const std::vector<float>& parameters) {
  const std::span<const float> all(parameters);
  const auto part = [&](std::int64_t offset, std::int64_t count) {
    return all.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count));
  };
  for (const Layer& layer : kModel) {
    const std::string name = prefix + layer.name;
    content.add(name + ".kernel", part(layer.kernel, layer.in * layer.out), {layer.in, layer.out});
    content.add(name + ".bias", part(layer.bias, layer.out), {layer.out});
  }
}

std::vector<float> parameters_of(const files::Safetensors& content, const std::string& prefix) {
  std::vector<float> parameters(kParameters);
  const auto copy = [&](const std::string& name, const Dims& sizes, std::int64_t offset) {
    const files::Tensor& tensor = content.find(name, files::TensorType::f32, sizes);
    std::memcpy(parameters.data() + offset, tensor.bytes.data(), tensor.bytes.size());
    const std::size_t count = tensor.bytes.size() / sizeof(float);
    if (!std::all_of(parameters.data() + offset, parameters.data() + offset + count,
                     [](float p) { return std::isfinite(p); })) {
      throw FileError(content.path, "holds a weight of '" + name + "' that isn't finite");
    }
  };
  for (const Layer& layer : kModel) {
    const std::string name = prefix + layer.name;
    copy(name + ".kernel", {layer.in, layer.out}, layer.kernel);
    copy(name + ".bias", {layer.out}, layer.bias);
  }
  return parameters;
}

std::int64_t prepare_run(const std::string& folder, const Recipe& recipe) {
  check(recipe);
  const TrainingState state = open_run(folder, recipe);
  read_metrics(folder, recipe, state.step);
  return state.step;
}

void train_run(const std::string& folder, const Recipe& recipe,
               const std::function<void(std::int64_t)>& progress) {
  check(recipe);
  make_folder(folder);
  const FolderLock lock(folder);
  files::remove_leftovers(folder);
  TrainingState state = open_run(folder, recipe);
  std::vector<Metrics> metrics = read_metrics(folder, recipe, state.step);
  Trainer trainer(recipe, std::move(state));
  double loss = 0;
  std::int64_t correct = 0, counted = 0;
  while (trainer.state().step < recipe.steps) {
    trainer.step();
    progress(1);
    if (!std::isfinite(trainer.loss())) diverge(folder, recipe, trainer.state().step);
    loss += trainer.loss();
    correct += trainer.correct();
    ++counted;
    const std::int64_t step = trainer.state().step;
    if (step % kMetricsEvery == 0 || step == recipe.steps) {
      const auto steps = static_cast<double>(counted);
      metrics.push_back(
          {step, loss / steps, static_cast<double>(correct) / (steps * static_cast<double>(recipe.batch))});
      loss = 0;
      correct = counted = 0;
    }
    if (step % kCheckpointEvery == 0 || step == recipe.steps) {
      if (!is_finite(trainer.state())) diverge(folder, recipe, step);
      save(folder, recipe, trainer.state(), metrics);
    }
  }
}

Run load_run(const std::string& folder) {
  if (!exists(in(folder, kConfig))) {
    const bool parent = exists(in(folder, "seed-0"));
    throw FileError(folder, parent ? "is not a run but a folder of runs; name " + in(folder, "seed-0")
                                   : "is not a run: it has no config.json; make one with 'whet train'");
  }
  Config config = read_config(folder);
  if (!exists(in(folder, kCheckpoint))) {
    throw FileError(folder, "has no checkpoint yet; let 'whet train' go on for a while");
  }
  const files::Safetensors content = files::read_safetensors(in(folder, kCheckpoint));
  const std::int64_t step = checkpoint_step(content, config.recipe);
  return {.folder = folder,
          .recipe = config.recipe,
          .parameters = parameters_of(content, ""),
          .step = step,
          .metrics = read_metrics(folder, config.recipe, step),
          .edit = std::move(config.edit)};
}

std::vector<std::string> files_of(const Run& run) {
  return {in(run.folder, kConfig), in(run.folder, kCheckpoint), in(run.folder, kMetrics),
          in(run.folder, kEvaluation)};
}

void save_edited_run(const std::string& folder, const Run& run) {
  make_folder(folder);
  if (exists(in(folder, kConfig))) throw Error(folder + ": holds a run already; name another folder");
  write_text(in(folder, kMetrics), metrics_text(run.metrics));
  write_checkpoint(folder, new_checkpoint(run.recipe, run.step, run.parameters));
  write_config(folder, {run.recipe, run.edit});
}

}  // namespace whet::lab
