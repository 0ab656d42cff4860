// What ranks agree on: bits of all ranks, combined in rounds of one message each.
//
// cluster/patches.py puts this file into Horovod. Gloo asks for permission before it sends, a hop
// more, as the receiver may have no room yet. Here there is always room.

#ifndef HOROVOD_ROUNDS_H
#define HOROVOD_ROUNDS_H

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "gloo/context.h"

namespace horovod {
namespace common {

class Rounds {
public:
  // All ranks of `context` do this, and then call Combine equally often.
  explicit Rounds(const std::shared_ptr<gloo::Context>& context) : context_(context) {
    const int rank = context->rank, size = context->size, slot = context->nextSlot(2);
    for (int turn = 0; turn < 2; turn++) {
      for (int distance = 1; distance < size; distance *= 2) {
        auto& to = context->getPair((rank + distance) % size);
        auto& from = context->getPair((rank - distance + size) % size);
        std::unique_ptr<Round> round(new Round);
        round->send = to->createSendBuffer(slot + turn, round->mine, sizeof(round->mine));
        round->receive = from->createRecvBuffer(slot + turn, round->theirs, sizeof(round->theirs));
        rounds_[turn].push_back(std::move(round));
      }
    }
  }

  // Overwrites the `data` of each rank with those of all ranks, combined. As in the barrier of
  // Hensgen, Finkel and Manber (1988, https://doi.org/10.1007/BF01379320) some ranks' come more
  // than once, which must make no difference.
  void Combine(long long* data, size_t count,
               void (*combine)(void*, const void*, const void*, size_t)) {
    for (size_t done = 0; done < count; done += kMost) {
      long long* const now = data + done;
      const size_t length = std::min(count - done, kMost);
      for (auto& round : rounds_[turn_]) {
        std::memcpy(round->mine, now, length * sizeof(long long));
        round->send->send(0, length * sizeof(long long));
        round->receive->waitRecv();
        round->send->waitSend();
        combine(now, now, round->theirs, length);
      }
      // A rank that is done with this turn may be in the next, while another still reads what it
      // got in this one; in the turn after the next nobody is before all are done with this one.
      turn_ = 1 - turn_;
    }
  }

private:
  static constexpr size_t kMost = 32;  // of 64 bits; a job with more names takes several turns

  struct Round {
    long long mine[kMost], theirs[kMost];
    std::unique_ptr<gloo::transport::Buffer> send, receive;
  };

  const std::shared_ptr<gloo::Context> context_;  // lives as long as the buffers
  std::vector<std::unique_ptr<Round>> rounds_[2];
  int turn_ = 0;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_ROUNDS_H
