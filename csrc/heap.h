// Keeps the holes of glibc's heap in one piece.
//
// torch asks for blocks aligned to 64 bytes. glibc before 2.38 cuts such a block out of a larger one
// and frees the offcuts: at most 112 bytes before and behind it. Free neighbours grow together, but
// an offcut goes into the thread's cache, where it counts as in use. So when the block is freed, its
// hole is as large as the block, and too small for the next block of that size, which needs the
// offcuts as well. A loop that takes and frees the same few megabytes scatters up to seven such
// offcuts of a size over the heap, and with them holes that it cannot use itself.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace revrnn {

// Exchanges what the thread's cache holds in the sizes of offcuts for blocks that lie together. It
// only asks for memory and frees it; other allocators do not mind.
inline void gather_offcuts() {
#ifdef __GLIBC__
  constexpr std::size_t kSmallest = 24, kLargest = 120, kStep = 16;  // what chunks of 32 .. hold
  constexpr int kCached = 7;  // of each size, in a thread's cache
  // Volatile: a compiler may leave out a pair of malloc and free.
  void* volatile block;
  void* volatile cached[kCached];
  void* volatile fresh[kCached];
  // A request of this size has freed blocks that are not in the cache grow together first. So the
  // fresh ones below are not offcuts.
  block = std::malloc(1 << 16);
  std::free(block);
  for (std::size_t size = kSmallest; size <= kLargest; size += kStep) {
    for (int i = 0; i < kCached; ++i) cached[i] = std::malloc(size);
    for (int i = 0; i < kCached; ++i) fresh[i] = std::malloc(size);
    for (int i = 0; i < kCached; ++i) std::free(fresh[i]);
    for (int i = 0; i < kCached; ++i) std::free(cached[i]);  // the cache is full: to the heap
  }
#endif
}

}  // namespace revrnn
