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

// One group's gates for `rows` rows. `gates` holds the input projections (bias included) of this
// group's G*D columns and receives the activations:
//   RevGRU:  [z; r] = sigmoid(W [x; h_other]),  g = tanh(U [x; r * h_other]); r * h_other -> reset
//   RevLSTM: [f, i, o, p] = sigmoid(W [x; h_other]),  g = tanh(U [x; h_other])
// Returns the first row with a pre-activation that is not finite, or -1.
__attribute__((noinline)) static int64_t compute_gates(const Shape& s, const Packed& w, int group, int64_t rows,
                                   const float* h_other, int64_t h_stride, float* gates,
                                   int64_t gates_stride, float* reset, int64_t reset_stride) {
  const int64_t d = s.group();
  int64_t bad_row = -1;
  if (s.cell == Cell::kGru) {
    gemm(rows, h_other, h_stride, d, w.hh[group], s.candidate(), gates, gates_stride, nullptr,
         Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      float* z = gates + n * gates_stride;
      if (!sigmoid_row(z, s.candidate()) && bad_row < 0) bad_row = n;
      const float* r = z + s.reset();
      const float* h = h_other + n * h_stride;
      float* rh = reset + n * reset_stride;
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        store_first(rh + i, mul(load_first(r + i, left), load_first(h + i, left)), left);
      }
    }
    gemm(rows, reset, reset_stride, d, w.candidate[group], d, gates + s.candidate(), gates_stride,
         nullptr, Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      if (!tanh_row(gates + n * gates_stride + s.candidate(), d) && bad_row < 0) bad_row = n;
    }
  } else {
    gemm(rows, h_other, h_stride, d, w.hh[group], s.gates() * d, gates, gates_stride, nullptr,
         Start::kTarget);
    for (int64_t n = 0; n < rows; ++n) {
      float* f = gates + n * gates_stride;
      if (!sigmoid_row(f, s.candidate()) && bad_row < 0) bad_row = n;
      if (!tanh_row(f + s.candidate(), d) && bad_row < 0) bad_row = n;
    }
  }
  return bad_row;
}
