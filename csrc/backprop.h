// Gradients of one chunk from its record: those of the real-valued step at the quantised values,
// rounding passed straight through.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

// d sigmoid / d pre-activation, and the same for a forget gate z = a + (1 - a) s.
static inline F sigmoid_slope(F s) { return mul(s, sub(set1(1.0f), s)); }

class Backstep {
 public:
  Backstep(const BackpropChunk& chunk, const Packed& packed, Deal deal)
      : c_(chunk), s_(chunk.shape), w_(packed), deal_(deal), forget_{s_.floor, s_.z_min} {}

  void run() {
    for (int64_t t = c_.steps - 1; t >= 0; --t) {
      const int64_t rows = deal_.share(c_.active[t]);
      if (rows == 0) continue;
      if (c_.d_out) add_output_gradient(t, rows);
      for (int group = 1; group >= 0; --group) {
        if (s_.cell == Cell::kGru) {
          gru(t, rows, group);
        } else {
          lstm(t, rows, group);
        }
      }
    }
  }

 private:
  int64_t packed_row(int64_t t, int64_t n) const { return c_.offsets[t] + deal_.row(n); }
  float* gate_row(int64_t t, int64_t n, int group) const {
    return c_.gates + packed_row(t, n) * s_.gate_columns() + group * s_.gates() * s_.group();
  }
  float* gradient(int which, int64_t n) const {
    return c_.d_state + (which * c_.batch + deal_.row(n)) * s_.hidden;
  }
  const float* old(int which, int64_t t, int64_t n) const {
    return c_.old + (packed_row(t, n) * s_.states() + which) * s_.hidden;
  }
  // h of the other group, as the gates of `group` saw it.
  const float* other(int64_t t, int64_t n, int group) const {
    if (s_.drops()) return extra(t, n, group) + s_.seen();
    return group == 0 ? old(0, t, n) + s_.group() : c_.mid + packed_row(t, n) * s_.group();
  }
  const float* extra(int64_t t, int64_t n, int group) const {
    return c_.extra + packed_row(t, n) * 2 * s_.extra() + group * s_.extra();
  }

