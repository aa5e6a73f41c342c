// One chunk of one layer: forward, reverse, backprop. Batch rows are dealt to threads like cards
// (row p, p + P, ... to thread p), so that sequences of unequal length share out evenly; a thread
// takes its rows through all steps of the chunk and meets no barrier.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

static int64_t packed_floats(const Shape& s, bool backward) {
  return packed_layout(s, backward, nullptr).floats;
}

static void pack(const Shape& s, const Weights& w, bool backward, float* base, int threads) {
  const Packed p = packed_layout(s, backward, base);
  const int64_t d = s.group(), columns = s.gate_columns(), main = s.candidate();
  struct Job {
    const float* from;
    bool transposed;  // `from` is (columns x depth), else (depth x columns)
    int64_t depth, columns;
    const float* to;
  };
  Job jobs[10];
  int count = 0;
  jobs[count++] = {w.ih, true, s.inputs, columns, p.ih};
  if (backward) jobs[count++] = {w.ih, false, columns, s.inputs, p.ih_t};
  for (int i = 0; i < 2; ++i) {
    const float* group = w.hh + i * s.gates() * d * d;
    const int64_t first = s.cell == Cell::kGru ? main : s.gates() * d;
    jobs[count++] = {group, true, d, first, p.hh[i]};
    if (backward) jobs[count++] = {group, false, first, d, p.hh_t[i]};
    if (s.cell != Cell::kGru) continue;
    const float* candidate = group + main * d;
    jobs[count++] = {candidate, true, d, d, p.candidate[i]};
    if (backward) jobs[count++] = {candidate, false, d, d, p.candidate_t[i]};
  }
  constexpr int64_t kPanelsPerTask = 4;
  int64_t first_task[11] = {0};
  for (int j = 0; j < count; ++j) {
    first_task[j + 1] =
        first_task[j] + (panels(jobs[j].columns) + kPanelsPerTask - 1) / kPanelsPerTask;
  }
  parallel_for(first_task[count], threads, [&](int64_t task) {
    int j = 0;
    while (task >= first_task[j + 1]) ++j;
    const Job& job = jobs[j];
    const int64_t first = (task - first_task[j]) * kPanelsPerTask;
    const int64_t last = lesser(first + kPanelsPerTask, panels(job.columns));
    float* to = const_cast<float*>(job.to);
    if (job.transposed) {
      pack_transposed(job.from, job.depth, job.columns, job.depth, to, first, last);
    } else {
      pack_rows(job.from, job.depth, job.columns, job.columns, to, first, last);
    }
  });
  float* bias = const_cast<float*>(p.bias);
  for (int64_t c = 0; c < panels(columns) * kPanel; ++c) {
    bias[c] = w.bias && c < columns ? w.bias[c] : 0.0f;
  }
}

// Per batch row: h as floats (H), then what is extra for each group (2*X), then the backward pass's
// gradient of r * h_other (D). Plus one scratch of accumulate_outer a thread.
static int64_t row_scratch(const Shape& s) { return s.hidden + 2 * s.extra() + s.group(); }

static int64_t scratch_floats(const Shape& s, int64_t batch, int threads) {
  return batch * row_scratch(s) + threads * kOuterScratch;
}

// Items first .. last-1 of a loop that is cut into equal tasks.
struct Part {
  int64_t first, last;
};
static Part part(int64_t items, int64_t tasks, int64_t task) {
  return {items * task / tasks, items * (task + 1) / tasks};
}
// How many tasks of at most `most` items: the same number for every thread.
static int64_t even_tasks(int64_t items, int64_t most, int64_t threads) {
  return threads * ((items + threads * most - 1) / (threads * most));
}
constexpr int64_t kRowsPerTask = 192;

