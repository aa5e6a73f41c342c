// What crosses between the Python side, the dispatcher and a tier: plain addresses and sizes, all
// checked in src/revrnn/kernels/cpu.py. Letters in shapes as in src/revrnn/kernels/contract.py.
#pragma once
#include <cstdint>

namespace revrnn {

// Lanes of a row's coder; unit j of a call uses lane j mod kLanes (revrnn.tape.LANES).
constexpr int kLanes = 16;

enum class Cell : int { kGru = 0, kLstm = 1 };
// How units forget (src/revrnn/forgetting.py).
enum class Rule : int { kFractional = 0, kRetained = 1, kDiscrete = 2 };
// Columns a unit of a forget gate, at most: discrete forgetting of up to RADIX_Z bits.
constexpr int kMostBlocks = REVRNN_RADIX_Z + 1;

struct Shape {
  Cell cell;
  Rule rule;
  int64_t blocks;   // B: columns a unit of a forget gate
  int64_t inputs;   // I
  int64_t hidden;   // H
  int64_t stored;   // K, at most H/2
  float floor;      // a in z = a + (1 - a) s
  int32_t z_min;
  bool gumbel;      // discrete forgetting: which estimator
  float softness;   // and 1 / temperature
  float zoneout;    // probability that a unit stays as it is
  float dropout;    // probability that the gates do not see a unit of the other group
  bool draws;       // false: nothing is drawn
  uint64_t seed;    // of what is drawn

  int64_t group() const { return hidden / 2; }                                       // D
  int64_t gates() const { return cell == Cell::kGru ? blocks + 2 : 2 * blocks + 3; }  // G
  int64_t states() const { return cell == Cell::kGru ? 1 : 2; }                      // S
  int64_t gate_columns() const { return gates() * hidden; }                          // G*H
  bool zoned() const { return zoneout > 0; }
  bool drops() const { return dropout > 0; }
  int64_t choices() const { return rule == Rule::kDiscrete || zoned() ? states() : 0; }
  int64_t extra() const { return (1 + choices() + drops()) * group(); }              // X
  // Where h of the other group, as the gates saw it, begins in a group's extra columns.
  int64_t seen() const { return (1 + choices()) * group(); }
  // Where a gate's columns begin among those of a group. RevGRU: z, r, g. RevLSTM: f, i, o, p, g.
  int64_t reset() const { return blocks * group(); }
  int64_t input() const { return blocks * group(); }
  int64_t output() const { return (blocks + 1) * group(); }
  int64_t keep() const { return (blocks + 2) * group(); }
  int64_t candidate() const { return (gates() - 1) * group(); }
};

struct Weights {
  const float* ih;    // (G*H, I)
  const float* hh;    // (G*H, D)
  const float* bias;  // (G*H) or null
};

struct Coder {
  int32_t* lanes;        // (N, kLanes)
  uint8_t* stack;
  const int64_t* begin;  // (N): first byte of each row's region
  int64_t* fill;         // (N): bytes in use
  double* ideal;         // (N): sum of -log2 z, added to when writing
  bool writing;          // false: same arithmetic on the lanes, bytes dropped
};

// One chunk of steps of one layer.
struct Chunk {
  Shape shape;
  int64_t steps;           // C
  int64_t rows;            // R
  int64_t batch;           // N
  const int64_t* offsets;  // (C): first packed row of each step
  const int64_t* active;   // (C): its rows, a prefix of the batch
  int64_t first;           // the time index of its first step, and from one to the next
  int64_t stride;
  const float* packed;     // what `pack` wrote
  const float* x;          // (R, I)
  int32_t* state;          // (S, N, H)
  Coder coder;
  int32_t* stored;         // (R, K) or null when K = 0
  float* out;              // (R, out_units), rows out_stride apart, or null
  int64_t out_stride;
  int64_t out_units;
  float* gates;            // (R, G*H)
  float* old;              // (R, S*H), or null: no record
  float* mid;              // (R, D)
  float* extra;            // (R, 2*X)
  float* scratch;          // scratch_floats()
  int threads;
};

struct BackpropChunk {
  Shape shape;
  int64_t steps;
  int64_t rows;
  int64_t batch;
  const int64_t* offsets;
  const int64_t* active;
  int64_t first;
  int64_t stride;
  const float* packed;
  const float* x;
  float* gates;          // (R, G*H): activations -> gradients of the pre-activations
  const float* old;
  const float* mid;
  const float* extra;
  const float* d_out;    // (R, d_out_units), rows d_out_stride apart, or null
  int64_t d_out_stride;
  int64_t d_out_units;
  float* d_state;        // (S, N, H)
  float* d_x;            // (R, I) or null
  float* d_ih;           // like the weights, or null
  float* d_hh;
  float* d_bias;
  float* scratch;
  int threads;
};

enum class Fault : int { kNone = 0, kOverflow = 1, kNotFinite = 2, kReversal = 3 };

// The first fault that one thread with all rows would meet, if any: which step of the chunk, which
// batch row.
struct Status {
  Fault fault = Fault::kNone;
  int64_t step = -1;
  int64_t row = -1;
};

// One CPU tier.
struct Tier {
  const char* name;
  int64_t (*packed_floats)(const Shape&, bool backward);
  void (*pack)(const Shape&, const Weights&, bool backward, float* packed, int threads);
  int64_t (*scratch_floats)(const Shape&, int64_t batch, int threads);
  Status (*forward)(const Chunk&);
  Status (*reverse)(const Chunk&);
  void (*backprop)(const BackpropChunk&);
};

const Tier& tier_baseline();
#ifdef REVRNN_HAVE_X86_TIERS
const Tier& tier_avx2();
const Tier& tier_avx512();
#endif

// The tier of that name, or null when this machine cannot run it.
const Tier* find_tier(const char* name);
// Names of the tiers this machine runs, best first; returns how many.
int available_tiers(const char* names[3]);

}  // namespace revrnn