  // Where the gradients of what the gates of a group saw are summed, a line a row.
  struct Sums {
    float* first;
    int64_t stride;
    float* row(int64_t n) const { return first + n * stride; }
  };
  // That is the gradient of h of the other group itself; with dropout zeros in the scratch, behind
  // that of r * h_other.
  Sums sums(int64_t rows, int group) const {
    const int64_t d = s_.group();
    if (!s_.drops()) return {gradient(0, 0) + (1 - group) * d, deal_.threads * s_.hidden};
    const int64_t size = row_scratch(s_);
    const Sums zeros{c_.scratch + deal_.row(0) * size + d, deal_.threads * size};
    for (int64_t n = 0; n < rows; ++n) fill_row(zeros.row(n), 0.0f, d);
    return zeros;
  }
  // With dropout: through the mask, to h of the other group.
  void unmask(int64_t t, int64_t rows, int group, const Sums& from) const {
    if (!s_.drops()) return;
    const int64_t d = s_.group();
    const StepNoise noise{c_.first + c_.stride * t, group, deal_};
    for (int64_t n = 0; n < rows; ++n) {
      const float* sum = from.row(n);
      float* mask = from.row(n) + d;
      float* to = gradient(0, n) + (1 - group) * d;
      seen_row(s_, noise, n, mask);
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        const F own = mul(load_first(sum + i, left), load_first(mask + i, left));
        store_first(to + i, add(load_first(to + i, left), own), left);
      }
    }
  }

  void add_output_gradient(int64_t t, int64_t rows) const {
    for (int64_t n = 0; n < rows; ++n) {
      const float* d_out = c_.d_out + packed_row(t, n) * c_.d_out_stride;
      float* dh = gradient(0, n);
      for (int64_t i = 0; i < c_.d_out_units; i += kWidth) {
        const int left = static_cast<int>(c_.d_out_units - i);
        store_first(dh + i, add(load_first(dh + i, left), load_first(d_out + i, left)), left);
      }
    }
  }

  // A forget gate's z, as (1 - z) g is computed with it.
  F forget_gate(const float* gate, const float* chosen, int64_t i, int left) const {
    if (s_.rule == Rule::kDiscrete) return load_first(chosen + i, left);
    const F s = load_first(gate + i, left);
    if (s_.rule == Rule::kRetained) return s_.zoned() ? shared(s, load_first(chosen + i, left)) : s;
    return forget_value(s_.zoned() ? quantise_shared(s, load_first(chosen + i, left), forget_)
                                   : quantise(s, forget_));
  }
  // With zoneout the share of a gradient that reaches an update or a z.
  F share(F gradient, const float* chosen, int64_t i, int left) const {
    return s_.zoned() ? mul(gradient, load_first(chosen + i, left)) : gradient;
  }
  // In the place of the gate the gradient of its pre-activation, from that of z.
  void put_forget_slope(float* gate, const float* chosen, int64_t i, int left, F d_z) const {
    if (s_.rule == Rule::kDiscrete) return put_discrete_slope(gate + i, left, d_z);
    d_z = share(d_z, chosen, i, left);
    const F s = load_first(gate + i, left);
    const F scaled = s_.rule == Rule::kRetained ? d_z : mul(d_z, set1(1.0f - s_.floor));
    store_first(gate + i, mul(scaled, sigmoid_slope(s)), left);
  }

  // d_z w_n (2^-n - sum_j w_j 2^-j), over the temperature; 0 where relu is flat, w being negative.
  void put_discrete_slope(float* columns, int left, F d_z) const {
    const int64_t d = s_.group();
    F mean = zero();
    float half = 1.0f;
    for (int64_t b = 0; b < s_.blocks; ++b, half *= 0.5f) {
      mean = fma(abs(load_first(columns + b * d, left)), set1(half), mean);
    }
    const F scaled = mul(d_z, set1(s_.gumbel ? s_.softness : 1.0f));
    half = 1.0f;
    for (int64_t b = 0; b < s_.blocks; ++b, half *= 0.5f) {
      const F w = max(load_first(columns + b * d, left), zero());
      store_first(columns + b * d, mul(mul(scaled, w), sub(set1(half), mean)), left);
    }
  }

  // h' = z h + (1 - z) g:
  //   dg = (1 - z) dh'    dz = (h - g) dh'    dh = z dh'
  //   d(r h_other) = U^T dg~    dr = h_other d(r h_other)    dh_other += r d(r h_other) + W^T [dz~, dr~]
  // where a tilde marks the gradient of a pre-activation. Where nothing is forgotten, h' = h + (1 - z) g,
  // dz = -g dh' and dh = dh'.
  void gru(int64_t t, int64_t rows, int group) const {
    const int64_t d = s_.group();
    const bool forgets = s_.rule != Rule::kRetained;
    const F one = set1(1.0f);
    for (int64_t n = 0; n < rows; ++n) {
      float* gate = gate_row(t, n, group);
      float* candidate = gate + s_.candidate();
      float* dh = gradient(0, n) + group * d;
      const float* h = old(0, t, n) + group * d;
      const float* chosen = extra(t, n, group) + d;
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        const F g = load_first(candidate + i, left), dn = load_first(dh + i, left);
        const F z = forget_gate(gate, chosen, i, left);
        const F dz = mul(dn, sub(forgets ? load_first(h + i, left) : zero(), g));
        const F dg = mul(dn, sub(one, z));
        put_forget_slope(gate, chosen, i, left, dz);
        store_first(candidate + i, mul(dg, sub(one, mul(g, g))), left);
        if (forgets) store_first(dh + i, mul(dn, z), left);
      }
    }
    const int64_t gate_stride = deal_.threads * s_.gate_columns();
    float* d_reset = c_.scratch + deal_.row(0) * row_scratch(s_);
    const int64_t reset_stride = deal_.threads * row_scratch(s_);
    gemm(rows, gate_row(t, 0, group) + s_.candidate(), gate_stride, d, w_.candidate_t[group], d,
         d_reset, reset_stride, nullptr, Start::kZero);
    const Sums d_other = sums(rows, group);
    for (int64_t n = 0; n < rows; ++n) {
      float* r = gate_row(t, n, group) + s_.reset();
      const float* h_other = other(t, n, group);
      const float* drh = d_reset + n * reset_stride;
      float* dho = d_other.row(n);
      for (int64_t i = 0; i < d; i += kWidth) {
        const int left = static_cast<int>(d - i);
        const F rv = load_first(r + i, left), dv = load_first(drh + i, left);
        const F dr = mul(dv, load_first(h_other + i, left));
        store_first(dho + i, fma(dv, rv, load_first(dho + i, left)), left);
        store_first(r + i, mul(dr, sigmoid_slope(rv)), left);
      }
    }
    gemm(rows, gate_row(t, 0, group), gate_stride, s_.candidate(), w_.hh_t[group], d,
         d_other.first, d_other.stride, nullptr, Start::kTarget);
    unmask(t, rows, group, d_other);
  }

  // h' = p h + o tanh(c'),  c' = f c + i g:
  //   dp = h dh'    do = tanh(c') dh'    dh = p dh'    dc' += o (1 - tanh(c')^2) dh'
  //   df = c dc'    di = g dc'    dg = i dc'    dc = f dc'    dh_other += W^T [df~, di~, do~, dp~, dg~]
  void lstm(int64_t t, int64_t rows, int group) const {
    const int64_t d = s_.group();
    const bool forgets = s_.rule != Rule::kRetained;
    const F one = set1(1.0f);
    for (int64_t n = 0; n < rows; ++n) {
      float* f_gate = gate_row(t, n, group);
      float* i_gate = f_gate + s_.input();
      float* o_gate = f_gate + s_.output();
      float* p_gate = f_gate + s_.keep();
      float* g_gate = f_gate + s_.candidate();
      float* dh = gradient(0, n) + group * d;
      float* dc = gradient(1, n) + group * d;
      const float* h = old(0, t, n) + group * d;
      const float* c = old(1, t, n) + group * d;
      const float* tanh_c = extra(t, n, group);
      const float *chosen_f = tanh_c + d, *chosen_p = tanh_c + 2 * d;
      for (int64_t j = 0; j < d; j += kWidth) {
        const int left = static_cast<int>(d - j);
        const F i = load_first(i_gate + j, left), o = load_first(o_gate + j, left);
        const F g = load_first(g_gate + j, left), tc = load_first(tanh_c + j, left);
        const F dn = load_first(dh + j, left);
        const F dhu = share(dn, chosen_p, j, left);
        const F dcn = fma(mul(dhu, o), sub(one, mul(tc, tc)), load_first(dc + j, left));
        const F dcu = share(dcn, chosen_f, j, left);
        F dh_old = dn, dc_old = dcn;
        if (forgets) {
          dh_old = mul(dn, forget_gate(p_gate, chosen_p, j, left));
          dc_old = mul(dcn, forget_gate(f_gate, chosen_f, j, left));
          put_forget_slope(f_gate, chosen_f, j, left, mul(dcn, load_first(c + j, left)));
          put_forget_slope(p_gate, chosen_p, j, left, mul(dn, load_first(h + j, left)));
        }
        store_first(i_gate + j, mul(mul(dcu, g), sigmoid_slope(i)), left);
        store_first(o_gate + j, mul(mul(dhu, tc), sigmoid_slope(o)), left);
        store_first(g_gate + j, mul(mul(dcu, i), sub(one, mul(g, g))), left);
        store_first(dh + j, dh_old, left);
        store_first(dc + j, dc_old, left);
      }
    }
    const Sums d_other = sums(rows, group);
    gemm(rows, gate_row(t, 0, group), deal_.threads * s_.gate_columns(), s_.gates() * d,
         w_.hh_t[group], d, d_other.first, d_other.stride, nullptr, Start::kTarget);
    unmask(t, rows, group, d_other);
  }

  const BackpropChunk& c_;
  const Shape& s_;
  const Packed& w_;
  const Deal deal_;
  const Forget forget_;
};

