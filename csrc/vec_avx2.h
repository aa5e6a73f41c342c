// Eight lanes: AVX2, FMA, BMI2.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace revrnn::avx2 {

constexpr int kWidth = 8;
// Rows of the largest GEMM tile, two vectors wide: 12 accumulators of 16 registers.
constexpr int kTileRows = 6;

// Batch rows that go through the coder in turns (update.h).
constexpr int kRowsAtOnce = 1;

using F = __m256;
using I = __m256i;
// All bits of a lane set or none.
struct M {
  __m256i v;
};

inline I lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline M mask_first(int n) { return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index())}; }
inline M mask_and(M a, M b) { return {_mm256_and_si256(a.v, b.v)}; }
inline M mask_or(M a, M b) { return {_mm256_or_si256(a.v, b.v)}; }
inline unsigned lane_bits(M m) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(m.v)));
}
inline bool any(M m) { return lane_bits(m) != 0; }

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float a) { return _mm256_set1_ps(a); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const float* p, M m) { return _mm256_maskload_ps(p, m.v); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline void store(float* p, F a, M m) { _mm256_maskstore_ps(p, m.v, a); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F copy_sign(F magnitude, F sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
inline M less(F a, F b) { return {_mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ))}; }
// Where |a| is infinite or a is NaN.
inline M not_finite(F a) {
  return {_mm256_castps_si256(_mm256_cmp_ps(abs(a), _mm256_set1_ps(3.4028235e38f), _CMP_NLE_UQ))};
}
inline F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m.v)); }
inline I to_int_nearest(F a) { return _mm256_cvtps_epi32(a); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I bits(F a) { return _mm256_castps_si256(a); }
inline F from_bits(I a) { return _mm256_castsi256_ps(a); }

inline I set1i(int32_t a) { return _mm256_set1_epi32(a); }
inline I loadi(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
inline I loadi(const int32_t* p, M m) { return _mm256_maskload_epi32(p, m.v); }
inline void storei(int32_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<I*>(p), a); }
inline void storei(int32_t* p, I a, M m) { _mm256_maskstore_epi32(p, m.v, a); }
inline I add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I mul_low(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline I min(I a, I b) { return _mm256_min_epi32(a, b); }
inline I max(I a, I b) { return _mm256_max_epi32(a, b); }
inline I abs(I a) { return _mm256_abs_epi32(a); }
inline I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
inline I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
inline I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
template <int K> inline I shift_left(I a) { return _mm256_slli_epi32(a, K); }
template <int K> inline I shift_right(I a) { return _mm256_srai_epi32(a, K); }
template <int K> inline I shift_right_unsigned(I a) { return _mm256_srli_epi32(a, K); }
inline M less(I a, I b) { return {_mm256_cmpgt_epi32(b, a)}; }
inline M greater_equal(I a, I b) {
  return {_mm256_xor_si256(_mm256_cmpgt_epi32(b, a), _mm256_set1_epi32(-1))};
}
inline I select(M m, I yes, I no) { return _mm256_blendv_epi8(no, yes, m.v); }

// One byte of ones for every lane in m.
inline uint64_t byte_mask(M m) { return _pdep_u64(lane_bits(m), 0x0101010101010101ull) * 0xFF; }
inline int count(M m) { return __builtin_popcount(lane_bits(m)); }

// Writes the low bytes of the lanes in m, in lane order, to p; returns how many.
inline int push_bytes(uint8_t* p, I a, M m) {
  const I low = _mm256_and_si256(a, _mm256_set1_epi32(0xFF));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  const auto lanes = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
  const uint64_t packed = _pext_u64(lanes, byte_mask(m));
  const int n = count(m);
  std::memcpy(p, &packed, static_cast<size_t>(n));  // never a byte more: the next row's may follow
  return n;
}
// The bytes that push_bytes wrote to p with the same mask, back in their lanes, zero elsewhere.
inline I pop_bytes(const uint8_t* p, M m) {
  uint64_t packed = 0;
  std::memcpy(&packed, p, static_cast<size_t>(count(m)));
  const uint64_t lanes = _pdep_u64(packed, byte_mask(m));
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(lanes)));
}

}  // namespace revrnn::avx2
