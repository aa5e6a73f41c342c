// The one function that computes gates. Forward and reverse pass both call it, with the same
// projections and the same float states, so they get the same floats (docs/exactness.md: recomputed floats
// must be the same floats).
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

// Where the packed weights of each kind start; see pack() in layer.h.
struct Packed {
  const float* bias;         // (G*H), zeros without bias
  const float* ih;           // W_ih^T: depth I, G*H columns
  const float* hh[2];        // per group, depth D: RevGRU z and r ((G-1)*D columns), RevLSTM all
  const float* candidate[2]; // RevGRU only, depth D: g (D columns)
  const float* ih_t;         // W_ih: depth G*H, I columns; backward only, as the next two
  const float* hh_t[2];      // depth (G-1)*D or G*D, D columns
  const float* candidate_t[2];
  int64_t floats;
};

static Packed packed_layout(const Shape& s, bool backward, const float* base) {
  const int64_t d = s.group();
  const bool gru = s.cell == Cell::kGru;
  const int64_t main = gru ? s.candidate() : s.gates() * d;  // computed from h_other itself
  Packed p{};
  int64_t at = 0;
  const auto take = [&](int64_t depth, int64_t columns) {
    const float* start = base + at;
    at += depth * panels(columns) * kPanel;
    return start;
  };
  p.bias = take(1, s.gate_columns());
  p.ih = take(s.inputs, s.gate_columns());
  for (int i = 0; i < 2; ++i) {
    p.hh[i] = take(d, main);
    if (gru) p.candidate[i] = take(d, d);
  }
  if (backward) {
    p.ih_t = take(s.gate_columns(), s.inputs);
    for (int i = 0; i < 2; ++i) {
      p.hh_t[i] = take(main, d);
      if (gru) p.candidate_t[i] = take(d, d);
    }
  }
  p.floats = at;
  return p;
}

// n values in place; false if one was not finite.
static bool sigmoid_row(float* a, int64_t n) {
  M bad = mask_first(0);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(n - i);
    const F x = load_first(a + i, left);
    bad = mask_or(bad, not_finite(x));
    store_first(a + i, sigmoid(x), left);
  }
  return !any(bad);
}

static bool tanh_row(float* a, int64_t n) {
  M bad = mask_first(0);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(n - i);
    const F x = load_first(a + i, left);
    bad = mask_or(bad, not_finite(x));
    store_first(a + i, tanh(x), left);
  }
  return !any(bad);
}

// What one thread of `threads` works with: its batch rows are thread, thread + threads, ...
struct Deal {
  int thread, threads;
  // How many of the first `active` batch rows are this thread's.
  int64_t share(int64_t active) const {
    return active > thread ? (active - thread - 1) / threads + 1 : 0;
  }
  int64_t row(int64_t n) const { return thread + n * threads; }
};

// Where the noise of one group's step comes from.
struct StepNoise {
  int64_t time;
  int group;
  Deal deal;  // of the rows
  RowNoise of(const Shape& s, int64_t n, int purpose) const {
    return RowNoise(s.seed, time, deal.row(n), group, purpose);
  }
};

// Discrete forgetting of d units of one row: in the place of the pre-activations (B blocks of d) their
// weights, negative where relu is flat; to `chosen` the z that was drawn, or the likeliest one where
// nothing is drawn (noise is null). src/revrnn/forgetting.py has the formulas; here logarithms are to
// base 2, a factor that no weight and no choice sees. Returns false if a pre-activation is not finite.
static bool choose_row(const Shape& s, float* columns, int64_t d, float* chosen,
                       const RowNoise* noise) {
  M bad = mask_first(0);
  for (int64_t i = 0; i < d; i += kWidth) {
    const int left = static_cast<int>(d - i);
    F pre[kMostBlocks], weight[kMostBlocks];
    F top = zero();
    for (int64_t b = 0; b < s.blocks; ++b) {
      pre[b] = load_first(columns + b * d + i, left);
      bad = mask_or(bad, not_finite(pre[b]));
      top = max(top, pre[b]);
    }
    F best = zero(), value = set1(1.0f), most = zero();
    float half = 1.0f;
    for (int64_t b = 0; b < s.blocks; ++b, half *= 0.5f) {
      const F exponential = exp_bounded(max(sub(max(pre[b], zero()), top), set1(-60.0f)));
      F odds = exponential;
      if (noise) odds = div(odds, sub(zero(), log2_positive(noise->uniform(b * d + i))));
      const F rank = noise ? odds : pre[b];
      const M better = less(best, rank);
      best = b == 0 ? rank : select(better, rank, best);
      if (b > 0) value = select(better, set1(half), value);
      weight[b] = s.gumbel ? odds : exponential;
      most = max(most, weight[b]);
    }
    if (s.gumbel && s.softness != 1.0f) {
      const F factor = set1(0.69314718f * s.softness);
      for (int64_t b = 0; b < s.blocks; ++b) {
        const F relative = max(div(weight[b], most), set1(0x1p-80f));
        weight[b] = exp_bounded(max(mul(log2_positive(relative), factor), set1(-64.0f)));
      }
    }
    F sum = weight[0];
    for (int64_t b = 1; b < s.blocks; ++b) sum = add(sum, weight[b]);
    const F scale = div(set1(1.0f), sum);
    for (int64_t b = 0; b < s.blocks; ++b) {
      const F w = mul(weight[b], scale);
      store_first(columns + b * d + i, select(less(zero(), pre[b]), w, sub(zero(), w)), left);
    }
    store_first(chosen + i, value, left);
  }
  return !any(bad);
}