// One weight gradient: rows first .. first+count of a weight matrix += D^T A over the packed rows.
struct OuterJob {
  int64_t first, count;  // gate columns
  const float* a;        // (R, width)
  int64_t a_stride, width;
  float* to;             // (G*H, width)
  float* sums;           // (G*H): += the sums of D over the packed rows, or null
};

// The gradients of input and weights, as one list of tasks: first the rows of d_x, then blocks of
// gate columns of each weight. Nothing depends on which thread takes which.
class ChunkGradients {
 public:
  ChunkGradients(const BackpropChunk& chunk, const Packed& packed) : c_(chunk), w_(packed) {
    const Shape& s = c_.shape;
    const int64_t d = s.group(), h = s.hidden;
    first_task_[0] = c_.d_x ? even_tasks(c_.rows, kRowsPerTask, c_.threads) : 0;
    if (c_.d_ih) add({0, s.gate_columns(), c_.x, s.inputs, s.inputs, c_.d_ih, c_.d_bias});
    if (c_.d_bias && !c_.d_ih) add({0, s.gate_columns(), nullptr, 0, 0, nullptr, c_.d_bias});
    if (!c_.d_hh) return;
    for (int group = 0; group < 2; ++group) {
      const float* other = group == 0 ? c_.old + d : c_.mid;
      int64_t stride = group == 0 ? s.states() * h : d;
      if (s.drops()) {
        other = c_.extra + group * s.extra() + s.seen();
        stride = 2 * s.extra();
      }
      const int64_t first = group * s.gates() * d;
      if (s.cell == Cell::kGru) {
        const int64_t main = s.candidate();
        add({first, main, other, stride, d, c_.d_hh, nullptr});
        add({first + main, d, c_.extra + group * s.extra(), 2 * s.extra(), d, c_.d_hh, nullptr});
      } else {
        add({first, s.gates() * d, other, stride, d, c_.d_hh, nullptr});
      }
    }
  }

