// sigmoid, tanh and log2 on one vector. The gates of the forward and of the reverse pass must be
// the same floats, so each is written in explicit operations (contraction is off for the whole
// build) and there is one definition of each. Coefficients: minimax fits, see
// fit_activations.py.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

// e^x for -87 <= x <= 88: x = n ln2 + r, |r| <= ln2 / 2, e^r = 1 + r + r^2 P(r); relative error 2e-7.
static inline F exp_bounded(F x) {
  const I n = to_int_nearest(mul(x, set1(1.44269504f)));
  const F nf = to_float(n);
  // ln2 in two parts, the first short enough for n times it to be exact.
  F r = fma(nf, set1(-0.693359375f), x);
  r = fma(nf, set1(2.12194440e-4f), r);
  F p = set1(0x1.6a2344p-10f);
  p = fma(p, r, set1(0x1.123a6ep-7f));
  p = fma(p, r, set1(0x1.5558f4p-5f));
  p = fma(p, r, set1(0x1.555490p-3f));
  p = fma(p, r, set1(0x1.fffffcp-2f));
  const F e = add(fma(mul(r, r), p, r), set1(1.0f));
  return mul(e, from_bits(shift_left<23>(add(n, set1i(127)))));
}

// 1 / (1 + e^-x)
static inline F sigmoid(F x) {
  const F bounded = min(max(x, set1(-87.0f)), set1(87.0f));
  const F e = exp_bounded(sub(zero(), bounded));
  return div(set1(1.0f), add(set1(1.0f), e));
}

// Small |x|: x + x^3 Q(x^2), which keeps the relative precision. Else 1 - 2 / (e^2|x| + 1), signed.
static inline F tanh(F x) {
  const F a = abs(x);
  const F x2 = mul(x, x);
  F q = set1(-0.00570499f);
  q = fma(q, x2, set1(0.02063909f));
  q = fma(q, x2, set1(-0.05373972f));
  q = fma(q, x2, set1(0.13331442f));
  q = fma(q, x2, set1(-0.33333282f));
  const F small = fma(mul(x, x2), q, x);
  const F e = exp_bounded(min(add(a, a), set1(40.0f)));
  const F large = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  return select(less(a, set1(0.625f)), small, copy_sign(large, x));
}

// log2 of a positive normal number, absolute error 3e-7: for the account of ideal bits only.
static inline F log2_positive(F x) {
  // Mantissa in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) puts the cut there.
  const I cut = set1i(0x3F3504F3);
  const I shifted = sub(bits(x), cut);
  const I exponent = shift_right<23>(shifted);
  const F m = sub(from_bits(sub(bits(x), shift_left<23>(exponent))), set1(1.0f));
  F p = set1(0.17062829f);
  p = fma(p, m, set1(-0.27269677f));
  p = fma(p, m, set1(0.29726388f));
  p = fma(p, m, set1(-0.35896198f));
  p = fma(p, m, set1(0.48046495f));
  p = fma(p, m, set1(-0.72137587f));
  p = fma(p, m, set1(1.44269973f));
  return fma(p, m, to_float(exponent));
}
