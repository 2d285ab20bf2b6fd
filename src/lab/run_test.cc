// Runs: interrupted or not they end in the same bytes, and what is damaged is refused and left alone.
#include "lab/run.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <whet/error.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "files/file.h"
#include "files/safetensors.h"
#include "temporary_folder.h"

namespace whet::lab {
namespace {

namespace fs = std::filesystem;
using files::FileError;
using Json = nlohmann::ordered_json;

// One checkpoint on the way, and an end between two lines of metrics.
Recipe small_recipe() {
  return {.seed = 5,
          .steps = 2100,
          .batch = 1,
          .sets = {.smallest = 5, .largest = 6},
          .schedule = Schedule::linear};
}

Recipe short_recipe() {
  Recipe recipe = small_recipe();
  recipe.steps = 3;
  return recipe;
}

void put(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
}

// All files of a folder, temporary ones too.
std::map<std::string, std::string> snapshot(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = content_of(entry.path().string());
  }
  return files;
}

struct Interrupted {};

// Trains until `stop` steps are done, and dies there before anything of that step is saved.
void train_until(const std::string& folder, const Recipe& recipe, std::int64_t stop) {
  std::int64_t done = prepare_run(folder, recipe);
  try {
    train_run(folder, recipe, [&](std::int64_t steps) {
      done += steps;
      if (done == stop) throw Interrupted();
    });
    ADD_FAILURE() << "not interrupted at step " << stop;
  } catch (const Interrupted&) {
  }
}

void train(const std::string& folder, const Recipe& recipe) {
  train_run(folder, recipe, [](std::int64_t) {});
}

// The text of the error of type E that `act` throws, "" if there is none.
template <typename E>
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The runs that a test makes.
class RunFolder : public TemporaryFolder {
 protected:
  std::string fresh() { return folder_ + "/" + std::to_string(++count_); }

  // A run that was never interrupted, and on the way a copy of it as it stood after its first checkpoint.
  void make_whole_and_half() {
    std::int64_t done = 0;
    train_run(whole(), small_recipe(), [&](std::int64_t steps) {
      done += steps;
      if (done == kCheckpointEvery + 1) fs::copy(whole(), half());
    });
  }
  std::string whole() const { return folder_ + "/whole"; }
  std::string half() const { return folder_ + "/half"; }

  // A run of three steps, for all that doesn't depend on how far it is.
  std::string short_run() {
    const std::string folder = fresh();
    train(folder, short_recipe());
    return folder;
  }

  // Both ways to open it fail, name `file`, and change nothing.
  static void expect_refused(const std::string& folder, const std::string& file) {
    const auto before = snapshot(folder);
    const std::string path = file.empty() ? folder + ": " : folder + "/" + file + ": ";
    EXPECT_EQ(error_of<FileError>([&] { train(folder, short_recipe()); }).rfind(path, 0), 0U);
    EXPECT_EQ(error_of<FileError>([&] { load_run(folder); }).rfind(path, 0), 0U);
    EXPECT_TRUE(snapshot(folder) == before) << "files of a refused run changed";
  }

 private:
  int count_ = 0;
};

// A checkpoint read, changed and written again with a valid checksum.
void change_checkpoint(const std::string& folder, const std::function<void(files::Safetensors&)>& change) {
  files::Safetensors tensors = files::read_safetensors(folder + "/checkpoint.safetensors");
  change(tensors);
  files::OutputFile file(folder + "/checkpoint.safetensors");
  files::write_safetensors(file, tensors);
  file.commit();
}

void drop_tensor(files::Safetensors& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.tensors.begin(), tensors.tensors.end(),
                                  [&](const files::Tensor& tensor) { return tensor.name == name; });
  ASSERT_NE(found, tensors.tensors.end()) << name;
  tensors.tensors.erase(found);
}

