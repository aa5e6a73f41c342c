// Matrix products whose every element is one chain of fma over k in ascending order, starting from
// a given value: a sum depends on its own row and column only, never on the number of rows, the
// tile that computed it or the thread. That is what lets the reverse pass recompute gates.
//
// Included once per CPU tier, inside namespace revrnn::REVRNN_TIER.

// Columns of B are packed in panels of two vectors: panel j holds, for each k, columns
// j*kPanel .. j*kPanel+kPanel-1, zero beyond the last column.
constexpr int kPanel = 2 * kWidth;

// The first n floats at p, zero beyond; n may be anything, also negative.
static inline F load_first(const float* p, int n) {
  if (n >= kWidth) return load(p);
  return n > 0 ? load(p, mask_first(n)) : zero();
}
static inline void store_first(float* p, F a, int n) {
  if (n >= kWidth) {
    store(p, a);
  } else if (n > 0) {
    store(p, a, mask_first(n));
  }
}

static inline int64_t panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

using Quad = float __attribute__((vector_size(16)));

static inline Quad load_quad(const float* p) {
  Quad q;
  __builtin_memcpy(&q, p, sizeof(q));
  return q;
}
static inline void store_quad(float* p, Quad q) { __builtin_memcpy(p, &q, sizeof(q)); }

