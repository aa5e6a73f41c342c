// What glibc's allocator does with the memory of a step, and how to have it do better.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace revrnn {

// Keeps the memory of a step for the next one.
//
// glibc maps blocks above a threshold of their own, and gives what is free at the end of its heap
// back to the system when that is more than twice the threshold. Memory that comes back is mapped
// and cleared page by page, which in a training loop takes up to a third of a step. So glibc raises
// the threshold to the size of whatever mapped block a program frees, up to 32 MiB: after a few
// large tensors it is there. A step whose largest block is a few megabytes, of ten in all, never
// gets it that far by itself; freeing one block that nobody has touched does. Where the user has
// set the thresholds (mallopt, MALLOC_TRIM_THRESHOLD_ and the like), glibc leaves them alone.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr std::size_t kMostRaised = std::size_t{32} << 20, kPage = 1 << 12;
  void* volatile block = std::malloc(kMostRaised - 2 * kPage);  // volatile: not to be left out
  std::free(block);
#endif
}

// Has the system map a fresh block in pages of 2 MiB, where it has such pages to give. For blocks
// above 32 MiB, which glibc maps each on their own unless its heap happens to have the room: a
// smaller one would leave its large pages to the heap that it is cut out of.
inline void use_large_pages(void* block, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kLarge = std::uintptr_t{2} << 20;
  const auto first = (reinterpret_cast<std::uintptr_t>(block) + kLarge - 1) / kLarge * kLarge;
  const auto last = (reinterpret_cast<std::uintptr_t>(block) + bytes) / kLarge * kLarge;
  // Advice: a system that does not take it has lost nothing.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)block, (void)bytes;
#endif
}

// Keeps the holes of the heap in one piece.
//
// torch asks for blocks aligned to 64 bytes. glibc before 2.38 cuts such a block out of a larger one
// and frees the offcuts: at most 112 bytes before and behind it. Free neighbours grow together, but
// an offcut goes into the thread's cache, where it counts as in use. So when the block is freed, its
// hole is as large as the block, and too small for the next block of that size, which needs the
// offcuts as well. A loop that takes and frees the same few megabytes scatters up to seven such
// offcuts of a size over the heap, and with them holes that it cannot use itself.
//
// This exchanges what the thread's cache holds in the sizes of offcuts for blocks that lie together.
// It only asks for memory and frees it; other allocators do not mind.
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