TEST_F(RunFolder, IsTheTrainersWork) {
  make_whole_and_half();
  Trainer trainer(small_recipe(), initial_state(small_recipe()));
  double loss = 0;
  std::int64_t correct = 0;
  std::vector<Metrics> expected;
  for (std::int64_t step = 1; step <= 2100; ++step) {
    trainer.step();
    loss += trainer.loss();
    correct += trainer.correct();
    if (step % kMetricsEvery != 0 && step != 2100) continue;
    const double steps = step == 2100 ? 100 : 500;
    expected.push_back({step, loss / steps, static_cast<double>(correct) / steps});
    loss = 0;
    correct = 0;
  }
  const lab::Run run = load_run(whole());
  EXPECT_EQ(run.step, 2100);
  EXPECT_TRUE(run.recipe == small_recipe());
  EXPECT_EQ(run.edit, "");
  EXPECT_EQ(run.parameters, trainer.state().parameters);
  ASSERT_EQ(run.metrics.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(run.metrics[i].step, expected[i].step);
    EXPECT_EQ(run.metrics[i].loss, expected[i].loss);
    EXPECT_EQ(run.metrics[i].accuracy, expected[i].accuracy);
  }
  const files::Safetensors tensors = files::read_safetensors(whole() + "/checkpoint.safetensors");
  EXPECT_EQ(parameters_of(tensors, "adam.m."), trainer.state().m);
  EXPECT_EQ(parameters_of(tensors, "adam.v."), trainer.state().v);
}

// At the first step, before and after the checkpoint, and before the end: from step 0 three times, then from
// 2000.
TEST_F(RunFolder, InterruptedAnywhereEndsInTheSameBytes) {
  make_whole_and_half();
  const std::string folder = fresh();
  for (const std::int64_t stop : {1, 2000, 2001, 2100}) {
    train_until(folder, small_recipe(), stop);
    EXPECT_EQ(fs::exists(folder + "/checkpoint.safetensors"), stop > 2000) << stop;
  }
  EXPECT_EQ(load_run(folder).step, 2000);
  EXPECT_EQ(prepare_run(folder, small_recipe()), 2000);
  const std::vector<std::int64_t> expected(100, 1);
  std::vector<std::int64_t> told;
  train_run(folder, small_recipe(), [&](std::int64_t steps) { told.push_back(steps); });
  EXPECT_EQ(told, expected);
  EXPECT_TRUE(snapshot(folder) == snapshot(whole()));
}

TEST_F(RunFolder, TrainedAgainStaysAsItIs) {
  const std::string folder = short_run();
  const auto before = snapshot(folder);
  const auto written = fs::last_write_time(folder + "/checkpoint.safetensors");
  std::vector<std::int64_t> told;
  train_run(folder, short_recipe(), [&](std::int64_t steps) { told.push_back(steps); });
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(prepare_run(folder, short_recipe()), 3);
  EXPECT_TRUE(snapshot(folder) == before);
  EXPECT_EQ(fs::last_write_time(folder + "/checkpoint.safetensors"), written);
}

TEST_F(RunFolder, IsTrainedByOneAtATime) {
  const std::string folder = fresh();
  std::string error;
  train_run(folder, short_recipe(), [&](std::int64_t) {
    error = error_of<files::FileError>([&] { train(folder, short_recipe()); });
  });
  EXPECT_TRUE(contains(error, folder + ": is being trained by another process")) << error;
}

TEST_F(RunFolder, KilledBetweenMetricsAndCheckpointDropsTheMetricsAhead) {
  make_whole_and_half();
  fs::copy_file(whole() + "/metrics.jsonl", half() + "/metrics.jsonl", fs::copy_options::overwrite_existing);
  const lab::Run run = load_run(half());
  ASSERT_EQ(run.metrics.size(), 4U);
  EXPECT_EQ(run.metrics.back().step, 2000);
  train(half(), small_recipe());
  EXPECT_TRUE(snapshot(half()) == snapshot(whole()));
}

TEST_F(RunFolder, RefusesAnotherRecipeAndNamesTheField) {
  const std::string folder = short_run();
  const auto before = snapshot(folder);
  Recipe other = short_recipe();
  other.steps = 3000;
  const std::string steps = error_of<Error>([&] { train(folder, other); });
  EXPECT_TRUE(contains(steps, folder) && contains(steps, "steps is 3 there and 3000 here")) << steps;
  other = short_recipe();
  other.weighting.rule = Rule::fixed(2);
  const std::string rule = error_of<Error>([&] { train(folder, other); });
  EXPECT_TRUE(contains(rule, "rule is \"none\" there and \"fixed:2\" here")) << rule;
  EXPECT_TRUE(snapshot(folder) == before);
}