// gates <- x W_ih^T + bias for every packed row of the chunk.
static void project(const Chunk& c, const Packed& w) {
  const int64_t columns = c.shape.gate_columns(), inputs = c.shape.inputs;
  const int64_t tasks = even_tasks(c.rows, kRowsPerTask, c.threads);
  parallel_for(tasks, c.threads, [&](int64_t task) {
    const Part rows = part(c.rows, tasks, task);
    gemm(rows.last - rows.first, c.x + rows.first * inputs, inputs, inputs, w.ih, columns,
         c.gates + rows.first * columns, columns, w.bias, Start::kBias);
  });
}

// A fault as a number that is the smaller the earlier one thread with all rows would meet it: the
// turn (which step and which of its groups, in the order of the walk), gates before updates, the row.
struct Met {
  static constexpr uint64_t kNothing = UINT64_MAX;
  static uint64_t fault(Fault fault, int64_t turn, int64_t row) {
    const uint64_t update = fault != Fault::kNotFinite;
    return static_cast<uint64_t>(turn) << 35 | update << 34 | static_cast<uint64_t>(row) << 2 |
           static_cast<uint64_t>(fault);
  }
  static int64_t turn(uint64_t met) { return static_cast<int64_t>(met >> 35); }
  static int64_t row(uint64_t met) { return static_cast<int64_t>(met >> 2 & 0xFFFFFFFF); }
  static Fault what(uint64_t met) { return static_cast<Fault>(met & 3); }
};

// One thread's view of the recurrence in a chunk.
class Walk {
 public:
  Walk(const Chunk& chunk, const Packed& packed, Deal deal)
      : c_(chunk), s_(chunk.shape), w_(packed), deal_(deal), forget_{s_.floor, s_.z_min} {}

  // Both return what `Met` makes of the first fault, or kNothing.
  uint64_t forward() {
    load_values();
    for (int64_t t = 0; t < c_.steps; ++t) {
      const int64_t rows = deal_.share(c_.active[t]);
      if (rows == 0) continue;
      if (c_.old) keep_old(t, rows);
      for (int group = 0; group < 2; ++group) {
        const int64_t turn = 2 * t + group;
        const int64_t infinite = gates(t, rows, group);
        if (infinite >= 0) return failed(Fault::kNotFinite, turn, infinite);
        const int64_t bad = each(rows, [&](int64_t n, auto at_once) {
          return advance<decltype(at_once)::value>(t, n, group);
        });
        if (bad < rows) return failed(Fault::kOverflow, turn, bad);
        if (c_.mid && group == 0) keep_mid(t, rows);
      }
      if (c_.out) put_out(t, rows);
    }
    return Met::kNothing;
  }

  uint64_t reverse() {
    load_values();
    for (int64_t t = c_.steps - 1; t >= 0; --t) {
      const int64_t rows = deal_.share(c_.active[t]);
      if (rows == 0) continue;
      if (c_.out) put_out(t, rows);
      keep_mid(t, rows);
      for (int group = 1; group >= 0; --group) {
        const int64_t turn = 2 * (c_.steps - 1 - t) + 1 - group;
        const int64_t infinite = gates(t, rows, group);
        if (infinite >= 0) return failed(Fault::kNotFinite, turn, infinite);
        const int64_t bad = each(rows, [&](int64_t n, auto at_once) {
          return rewind<decltype(at_once)::value>(t, n, group);
        });
        if (bad < rows) return failed(Fault::kReversal, turn, bad);
      }
      keep_old(t, rows);
    }
    return Met::kNothing;
  }

 private:
  int64_t packed_row(int64_t t, int64_t n) const { return c_.offsets[t] + deal_.row(n); }
  float* value(int64_t n) const { return c_.scratch + deal_.row(n) * row_scratch(s_); }
  int32_t* state(int which, int64_t n) const {
    return c_.state + (which * c_.batch + deal_.row(n)) * s_.hidden;
  }
  float* gate_row(int64_t t, int64_t n, int group) const {
    return c_.gates + packed_row(t, n) * s_.gate_columns() + group * s_.gates() * s_.group();
  }
  // r * h_other or tanh(c), then what was chosen: in the record when there is one.
  float* extra(int64_t t, int64_t n, int group) const {
    float* row = c_.extra ? c_.extra + packed_row(t, n) * 2 * s_.extra() : value(n) + s_.hidden;
    return row + group * s_.extra();
  }
  int64_t extra_stride() const {
    return deal_.threads * (c_.extra ? 2 * s_.extra() : row_scratch(s_));
  }

