// Sixteen lanes: AVX-512 F, BW, DQ, VL.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace revrnn::avx512 {

constexpr int kWidth = 16;
// Rows of the largest GEMM tile, two vectors wide: 24 accumulators of 32 registers.
constexpr int kTileRows = 12;

// Batch rows that go through the coder in turns (update.h).
constexpr int kRowsAtOnce = 2;

using F = __m512;
using I = __m512i;
using M = __mmask16;

inline M mask_first(int n) { return static_cast<M>(n >= 16 ? 0xFFFF : (1u << n) - 1u); }
inline M mask_and(M a, M b) { return static_cast<M>(a & b); }
inline M mask_or(M a, M b) { return static_cast<M>(a | b); }
inline bool any(M m) { return m != 0; }

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float a) { return _mm512_set1_ps(a); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const float* p, M m) { return _mm512_maskz_loadu_ps(m, p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void store(float* p, F a, M m) { _mm512_mask_storeu_ps(p, m, a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F copy_sign(F magnitude, F sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
inline M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
// Where |a| is infinite or a is NaN.
inline M not_finite(F a) { return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(3.4028235e38f), _CMP_NLE_UQ); }
inline F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
inline I to_int_nearest(F a) { return _mm512_cvtps_epi32(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I bits(F a) { return _mm512_castps_si512(a); }
inline F from_bits(I a) { return _mm512_castsi512_ps(a); }

inline I set1i(int32_t a) { return _mm512_set1_epi32(a); }
inline I loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
inline I loadi(const int32_t* p, M m) { return _mm512_maskz_loadu_epi32(m, p); }
inline void storei(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline void storei(int32_t* p, I a, M m) { _mm512_mask_storeu_epi32(p, m, a); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I mul_low(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I min(I a, I b) { return _mm512_min_epi32(a, b); }
inline I max(I a, I b) { return _mm512_max_epi32(a, b); }
inline I abs(I a) { return _mm512_abs_epi32(a); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
inline I lane_index() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
template <int K> inline I shift_left(I a) { return _mm512_slli_epi32(a, K); }
template <int K> inline I shift_right(I a) { return _mm512_srai_epi32(a, K); }
template <int K> inline I shift_right_unsigned(I a) { return _mm512_srli_epi32(a, K); }
inline M less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
inline M greater_equal(I a, I b) { return _mm512_cmpge_epi32_mask(a, b); }
inline I select(M m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

// Writes the low bytes of the lanes in m, in lane order, to p; returns how many.
inline int push_bytes(uint8_t* p, I a, M m) {
  const int n = __builtin_popcount(m);
  const __m128i packed = _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(m, a));
  _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1u << n) - 1u), packed);
  return n;
}
inline int count(M m) { return __builtin_popcount(m); }
// The bytes that push_bytes wrote to p with the same mask, back in their lanes, zero elsewhere.
inline I pop_bytes(const uint8_t* p, M m) {
  const int n = __builtin_popcount(m);
  const __m128i packed = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1u), p);
  return _mm512_maskz_expand_epi32(m, _mm512_cvtepu8_epi32(packed));
}

}  // namespace revrnn::avx512
