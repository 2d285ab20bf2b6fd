// All normalizers: the one table that a new one is added to, and the row engine compiled for each.

#include "kernels/row/normalizers.h"

#include <whet/normalizer.h>
#include <whet/shard.h>

#include <cstddef>
#include <string>

#include "core/arguments.h"
#include "core/saved_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/row/normalizers.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/entmax/entmax-inl.h"
#include "kernels/hard/hard-inl.h"
#include "kernels/hard/straight_through-inl.h"
#include "kernels/row/normalizers-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/softmax/softmax-inl.h"
#include "kernels/top_k/top_k-inl.h"
#include "kernels/unnormalised/relu-inl.h"
#include "kernels/unnormalised/sigmoid-inl.h"
#include "kernels/unnormalised/softpick-inl.h"

// The first is the default.
#undef WHET_FOR_EACH_NORMALIZER
#define WHET_FOR_EACH_NORMALIZER(X) \
  X(Softmax)                        \
  X(Sparsemax) X(Entmax15) X(Entmax) X(TopK) X(Hard) X(StraightThrough) X(Sigmoid) X(Relu) X(Softpick)

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

template <class N, typename T>
HWY_NOINLINE void Normalise(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out,
                            RowResult<T>& result) {
  NormaliseRow<N>(row, rule, wanted, out, result);
}

template <class N, typename T>
double Least(double parameter, const SavedRow& saved) {
  return N::template Least<T>(parameter, saved);
}

template <class N>
constexpr auto ThresholdPower() -> double (*)(double) {
  if constexpr (N::kSharesThreshold) {
    return N::PowerOf;
  } else {
    return nullptr;
  }
}

template <typename T>
const RowFunctions<T>& FunctionsOf(const Normalizer& normalizer) {
#define WHET_ENTRY(N)                                                                  \
  {Normalise<N, T>,         WeighRow<N, T>,    SaveRow<N, T>,      WeighPart<N, T>,    \
   ThresholdPart<N, T>,     BackwardRow<N, T>, SumsOfPart<N, T>,   BackwardPart<N, T>, \
   ParameterGradient<N, T>, Least<N, T>,       N::kSavesThreshold, N::kIsSparse},
  static constexpr RowFunctions<T> kFunctions[] = {WHET_FOR_EACH_NORMALIZER(WHET_ENTRY)};
#undef WHET_ENTRY
  return kFunctions[static_cast<std::size_t>(normalizer.index())];
}

template const RowFunctions<float>& FunctionsOf<float>(const Normalizer& normalizer);
template const RowFunctions<double>& FunctionsOf<double>(const Normalizer& normalizer);

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

std::span<const core::NormalizerEntry> kernels::normalizers() {
#define WHET_ENTRY(N)                    \
  {HWY_NAMESPACE::N::kName,              \
   HWY_NAMESPACE::N::kParameter,         \
   HWY_NAMESPACE::N::kUsesBeta,          \
   HWY_NAMESPACE::N::kNeedsScratch,      \
   HWY_NAMESPACE::N::kSavesThreshold,    \
   HWY_NAMESPACE::N::kMergesShards,      \
   HWY_NAMESPACE::N::kParameterGradient, \
   HWY_NAMESPACE::ThresholdPower<HWY_NAMESPACE::N>()},
  static constexpr core::NormalizerEntry kNormalizers[] = {WHET_FOR_EACH_NORMALIZER(WHET_ENTRY)};
#undef WHET_ENTRY
  return kNormalizers;
}

const core::NormalizerEntry& kernels::entry_of(const Normalizer& normalizer) {
  return normalizers()[static_cast<std::size_t>(normalizer.index())];
}

void kernels::check_merges_shards(const Normalizer& normalizer) {
  if (entry_of(normalizer).merges_shards) return;
  core::fail("normalizer", "is " + normalizer.name() + ", which can't be merged from shards of keys");
}

void kernels::check_threshold(const Normalizer& normalizer, bool wanted) {
  if (needs_threshold(normalizer) == wanted) return;
  core::fail("normalizer", "is " + normalizer.name() +
                               (wanted ? ", must be sparsemax, entmax15 or entmax:A, which have a threshold"
                                       : ", whose threshold comes after the maxima of all shards"));
}

void kernels::check_parameter_gradient(const Normalizer& normalizer) {
  if (entry_of(normalizer).parameter_gradient) return;
  std::string names;
  for (const core::NormalizerEntry& entry : normalizers()) {
    if (entry.parameter_gradient) names += (names.empty() ? "" : " or ") + std::string(entry.name) + ":P";
  }
  core::fail("dparameter", "given, but the normalizer is " + normalizer.name() + ", must be " + names +
                               ", whose parameter has a gradient");
}

std::int64_t kernels::saved_size(const Rule& rule, const Normalizer& normalizer) {
  const core::NormalizerEntry& entry = entry_of(normalizer);
  return core::saved_size(entry.uses_beta ? rule : Rule{}) + (entry.saves_threshold ? 1 : 0);
}

Normalizer Normalizer::parse(std::string_view name) {
  const auto [index, parameter] = core::parse_normalizer(name, kernels::normalizers());
  Normalizer result;
  result.index_ = index;
  result.parameter_ = parameter;
  return result;
}

std::string Normalizer::name() const {
  return core::normalizer_name({index_, parameter_}, kernels::normalizers());
}

}  // namespace whet
#endif  // HWY_ONCE
