#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace revrnn {
namespace {

// Default rounding, no flush to zero: a program may have set either on its own thread only, and the
// reverse pass must compute the floats of the forward pass whichever thread gets the work.
class DefaultFloatMode {
 public:
#if defined(__SSE__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

inline void relax() {
#if defined(__SSE__)
  _mm_pause();
#endif
}

// How often a thread looks for work before it sleeps: some tens of microseconds, the gap between
// the loops of one kernel call.
constexpr int kSpins = 4000;

class Pool {
 public:
  void run(int64_t tasks, int threads, Task task, const void* context) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, tasks)) - 1;
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (helpers <= 0 || !turn.try_lock()) {
      DefaultFloatMode mode;
      for (int64_t i = 0; i < tasks; ++i) task(context, i);
      return;
    }
    hire(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = helpers;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work();
    {
      // All tasks are taken: a thread that has not woken by now is not waited for.
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;
    }
    for (int i = 0; running_.load(std::memory_order_acquire) != 0; ++i) {
      if (i < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void hire(int helpers) {
    try {
      while (workers_ < helpers) {
        std::thread([this, index = workers_] { serve(index); }).detach();
        ++workers_;
      }
    } catch (const std::system_error&) {
      // No more threads to be had: those there are do the work.
    }
  }

  void work() {
    DefaultFloatMode mode;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i);
  }

  void serve(int index) {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) relax();
      bool mine;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
        seen = round_.load(std::memory_order_relaxed);
        mine = index < wanted_;
        if (mine) running_.fetch_add(1, std::memory_order_relaxed);
      }
      if (!mine) continue;
      work();
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex turn_;  // held by the caller whose tasks run
  int workers_ = 0;  // detached threads of this pool; changed under turn_
  std::mutex mutex_;  // guards the fields below, as they change from round to round
  std::condition_variable wake_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int64_t tasks_ = 0;
  int wanted_ = 0;  // threads 0 .. wanted_-1 may join the round
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{0};   // the next task nobody has taken
  std::atomic<int> running_{0};    // threads that joined the round and are not done
};

// Never destroyed: its threads may still wait on it when the process ends.
std::atomic<Pool*> pool{nullptr};

Pool& current_pool() {
  Pool* existing = pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  auto* fresh = new Pool;
  if (pool.compare_exchange_strong(existing, fresh)) {
    return *fresh;
  }
  delete fresh;
  return *existing;
}

// Null: no runtime was lent, or this process is a fork, where its threads do not exist.
std::atomic<OpenMpParallel> openmp{nullptr};

// One loop on borrowed threads.
struct Loop {
  Task task;
  const void* context;
  int64_t tasks;
  std::atomic<int64_t> next{0};
};

void take_tasks(void* data) {
  auto& loop = *static_cast<Loop*>(data);
  DefaultFloatMode mode;
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.tasks;) {
    loop.task(loop.context, i);
  }
}

void forget_threads() {
  pool.store(nullptr, std::memory_order_release);
  openmp.store(nullptr, std::memory_order_release);
}

// A fork has none of the threads: it leaves this pool, whatever state it is in, and makes its own.
void watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_threads); });
#endif
}

}  // namespace

void borrow_openmp(OpenMpParallel parallel) {
  watch_forks();
  openmp.store(parallel, std::memory_order_release);
}

void run_tasks(int64_t tasks, int threads, Task task, const void* context) {
  if (tasks <= 0) return;
  watch_forks();
  OpenMpParallel parallel = openmp.load(std::memory_order_acquire);
  if (parallel && tasks > 1 && threads > 1) {
    Loop loop{task, context, tasks};
    parallel(take_tasks, &loop, static_cast<unsigned>(threads), 0);
  } else {
    current_pool().run(tasks, threads, task, context);
  }
}

}  // namespace revrnn