  uint64_t failed(Fault fault, int64_t turn, int64_t n) const {
    return Met::fault(fault, turn, deal_.row(n));
  }

  void load_values() {
    const int64_t rows = deal_.share(c_.batch);
    for (int64_t n = 0; n < rows; ++n) to_values(state(0, n), value(n));
  }
  void to_values(const int32_t* fixed, float* to) const {
    for (int64_t i = 0; i < s_.hidden; i += kWidth) {
      const int left = static_cast<int>(s_.hidden - i);
      store_first(to + i, state_value(loadi_first(fixed + i, left)), left);
    }
  }

  void keep_old(int64_t t, int64_t rows) const {
    for (int64_t n = 0; n < rows; ++n) {
      float* old = c_.old + packed_row(t, n) * s_.states() * s_.hidden;
      copy_row(old, value(n), s_.hidden);
      if (s_.cell == Cell::kLstm) to_values(state(1, n), old + s_.hidden);
    }
  }
  void keep_mid(int64_t t, int64_t rows) const {
    for (int64_t n = 0; n < rows; ++n) {
      copy_row(c_.mid + packed_row(t, n) * s_.group(), value(n), s_.group());
    }
  }
  void put_out(int64_t t, int64_t rows) const {
    for (int64_t n = 0; n < rows; ++n) {
      copy_row(c_.out + packed_row(t, n) * c_.out_stride, value(n), c_.out_units);
    }
  }

  // The first row with a gate that is not finite, or -1.
  int64_t gates(int64_t t, int64_t rows, int group) {
    const int64_t d = s_.group();
    return compute_gates(
        s_, w_, group, rows, value(0) + (1 - group) * d, deal_.threads * row_scratch(s_),
        gate_row(t, 0, group), deal_.threads * s_.gate_columns(), extra(t, 0, group),
        extra_stride(), StepNoise{c_.first + c_.stride * t, group, deal_});
  }

  // The units of group 1 of h that are stored at every step and skip the tape.
  int64_t stored_units(int group) const { return group == 0 ? s_.stored : 0; }

  template <int N>
  struct Number {
    static constexpr int value = N;
  };
  // `work(n, Number<K>)` on rows n .. n+K-1, all rows in order; it returns the first of the K that
  // is wrong, or K. Returns the first row that is wrong, or `rows`.
  template <class Work>
  static int64_t each(int64_t rows, const Work& work) {
    int64_t n = 0;
    for (; n + kRowsAtOnce <= rows; n += kRowsAtOnce) {
      const int good = work(n, Number<kRowsAtOnce>{});
      if (good < kRowsAtOnce) return n + good;
    }
    for (; n < rows; ++n) {
      if (work(n, Number<1>{}) < 1) return n;
    }
    return rows;
  }

  // What `K` rows from n on work on: their h, or c (which = 1).
  template <int K>
  Rows<K> rows_of(int64_t n, int group, int which, float* const* value) const {
    Rows<K> rows;
    for (int k = 0; k < K; ++k) {
      rows.state[k] = state(which, n + k) + group * s_.group();
      rows.value[k] = value[k];
      rows.coder[k] = open(n + k);
    }
    return rows;
  }
  template <int K>
  void close_all(int64_t n, const Rows<K>& rows) const {
    for (int k = 0; k < K; ++k) close(n + k, rows.coder[k]);
  }

