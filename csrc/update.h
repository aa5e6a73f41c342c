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

// kRowsAtOnce rows go through the coder block by block in turns: a row's lanes are one long chain of
// dependent divisions, and the other row's fill the waiting.
//
// Of row k: `rule(k)`, `increment(k)`, and what a row works on.
template <int ROWS>
struct Rows {
  int32_t* state[ROWS];
  float* value[ROWS];  // receives the new state as floats
  RowCoder coder[ROWS];
};

// Units [0, stored) go untaped; [stored, units) through the coder, unless the rule never forgets.
// Returns the first row of which a state left its range, or ROWS.
template <int ROWS, class RuleOf, class IncrementOf>
static inline int advance_units(int64_t units, int64_t stored, const RuleOf& rule,
                                const IncrementOf& increment, Rows<ROWS>& rows, IdealBits* ideal) {
  using Rule = decltype(rule(0));
  if (!Rule::kForgets) stored = units;
  I extreme[ROWS];
  for (I& e : extreme) e = set1i(0);
  const auto finish = [&](int k, int64_t i, int left, I product, I z) {
    const F change = increment(k)(i, left, rule(k), z);
    const I h = add(product, to_int_nearest(mul(change, set1(static_cast<float>(kHOne)))));
    extreme[k] = max(extreme[k], abs(h));
    storei_first(rows.state[k] + i, h, left);
    store_first(rows.value[k] + i, state_value(h), left);
  };
  for (int k = 0; k < ROWS; ++k) {
    for (int64_t i = 0; i < stored; i += kWidth) {
      const int left = static_cast<int>(stored - i);
      const I z = rule(k).amount(i, left);
      finish(k, i, left, rule(k).untaped(loadi_first(rows.state[k] + i, left), z), z);
    }
  }
  for (int64_t j = stored; j < units; j += kLanes) {
    const Block block(j, units);
    for (int k = 0; k < ROWS; ++k) {
      I z[kParts], h[kParts];
      for (int p = 0; p < kParts; ++p) {
        z[p] = rule(k).amount(block.at(p), block.left[p]);
        h[p] = Rule::to_tape(loadi_first(rows.state[k] + block.at(p), block.left[p]), z[p]);
        if (ideal) ideal[k].take(select(block.active[p], forget_value(z[p]), set1(1.0f)));
      }
      rows.coder[k].multiply(h, z, block.active);
      for (int p = 0; p < kParts; ++p) {
        if (block.left[p] > 0) finish(k, block.at(p), block.left[p], h[p], z[p]);
      }
    }
  }
  int good = 0;
  while (good < ROWS && !any(greater_equal(extreme[good], set1i(kStateLimit)))) ++good;
  return good;
}

// The inverse: last block first. `before` holds each row's stored units as they were before the step.
// Returns the first row of which the states cannot have come from `advance_units`, or ROWS.
template <int ROWS, class RuleOf, class IncrementOf>
static inline int rewind_units(int64_t units, int64_t stored, const RuleOf& rule,
                               const IncrementOf& increment, const int32_t* const* before,
                               Rows<ROWS>& rows) {
  using Rule = decltype(rule(0));
  const auto update = [&](int k, int64_t i, int left, I z) {
    const F change = increment(k)(i, left, rule(k), z);
    return to_int_nearest(mul(change, set1(static_cast<float>(kHOne))));
  };
  const auto put = [&](int k, int64_t i, int left, I h) {
    storei_first(rows.state[k] + i, h, left);
    store_first(rows.value[k] + i, state_value(h), left);
  };
  bool valid[ROWS];
  for (bool& v : valid) v = true;
  if constexpr (!Rule::kForgets) {
    for (int k = 0; k < ROWS; ++k) {
      for (int64_t i = stored; i < units; i += kWidth) {
        const int left = static_cast<int>(units - i);
        const I z = rule(k).amount(i, left);
        put(k, i, left, sub(loadi_first(rows.state[k] + i, left), update(k, i, left, z)));
      }
    }
    units = stored;
  }
  const int64_t blocks = (units - stored + kLanes - 1) / kLanes;
  for (int64_t b = blocks - 1; b >= 0; --b) {
    const Block block(stored + b * kLanes, units);
    for (int k = 0; k < ROWS; ++k) {
      I z[kParts], h[kParts];
      for (int p = 0; p < kParts; ++p) {
        const int64_t i = block.at(p);
        const int left = block.left[p];
        z[p] = rule(k).amount(i, left);
        h[p] = set1i(0);
        if (left > 0) h[p] = sub(loadi_first(rows.state[k] + i, left), update(k, i, left, z[p]));
      }
      valid[k] &= rows.coder[k].divide(h, z, block.active);
      for (int p = 0; p < kParts; ++p) {
        if (block.left[p] > 0) put(k, block.at(p), block.left[p], Rule::from_tape(h[p], z[p]));
      }
    }
  }
  // A stored unit must lead to the state it is now, as the forward pass computed it: nothing else
  // would notice that it was changed.
  for (int k = 0; k < ROWS; ++k) {
    for (int64_t i = 0; i < stored; i += kWidth) {
      const int left = static_cast<int>(stored - i);
      const I z = rule(k).amount(i, left);
      const I h = loadi_first(before[k] + i, left);
      const I again = add(rule(k).untaped(h, z), update(k, i, left, z));
      const I now = loadi_first(rows.state[k] + i, left);
      valid[k] &= !any(mask_or(less(again, now), less(now, again)));
      put(k, i, left, h);
    }
  }
  int good = 0;
  while (good < ROWS && valid[good]) ++good;
  return good;
}
