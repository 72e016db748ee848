// A small persistent thread pool: parallel_for over indices, caller included.
//
// It knows nothing of kernels. Invariant: which thread runs which range is free, so kernels must give the same
// result for any split (they do: every range writes outputs that no other range touches or reads).
#pragma once
#include <stdint.h>

#include <mutex>

namespace wicore {

using RangeFn = void (*)(const void* context, int64_t begin, int64_t end);

void run_ranges(int64_t count, int64_t grain, RangeFn fn, const void* context);

// Calls body(begin, end) for ranges of [0, count). Threads take `grain` consecutive indices at a time. Runs inline when
// there is one thread or one range. Not re-entrant. After fork the child starts with fresh workers on its next call.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  run_ranges(
      count, grain,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

void set_threads(int64_t threads);
int64_t threads();

// Held by every entry point that uses the pool: one run at a time.
std::mutex& entry_mutex();

}  // namespace wicore