  void run() {
    // A task of the pool is a thread's whole work here, since each needs a scratch of its own.
    int64_t next = 0;
    float* scratch = c_.scratch + c_.batch * row_scratch(c_.shape);
    parallel_for(c_.threads, c_.threads, [&](int64_t thread) {
      for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < first_task_[jobs_];) {
        if (task < first_task_[0]) {
          input_rows(task);
        } else {
          weight_block(task, scratch + thread * kOuterScratch);
        }
      }
    });
  }

 private:
  void add(const OuterJob& job) {
    job_[jobs_] = job;
    first_task_[jobs_ + 1] = first_task_[jobs_] + blocks(job);
    ++jobs_;
  }
  static int64_t blocks(const OuterJob& job) {
    return (job.count + kOuterColumns - 1) / kOuterColumns;
  }

  // d_x <- D W_ih
  void input_rows(int64_t task) const {
    const int64_t columns = c_.shape.gate_columns(), inputs = c_.shape.inputs;
    const Part rows = part(c_.rows, first_task_[0], task);
    gemm(rows.last - rows.first, c_.gates + rows.first * columns, columns, columns, w_.ih_t, inputs,
         c_.d_x + rows.first * inputs, inputs, nullptr, Start::kZero);
  }

  void weight_block(int64_t task, float* scratch) const {
    int j = 0;
    while (task >= first_task_[j + 1]) ++j;
    const OuterJob& job = job_[j];
    const Part columns = part(job.count, blocks(job), task - first_task_[j]);
    const int64_t at = job.first + columns.first;
    accumulate_outer(columns.last - columns.first, job.width, c_.rows, c_.gates + at,
                     c_.shape.gate_columns(), job.a, job.a_stride, job.to + at * job.width,
                     job.width, job.sums ? job.sums + at : nullptr, scratch);
  }

  const BackpropChunk& c_;
  const Packed& w_;
  OuterJob job_[5];
  int jobs_ = 0;
  int64_t first_task_[6];  // of each job; before the first of them, the tasks of d_x
};

static void backprop(const BackpropChunk& c) {
  const Packed packed = packed_layout(c.shape, true, c.packed);
  const int threads = static_cast<int>(lesser(c.threads, c.batch));
  parallel_for(threads, c.threads, [&](int64_t i) {
    Backstep(c, packed, Deal{static_cast<int>(i), threads}).run();
  });
  ChunkGradients(c, packed).run();
}
