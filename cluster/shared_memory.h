// Sums, and what ranks agree on, where several are on each host: through memory that those share.
//
// cluster/patches.py puts this file into Horovod. Gloo has one ring over all ranks: inside a host
// the bytes go through the kernel and back, and with 2 hosts of 4 ranks each host sends 1.75 times
// the buffer. Here each rank adds up its part of the host's buffers, sums that over the ranks with
// the same local rank, and hands it on: each host sends the buffer once.

#ifndef HOROVOD_SHARED_MEMORY_H
#define HOROVOD_SHARED_MEMORY_H

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "gloo/allreduce.h"
#include "gloo/broadcast.h"
#include "gloo/common/error.h"
#include "gloo/context.h"
#include "gloo/math.h"

#include "../logging.h"

#ifndef SYS_pidfd_open  // by glibc before 2.31
#define SYS_pidfd_open 434
#endif

namespace horovod {
namespace common {

template <typename T>
void SumOverAll(const std::shared_ptr<gloo::Context>& context, T* data, size_t count) {
  gloo::AllreduceOptions options(context);
  options.setOutput(data, count);
  void (*sum)(void*, const void*, const void*, size_t) = &gloo::sum<T>;
  options.setReduceFunction(gloo::AllreduceOptions::Func(sum));
  gloo::allreduce(options);
}

class SharedMemory {
public:
  using Context = std::shared_ptr<gloo::Context>;

  // All ranks of `all` call this. Null, on all of them, where it is of no use or not possible:
  // hosts have one rank, or not all the same number; their ranks see different processes, as those
  // of several containers do; or HOROVOD_SHARED_MEMORY=0 is in the environment of one.
  static std::shared_ptr<SharedMemory> Make(const Context& all, const Context& local,
                                            const Context& cross) {
    if (cross->size == all->size) {
      return nullptr;
    }
    std::shared_ptr<SharedMemory> made(new SharedMemory(local, cross));
    const char* wanted = std::getenv("HOROVOD_SHARED_MEMORY");
    int64_t usable = made->Map() && local->size * cross->size == all->size &&
                     !(wanted && std::string(wanted) == "0");
    gloo::AllreduceOptions options(all);
    options.setOutput(&usable, 1);
    void (*least)(void*, const void*, const void*, size_t) = &gloo::min<int64_t>;
    options.setReduceFunction(gloo::AllreduceOptions::Func(least));
    gloo::allreduce(options);
    LOG(DEBUG) << "The ranks of a host sum and agree in shared memory: " << (usable ? "yes" : "no");
    return usable ? made : nullptr;
  }

  ~SharedMemory() {
    if (head_ != nullptr) {
      munmap(head_, Bytes());
    }
    if (file_ >= 0) {
      close(file_);
    }
  }

  // Overwrites each rank's `data`, of `count` elements, with the sum over all ranks.
  template <typename T>
  void Sum(T* data, size_t count,
           void (*sum_over_hosts)(const Context&, T*, size_t) = &SumOverAll<T>) {
    try {
      SumInSlots(data, count, sum_over_hosts);
    } catch (...) {
      Break();
      throw;
    }
  }

  // Overwrites the `data` of each rank of a host with those of all of them, combined.
  template <typename T>
  void Combine(T* data, size_t count, void (*combine)(void*, const void*, const void*, size_t)) {
    if (count * sizeof(T) > slot_bytes_) {
      throw std::length_error("Shared memory has no room for so much");
    }
    std::memcpy(Slot<T>(local_->rank), data, count * sizeof(T));
    Barrier();
    for (int other = 1; other < local_->size; other++) {
      combine(data, data, Slot<T>((local_->rank + other) % local_->size), count);
    }
    turn_ = 1 - turn_;
  }

  // Behind an error: what the others get would be no sum, and they are not to take our next barrier
  // for this one.
  void Break() {
    head_->broken.store(1);
    Wake();
  }

private:
  // What the memory begins with; the slots of the ranks follow.
  struct Head {
    int64_t name;
    std::atomic<uint32_t> arrived, barriers;  // ranks at the next barrier, and those that are over
    std::atomic<uint32_t> broken;             // 1 behind an error of any rank
    pid_t processes[1];                       // of the ranks
  };

  SharedMemory(const Context& local, const Context& cross)
      : local_(local), cross_(cross), slot_bytes_((cross->size > 1 ? 8 : 1) << 20) {}

