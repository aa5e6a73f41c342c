// Random numbers that can be drawn again: the twin of src/revrnn/noise.py, which has the formulas. The
// same integers, whichever pass, thread or tier asks for them.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

static inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

static inline I mix32(I x) {
  x = mul_low(bit_xor(x, shift_right_unsigned<16>(x)), set1i(0x7FEB352D));
  x = mul_low(bit_xor(x, shift_right_unsigned<15>(x)), set1i(static_cast<int32_t>(0x846CA68Bu)));
  return bit_xor(x, shift_right_unsigned<16>(x));
}

// The noise of one row, step, group and purpose.
struct RowNoise {
  int32_t low, high;

  RowNoise(uint64_t seed, int64_t time, int64_t row, int group, int purpose) {
    const uint64_t parts[] = {static_cast<uint64_t>(time), static_cast<uint64_t>(row),
                              static_cast<uint64_t>(2 * purpose + group)};
    uint64_t key = seed;
    for (const uint64_t part : parts) key = mix64(key + (part + 1) * 0x9E3779B97F4A7C15ull);
    low = static_cast<int32_t>(static_cast<uint32_t>(key));
    high = static_cast<int32_t>(static_cast<uint32_t>(key >> 32));
  }

  // The numbers in (0, 1) of columns `column`, `column` + 1, ...
  inline F uniform(int64_t column) const {
    const I place = add(set1i(static_cast<int32_t>(column)), lane_index());
    I x = mix32(add(mul_low(place, set1i(static_cast<int32_t>(0x9E3779B9u))), set1i(low)));
    x = mix32(bit_xor(x, set1i(high)));
    return mul(add(to_float(shift_right_unsigned<9>(x)), set1(0.5f)), set1(0x1p-23f));
  }
};
