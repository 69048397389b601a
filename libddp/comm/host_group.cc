// SPDX-License-Identifier: Apache-2.0
// A hierarchical group whose ranks are all on one node.
#include <memory>
#include <utility>
#include <vector>

#include "libddp/comm/base/range_list.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/messages/channels.h"

namespace ddp {
namespace {

class HostGroup final : public HierarchicalGroup {
 public:
  HostGroup(Members members, std::shared_ptr<SharedSegment> segment, const GroupOptions& options,
            uint64_t allocation_numbers)
      : HierarchicalGroup(std::move(members), options, allocation_numbers, /*viewed=*/false),
        segment_(std::move(segment)),
        engine_(EngineAt(*segment_, 0, options), options.progress),
        channels_(ChannelBlock(segment_->data() + ControlBlock::Bytes(size()), size()), &engine_, options.progress) {
    engine_.SetIdleCallback([this] { channels_.Progress(); });
  }

  void Fail(const absl::Status& why) override { engine_.Fail(why); }
  absl::Status status() const override { return engine_.status(); }
  void Progress() override {
    engine_.Progress();
    channels_.Progress();
  }
  Observer* observer() const override { return engine_.listener(); }
  std::vector<int> Dead() const override {
    std::vector<int> dead;
    for (const Engine::GonePeer& peer : engine_.GonePeers()) {
      if (peer.died) dead.push_back(peer.rank);
    }
    return dead;
  }

 private:
  Work StartChecked(const CheckedCall& call) override {
    auto* operation = new Operation(&engine_, call.key);
    operation->called = call.called;
    operation->in = Ranges(call.in);
    operation->out = Ranges(call.out);
    operation->count = call.count;
    operation->parameters = call.parameters;
    operation->begins = call.Begins();
    operation->timeout = call.timeout;
    if (call.reduce != nullptr) {
      operation->reduce = call.kernel;
      operation->nonfinite = call.reduce->nonfinite;
      operation->bucket = call.reduce->bucket;
    }
    return engine_.Launch(operation);
  }
  Work StartMessage(const MessageCall& m) override {
    const auto kind = m.send ? MessageSpec::Kind::kSend : MessageSpec::Kind::kRecv;
    MessageSpec spec{kind, m.peer, m.tag, m.extent.dtype, m.extent.count, m.timeout, Ranges(m.buffers)};
    return m.send ? channels_.Send(std::move(spec)) : channels_.Recv(std::move(spec));
  }

  const std::shared_ptr<SharedSegment> segment_;
  Engine engine_;
  Channels channels_;
};

}  // namespace

size_t HostGroupBytes(int ranks) { return ControlBlock::Bytes(ranks) + ChannelBlock::Bytes(ranks); }

std::unique_ptr<ProcessGroup> MakeHostGroup(Members members, std::shared_ptr<SharedSegment> segment,
                                            const GroupOptions& options, uint64_t allocation_numbers) {
  return std::make_unique<HostGroup>(std::move(members), std::move(segment), options, allocation_numbers);
}

}  // namespace ddp
