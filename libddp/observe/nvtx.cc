// SPDX-License-Identifier: Apache-2.0
#include "libddp/observe/nvtx.h"

#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

nvtxEventAttributes_t Named(const char* name) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  return attributes;
}

class NvtxObserver final : public Observer {
 public:
  explicit NvtxObserver(nvtxDomainHandle_t domain) : domain_(domain) {}
  ~NvtxObserver() override { nvtxDomainDestroy(domain_); }

  // An operation ends in another place, and perhaps on another thread, than it began.
  void OnOperation(const OperationEvent& event) noexcept override {
    const auto key = std::pair(event.group, event.sequence);
    std::lock_guard<std::mutex> lock(mutex_);
    if (event.state == OperationEvent::State::kCalled) {
      const std::string name =
          absl::StrCat(event.kind, event.bucket < 0 ? "" : absl::StrCat(", bucket ", event.bucket));
      const nvtxEventAttributes_t attributes = Named(name.c_str());
      ranges_[key] = nvtxDomainRangeStartEx(domain_, &attributes);
    } else if (const auto found = ranges_.find(key); found != ranges_.end()) {
      nvtxDomainRangeEnd(domain_, found->second);
      ranges_.erase(found);
    }
  }
  void OnBucket(const BucketEvent&) noexcept override {}  // its operation says it all
  void OnScope(const ScopeEvent& event) noexcept override {
    const nvtxEventAttributes_t attributes = Named(event.name);
    if (event.begin) {
      nvtxDomainRangePushEx(domain_, &attributes);
    } else {
      nvtxDomainRangePop(domain_);
    }
  }

 private:
  const nvtxDomainHandle_t domain_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, nvtxRangeId_t> ranges_;  // of operations under way, by group and number
};

}  // namespace

std::unique_ptr<Observer> CreateNvtxObserver() {
  // NVTX loads the tool at its first call, and a second thread that comes meanwhile reads what the first one writes.
  static std::mutex first_call;
  std::lock_guard<std::mutex> lock(first_call);
  // Without a tool that was injected into the process there is no domain to be had.
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("ddp");
  if (domain == nullptr) return nullptr;
  return std::make_unique<NvtxObserver>(domain);
}

}  // namespace ddp
