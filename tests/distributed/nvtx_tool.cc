// SPDX-License-Identifier: Apache-2.0
// A tool as NVTX loads it into a process (NVTX_INJECTION64_PATH): counts the ranges that begin and end.
#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>
#include <string>

namespace {

struct Counts {
  std::mutex mutex;
  std::map<std::string, int> begun;
  int ended = 0;
  uint64_t next_range = 0;
};
Counts& All() {
  static Counts counts;
  return counts;
}

void Begin(const nvtxEventAttributes_t* attributes) {
  std::lock_guard<std::mutex> lock(All().mutex);
  ++All().begun[attributes->message.ascii];
}
void End() {
  std::lock_guard<std::mutex> lock(All().mutex);
  ++All().ended;
}

nvtxDomainHandle_t NVTX_API DomainCreate(const char* name) {
  return std::string(name) == "ddp" ? reinterpret_cast<nvtxDomainHandle_t>(&All()) : nullptr;
}
void NVTX_API DomainDestroy(nvtxDomainHandle_t) {}
int NVTX_API Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  Begin(attributes);
  return 0;
}
int NVTX_API Pop(nvtxDomainHandle_t) {
  End();
  return 0;
}
nvtxRangeId_t NVTX_API Start(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  Begin(attributes);
  std::lock_guard<std::mutex> lock(All().mutex);
  return ++All().next_range;
}
void NVTX_API RangeEnd(nvtxDomainHandle_t, nvtxRangeId_t) { End(); }

template <typename Function>
void Set(NvtxFunctionTable table, int id, Function* function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  Set(table, NVTX_CBID_CORE2_DomainCreateA, DomainCreate);
  Set(table, NVTX_CBID_CORE2_DomainDestroy, DomainDestroy);
  Set(table, NVTX_CBID_CORE2_DomainRangePushEx, Push);
  Set(table, NVTX_CBID_CORE2_DomainRangePop, Pop);
  Set(table, NVTX_CBID_CORE2_DomainRangeStartEx, Start);
  Set(table, NVTX_CBID_CORE2_DomainRangeEnd, RangeEnd);
  return 1;
}

__attribute__((visibility("default"))) int NvtxToolBegun(const char* name) {
  std::lock_guard<std::mutex> lock(All().mutex);
  return All().begun[name];
}
__attribute__((visibility("default"))) int NvtxToolOpen() {
  std::lock_guard<std::mutex> lock(All().mutex);
  int open = -All().ended;
  for (const auto& [name, count] : All().begun) open += count;
  return open;
}

}  // extern "C"
