// The range every inverse temperature is kept in: wide enough for any use, narrow enough that
// beta times a finite f32 logit difference and -101 / beta stay finite.
#ifndef WHET_CORE_BETA_H_
#define WHET_CORE_BETA_H_

namespace whet::core {

inline constexpr double kMinBeta = 0x1p-60;
inline constexpr double kMaxBeta = 0x1p60;

}  // namespace whet::core

#endif  // WHET_CORE_BETA_H_
