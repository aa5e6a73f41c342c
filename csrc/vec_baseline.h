// Four lanes of the compiler's own vector types: any machine that GCC or Clang know.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace revrnn::baseline {

constexpr int kWidth = 4;
// Rows of the largest GEMM tile, two vectors wide: 12 accumulators of 16 registers.
constexpr int kTileRows = 6;

// Batch rows that go through the coder in turns (update.h).
constexpr int kRowsAtOnce = 1;

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
// All bits of a lane set or none.
struct M {
  I v;
};

inline F set1(float a) { return F{a, a, a, a}; }
inline I set1i(int32_t a) { return I{a, a, a, a}; }
inline I bits(F a) { return reinterpret_cast<I>(a); }
inline F from_bits(I a) { return reinterpret_cast<F>(a); }

inline I lane_index() { return I{0, 1, 2, 3}; }
inline M mask_first(int n) { return {set1i(n) > lane_index()}; }
inline M mask_and(M a, M b) { return {a.v & b.v}; }
inline M mask_or(M a, M b) { return {a.v | b.v}; }
inline bool any(M m) { return (m.v[0] | m.v[1] | m.v[2] | m.v[3]) != 0; }

template <class V, class T> inline V load_lanes(const T* p) {
  V a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
template <class V, class T> inline V load_lanes(const T* p, M m) {
  V a = {};
  for (int i = 0; i < kWidth; ++i) {
    if (m.v[i]) a[i] = p[i];
  }
  return a;
}
template <class V, class T> inline void store_lanes(T* p, V a, M m) {
  for (int i = 0; i < kWidth; ++i) {
    if (m.v[i]) p[i] = a[i];
  }
}

inline F zero() { return F{}; }
inline F load(const float* p) { return load_lanes<F>(p); }
inline F load(const float* p, M m) { return load_lanes<F>(p, m); }
inline void store(float* p, F a) { std::memcpy(p, &a, sizeof(a)); }
inline void store(float* p, F a, M m) { store_lanes(p, a, m); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
// Two roundings: a machine of this tier may have no fused instruction, and contraction is off.
inline F fma(F a, F b, F c) { return a * b + c; }
inline F select(M m, F yes, F no) { return from_bits((bits(yes) & m.v) | (bits(no) & ~m.v)); }
inline I select(M m, I yes, I no) { return (yes & m.v) | (no & ~m.v); }
inline F min(F a, F b) { return select({a < b}, a, b); }
inline F max(F a, F b) { return select({a > b}, a, b); }
inline F abs(F a) { return from_bits(bits(a) & set1i(0x7FFFFFFF)); }
inline F copy_sign(F magnitude, F sign) {
  return from_bits(bits(magnitude) | (bits(sign) & set1i(INT32_MIN)));
}
inline M less(F a, F b) { return {a < b}; }
// Where |a| is infinite or a is NaN.
inline M not_finite(F a) { return {~(abs(a) <= set1(3.4028235e38f))}; }
inline I to_int_nearest(F a) {
#if defined(__SSE2__)
  return reinterpret_cast<I>(_mm_cvtps_epi32(a));
#else
  I b;
  for (int i = 0; i < kWidth; ++i) b[i] = static_cast<int32_t>(std::nearbyint(a[i]));
  return b;
#endif
}
inline F to_float(I a) { return __builtin_convertvector(a, F); }

inline I loadi(const int32_t* p) { return load_lanes<I>(p); }
inline I loadi(const int32_t* p, M m) { return load_lanes<I>(p, m); }
inline void storei(int32_t* p, I a) { std::memcpy(p, &a, sizeof(a)); }
inline void storei(int32_t* p, I a, M m) { store_lanes(p, a, m); }
inline I add(I a, I b) { return a + b; }
inline I sub(I a, I b) { return a - b; }
inline I mul_low(I a, I b) { return a * b; }
inline I min(I a, I b) { return select({a < b}, a, b); }
inline I max(I a, I b) { return select({a > b}, a, b); }
inline I abs(I a) { return select({a < 0}, -a, a); }
inline I bit_and(I a, I b) { return a & b; }
inline I bit_or(I a, I b) { return a | b; }
inline I bit_xor(I a, I b) { return a ^ b; }
template <int K> inline I shift_left(I a) { return a << K; }
template <int K> inline I shift_right(I a) { return a >> K; }
template <int K> inline I shift_right_unsigned(I a) {
  using Unsigned = uint32_t __attribute__((vector_size(16)));
  return reinterpret_cast<I>(reinterpret_cast<Unsigned>(a) >> K);
}
inline M less(I a, I b) { return {a < b}; }
inline M greater_equal(I a, I b) { return {a >= b}; }

inline int count(M m) {
  const I ones = -m.v;
  return ones[0] + ones[1] + ones[2] + ones[3];
}
// Writes the low bytes of the lanes in m, in lane order, to p; returns how many.
inline int push_bytes(uint8_t* p, I a, M m) {
  int n = 0;
  for (int i = 0; i < kWidth; ++i) {
    if (m.v[i]) p[n++] = static_cast<uint8_t>(a[i] & 0xFF);
  }
  return n;
}
// The bytes that push_bytes wrote to p with the same mask, back in their lanes, zero elsewhere.
inline I pop_bytes(const uint8_t* p, M m) {
  I a = {};
  int n = 0;
  for (int i = 0; i < kWidth; ++i) {
    if (m.v[i]) a[i] = p[n++];
  }
  return a;
}

}  // namespace revrnn::baseline