TEST_F(RunFolder, ChecksTheRecipeBeforeItMakesAFolder) {
  const std::string folder = fresh();
  Recipe recipe = small_recipe();
  recipe.batch = 0;
  EXPECT_TRUE(contains(error_of<Error>([&] { train(folder, recipe); }), "batch: is 0"));
  EXPECT_FALSE(fs::exists(folder));
}

TEST_F(RunFolder, RefusesACheckpointCutShort) {
  const std::string folder = short_run();
  const std::string path = folder + "/checkpoint.safetensors", bytes = content_of(path);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{5}, std::size_t{300}, bytes.size() / 2, bytes.size() - 1}) {
    SCOPED_TRACE("cut to " + std::to_string(size) + " bytes");
    put(path, bytes.substr(0, size));
    expect_refused(folder, "checkpoint.safetensors");
  }
}

TEST_F(RunFolder, RefusesACheckpointWithOneBitFlipped) {
  const std::string folder = short_run();
  const std::string path = folder + "/checkpoint.safetensors", bytes = content_of(path);
  std::vector<std::size_t> places = {0, bytes.find("step"), bytes.find("whet run"), bytes.size() - 1};
  for (std::size_t i = 1; i < 8; ++i) places.push_back(i * bytes.size() / 8);
  for (const std::size_t place : places) {
    SCOPED_TRACE("byte " + std::to_string(place) + " of " + std::to_string(bytes.size()));
    std::string damaged = bytes;
    damaged.at(place) = static_cast<char>(damaged[place] ^ 1);
    put(path, damaged);
    expect_refused(folder, "checkpoint.safetensors");
  }
}

