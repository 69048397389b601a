// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks. They start at once and in any order with collective operations.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend.h"
#include "outcome.h"
#include "tensors.h"

namespace ddp_torch {

using std::chrono::milliseconds;

class Message : public c10d::Work {
 public:
  // `from` < 0: from any rank, which is known once one has sent it.
  Message(c10::intrusive_ptr<DdpBackend> backend, c10d::OpType type, const char* title, const at::Tensor& tensor,
          int from, int tag)
      : Work(backend->getRank(), type, title, std::vector<at::Tensor>{tensor}),
        backend_(std::move(backend)),
        title_(title),
        tensor_(tensor),
        from_(from),
        tag_(tag) {
    const at::NoGradGuard no_grad;
    memory_ = Contiguous(tensor, true);
    buffers_ = BuffersOf({memory_}, true);
  }

  void Send(int to) {
    backend_->announcements_->Announce(to, tag_, backend_->options_->timeout);
    work_ = Group().Send(ddp::Buffers(buffers_), to, tag_, ddp::CurrentStream(memory_.device()));
  }

  void Receive() {
    if (from_ < 0) return;
    backend_->announcements_->Consume(from_, tag_);
    Start();
  }

  int sourceRank() const override { return from_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }

  bool isCompleted() override {
    // Who holds it will say when the message has ended.
    const std::unique_lock<std::timed_mutex> lock(call_mutex_, std::try_to_lock);
    if (lock && !Work::isCompleted() && Found(milliseconds(0))) End(OutcomeBy(*work_, absl::InfinitePast()));
    return Work::isCompleted();
  }

  bool wait(milliseconds timeout) override {
    const bool limited = timeout != kNoTimeout;
    const absl::Time deadline = limited ? absl::Now() + absl::FromChrono(timeout) : absl::InfiniteFuture();
    std::unique_lock<std::timed_mutex> lock(call_mutex_, std::defer_lock);
    if (!limited) {
      lock.lock();
    } else if (!lock.try_lock_for(timeout)) {
      ThrowTimedOut(rank_, title_, timeout);  // another thread waits without limit
    }
    if (!Work::isCompleted()) {
      const milliseconds left = std::max(milliseconds(0), absl::ToChronoMilliseconds(deadline - absl::Now()));
      if (!Found(limited ? left : backend_->options_->timeout)) {
        C10_THROW_ERROR(DistBackendError,
                        absl::StrCat("[Rank ", rank_, "] ", title_, ": Timed out: no rank has sent a message with tag ",
                                     tag_, " in ", (limited ? timeout : backend_->options_->timeout).count(),
                                     " ms. Look at what the senders were doing."));
      }
      if (!End(OutcomeBy(*work_, deadline))) ThrowTimedOut(rank_, title_, timeout);
    }
    return Work::wait();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_ != nullptr) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    auto self = c10::intrusive_ptr<Message>::unsafe_reclaim_from_nonowning(this);
    std::thread([self, future = future_] {
      try {
        self->wait(kNoTimeout);
        future->markCompleted(std::vector<at::Tensor>{self->tensor_});
      } catch (...) {
        future->setError(std::current_exception());
      }
    }).detach();
    return future_;
  }

 private:
  ddp::ProcessGroup& Group() { return backend_->GroupFor(memory_.device(), c10d::kUnsetTimeout); }
  void Start() { work_ = Group().Recv(ddp::Buffers(buffers_), from_, tag_, ddp::CurrentStream(memory_.device())); }

  bool Found(milliseconds timeout) {
    if (work_) return true;
    from_ = backend_->announcements_->ConsumeAny(tag_, timeout);
    if (from_ < 0) return false;
    Start();
    return true;
  }

  // False if there is no outcome yet.
  bool End(const std::optional<absl::Status>& outcome) {
    if (!outcome) return false;
    try {
      ThrowIfFailed(*outcome, rank_, title_);
      const at::NoGradGuard no_grad;
      if (opType_ != c10d::OpType::SEND && !memory_.is_same(tensor_)) tensor_.copy_(memory_);
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
    return true;
  }

  c10::intrusive_ptr<DdpBackend> backend_;
  const char* title_;
  at::Tensor tensor_, memory_;
  std::vector<ddp::Buffer> buffers_;
  int from_, tag_;
  // Held by the thread that waits, also without limit: others only try to get it.
  std::timed_mutex call_mutex_;
  std::mutex future_mutex_;
  std::optional<ddp::Work> work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

WorkPtr DdpBackend::Start(Tensors& tensors, int peer, int tag, c10d::OpType type, const char* title) {
  Require(tensors.size() == 1, absl::StrCat(title, ": requires a single tensor"));
  RequireDense(tensors, title);
  Require(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_),
          absl::StrCat(title, ": there is no rank ", peer, " in a group of ", size_));
  Require(announcements_ != nullptr, absl::StrCat(title, ": a group of one rank has no peer"));
  auto self = c10::intrusive_ptr<DdpBackend>::unsafe_reclaim_from_nonowning(this);
  auto message = c10::make_intrusive<Message>(self, type, title, tensors[0], peer, tag);
  if (type == c10d::OpType::SEND) {
    message->Send(peer);
  } else {
    message->Receive();
  }
  return message;
}

WorkPtr DdpBackend::send(Tensors& tensors, int to, int tag) {
  return Start(tensors, to, tag, c10d::OpType::SEND, "ddp:send");
}

WorkPtr DdpBackend::recv(Tensors& tensors, int from, int tag) {
  return Start(tensors, from, tag, c10d::OpType::RECV, "ddp:recv");
}

WorkPtr DdpBackend::recvAnysource(Tensors& tensors, int tag) {
  return Start(tensors, -1, tag, c10d::OpType::RECVANYSOURCE, "ddp:recvAnySource");
}

}  // namespace ddp_torch
