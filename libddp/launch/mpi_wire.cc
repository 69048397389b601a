// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/mpi_wire.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ddp {

absl::Status CheckMpi(int code, absl::string_view call) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  return absl::UnavailableError(absl::StrCat(call, " failed: ", absl::string_view(text, static_cast<size_t>(length)),
                                             "; restart the job, and see mpirun's own messages"));
}

std::mutex& MpiMutex() {
  static std::mutex mutex;
  return mutex;
}

void MpiDrain::Receive(Expected* expected) {
  if (MPI_Irecv(expected->buffer.data(), static_cast<int>(expected->buffer.size()), MPI_BYTE, MPI_ANY_SOURCE,
                expected->tag, expected->comm, &expected->request) != MPI_SUCCESS) {
    expected->left = 0;
  }
}

void MpiDrain::Add(MPI_Comm comm, int tag, size_t bytes, int count) {
  if (count == 0) return;
  Receive(&expected_.emplace_back(Expected{comm, tag, count, std::vector<char>(bytes)}));
}

// Not each time: a group that a peer keeps for long would cost every other group's polls.
void MpiDrain::Poll() {
  constexpr unsigned kSeldom = 64;
  if (expected_.empty() || ++polls_ % kSeldom != 0) return;
  expected_.remove_if([](Expected& e) {
    int done = 1;
    while (e.left > 0 && MPI_Test(&e.request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0) {
      if (--e.left > 0) Receive(&e);
    }
    return e.left == 0;
  });
}

void MpiDrain::Cancel() {
  for (Expected& e : expected_) {
    if (MPI_Cancel(&e.request) == MPI_SUCCESS) MPI_Wait(&e.request, MPI_STATUS_IGNORE);
  }
  expected_.clear();
}

void MpiLeftovers::Add(const std::vector<MPI_Request>& requests) {
  requests_.insert(requests_.end(), requests.begin(), requests.end());
}

bool MpiLeftovers::Settle(MPI_Comm comm) {
  int done = 0;
  if (MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS &&
      done != 0) {
    requests_.clear();
  }
  if (MPI_Test(&dropping_, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done == 0) return false;
  MPI_Status status;
  int found = 0, bytes = 0;
  if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, &status) != MPI_SUCCESS || found == 0) return empty();
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  dropped_.resize(static_cast<size_t>(bytes));
  MPI_Irecv(dropped_.data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm, &dropping_);
  return false;
}

namespace {

class MpiWire final : public Wire {
 public:
  MpiWire(std::shared_ptr<MpiShared> shared, uint32_t channel)
      : shared_(std::move(shared)), tag_base_(static_cast<int>(channel) * kTags) {
    std::lock_guard<std::mutex> lock(MpiMutex());
    MPI_Query_thread(&level_);
  }

  bool Usable(bool background) const override {
    // Where the program initialised MPI it may be inside MPI now, and only MPI_THREAD_MULTIPLE allows two at a time.
    if (background) return level_ == MPI_THREAD_MULTIPLE || (shared_->owner && level_ >= MPI_THREAD_SERIALIZED);
    if (level_ >= MPI_THREAD_SERIALIZED) return true;
    int is_main = 0;
    return MPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main != 0;
  }

  absl::Status Send(Transfer* t) override {
    return Start(t, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(t->data, static_cast<int>(t->bytes), MPI_BYTE, t->peer, tag_base_ + t->tag, shared_->comm,
                       request);
    });
  }

  absl::Status Receive(Transfer* t) override {
    const int peer = t->peer == Transfer::kAnyPeer ? MPI_ANY_SOURCE : t->peer;
    return Start(t, "MPI_Irecv", [&](MPI_Request* request) {
      return MPI_Irecv(t->data, static_cast<int>(t->bytes), MPI_BYTE, peer, tag_base_ + t->tag, shared_->comm, request);
    });
  }

