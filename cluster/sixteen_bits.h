// The sum over ranks of values that travel in 16 bits, half as many bytes: see SumIn16Bits.
//
// cluster/patches.py puts this file into Horovod.

#ifndef HOROVOD_SIXTEEN_BITS_H
#define HOROVOD_SIXTEEN_BITS_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#if __F16C__ && __AVX__
#include <immintrin.h>
#endif

#include "../common.h"
#include "gloo/context.h"
#include "gloo/types.h"
#include "gloo_context.h"

namespace horovod {
namespace common {

struct BFloat16 {
  static void Cut(const float* from, uint16_t* to, size_t count) {
    for (size_t i = 0; i < count; i++) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof(bits));
      const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);  // to the nearest, or the even
      const bool is_number = (bits & 0x7fffffff) <= 0x7f800000;
      to[i] = static_cast<uint16_t>((is_number ? rounded : bits | 0x400000) >> 16);
    }
  }

  static void Widen(const uint16_t* from, float* to, size_t count) {
    for (size_t i = 0; i < count; i++) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &bits, sizeof(bits));
    }
  }
};

struct Float16 {
  static void Cut(const float* from, uint16_t* to, size_t count) {
    size_t i = 0;
#if __F16C__ && __AVX__
    for (; i + 8 <= count; i += 8) {
      const __m128i cut = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), cut);
    }
#endif
    for (; i < count; i++) {
      to[i] = gloo::cpu_float2half_rn(from[i]).x;
    }
  }

  static void Widen(const uint16_t* from, float* to, size_t count) {
    size_t i = 0;
#if __F16C__ && __AVX__
    for (; i + 8 <= count; i += 8) {
      const __m128i cut = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(cut));
    }
#endif
    for (; i < count; i++) {
      gloo::float16 half;
      half.x = from[i];
      to[i] = gloo::cpu_half2float(half);
    }
  }
};

// A part of the buffer, of which each rank adds up its share: first all send each its share, then
// each sends the sum of its share to all.
template <typename Format> class PieceIn16Bits {
public:
  PieceIn16Bits(const std::shared_ptr<gloo::Context>& context, int number, float* data,
                size_t count)
      : context_(*context), data_(data), count_(count),
        share_((count + context->size - 1) / context->size), length_(share_ * context->size),
        cut_(new uint16_t[length_]), theirs_(new uint16_t[length_]), sums_(new uint16_t[length_]),
        scatter_(gloo::Slot::build(gloo::kAlltoallSlotPrefix, 2 * number)),
        gather_(gloo::Slot::build(gloo::kAlltoallSlotPrefix, 2 * number + 1)),
        cut_buffer_(context->createUnboundBuffer(cut_.get(), Bytes(length_))),
        theirs_buffer_(context->createUnboundBuffer(theirs_.get(), Bytes(length_))),
        sums_buffer_(context->createUnboundBuffer(sums_.get(), Bytes(length_))) {
    for (int distance = 1; distance < context_.size; distance++) {
      const int from = (context_.rank - distance + context_.size) % context_.size;
      theirs_buffer_->recv(from, scatter_, Bytes(from * share_), Bytes(share_));
      sums_buffer_->recv(from, gather_, Bytes(from * share_), Bytes(share_));
    }
  }

  void Scatter() {
    Format::Cut(data_, cut_.get(), count_);
    std::fill(cut_.get() + count_, cut_.get() + length_, 0);
    for (int distance = 1; distance < context_.size; distance++) {
      const int to = (context_.rank + distance) % context_.size;
      cut_buffer_->send(to, scatter_, Bytes(to * share_), Bytes(share_));
    }
  }

  void Gather() {
    Wait([this] { theirs_buffer_->waitRecv(context_.getTimeout()); });
    const size_t mine = context_.rank * share_;
    float sum[kBlock], part[kBlock];
    for (size_t begin = 0; begin < share_; begin += kBlock) {
      const size_t count = std::min<size_t>(kBlock, share_ - begin);
      for (int rank = 0; rank < context_.size; rank++) {
        const uint16_t* from = (rank == context_.rank ? cut_ : theirs_).get() + rank * share_;
        Format::Widen(from + begin, rank ? part : sum, count);
        for (size_t i = 0; rank && i < count; i++) {
          sum[i] += part[i];
        }
      }
      Format::Cut(sum, sums_.get() + mine + begin, count);
    }
    for (int distance = 1; distance < context_.size; distance++) {
      const int to = (context_.rank + distance) % context_.size;
      sums_buffer_->send(to, gather_, Bytes(mine), Bytes(share_));
    }
  }

  void Finish() {
    Wait([this] { sums_buffer_->waitRecv(context_.getTimeout()); });
    Format::Widen(sums_.get(), data_, count_);
    Wait([this] { cut_buffer_->waitSend(context_.getTimeout()); });
    Wait([this] { sums_buffer_->waitSend(context_.getTimeout()); });
  }

private:
  static constexpr size_t kBlock = 1024;

  static size_t Bytes(size_t count) { return count * sizeof(uint16_t); }

  template <typename One> void Wait(One one) {
    for (int other = 1; other < context_.size; other++) {
      one();
    }
  }

  gloo::Context& context_;
  float* const data_;
  const size_t count_, share_, length_;
  const std::unique_ptr<uint16_t[]> cut_, theirs_, sums_;  // the shares of all ranks
  const gloo::Slot scatter_, gather_;
  std::unique_ptr<gloo::transport::UnboundBuffer> cut_buffer_, theirs_buffer_, sums_buffer_;
};

// Overwrites each rank's `data` with the sum over all ranks of what is left of it in 16 bits, added
// in 32 and cut again: twice rounded, whatever the number of ranks. While one piece travels
// another is converted.
template <typename Format>
void SumIn16Bits(const std::shared_ptr<gloo::Context>& context, float* data, size_t count) {
  const size_t piece = 1 << 18, window = 16 * piece;
  for (size_t begin = 0; begin < count; begin += window) {
    const size_t end = std::min(count, begin + window);
    std::vector<std::unique_ptr<PieceIn16Bits<Format>>> pieces;
    for (size_t from = begin; from < end; from += piece) {
      pieces.emplace_back(new PieceIn16Bits<Format>(
          context, pieces.size(), data + from, std::min(piece, end - from)));
    }
    for (auto& each : pieces) {
      each->Scatter();
    }
    for (auto& each : pieces) {
      each->Gather();
    }
    for (auto& each : pieces) {
      each->Finish();
    }
  }
}

// If the names of all tensors say so by their end, and they are of 32 bits, makes that of `data`,
// which is all of them, and returns true. Where ranks share memory, what they sum there is not cut.
inline bool SumIn16Bits(GlooContext& context, const std::vector<TensorTableEntry>& entries,
                        void* data, size_t count) {
  const auto all_end = [&](const std::string& end) {
    return std::all_of(entries.begin(), entries.end(), [&](const TensorTableEntry& entry) {
      const auto& name = entry.tensor_name;
      return entry.tensor->dtype() == HOROVOD_FLOAT32 && name.size() > end.size() &&
             name.compare(name.size() - end.size(), end.size(), end) == 0;
    });
  };
  const auto sum = all_end("@bf16")   ? &SumIn16Bits<BFloat16>
                   : all_end("@fp16") ? &SumIn16Bits<Float16>
                                      : nullptr;
  if (context.ctx->size == 1) {
    return false;
  }
  if (sum && context.shared) {
    context.shared->Sum(static_cast<float*>(data), count, sum);
  } else if (sum) {
    sum(context.ctx, static_cast<float*>(data), count);
  }
  return sum;
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_SIXTEEN_BITS_H
