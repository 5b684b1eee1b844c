// Launches that follow each other, run by one team of torch's threads. Between two launches the team meets, but does not
// part: a thread waits for the others in a loop, which takes a third of the time of ending one team and calling another.

#pragma once

#include "step_launches.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Times = std::vector<Clock::time_point>;
using TeamSize = int (*)(); // omp_get_num_threads

// What OpenMP's library is called by.
struct OpenMP {
  Parallel parallel = nullptr;
  TeamSize size = nullptr;
};

struct Ready {
  Worker worker;
  int64_t* words;
  bool divided; // among all threads; else one thread runs it
};

class Team {
 public:
  // Run launches in order until `until`, or all of them, and return how many have run. When each ended is added to `times`.
  static size_t run(const std::vector<Ready>& launches, const OpenMP& openmp, Clock::time_point until, Times* times) {
    Team team(launches, openmp.size, until, times);
    openmp.parallel(&Team::join, &team, static_cast<unsigned>(at::get_num_threads()), 0);
    if (times)
      times->push_back(Clock::now()); // of the last one, which the team's end waits for
    return team.end_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr int patience = 4096; // turns after which a core that others want is left to them

  Team(const std::vector<Ready>& launches, TeamSize size, Clock::time_point until, Times* times)
      : launches_(launches), size_(size), until_(until), times_(times), end_(launches.size()) {}

  static void join(void* team) {
    static_cast<Team*>(team)->take_part();
  }

  void take_part() {
    const bool leads = joined_.fetch_add(1, std::memory_order_relaxed) == 0;
    const int others = size_() - 1;
    for (size_t i = 0; i < launches_.size(); i++) {
      const Ready& launch = launches_[i];
      if (leads || launch.divided)
        launch.worker(launch.words);
      if (i + 1 == launches_.size())
        return;
      if (leads && Clock::now() > until_)
        end_.store(i + 1, std::memory_order_relaxed);
      meet(others, i);
      if (i + 1 == end_.load(std::memory_order_relaxed))
        return;
    }
  }

  // Wait until all have come that work on launch `i`. Who comes last notes the time: any other may be held up by other
  // programs on its way out, while the team is at the next launch.
  void meet(int others, size_t i) {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == others) {
      if (times_ && i + 1 != end_.load(std::memory_order_relaxed))
        times_->push_back(Clock::now());
      arrived_.store(0, std::memory_order_relaxed);
      met_.store(i + 1, std::memory_order_release);
      return;
    }
    for (int turns = 0; met_.load(std::memory_order_acquire) <= i; turns++)
      if (turns < patience)
        relax();
      else
        std::this_thread::yield();
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const std::vector<Ready>& launches_;
  const TeamSize size_;
  const Clock::time_point until_;
  Times* const times_;
  std::atomic<size_t> end_;
  // Threads write these while others read their neighbours: each has a line of the cache.
  alignas(64) std::atomic<int> joined_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<size_t> met_{0};
};

} // namespace