// Files that are whole, with a checksum that holds, but aren't this run's checkpoint.
TEST_F(RunFolder, RefusesACheckpointThatIsNotItsOwn) {
  Recipe other = short_recipe();
  other.seed = 6;
  const std::vector<std::pair<std::string, std::function<void(files::Safetensors&)>>> changes = {
      {"no tensor", [](auto& t) { t.tensors.clear(); }},
      {"a missing tensor", [](auto& t) { drop_tensor(t, "q.bias"); }},
      {"a tensor of another shape",
       [](auto& t) {
         t.tensors[0].sizes = {t.tensors[0].sizes[1], t.tensors[0].sizes[0]};
       }},
      {"a tensor of another type", [](auto& t) { t.tensors[0].type = files::TensorType::i32; }},
      {"another recipe", [&](auto& t) { t.metadata["recipe"] = to_json(other).dump(); }},
      {"no recipe", [](auto& t) { t.metadata.erase("recipe"); }},
      {"another format", [](auto& t) { t.metadata["format"] = "whet run 2"; }},
      {"no metadata", [](auto& t) { t.metadata.clear(); }},
      {"no step", [](auto& t) { t.metadata.erase("step"); }},
      {"a step below 0", [](auto& t) { t.metadata["step"] = "-1"; }},
      {"a step beyond the end", [](auto& t) { t.metadata["step"] = "4"; }},
      {"a step beyond int64", [](auto& t) { t.metadata["step"] = "9223372036854775809"; }},
      {"a step nested deep", [](auto& t) { t.metadata["step"] = std::string(200'000, '['); }},
      {"a step that is no integer", [](auto& t) { t.metadata["step"] = "3e0"; }}};
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    const std::string folder = short_run();
    change_checkpoint(folder, change);
    expect_refused(folder, "checkpoint.safetensors");
  }
}

TEST_F(RunFolder, WithoutAMomentCanBeReadButNotTrained) {
  const std::string folder = short_run();
  change_checkpoint(folder, [](auto& tensors) { drop_tensor(tensors, "adam.v.output.bias"); });
  const auto before = snapshot(folder);
  const std::string error = error_of<FileError>([&] { train(folder, short_recipe()); });
  EXPECT_TRUE(contains(error, folder + "/checkpoint.safetensors: ") && contains(error, "adam.v.output.bias"))
      << error;
  EXPECT_EQ(load_run(folder).step, 3);
  EXPECT_TRUE(snapshot(folder) == before);
}

TEST_F(RunFolder, RefusesAConfigThatIsNone) {
  const std::string folder = short_run();
  const std::string path = folder + "/config.json", text = content_of(path);
  const auto changed = [&](const std::function<void(Json&)>& change) {
    Json json = Json::parse(text);
    change(json);
    return json.dump();
  };
  const std::vector<std::pair<std::string, std::string>> configs = {
      {"empty", ""},
      {"cut short", text.substr(0, text.size() / 2)},
      {"cut by its last brace", text.substr(0, text.rfind('}'))},
      {"no JSON", "seed = 5\n"},
      {"nested deep", std::string(200'000, '[')},
      {"nested deep in a recipe", R"({"format":"whet run 1","recipe":)" + std::string(200'000, '[')},
      {"a rule that names a file", changed([&](Json& j) { j["recipe"]["rule"] = "polynomial:" + path; })},
      {"foreign JSON", R"({"name": "whet", "version": 1})"},
      {"a list", "[1, 2]"},
      {"a number", "5"},
      {"a later format", changed([](Json& j) { j["format"] = "whet run 2"; })},
      {"a format that is a number", changed([](Json& j) { j["format"] = 1; })},
      {"no format", changed([](Json& j) { j.erase("format"); })},
      {"no recipe", changed([](Json& j) { j.erase("recipe"); })},
      {"a recipe that is text", changed([](Json& j) { j["recipe"] = "paper"; })},
      {"a recipe with an unknown field", changed([](Json& j) { j["recipe"]["momentum"] = 0.9; })},
      {"a recipe out of range", changed([](Json& j) { j["recipe"]["batch"] = 0; })},
      {"an unknown field", changed([](Json& j) { j["author"] = "me"; })},
      {"an edit that is a number", changed([](Json& j) { j["edit"] = 5; })}};
  for (const auto& [what, bytes] : configs) {
    SCOPED_TRACE(what);
    put(path, bytes);
    expect_refused(folder, "config.json");
  }
  put(path, changed([](Json& j) { j["recipe"]["momentum"] = 0.9; }));
  EXPECT_TRUE(contains(error_of<FileError>([&] { load_run(folder); }), "momentum"));
}

// As an older whet would have left it, before it knew the field.
TEST_F(RunFolder, LacksAFieldThatHasItsDefault) {
  const std::string folder = short_run(), path = folder + "/config.json";
  Json json = Json::parse(content_of(path));
  json["recipe"].erase("zoom");
  put(path, json.dump());
  EXPECT_TRUE(load_run(folder).recipe == short_recipe());
  EXPECT_EQ(prepare_run(folder, short_recipe()), 3);
  change_checkpoint(folder, [&](auto& t) { t.metadata["recipe"] = json["recipe"].dump(); });
  EXPECT_EQ(load_run(folder).step, 3);
}

TEST_F(RunFolder, RefusesACheckpointWithoutConfig) {
  const std::string folder = short_run();
  fs::remove(folder + "/config.json");
  expect_refused(folder, "");
}

TEST_F(RunFolder, RefusesDamagedMetrics) {
  const std::string folder = short_run();
  const std::string path = folder + "/metrics.jsonl", text = content_of(path);
  const std::vector<std::pair<std::string, std::string>> damages = {
      {"cut within a line", text.substr(0, text.size() - 5)},
      {"no JSON", "step,loss,accuracy\n" + text},
      {"an empty line", "\n" + text},
      {"nested deep", std::string(200'000, '[')},
      {"a line without loss", "{\"step\":500,\"accuracy\":0.5}\n"},
      {"a line that is a list", "[500,2.5,0.5]\n"},
      {"a step that is text", "{\"step\":\"500\",\"loss\":2.5,\"accuracy\":0.5}\n"}};
  for (const auto& [what, bytes] : damages) {
    SCOPED_TRACE(what);
    put(path, bytes);
    expect_refused(folder, "metrics.jsonl");
  }
}

TEST_F(RunFolder, IsNoRunYet) {
  const std::string folder = fresh();
  EXPECT_TRUE(contains(error_of<FileError>([&] { load_run(folder); }), folder + ": is not a run"));
  EXPECT_FALSE(fs::exists(folder));
  train_until(folder, small_recipe(), 1);
  EXPECT_TRUE(contains(error_of<FileError>([&] { load_run(folder); }), folder + ": has no checkpoint yet"));
  const std::string file = fresh();
  put(file, "not a folder");
  EXPECT_TRUE(contains(error_of<FileError>([&] { train(file, small_recipe()); }), file));
  EXPECT_EQ(content_of(file), "not a folder");
}

TEST_F(RunFolder, EditedComesBackAndCantBeTrained) {
  lab::Run run = load_run(short_run());
  for (float& p : run.parameters) p *= 1.5F;
  run.parameters[0] = -0.0F;
  run.edit = "all weights times 1.5";
  const std::string folder = fresh() + "/deeper";
  save_edited_run(folder, run);

  const lab::Run back = load_run(folder);
  EXPECT_EQ(back.folder, folder);
  EXPECT_TRUE(back.recipe == run.recipe);
  EXPECT_EQ(back.step, run.step);
  EXPECT_EQ(back.edit, run.edit);
  EXPECT_EQ(std::memcmp(back.parameters.data(), run.parameters.data(), kParameters * sizeof(float)), 0);
  EXPECT_EQ(content_of(folder + "/metrics.jsonl"), content_of(run.folder + "/metrics.jsonl"));

  const auto before = snapshot(folder);
  const std::string error = error_of<Error>([&] { train(folder, short_recipe()); });
  EXPECT_TRUE(contains(error, folder) && contains(error, "all weights times 1.5")) << error;
  EXPECT_TRUE(contains(error_of<Error>([&] { save_edited_run(folder, run); }), folder));
  EXPECT_TRUE(snapshot(folder) == before);
}

// A disk that is full after so many bytes of a file.
class SmallDisk {
 public:
  explicit SmallDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit small{bytes, limit_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~SmallDisk() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, handler_);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  void (*handler_)(int);
  rlimit limit_{};
};

std::string error_on_small_disk(rlim_t bytes, const std::string& folder) {
  const SmallDisk disk(bytes);
  return error_of<FileError>([&] { train(folder, small_recipe()); });
}

// At the end of a run, where the second checkpoint can't be written, or not even the metrics.
TEST_F(RunFolder, OnAFullDiskKeepsItsLastCheckpoint) {
  make_whole_and_half();
  const std::string folder = half();
  const auto before = snapshot(folder);

  const std::string metrics = error_on_small_disk(50, folder);
  EXPECT_TRUE(contains(metrics, folder + "/metrics.jsonl: cannot write it")) << metrics;
  EXPECT_TRUE(snapshot(folder) == before);

  const std::string checkpoint = error_on_small_disk(100'000, folder);
  EXPECT_TRUE(contains(checkpoint, folder + "/checkpoint.safetensors: cannot write it")) << checkpoint;
  auto after = snapshot(folder);
  EXPECT_EQ(after.size(), before.size()) << "a temporary file was left";
  EXPECT_TRUE(after["checkpoint.safetensors"] == before.at("checkpoint.safetensors"));
  EXPECT_EQ(load_run(folder).step, 2000);

  train(folder, small_recipe());
  EXPECT_TRUE(snapshot(folder) == snapshot(whole()));
}

TEST_F(RunFolder, OnAFullDiskDoesNotBegin) {
  const std::string folder = fresh();
  const std::string error = error_on_small_disk(10, folder);
  EXPECT_TRUE(contains(error, folder + "/config.json: cannot write it")) << error;
  EXPECT_TRUE(snapshot(folder).empty());
}

}  // namespace
}  // namespace whet::lab
