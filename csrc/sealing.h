// What the end of a forward pass and the beginning of a backward pass do with a tape: the twins of
// the torch operations in src/revrnn/_sealing.py, which say what the bytes mean. A step of a small
// layer would spend as long on some thirty operations of torch as on a tenth of its products.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace revrnn {

// Row i has fill[i] bytes at region + i * capacity: all of them, one row after the other.
inline void compact(const uint8_t* region, int64_t capacity, const int64_t* fill, int64_t rows,
                    uint8_t* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const size_t bytes = static_cast<size_t>(fill[row]);
    if (bytes > 0) std::memcpy(out, region + row * capacity, bytes);
    out += bytes;
  }
}

// The way back to where each row lies: begin[i] is the sum of the fills before. Returns the sum of
// all, or -1 where a fill is negative.
inline int64_t lay_out(const int32_t* sealed, int64_t rows, int64_t* fill, int64_t* begin) {
  int64_t sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (sealed[row] < 0) return -1;
    begin[row] = sum;
    fill[row] = sealed[row];
    sum += sealed[row];
  }
  return sum;
}

constexpr int kPackedLanes = 2 * kLanes + kLanes / 4;  // bytes of a row's lanes, 18 bits each

inline void pack_lanes(const int32_t* lanes, int64_t rows, uint8_t* out) {
  for (int64_t row = 0; row < rows; ++row, lanes += kLanes, out += kPackedLanes) {
    for (int i = 0; i < kLanes; ++i) {
      out[2 * i] = static_cast<uint8_t>(lanes[i]);
      out[2 * i + 1] = static_cast<uint8_t>(lanes[i] >> 8);
    }
    for (int i = 0; i < kLanes / 4; ++i) {
      int top = 0;
      for (int j = 0; j < 4; ++j) top |= (lanes[4 * i + j] >> 16 & 3) << 2 * j;
      out[2 * kLanes + i] = static_cast<uint8_t>(top);
    }
  }
}

inline void unpack_lanes(const uint8_t* packed, int64_t rows, int32_t* lanes) {
  for (int64_t row = 0; row < rows; ++row, lanes += kLanes, packed += kPackedLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const int top = packed[2 * kLanes + i / 4] >> 2 * (i % 4) & 3;
      lanes[i] = packed[2 * i] | packed[2 * i + 1] << 8 | top << 16;
    }
  }
}

}  // namespace revrnn
