// e^(beta y) for y <= 0: the one function whet spends its time in.
//
// f32: 2^(c y) with c = beta log2(e), as 2^k 2^f. c y is never rounded on its own: both k and f come
// from a fused multiply-add, so a large |c y| costs no accuracy and beta is exactly c / log2(e). 2^f on
// [-1/2, 1/2] is 1 + f q(f), q of degree 4 (minimax, 9.4e-8), hence exactly 1 at y = 0. Relative
// error about 2e-7 where the target has a fused multiply-add. 11 operations, no branch.
// Anything below 2^-100.5 (6e-31) is 0: the power of two is built as 2^(k-26), whose exponent bits
// are empty at k = -101, and the polynomial carries the other 2^26. So no denormal ever arises,
// here or in the weights, and a hidden key costs what any other does. NaN gives NaN.
//
// f64: Highway's Exp, 1 ULP. Anything from e^-708 (2^-1021.4) down is 0: no denormal arises here either.
#if defined(WHET_KERNELS_ELEMENTS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ELEMENTS_EXP_INL_H_
#undef WHET_KERNELS_ELEMENTS_EXP_INL_H_
#else
#define WHET_KERNELS_ELEMENTS_EXP_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// max(low, v) that keeps a NaN in v. x86's instruction returns its second operand if either is NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V MaxKeepNaN(D d, V low, V v) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  (void)d;
  return hn::Max(low, v);
#else
  (void)d;
  return hn::IfThenElse(hn::Lt(v, low), low, v);
#endif
}

// Prepared once per row: y is limited to where e^(beta y) isn't 0 yet, so that 0 * inf never happens.
template <typename T>
struct Exponential;

template <>
struct Exponential<float> {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;

  explicit Exponential(double beta)
      : c(static_cast<float>(beta * kLog2E)), lowest(static_cast<float>(-kCut) / c) {}

  // The inverse temperature that `beta` becomes when c is rounded; never below 1 if `beta` isn't, though c of
  // 1 itself rounds down.
  static double representable(double beta) {
    const auto nearest = static_cast<float>(beta * kLog2E);
    const double rounded = static_cast<double>(nearest) / kLog2E;
    if (beta < 1 || rounded >= 1) return rounded;
    return static_cast<double>(std::nextafter(nearest, 2.0F)) / kLog2E;
  }

  HWY_INLINE V limit(D d, V y) const { return MaxKeepNaN(d, hn::Set(d, lowest), y); }

  HWY_INLINE V operator()(D d, V y) const {
    const V slope = hn::Set(d, c);
    const V magic = hn::Set(d, 12582912.0f + kCut);  // 1.5 * 2^23: adding it rounds to an integer
    const V rounded = hn::MulAdd(y, slope, magic);   // low bits: k + kCut
    const V k = hn::Sub(rounded, magic);
    const V f = hn::MulSub(y, slope, k);
    const hn::RebindToSigned<D> di;
    const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, rounded)));  // 2^k / kLift
    V p = hn::Set(d, kLift * 0x1.5bd9b6p-10f);
    p = hn::MulAdd(p, f, hn::Set(d, kLift * 0x1.3ce8b6p-7f));
    p = hn::MulAdd(p, f, hn::Set(d, kLift * 0x1.c6b6dap-5f));
    p = hn::MulAdd(p, f, hn::Set(d, kLift * 0x1.ebf9c2p-3f));
    p = hn::MulAdd(p, f, hn::Set(d, kLift * 0x1.62e42ap-1f));
    p = hn::MulAdd(p, f, hn::Set(d, kLift));
    return hn::Mul(p, power);
  }

  static constexpr int kCut = 101;  // exponents that round to -kCut give 0
  static constexpr float kLift = 0x1p26f;
  static_assert(kCut + 26 == 127);
  static constexpr double kLog2E = 1.4426950408889634;
  float c;
  float lowest;
};

template <>
struct Exponential<double> {
  using D = hn::ScalableTag<double>;
  using V = hn::Vec<D>;

  explicit Exponential(double beta_) : beta(beta_), lowest(-708.0 / beta_) {}

  static double representable(double beta) { return beta; }

  HWY_INLINE V limit(D d, V y) const { return MaxKeepNaN(d, hn::Set(d, lowest), y); }

  HWY_INLINE V operator()(D d, V y) const {
    const V least = hn::Set(d, lowest);
    const V e = hn::Exp(d, hn::Mul(y, hn::Set(d, beta)));
    // 0 where y was limited; NaN where it is NaN, which Exp itself turns into 0.
    return hn::IfThenElse(hn::Gt(y, least), e, hn::Sub(y, least));
  }

  double beta;
  double lowest;
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ELEMENTS_EXP_INL_H_