  absl::Status Poll() override {
    std::lock_guard<std::mutex> lock(MpiMutex());
    shared_->drain.Poll();
    if (requests_.empty()) return absl::OkStatus();
    const int n = static_cast<int>(requests_.size());
    int done = 0;
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    const int code = MPI_Testsome(n, requests_.data(), &done, indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return CheckMpi(code, "MPI_Testsome");
    if (done == MPI_UNDEFINED || done == 0) return absl::OkStatus();
    for (int k = 0; k < done; ++k) {
      MPI_Status& status = statuses_[static_cast<size_t>(k)];
      Transfer& t = *transfers_[static_cast<size_t>(indices_[static_cast<size_t>(k)])];
      if (code == MPI_ERR_IN_STATUS && status.MPI_ERROR != MPI_SUCCESS) {
        int error_class = 0;
        MPI_Error_class(status.MPI_ERROR, &error_class);
        if (error_class != MPI_ERR_TRUNCATE) return CheckMpi(status.MPI_ERROR, "MPI_Testsome");
        t.truncated = true;
      } else if (receives_[static_cast<size_t>(indices_[static_cast<size_t>(k)])]) {
        int bytes = 0;
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        t.bytes = static_cast<size_t>(bytes);
        t.peer = status.MPI_SOURCE;
      }
      t.done = true;
    }
    Sweep();
    return absl::OkStatus();
  }

  bool Cancel(Transfer* transfer) override {
    const auto found = std::find(transfers_.begin(), transfers_.end(), transfer);
    if (found == transfers_.end()) return false;
    const size_t i = static_cast<size_t>(found - transfers_.begin());
    MPI_Status status;
    int cancelled = 0;
    std::lock_guard<std::mutex> lock(MpiMutex());
    // A receive is either cancelled or complete: the wait for it ends at once.
    if (MPI_Cancel(&requests_[i]) != MPI_SUCCESS || MPI_Wait(&requests_[i], &status) != MPI_SUCCESS) return false;
    Sweep();
    return MPI_Test_cancelled(&status, &cancelled) == MPI_SUCCESS && cancelled != 0;
  }

  bool Abandon() override {
    if (requests_.empty()) return true;
    std::lock_guard<std::mutex> lock(MpiMutex());
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (receives_[i]) MPI_Cancel(&requests_[i]);
    }
    shared_->leftovers.Add(requests_);
    requests_.clear();
    transfers_.clear();
    receives_.clear();
    return false;
  }

  void Drain(int tag, size_t bytes, int count) override {
    std::lock_guard<std::mutex> lock(MpiMutex());
    shared_->drain.Add(shared_->comm, tag_base_ + tag, bytes, count);
  }

  // As many as MPI has tags for.
  uint32_t channels() const override {
    std::lock_guard<std::mutex> lock(MpiMutex());
    int* largest_tag = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest_tag, &found);
    constexpr int kLeast = 32767;  // which the standard grants
    return (static_cast<uint32_t>(found != 0 ? *largest_tag : kLeast) + 1) / kTags;
  }

  std::unique_ptr<Wire> Channel(uint32_t channel) const override { return std::make_unique<MpiWire>(shared_, channel); }

 private:
  template <typename Call>
  absl::Status Start(Transfer* t, absl::string_view name, Call call) {
    MPI_Request request = MPI_REQUEST_NULL;
    {
      std::lock_guard<std::mutex> lock(MpiMutex());
      if (absl::Status s = CheckMpi(call(&request), name); !s.ok()) return s;
    }
    requests_.push_back(request);
    transfers_.push_back(t);
    receives_.push_back(name == "MPI_Irecv");
    return absl::OkStatus();
  }

  // Drops the requests that MPI has completed.
  void Sweep() {
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      transfers_[kept] = transfers_[i];
      receives_[kept] = receives_[i];
      ++kept;
    }
    requests_.resize(kept);
    transfers_.resize(kept);
    receives_.resize(kept);
  }

  const std::shared_ptr<MpiShared> shared_;
  const int tag_base_;
  int level_ = MPI_THREAD_SINGLE;
  // What is under way.
  std::vector<MPI_Request> requests_;
  std::vector<Transfer*> transfers_;
  std::vector<bool> receives_;
  // Room for MPI_Testsome.
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace

std::unique_ptr<Wire> CreateMpiWire(std::shared_ptr<MpiShared> shared) {
  return std::make_unique<MpiWire>(std::move(shared), 0);
}

}  // namespace ddp
