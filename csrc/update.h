// The exact update of one row and group and its inverse:
//   state <- z* (x) state + round(2^RADIX_H increment)
// where (x) is what the rule of forgetting makes of a state: with fractional forgetting the exact
// multiplication. RevGRU: state h, z* from z, increment (1 - z) g. RevLSTM: first c with f and i g,
// then h with p and o tanh(c).
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

struct Forget {
  float floor;
  int32_t z_min;
};

// z* = round(2^RADIX_Z (a + (1 - a) s)), clamped to [z_min, 2^RADIX_Z - 1].
static inline I quantise(F gate, const Forget& forget) {
  const F z = add(set1(forget.floor), mul(set1(1.0f - forget.floor), gate));
  const I fixed = to_int_nearest(mul(z, set1(static_cast<float>(kZOne))));
  return min(max(fixed, set1i(forget.z_min)), set1i(kZMax));
}
// 1 - w (1 - z): what a unit's state is multiplied by that takes a share w of the step.
static inline F shared(F z, F share) { return sub(set1(1.0f), mul(share, sub(set1(1.0f), z))); }
// The same of such a z: 2^RADIX_Z where w is 0.
static inline I quantise_shared(F gate, F share, const Forget& forget) {
  const F z = add(set1(forget.floor), mul(set1(1.0f - forget.floor), gate));
  const I fixed = to_int_nearest(mul(shared(z, share), set1(static_cast<float>(kZOne))));
  return min(max(fixed, set1i(forget.z_min)), set1i(kZOne));
}

static inline F forget_value(I z) { return mul(to_float(z), set1(kZUnit)); }
static inline F state_value(I h) { return mul(to_float(h), set1(kHUnit)); }

// A rule of forgetting reads the amounts of a vector of units from their gate; `value` is z, of which
// a RevGRU's update is computed.

// z* / 2^RADIX_Z on the tape.
struct Fractional {
  static constexpr bool kForgets = true, kShares = false;
  const float* gate;
  Forget forget;
  inline I amount(int64_t i, int left) const { return quantise(load_first(gate + i, left), forget); }
  inline F value(I z) const { return forget_value(z); }
  inline I untaped(I h, I z) const { return multiply_untaped(h, z); }
  static inline I to_tape(I h, I) { return h; }
  static inline I from_tape(I h, I) { return h; }
};
// h >> n, with z* = 2^(RADIX_Z - n): a multiplication of the rotated state (src/revrnn/exact.py).
struct Discrete {
  static constexpr bool kForgets = true, kShares = false;
  const float* chosen;
  // At least 1, for the padding.
  inline I amount(int64_t i, int left) const {
    const F z = load_first(chosen + i, left);
    return max(to_int_nearest(mul(z, set1(static_cast<float>(kZOne)))), set1i(1));
  }
  inline F value(I z) const { return forget_value(z); }
  inline I untaped(I h, I z) const { return multiply_untaped(h, z); }
  static inline I to_tape(I h, I z) { return rotate(h, z); }
  static inline I from_tape(I h, I z) {
    return rotate(h, to_int_nearest(div(set1(static_cast<float>(kZOne)), to_float(z))));
  }
};
// Nothing is forgotten and nothing taped. z (RevGRU only) is the sigmoid itself: its bits are the
// amount.
struct Retained {
  static constexpr bool kForgets = false, kShares = false;
  const float* gate;
  inline I amount(int64_t i, int left) const { return bits(load_first(gate + i, left)); }
  inline F value(I z) const { return from_bits(z); }
  inline I untaped(I h, I) const { return h; }
  static inline I to_tape(I h, I) { return h; }
  static inline I from_tape(I h, I) { return h; }
};

// Zoneout: the same two rules for units that take a share of the step.
struct SharedFractional : Fractional {
  static constexpr bool kShares = true;
  const float* shares;
  inline F share(int64_t i, int left) const { return load_first(shares + i, left); }
  // At least 1, for the padding.
  inline I amount(int64_t i, int left) const {
    return quantise_shared(load_first(gate + i, left), share(i, left), forget);
  }
};
struct SharedRetained : Retained {
  static constexpr bool kShares = true;
  const float* shares;
  inline F share(int64_t i, int left) const { return load_first(shares + i, left); }
  inline I amount(int64_t i, int left) const {
    return bits(shared(load_first(gate + i, left), share(i, left)));
  }
};

// RevGRU: (1 - z) g with z the value that multiplies.
struct KeepCandidate {
  const float* g;
  template <class Rule>
  inline F operator()(int64_t i, int left, const Rule& rule, I z) const {
    return mul(sub(set1(1.0f), rule.value(z)), load_first(g + i, left));
  }
};
// RevLSTM: i g for c, o tanh(c) for h; with zoneout a share of it.
struct Product {
  const float* a;
  const float* b;
  template <class Rule>
  inline F operator()(int64_t i, int left, const Rule& rule, I) const {
    const F product = mul(load_first(a + i, left), load_first(b + i, left));
    if constexpr (Rule::kShares) {
      return mul(product, rule.share(i, left));
    } else {
      return product;
    }
  }
};

