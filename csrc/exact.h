// The exact multiplication on interleaved lanes: the twin of src/revrnn/exact.py, which has the
// equations and the proof. Same arithmetic, same byte order, so tapes are interchangeable.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

constexpr int32_t kZOne = 1 << REVRNN_RADIX_Z;
constexpr int32_t kZMax = kZOne - 1;
constexpr int32_t kHOne = 1 << REVRNN_RADIX_H;
constexpr float kHUnit = 1.0f / static_cast<float>(kHOne);
constexpr float kZUnit = 1.0f / static_cast<float>(kZOne);
// A lane holds x in [kLaneLow, 256 kLaneLow) between any two multiplications.
constexpr int32_t kLaneLow = kZOne;
constexpr int32_t kStateLimit = static_cast<int32_t>((1ll << 31) - 2ll * kHOne);
// h* div 2^RADIX_Z of a state inside the limit stays below this.
constexpr int32_t kQuotientLimit = 1 << (31 - REVRNN_RADIX_Z);

// One block of kLanes units is kParts vectors.
constexpr int kParts = kLanes / kWidth;
static_assert(kLanes % kWidth == 0);

// a div b and a mod b (floored) for |a / b| < 2^21 and 1 <= b < 2^RADIX_Z. The quotient through
// float32 is rounded twice (a, then a / b), by a relative 2^-24 each, so it is off by less than
// 2^21 * 2 * 2^-24 = 1/4; rounded to the nearest integer it is the floor or one above it, and the
// integer remainder says which.
static inline void divide_floor(I a, I b, I& quotient, I& remainder) {
  const I q = to_int_nearest(div(to_float(a), to_float(b)));
  const I r = sub(a, mul_low(q, b));
  const M above = less(r, set1i(0));
  quotient = select(above, sub(q, set1i(1)), q);
  remainder = select(above, add(r, b), r);
}

// The lanes and the byte stack of one batch row, while a kernel works on it.
struct RowCoder {
  I lanes[kParts];
  const uint8_t* bottom;  // pops must not go below
  uint8_t* top;           // one past the last byte pushed
  bool writing;           // false: same arithmetic, bytes are dropped
  bool underflow;         // a pop found too few bytes: the tape does not belong to these weights

  // h* -> the exact product by z*, for the m units of one block; `active` holds their lanes.
  inline void multiply(I h[kParts], const I z[kParts], const M active[kParts]) {
    M two[kParts];
    bool any_two = false;
    for (int p = 0; p < kParts; ++p) {
      const I x = lanes[p];
      const M one = mask_and(active[p], greater_equal(x, shift_left<8>(z[p])));
      two[p] = mask_and(one, greater_equal(x, shift_left<16>(z[p])));
      any_two |= any(two[p]);
      if (writing) top += push_bytes(top, x, one);
      lanes[p] = select(one, shift_right<8>(x), x);
    }
    if (any_two) {  // z* < 4 only
      for (int p = 0; p < kParts; ++p) {
        if (writing) top += push_bytes(top, lanes[p], two[p]);
        lanes[p] = select(two[p], shift_right<8>(lanes[p]), lanes[p]);
      }
    }
    for (int p = 0; p < kParts; ++p) {
      const I remainder = bit_and(h[p], set1i(kZOne - 1));
      const I y = bit_or(shift_left<REVRNN_RADIX_Z>(lanes[p]), remainder);
      I quotient, extra;
      divide_floor(y, z[p], quotient, extra);  // y < 2^18 z*
      h[p] = add(mul_low(shift_right<REVRNN_RADIX_Z>(h[p]), z[p]), extra);
      lanes[p] = select(active[p], quotient, lanes[p]);
    }
  }

  // The exact inverse of `multiply`. Returns false where h cannot have come from it.
  inline bool divide(I h[kParts], const I z[kParts], const M active[kParts]) {
    M one[kParts], two[kParts];
    int popped = 0;
    bool any_two = false;
    bool valid = true;
    I high[kParts];
    for (int p = 0; p < kParts; ++p) {
      I extra;
      divide_floor(h[p], z[p], high[p], extra);
      const M outside = mask_or(greater_equal(high[p], set1i(kQuotientLimit)),
                                less(high[p], set1i(-kQuotientLimit)));
      valid &= !any(mask_and(active[p], outside));
      const I y = add(mul_low(lanes[p], z[p]), extra);
      const I x = shift_right<REVRNN_RADIX_Z>(y);
      h[p] = add(shift_left<REVRNN_RADIX_Z>(high[p]), bit_and(y, set1i(kZOne - 1)));
      one[p] = mask_and(active[p], less(x, set1i(kLaneLow)));
      two[p] = mask_and(active[p], less(x, set1i(kLaneLow >> 8)));
      popped += count(one[p]) + count(two[p]);
      any_two |= any(two[p]);
      lanes[p] = select(active[p], x, lanes[p]);
    }
    if (top - bottom < popped) {
      underflow = true;
      return false;
    }
    if (any_two) {
      for (int p = kParts - 1; p >= 0; --p) {
        top -= count(two[p]);
        const I byte = pop_bytes(top, two[p]);
        lanes[p] = select(two[p], bit_or(shift_left<8>(lanes[p]), byte), lanes[p]);
      }
    }
    for (int p = kParts - 1; p >= 0; --p) {
      top -= count(one[p]);
      const I byte = pop_bytes(top, one[p]);
      lanes[p] = select(one[p], bit_or(shift_left<8>(lanes[p]), byte), lanes[p]);
    }
    return valid;
  }
};

// The low digits of h* rotated by those that a factor, a power of two, moves beyond RADIX_Z places:
// with z* = 2^(RADIX_Z - n) the lowest n go above the others, with 2^n back again.
static inline I rotate(I h, I factor) {
  const I digits = set1i(kZOne - 1);
  const I t = mul_low(bit_and(h, digits), factor);
  const I rotated = bit_or(shift_right<REVRNN_RADIX_Z>(t), bit_and(t, digits));
  return bit_or(bit_and(h, set1i(~(kZOne - 1))), rotated);
}

// The product of a unit that skips the tape because it is stored: floor(h* z* / 2^RADIX_Z).
static inline I multiply_untaped(I h, I z) {
  const I low = shift_right<REVRNN_RADIX_Z>(mul_low(bit_and(h, set1i(kZOne - 1)), z));
  return add(mul_low(shift_right<REVRNN_RADIX_Z>(h), z), low);
}