// What the noise is for.
enum Purpose : int { kForget = 0, kKeep = 1, kSeen = 2 };

static inline void fill_row(float* to, float value, int64_t d) {
  for (int64_t i = 0; i < d; i += kWidth) store_first(to + i, set1(value), static_cast<int>(d - i));
}
static inline void multiply_row(float* a, const float* b, int64_t d) {
  for (int64_t i = 0; i < d; i += kWidth) {
    const int left = static_cast<int>(d - i);
    store_first(a + i, mul(load_first(a + i, left), load_first(b + i, left)), left);
  }
}

// d times 0 with this probability, else `kept`.
static void mask_row(float probability, float kept, float* to, int64_t d, const RowNoise& noise) {
  for (int64_t i = 0; i < d; i += kWidth) {
    const M dropped = less(noise.uniform(i), set1(probability));
    store_first(to + i, select(dropped, zero(), set1(kept)), static_cast<int>(d - i));
  }
}

// One forget gate of one row, in place; what is chosen, with zoneout the share of the step that each
// unit takes, goes to `chosen`.
static inline bool forget_row(const Shape& s, float* columns, float* chosen, const StepNoise& noise,
                              int64_t n, Purpose purpose) {
  const int64_t d = s.group();
  if (s.rule == Rule::kDiscrete) {
    if (!s.draws) return choose_row(s, columns, d, chosen, nullptr);
    const RowNoise own = noise.of(s, n, purpose);
    return choose_row(s, columns, d, chosen, &own);
  }
  if (s.zoned()) {
    if (s.draws) {
      mask_row(s.zoneout, 1.0f, chosen, d, noise.of(s, n, purpose));
    } else {
      fill_row(chosen, 1.0f - s.zoneout, d);
    }
  }
  return sigmoid_row(columns, s.blocks * d);
}

// What the gates do not see of h of the other group, by the units: times 0 or 1 / (1 - p).
static inline void seen_row(const Shape& s, const StepNoise& noise, int64_t n, float* mask) {
  mask_row(s.dropout, 1.0f / (1.0f - s.dropout), mask, s.group(), noise.of(s, n, kSeen));
}

// One group's gates for `rows` rows. `gates` holds the input projections (bias included) of this
// group's G*D columns and receives the activations:
//   RevGRU:  [z; r] = sigmoid(W [x; h_other]),  g = tanh(U [x; r * h_other]); r * h_other -> extra
//   RevLSTM: [f, i, o, p] = sigmoid(W [x; h_other]),  g = tanh(U [x; h_other])
// With discrete forgetting z, f and p are chosen instead, and go behind the first D values of extra;
// with zoneout the shares do. With dropout h_other is h times a mask, and is the last D values.
// Returns the first row with a pre-activation that is not finite, or -1.
__attribute__((noinline)) static int64_t compute_gates(const Shape& s, const Packed& w, int group, int64_t rows,
                                   const float* h_other, int64_t h_stride, float* gates,
                                   int64_t gates_stride, float* extra, int64_t extra_stride,
                                   const StepNoise& noise) {
  const int64_t d = s.group();
  int64_t bad_row = -1;
  if (s.drops()) {
    for (int64_t n = 0; n < rows; ++n) {
      float* seen = extra + n * extra_stride + s.seen();
      seen_row(s, noise, n, seen);
      multiply_row(seen, h_other + n * h_stride, d);
    }
    h_other = extra + s.seen();
    h_stride = extra_stride;
  }
  if (s.cell == Cell::kGru) {
    gemm(rows, h_other, h_stride, d, w.hh[group], s.candidate(), gates, gates_stride, nullptr,
         Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      float* z = gates + n * gates_stride;
      float* rh = extra + n * extra_stride;
      bool finite = forget_row(s, z, rh + d, noise, n, kForget);
      finite &= sigmoid_row(z + s.reset(), d);
      if (!finite && bad_row < 0) bad_row = n;
      const float* r = z + s.reset();
      const float* h = h_other + n * h_stride;
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        store_first(rh + i, mul(load_first(r + i, left), load_first(h + i, left)), left);
      }
    }
    gemm(rows, extra, extra_stride, d, w.candidate[group], d, gates + s.candidate(), gates_stride,
         nullptr, Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      if (!tanh_row(gates + n * gates_stride + s.candidate(), d) && bad_row < 0) bad_row = n;
    }
  } else {
    gemm(rows, h_other, h_stride, d, w.hh[group], s.gates() * d, gates, gates_stride, nullptr,
         Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      float* f = gates + n * gates_stride;
      float* chosen = extra + n * extra_stride + d;
      bool finite = forget_row(s, f, chosen, noise, n, kForget);
      finite &= sigmoid_row(f + s.input(), 2 * d);  // i and o
      finite &= forget_row(s, f + s.keep(), chosen + d, noise, n, kKeep);
      finite &= tanh_row(f + s.candidate(), d);
      if (!finite && bad_row < 0) bad_row = n;
    }
  }
  return bad_row;
}