  // The first of K rows of which a state left its range, or K.
  template <int K>
  int advance(int64_t t, int64_t n, int group) {
    const int64_t d = s_.group(), stored = stored_units(group);
    const float *g[K], *chosen[K];
    float *h_value[K], *tanh_c[K];
    for (int k = 0; k < K; ++k) {
      g[k] = gate_row(t, n + k, group);
      tanh_c[k] = extra(t, n + k, group);
      chosen[k] = tanh_c[k] + d;
      h_value[k] = value(n + k) + group * d;
      if (!c_.stored) continue;
      const int32_t* h = state(0, n + k) + group * d;
      int32_t* kept = c_.stored + packed_row(t, n + k) * stored;
      for (int64_t i = 0; i < stored; ++i) kept[i] = h[i];
    }
    IdealBits ideal[K];
    IdealBits* count = c_.coder.writing ? ideal : nullptr;
    int good = K;
    if (s_.cell == Cell::kGru) {
      Rows<K> rows = rows_of<K>(n, group, 0, h_value);
      with_rule([&](const auto& make) {
        good = advance_units<K>(
            d, stored, [&](int k) { return make(g[k], chosen[k]); },
            [&](int k) { return KeepCandidate{g[k] + s_.candidate()}; }, rows, count);
      });
      close_all(n, rows);
    } else {
      Rows<K> rows = rows_of<K>(n, group, 1, tanh_c);
      with_rule([&](const auto& make) {
        good = advance_units<K>(
            d, 0, [&](int k) { return make(g[k], chosen[k]); },
            [&](int k) { return Product{g[k] + s_.input(), g[k] + s_.candidate()}; }, rows, count);
      });
      for (int k = 0; k < K; ++k) {
        tanh_row(tanh_c[k], d);
        rows.state[k] = state(0, n + k) + group * d;
        rows.value[k] = h_value[k];
      }
      with_rule([&](const auto& make) {
        const int h_good = advance_units<K>(
            d, stored, [&](int k) { return make(g[k] + s_.keep(), chosen[k] + d); },
            [&](int k) { return Product{g[k] + s_.output(), tanh_c[k]}; }, rows, count);
        good = good < h_good ? good : h_good;
      });
      close_all(n, rows);
    }
    for (int k = 0; count && k < K; ++k) c_.coder.ideal[deal_.row(n + k)] += ideal[k].bits();
    return good;
  }

