// Ranks in several processes of this host. The processes are forked before any of them uses CUDA,
// and exchange bytes through shared memory.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace jax_ep::p2p {

class Exchange {
 public:
  static constexpr int kMaxProcesses = 32;

  // The exchange of a process that is alone.
  Exchange() = default;

  int process() const { return process_; }
  int n_processes() const { return n_processes_; }
  bool is_alone() const { return n_processes_ == 1; }

  // Whether a rank belongs to this process. Ranks are spread evenly, in order.
  bool IsLocal(int rank, int n_ranks) const { return rank * n_processes_ / n_ranks == process_; }

  // Waits until all processes have posted, and gives what they posted. False: one did not in time.
  bool Meet(const std::string& mine, std::vector<std::string>* all, double limit_s = 60.0) {
    if (is_alone()) return *all = {mine}, true;
    // Two buffers are enough: no process posts two meetings ahead of one that still reads.
    const uint32_t meeting = n_meetings_++;
    if (mine.size() > kSlotBytes) return false;
    Slot& slot = board_[process_];
    std::memcpy(slot.bytes[meeting % 2], mine.data(), mine.size());
    slot.size[meeting % 2] = static_cast<uint32_t>(mine.size());
    slot.n_posts.store(meeting + 1, std::memory_order_release);
    const auto begin = std::chrono::steady_clock::now();
    all->clear();
    for (int process = 0; process < n_processes_; ++process) {
      const Slot& other = board_[process];
      while (other.n_posts.load(std::memory_order_acquire) <= meeting) {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
        if (waited.count() > limit_s) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      all->emplace_back(other.bytes[meeting % 2], other.size[meeting % 2]);
    }
    return true;
  }
  bool Meet(double limit_s = 60.0) {
    std::vector<std::string> all;
    return Meet("", &all, limit_s);
  }

  // Runs `body` in `n` processes. Returns how many did not return 0 in time.
  template <class Body>
  static int Fork(int n, unsigned limit_s, Exchange* exchange, const Body& body) {
    void* const memory =
        mmap(nullptr, sizeof(Slot) * n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (n < 1 || n > kMaxProcesses || memory == MAP_FAILED) return n;
    exchange->board_ = new (memory) Slot[n];
    exchange->n_processes_ = n;
    std::fflush(stdout);
    std::vector<pid_t> children;
    for (int process = 0; process < n; ++process) {
      const pid_t child = fork();
      if (child < 0) return n;
      if (child > 0) {
        children.push_back(child);
        continue;
      }
      alarm(limit_s);
      exchange->process_ = process;
      const int status = body();
      std::fflush(stdout);
      _exit(status);
    }
    int n_failed = 0;
    for (int process = 0; process < n; ++process) {
      int status = 0;
      waitpid(children[process], &status, 0);
      if (status == 0) continue;
      ++n_failed;
      std::printf("FAILED: process %d ended with wait status %d\n", process, status);
    }
    return n_failed;
  }

 private:
  static constexpr size_t kSlotBytes = 8192;

  struct Slot {
    std::atomic<uint32_t> n_posts{0};
    uint32_t size[2];
    char bytes[2][kSlotBytes];
  };

  Slot* board_ = nullptr;  // [n_processes]
  int process_ = 0;
  int n_processes_ = 1;
  uint32_t n_meetings_ = 0;
};

// The exchange of this process.
inline Exchange exchange;

}  // namespace jax_ep::p2p
