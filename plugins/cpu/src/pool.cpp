#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace wicore {
namespace {

// Workers spin this long for the next job before they sleep: longer than the gaps between a step's operators,
// short against a step, so an idle engine costs nothing.
constexpr std::chrono::microseconds kSpin(50);
constexpr int kSpinsBeforeYield = 2000;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  RangeFn fn;
  const void* context;
  int64_t count, grain;
};

// `state_` is epoch << 32 | joined workers << 1 | open. A worker joins by raising the count while the job is open;
// the caller closes the job when no index is left and waits for those who joined only, so a worker that the system
// has not scheduled never delays a step.
class Pool {
 public:
  explicit Pool(int64_t threads) {
    try {
      for (int64_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // fewer do the same work
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }

  void run(const Job& job) {
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(epoch << 32 | 1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    drain();
    state_.fetch_and(~uint64_t{1});
    for (int spins = 0; (state_.load(std::memory_order_acquire) & 0xffffffffu) != 0; ++spins) {
      if (spins < kSpinsBeforeYield) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  void drain() {
    const Job job = job_;
    for (;;) {
      const int64_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
      if (begin >= job.count) return;
      const int64_t end = begin + job.grain < job.count ? begin + job.grain : job.count;
      job.fn(job.context, begin, end);
    }
  }

  bool pending(uint64_t seen) const {
    const uint64_t state = state_.load();
    return (state & 1) != 0 && (state >> 32) != seen;
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      await(seen);
      if (stop_.load()) return;
      uint64_t state = state_.load();
      while ((state & 1) != 0 && (state >> 32) != seen) {
        if (!state_.compare_exchange_weak(state, state + 2)) continue;
        seen = state >> 32;
        drain();
        state_.fetch_sub(2, std::memory_order_release);
        break;
      }
    }
  }

  void await(uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (int i = 0; !pending(seen); ++i) {
      if (stop_.load(std::memory_order_relaxed)) return;
      pause();
      if (i % 64 == 63 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return pending(seen) || stop_.load(); });
        sleepers_.fetch_sub(1);
        return;
      }
    }
  }

  Job job_{};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Never destroyed at exit: workers may sleep in it until the process is gone.
Pool* g_pool = nullptr;
int64_t g_threads = 1;

alignas(std::mutex) unsigned char g_mutex[sizeof(std::mutex)];

// The child of a fork has neither the workers nor, if one was running, the thread that holds the mutex.
void start_afresh_in_child() {
  g_pool = nullptr;
  new (g_mutex) std::mutex;
}

}  // namespace

void set_threads(int64_t threads) {
  delete g_pool;
  g_pool = nullptr;
  g_threads = threads < 1 ? 1 : threads;
}

int64_t threads() { return g_threads; }

std::mutex& entry_mutex() {
  static std::mutex* mutex = [] {
    pthread_atfork(nullptr, nullptr, start_afresh_in_child);
    return new (g_mutex) std::mutex;
  }();
  return *mutex;
}

void run_ranges(int64_t count, int64_t grain, RangeFn fn, const void* context) {
  if (count <= 0) return;
  if (g_threads == 1 || count <= grain) {
    fn(context, 0, count);
    return;
  }
  if (g_pool == nullptr) g_pool = new Pool(g_threads);
  g_pool->run({fn, context, count, grain});
}

}  // namespace wicore