  template <typename T>
  void SumInSlots(T* data, size_t count, void (*sum_over_hosts)(const Context&, T*, size_t)) {
    const int size = local_->size, rank = local_->rank;
    const size_t most = slot_bytes_ / sizeof(T);
    for (size_t done = 0; done < count; done += most) {
      T* const now = data + done;
      const size_t length = std::min(count - done, most);
      const size_t part = (length + size - 1) / size;
      const auto begin = [&](int of) { return std::min(length, of * part); };
      const auto copy = [&](T* to, const T* from, size_t first, size_t last) {
        std::memcpy(to + first, from + first, (last - first) * sizeof(T));
      };
      const size_t mine = begin(rank), next = begin(rank + 1);

      copy(Slot<T>(rank), now, 0, mine);
      copy(Slot<T>(rank), now, next, length);
      Barrier();
      for (int other = 1; other < size; other++) {
        T* const theirs = Slot<T>((rank + other) % size);
        gloo::sum<T>(now + mine, now + mine, theirs + mine, next - mine);
      }
      if (cross_->size > 1 && next > mine) {
        sum_over_hosts(cross_, now + mine, next - mine);
      }
      copy(Slot<T>(rank), now, mine, next);
      Barrier();
      for (int other = 0; other < size; other++) {
        if (other != rank) {
          copy(now, Slot<T>(other), begin(other), begin(other + 1));
        }
      }
      turn_ = 1 - turn_;
    }
  }

  // Two sets of slots take turns: a rank may still read from those of before.
  template <typename T> T* Slot(int of) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(head_) + HeadBytes() +
                                (turn_ * local_->size + of) * slot_bytes_);
  }

  size_t HeadBytes() const {
    return (sizeof(Head) + local_->size * sizeof(pid_t) + 4095) / 4096 * 4096;
  }

  size_t Bytes() const { return HeadBytes() + 2 * local_->size * slot_bytes_; }

  // The first rank of a host makes a file that has no name, and the others find it among the open
  // files of that process. So nothing is left over, and /dev/shm may be small. Ranks of different
  // containers do not find it, or would know each other's processes by other numbers.
  bool Map() {
    int64_t found[3] = {getpid(), -1, 0};  // process, file, and the name that stands in it
    if (local_->rank == 0) {
      std::random_device random;
      found[2] = (static_cast<int64_t>(random()) << 32) | random();
      file_ = memfd_create("horovod", MFD_CLOEXEC);
      if (file_ >= 0 && ftruncate(file_, Bytes()) == 0 &&
          pwrite(file_, &found[2], sizeof(found[2]), 0) == sizeof(found[2])) {
        found[1] = file_;
      }
    }
    gloo::BroadcastOptions options(local_);
    options.setRoot(0);
    options.setOutput(found, 3);
    gloo::broadcast(options);
    if (found[1] < 0) {
      return false;
    }
    if (local_->rank > 0) {
      const auto path =
          "/proc/" + std::to_string(found[0]) + "/fd/" + std::to_string(found[1]);
      file_ = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY);
    }
    char self[16] = {};
    if (readlink("/proc/self", self, sizeof(self) - 1) < 0 || self != std::to_string(getpid())) {
      return false;
    }
    int64_t name = 0;
    if (file_ < 0 || pread(file_, &name, sizeof(name), 0) != sizeof(name) || name != found[2]) {
      return false;
    }
    void* memory = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) {
      return false;
    }
    head_ = static_cast<Head*>(memory);
    head_->processes[local_->rank] = getpid();
    return true;
  }

  // Returns when all ranks of the host are here. Gloo's own takes 0.2 ms.
  void Barrier() {
    const uint32_t before = head_->barriers.load();
    if (head_->broken.load()) {
      throw gloo::IoException("Another rank of this host had an error");
    }
    if (head_->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(local_->size)) {
      head_->arrived.store(0);
      head_->barriers.fetch_add(1);
      Wake();
      return;
    }
    const auto end = std::chrono::steady_clock::now() + local_->getTimeout();
    const timespec look = {0, 100000000};
    const auto is_over = [&] { return head_->barriers.load() != before; };
    while (true) {
      syscall(SYS_futex, &head_->barriers, FUTEX_WAIT, before, &look, nullptr, 0);
      if (is_over()) {
        return;
      }
      const std::string why = WhyNot(end);
      if (!why.empty() && !is_over()) {  // one that has ended may have been here before
        throw gloo::IoException(why);
      }
    }
  }

  void Wake() { syscall(SYS_futex, &head_->barriers, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  // Why a barrier will never be over; empty if it may be.
  std::string WhyNot(std::chrono::steady_clock::time_point end) const {
    for (int of = 0; of < local_->size; of++) {
      if (HasEnded(head_->processes[of])) {
        return "Local rank " + std::to_string(of) + " has ended";
      }
    }
    if (head_->broken.load()) {
      return "Another rank of this host had an error";
    }
    const bool late = std::chrono::steady_clock::now() > end;
    return late ? "Timed out waiting for the ranks of this host" : "";
  }

  static bool HasEnded(pid_t process) {
    pollfd state = {static_cast<int>(syscall(SYS_pidfd_open, process, 0)), POLLIN, 0};
    if (state.fd < 0) {  // it is not there, or Linux is older than 5.3
      return kill(process, 0) != 0 && errno == ESRCH;
    }
    const bool ended = poll(&state, 1, 0) > 0;
    close(state.fd);
    return ended;
  }

  const Context local_, cross_;
  // What is summed at once. Inside a host what stays in a cache; between hosts more than a bucket
  // of gradients, as each time takes a round of messages.
  const size_t slot_bytes_;
  int file_ = -1, turn_ = 0;
  Head* head_ = nullptr;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_SHARED_MEMORY_H
