// A small pool of threads for loops whose tasks are independent and about equally long.
#pragma once
#include <cstdint>

namespace revrnn {

// A task by address, not std::function: each CPU tier is compiled with its own instruction set, and
// a template of the standard library that two of them instantiate would be merged by the linker.
using Task = void (*)(const void* context, int64_t index);

// Runs task(context, 0) .. task(context, tasks-1) on up to `threads` threads, the caller among them,
// and returns when all are done. Which thread runs a task never matters to its result. While another
// thread of the program uses the pool, the caller runs its tasks alone rather than wait. Tasks must
// not throw.
void run_tasks(int64_t tasks, int threads, Task task, const void* context);

// Lend the pool the threads of an OpenMP runtime that the process has loaded anyway: the address of
// its GOMP_parallel. torch's own threads spin for milliseconds after each of its parallel loops; a
// second set of threads would have to fight them for the cores.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
void borrow_openmp(OpenMpParallel parallel);

}  // namespace revrnn