  // The first of K rows of which the states cannot have come from `advance`, or K.
  template <int K>
  int rewind(int64_t t, int64_t n, int group) {
    const int64_t d = s_.group(), stored = stored_units(group);
    const float *g[K], *chosen[K];
    float *h_value[K], *tanh_c[K];
    const int32_t* before[K];
    for (int k = 0; k < K; ++k) {
      g[k] = gate_row(t, n + k, group);
      tanh_c[k] = extra(t, n + k, group);
      chosen[k] = tanh_c[k] + d;
      h_value[k] = value(n + k) + group * d;
      before[k] = stored > 0 ? c_.stored + packed_row(t, n + k) * stored : nullptr;
    }
    int good = K;
    if (s_.cell == Cell::kGru) {
      Rows<K> rows = rows_of<K>(n, group, 0, h_value);
      with_rule([&](const auto& make) {
        good = rewind_units<K>(
            d, stored, [&](int k) { return make(g[k], chosen[k]); },
            [&](int k) { return KeepCandidate{g[k] + s_.candidate()}; }, before, rows);
      });
      close_all(n, rows);
      return good;
    }
    for (int k = 0; k < K; ++k) {
      const int32_t* c = state(1, n + k) + group * d;
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        store_first(tanh_c[k] + i, state_value(loadi_first(c + i, left)), left);
      }
      tanh_row(tanh_c[k], d);
    }
    Rows<K> rows = rows_of<K>(n, group, 0, h_value);
    with_rule([&](const auto& make) {
      good = rewind_units<K>(
          d, stored, [&](int k) { return make(g[k] + s_.keep(), chosen[k] + d); },
          [&](int k) { return Product{g[k] + s_.output(), tanh_c[k]}; }, before, rows);
    });
    // After a fault, too: the first row that is wrong may be so only here.
    for (int k = 0; k < K; ++k) {
      rows.state[k] = state(1, n + k) + group * d;
      // The record's c is read from the state; this buffer only takes the floats nobody needs.
      rows.value[k] = value(n + k) + s_.hidden + 2 * s_.extra();
    }
    with_rule([&](const auto& make) {
      const int c_good = rewind_units<K>(
          d, 0, [&](int k) { return make(g[k], chosen[k]); },
          [&](int k) { return Product{g[k] + s_.input(), g[k] + s_.candidate()}; }, nullptr, rows);
      good = good < c_good ? good : c_good;
    });
    close_all(n, rows);
    return good;
  }

  // `visit(make)`, where `make(gate, chosen)` is the layer's rule of forgetting on the columns of one
  // forget gate, or on what was chosen from them.
  template <class Visit>
  void with_rule(const Visit& visit) const {
    const Forget forget = forget_;
    if (s_.rule == Rule::kDiscrete) {
      visit([](const float*, const float* chosen) { return Discrete{chosen}; });
    } else if (s_.rule == Rule::kRetained) {
      if (s_.zoned()) {
        visit([](const float* gate, const float* chosen) { return SharedRetained{{gate}, chosen}; });
      } else {
        visit([](const float* gate, const float*) { return Retained{gate}; });
      }
    } else if (s_.zoned()) {
      visit([=](const float* gate, const float* chosen) {
        return SharedFractional{{gate, forget}, chosen};
      });
    } else {
      visit([=](const float* gate, const float*) { return Fractional{gate, forget}; });
    }
  }

  RowCoder open(int64_t n) const {
    const int64_t row = deal_.row(n);
    RowCoder coder;
    for (int p = 0; p < kParts; ++p) {
      coder.lanes[p] = loadi(c_.coder.lanes + row * kLanes + p * kWidth);
    }
    uint8_t* bottom = c_.coder.stack + c_.coder.begin[row];
    coder.bottom = bottom;
    coder.top = bottom + c_.coder.fill[row];
    coder.writing = c_.coder.writing;
    return coder;
  }
  void close(int64_t n, const RowCoder& coder) const {
    const int64_t row = deal_.row(n);
    for (int p = 0; p < kParts; ++p) {
      storei(c_.coder.lanes + row * kLanes + p * kWidth, coder.lanes[p]);
    }
    c_.coder.fill[row] = coder.top - coder.bottom;
  }

  const Chunk& c_;
  const Shape& s_;
  const Packed& w_;
  const Deal deal_;
  const Forget forget_;
};

template <class Visit>
static Status walk(const Chunk& c, bool reverse, const Visit& visit) {
  const Packed packed = packed_layout(c.shape, false, c.packed);
  project(c, packed);
  const int threads = static_cast<int>(lesser(c.threads, c.batch));
  uint64_t first = Met::kNothing;  // of all threads
  parallel_for(threads, c.threads, [&](int64_t i) {
    const uint64_t mine = visit(Walk(c, packed, Deal{static_cast<int>(i), threads}));
    uint64_t seen = __atomic_load_n(&first, __ATOMIC_RELAXED);
    while (mine < seen && !__atomic_compare_exchange_n(&first, &seen, mine, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
  });
  if (first == Met::kNothing) return {};
  const int64_t step = Met::turn(first) / 2;
  return {Met::what(first), reverse ? c.steps - 1 - step : step, Met::row(first)};
}

static Status forward(const Chunk& c) {
  return walk(c, false, [](Walk one) { return one.forward(); });
}

static Status reverse(const Chunk& c) {
  return walk(c, true, [](Walk one) { return one.reverse(); });
}
