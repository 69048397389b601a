// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/memory_wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace ddp {

void MemoryExchange::Put(int from, int to, uint64_t tag, std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto drop = dropped_.find({to, tag}); drop != dropped_.end()) {
    if (--drop->second == 0) dropped_.erase(drop);
    return;
  }
  waiting_[{to, tag, from}].push_back(std::move(message));
}

void MemoryExchange::Drop(int to, uint64_t tag, int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = waiting_.lower_bound({to, tag, 0});
  for (; count > 0 && found != waiting_.end() && std::get<0>(found->first) == to && std::get<1>(found->first) == tag;) {
    for (; count > 0 && !found->second.empty(); --count) found->second.pop_front();
    if (found->second.empty()) found = waiting_.erase(found);
  }
  if (count > 0) dropped_[{to, tag}] += count;
}

// Under one lock, or a message that comes in between could go to the second of two receives.
void MemoryExchange::Deliver(int to, uint64_t first_tag, absl::Span<Transfer* const> receives) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Transfer* t : receives) {
    const uint64_t tag = first_tag + static_cast<uint64_t>(t->tag);
    const auto found =
        t->peer == Transfer::kAnyPeer ? waiting_.lower_bound({to, tag, 0}) : waiting_.find({to, tag, t->peer});
    if (found == waiting_.end()) continue;
    const auto& [receiver, its_tag, sender] = found->first;
    if (receiver != to || its_tag != tag) continue;
    const std::string& message = found->second.front();
    t->peer = sender;
    t->truncated = message.size() > t->bytes;
    t->bytes = std::min(message.size(), t->bytes);
    if (t->bytes > 0) std::memcpy(t->data, message.data(), t->bytes);
    t->done = true;
    found->second.pop_front();
    if (found->second.empty()) waiting_.erase(found);
  }
}

namespace {

class MemoryWire final : public Wire {
 public:
  MemoryWire(std::shared_ptr<MemoryExchange> exchange, int rank, uint32_t channel)
      : exchange_(std::move(exchange)), rank_(rank), channel_(channel) {}

  bool Usable(bool) const override { return true; }

  absl::Status Send(Transfer* transfer) override {
    std::string message(transfer->bytes, '\0');
    if (transfer->bytes > 0) std::memcpy(message.data(), transfer->data, transfer->bytes);
    exchange_->Put(rank_, transfer->peer, FirstTag() + static_cast<uint64_t>(transfer->tag), std::move(message));
    transfer->done = true;
    return absl::OkStatus();
  }

  absl::Status Receive(Transfer* transfer) override {
    receives_.push_back(transfer);
    return absl::OkStatus();
  }

  absl::Status Poll() override {
    exchange_->Deliver(rank_, FirstTag(), receives_);
    receives_.erase(std::remove_if(receives_.begin(), receives_.end(), [](const Transfer* t) { return t->done; }),
                    receives_.end());
    return absl::OkStatus();
  }

  bool Cancel(Transfer* transfer) override {
    const auto found = std::find(receives_.begin(), receives_.end(), transfer);
    if (found == receives_.end()) return false;
    receives_.erase(found);
    return true;
  }

  bool Abandon() override {
    receives_.clear();
    return true;
  }

  void Drain(int tag, size_t /*bytes*/, int count) override {
    exchange_->Drop(rank_, FirstTag() + static_cast<uint64_t>(tag), count);
  }

  std::unique_ptr<Wire> Channel(uint32_t channel) const override {
    return std::make_unique<MemoryWire>(exchange_, rank_, channel);
  }
  uint32_t channels() const override { return std::numeric_limits<uint32_t>::max(); }

 private:
  uint64_t FirstTag() const { return uint64_t{channel_} * kTags; }

  const std::shared_ptr<MemoryExchange> exchange_;
  const int rank_;
  const uint32_t channel_;
  std::vector<Transfer*> receives_;
};

}  // namespace

std::unique_ptr<Wire> CreateMemoryWire(std::shared_ptr<MemoryExchange> exchange, int rank) {
  return std::make_unique<MemoryWire>(std::move(exchange), rank, 0);
}

}  // namespace ddp