// Sum of -log2 z over the taped units of a row, gathered as products: z >= 2^-10, so a product of
// kFactors of them is a normal float.
struct IdealBits {
  static constexpr int kFactors = 8;
  F product = set1(1.0f);
  F sum = zero();
  int factors = 0;
  inline void take(F z) {
    product = mul(product, z);
    if (++factors == kFactors) flush();
  }
  inline void flush() {
    sum = add(sum, log2_positive(product));
    product = set1(1.0f);
    factors = 0;
  }
  inline double bits() {
    flush();
    float lanes[kWidth];
    store(lanes, sum);
    double total = 0;
    for (float lane : lanes) total -= lane;
    return total;
  }
};

// One block of kLanes units, or the first `units` of it, as kParts vectors. Padding lanes compute
// on zeros and are neither stored nor allowed to move the coder.
struct Block {
  int64_t first;
  int left[kParts];
  M active[kParts];
  Block(int64_t first_unit, int64_t end) : first(first_unit) {
    for (int p = 0; p < kParts; ++p) {
      left[p] = static_cast<int>(end - first) - p * kWidth;
      active[p] = mask_first(left[p] > 0 ? left[p] : 0);
    }
  }
  int64_t at(int p) const { return first + p * kWidth; }
};

static inline I loadi_first(const int32_t* p, int n) {
  if (n >= kWidth) return loadi(p);
  return n > 0 ? loadi(p, mask_first(n)) : set1i(0);
}
static inline void storei_first(int32_t* p, I a, int n) {
  if (n >= kWidth) {
    storei(p, a);
  } else if (n > 0) {
    storei(p, a, mask_first(n));
  }
}

// Units [0, stored) go untaped; [stored, units) through the coder, unless the rule never forgets.
// value receives the new state as floats. Returns false when a state leaves its range.
template <class Rule, class Increment>
static inline bool advance_units(int64_t units, int64_t stored, const Rule& rule,
                          const Increment& increment, int32_t* state, float* value,
                          RowCoder& coder, IdealBits* ideal) {
  if (!Rule::kForgets) stored = units;
  I extreme = set1i(0);
  const auto finish = [&](int64_t i, int left, I product, I z) {
    const I u = to_int_nearest(mul(increment(i, left, rule, z), set1(static_cast<float>(kHOne))));
    const I h = add(product, u);
    extreme = max(extreme, abs(h));
    storei_first(state + i, h, left);
    store_first(value + i, state_value(h), left);
  };
  for (int64_t i = 0; i < stored; i += kWidth) {
    const int left = static_cast<int>(stored - i);
    const I z = rule.amount(i, left);
    finish(i, left, rule.untaped(loadi_first(state + i, left), z), z);
  }
  for (int64_t j = stored; j < units; j += kLanes) {
    const Block block(j, units);
    I z[kParts], h[kParts];
    for (int p = 0; p < kParts; ++p) {
      z[p] = rule.amount(block.at(p), block.left[p]);
      h[p] = Rule::to_tape(loadi_first(state + block.at(p), block.left[p]), z[p]);
      if (ideal) ideal->take(select(block.active[p], forget_value(z[p]), set1(1.0f)));
    }
    coder.multiply(h, z, block.active);
    for (int p = 0; p < kParts; ++p) {
      if (block.left[p] > 0) finish(block.at(p), block.left[p], h[p], z[p]);
    }
  }
  return !any(greater_equal(extreme, set1i(kStateLimit)));
}

// The inverse: last block first. `before` holds the stored units as they were before the step.
// Returns false when the states cannot have come from `advance_units`.
template <class Rule, class Increment>
static inline bool rewind_units(int64_t units, int64_t stored, const Rule& rule,
                         const Increment& increment, const int32_t* before, int32_t* state,
                         float* value, RowCoder& coder) {
  const auto update = [&](int64_t i, int left, I z) {
    return to_int_nearest(mul(increment(i, left, rule, z), set1(static_cast<float>(kHOne))));
  };
  const auto put = [&](int64_t i, int left, I h) {
    storei_first(state + i, h, left);
    store_first(value + i, state_value(h), left);
  };
  bool valid = true;
  if constexpr (!Rule::kForgets) {
    for (int64_t i = stored; i < units; i += kWidth) {
      const int left = static_cast<int>(units - i);
      put(i, left, sub(loadi_first(state + i, left), update(i, left, rule.amount(i, left))));
    }
    units = stored;
  }
  const int64_t blocks = (units - stored + kLanes - 1) / kLanes;
  for (int64_t b = blocks - 1; b >= 0; --b) {
    const Block block(stored + b * kLanes, units);
    I z[kParts], h[kParts];
    for (int p = 0; p < kParts; ++p) {
      const int64_t i = block.at(p);
      z[p] = rule.amount(i, block.left[p]);
      h[p] = set1i(0);
      if (block.left[p] > 0) {
        h[p] = sub(loadi_first(state + i, block.left[p]), update(i, block.left[p], z[p]));
      }
    }
    valid &= coder.divide(h, z, block.active);
    for (int p = 0; p < kParts; ++p) {
      if (block.left[p] > 0) put(block.at(p), block.left[p], Rule::from_tape(h[p], z[p]));
    }
  }
  // A stored unit must lead to the state it is now, as the forward pass computed it: nothing else
  // would notice that it was changed.
  for (int64_t i = 0; i < stored; i += kWidth) {
    const int left = static_cast<int>(stored - i);
    const I z = rule.amount(i, left);
    const I h = loadi_first(before + i, left);
    const I again = add(rule.untaped(h, z), update(i, left, z));
    const I now = loadi_first(state + i, left);
    valid &= !any(mask_or(less(again, now), less(now, again)));
    put(i, left, h);
  }
  return valid;
}