// target[k * kPanel + c] <- source[c * stride + k] for c < 4, k < 4.
static inline void transpose_quads(const float* source, int64_t stride, float* target) {
  const Quad a = load_quad(source), b = load_quad(source + stride);
  const Quad c = load_quad(source + 2 * stride), d = load_quad(source + 3 * stride);
  const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Quad cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store_quad(target, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
  store_quad(target + kPanel, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
  store_quad(target + 2 * kPanel, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
  store_quad(target + 3 * kPanel, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}

static inline void copy_row(float* target, const float* source, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(target + i, load(source + i));
  const int left = static_cast<int>(n - i);
  store_first(target + i, load_first(source + i, left), left);
}

// Packs panels first .. last-1 of B = W^T, for W (columns x depth) with rows `stride` apart.
static void pack_transposed(const float* w, int64_t depth, int64_t columns, int64_t stride,
                            float* packed, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; ++j) {
    const int64_t width = lesser(kPanel, columns - j * kPanel);
    const float* source = w + j * kPanel * stride;
    float* target = packed + j * kPanel * depth;
    const int64_t whole = width == kPanel ? depth / 4 * 4 : 0;
    for (int64_t k = 0; k < whole; k += 4) {
      for (int64_t c = 0; c < kPanel; c += 4) {
        transpose_quads(source + c * stride + k, stride, target + k * kPanel + c);
      }
    }
    for (int64_t k = whole; k < depth; ++k) {
      for (int64_t c = 0; c < kPanel; ++c) {
        target[k * kPanel + c] = c < width ? source[c * stride + k] : 0.0f;
      }
    }
  }
}

// Packs panels first .. last-1 of B (depth x columns) with rows `stride` apart.
static void pack_rows(const float* b, int64_t depth, int64_t columns, int64_t stride, float* packed,
                      int64_t first, int64_t last) {
  for (int64_t j = first; j < last; ++j) {
    const int width = static_cast<int>(lesser(kPanel, columns - j * kPanel));
    const float* source = b + j * kPanel;
    float* target = packed + j * kPanel * depth;
    for (int64_t k = 0; k < depth; ++k) {
      store(target + k * kPanel, load_first(source + k * stride, width));
      store(target + k * kPanel + kWidth, load_first(source + k * stride + kWidth, width - kWidth));
    }
  }
}

// What the sums start from; kAdd sums from zero and then adds to the target, so that a long sum over
// many calls is a sum of partial sums.
enum class Start { kZero, kBias, kTarget, kAdd };

// How A lies in memory: element (r, k) at a[r * stride + k] or, transposed, at a[k * stride + r].
enum class Layout { kRows, kTransposed };

// One tile: ROWS rows of A times PANELS adjacent panels of B.
template <int ROWS, int PANELS, Layout LAYOUT>
static void gemm_tile(const float* a, int64_t a_stride, int64_t depth, const float* b, float* c,
                      int64_t c_stride, const float* bias, Start start, int columns) {
  constexpr int kVectors = 2 * PANELS;
  F acc[ROWS][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if (start == Start::kZero || start == Start::kAdd) {
        acc[r][v] = zero();
      } else {
        const float* from = start == Start::kBias ? bias : c + r * c_stride;
        acc[r][v] = load_first(from + v * kWidth, columns - v * kWidth);
      }
    }
  }
  const float* second = b + depth * kPanel;
  for (int64_t k = 0; k < depth; ++k) {
    F bv[kVectors];
    bv[0] = load(b + k * kPanel);
    bv[1] = load(b + k * kPanel + kWidth);
    if constexpr (PANELS == 2) {
      bv[2] = load(second + k * kPanel);
      bv[3] = load(second + k * kPanel + kWidth);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const F av = set1(LAYOUT == Layout::kRows ? a[r * a_stride + k] : a[k * a_stride + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(av, bv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * c_stride + v * kWidth;
      const int left = columns - v * kWidth;
      const F sum = start == Start::kAdd ? add(load_first(to, left), acc[r][v]) : acc[r][v];
      store_first(to, sum, left);
    }
  }
}

template <int PANELS, Layout LAYOUT>
static void gemm_rows(int rows, const float* a, int64_t a_stride, int64_t depth, const float* b,
                      float* c, int64_t c_stride, const float* bias, Start start, int columns) {
#define REVRNN_TILE(R)                                                                          \
  case R:                                                                                       \
    if constexpr (R * PANELS <= kTileRows)                                                      \
      gemm_tile<R, PANELS, LAYOUT>(a, a_stride, depth, b, c, c_stride, bias, start, columns);   \
    break;
  switch (rows) {
    REVRNN_TILE(1) REVRNN_TILE(2) REVRNN_TILE(3) REVRNN_TILE(4) REVRNN_TILE(5) REVRNN_TILE(6)
    REVRNN_TILE(7) REVRNN_TILE(8) REVRNN_TILE(9) REVRNN_TILE(10) REVRNN_TILE(11) REVRNN_TILE(12)
  }
#undef REVRNN_TILE
}

// C (rows x columns) = start + A (rows x depth) B; B packed; bias: one value a column.
template <Layout LAYOUT = Layout::kRows>
static void gemm(int64_t rows, const float* a, int64_t a_stride, int64_t depth, const float* b,
                 int64_t columns, float* c, int64_t c_stride, const float* bias, Start start) {
  if (rows <= 0) return;
  // Few rows: two panels at once, so that there are chains enough to hide the latency of fma.
  const bool wide = rows <= kTileRows / 2;
  const int per_tile = wide ? kTileRows / 2 : kTileRows;
  const int64_t tiles = (rows + per_tile - 1) / per_tile;
  for (int64_t j = 0; j < panels(columns);) {
    const bool pair = wide && (j + 1) * kPanel < columns;
    const int width = static_cast<int>(lesser((pair ? 2 : 1) * kPanel, columns - j * kPanel));
    const float* panel = b + j * kPanel * depth;
    const float* panel_bias = bias ? bias + j * kPanel : nullptr;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = t * rows / tiles;
      const int count = static_cast<int>((t + 1) * rows / tiles - first);
      const float* at = a + first * (LAYOUT == Layout::kRows ? a_stride : 1);
      float* ct = c + first * c_stride + j * kPanel;
      if (pair) {
        gemm_rows<2, LAYOUT>(count, at, a_stride, depth, panel, ct, c_stride, panel_bias, start, width);
      } else {
        gemm_rows<1, LAYOUT>(count, at, a_stride, depth, panel, ct, c_stride, panel_bias, start, width);
      }
    }
    j += pair ? 2 : 1;
  }
}

// Columns of A that one task of accumulate_outer takes, and the depth it takes at a time.
constexpr int64_t kOuterColumns = 192;
constexpr int64_t kOuterDepth = 256;
constexpr int64_t kOuterScratch = (kOuterColumns + kPanel) * kOuterDepth;

// sums[j] += the sum of column j of A (depth x m).
static void add_column_sums(const float* a, int64_t a_stride, int64_t depth, int64_t m, float* sums) {
  for (int64_t j = 0; j < m; j += kWidth) {
    const int left = static_cast<int>(m - j);
    F sum = zero();
    for (int64_t k = 0; k < depth; ++k) sum = add(sum, load_first(a + k * a_stride + j, left));
    store_first(sums + j, add(load_first(sums + j, left), sum), left);
  }
}

// C (m x n) += A^T B for A (depth x m), B (depth x n) and m <= kOuterColumns: weight gradients; and
// sums, when given, += the column sums of A. Both operands are copied together first: the rows of A
// and B lie pages apart.
static void accumulate_outer(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_stride,
                             const float* b, int64_t b_stride, float* c, int64_t c_stride,
                             float* sums, float* scratch) {
  float* a_near = scratch;                                // (depth, kOuterColumns)
  float* b_panel = scratch + kOuterColumns * kOuterDepth;  // (depth, kPanel)
  for (int64_t k0 = 0; k0 < depth; k0 += kOuterDepth) {
    const int64_t d = lesser(kOuterDepth, depth - k0);
    for (int64_t k = 0; k < d; ++k) {
      copy_row(a_near + k * kOuterColumns, a + (k0 + k) * a_stride, m);
    }
    if (sums) add_column_sums(a_near, kOuterColumns, d, m, sums);
    for (int64_t j = 0; j < panels(n); ++j) {
      const int64_t width = lesser(kPanel, n - j * kPanel);
      for (int64_t k = 0; k < d; ++k) {
        copy_row(b_panel + k * kPanel, b + (k0 + k) * b_stride + j * kPanel, width);
      }
      gemm<Layout::kTransposed>(m, a_near, kOuterColumns, d, b_panel, width, c + j * kPanel,
                                c_stride, nullptr, Start::kAdd);
    }
  }
}
