// SPDX-License-Identifier: Apache-2.0
// Packets of the staged protocol on the CPU.
#ifndef TESTS_SUPPORT_WHOLE_PACKET_H_
#define TESTS_SUPPORT_WHOLE_PACKET_H_

#include <atomic>
#include <cstdint>

#include "libddp/device/staged_memory.h"

namespace ddp::testing {

// Whoever sees the mark has the data that came with it: nobody writes to a packet again before all have read it.
inline staged::Packet LoadPacket(const staged::Packet* from) {
  auto* const packet = const_cast<staged::Packet*>(from);
  staged::Packet loaded;
  loaded.mark = std::atomic_ref<uint32_t>(packet->mark).load(std::memory_order_acquire);
  for (int w = 0; w < staged::kPacketBytes / 4; ++w) {
    loaded.data.word[w] = std::atomic_ref<uint32_t>(packet->data.word[w]).load(std::memory_order_relaxed);
  }
  return loaded;
}
inline void StorePacket(staged::Packet* to, const staged::Packet& packet) {
  for (int w = 0; w < staged::kPacketBytes / 4; ++w) {
    std::atomic_ref<uint32_t>(to->data.word[w]).store(packet.data.word[w], std::memory_order_relaxed);
  }
  std::atomic_ref<uint32_t>(to->mark).store(packet.mark, std::memory_order_release);
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_WHOLE_PACKET_H_
