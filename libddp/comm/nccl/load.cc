// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "libddp/base/env.h"
#include "libddp/comm/nccl/api.h"

namespace ddp::nccl {
namespace {

// Looks one function up; false if the library has none of that name.
template <typename Function>
bool Find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

absl::StatusOr<Api> Load() {
  const std::string name = ReadEnv(Env::kNcclLibrary).value_or("libnccl.so.2");
  // Never closed: its threads may outlive every group.
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return absl::NotFoundError(
        absl::StrCat("NCCL cannot be loaded (", why == nullptr ? name : std::string(why),
                     "): install libnccl2, or name the library by DDP_NCCL_LIBRARY=/path/to/libnccl.so.2"));
  }
  Api api;
  const bool complete =
      Find(library, "ncclGetVersion", &api.GetVersion) && Find(library, "ncclGetUniqueId", &api.GetUniqueId) &&
      Find(library, "ncclCommInitRankConfig", &api.CommInitRankConfig) &&
      Find(library, "ncclCommCount", &api.CommCount) && Find(library, "ncclCommUserRank", &api.CommUserRank) &&
      Find(library, "ncclCommCuDevice", &api.CommCuDevice) && Find(library, "ncclCommDestroy", &api.CommDestroy) &&
      Find(library, "ncclCommAbort", &api.CommAbort) &&
      Find(library, "ncclCommGetAsyncError", &api.CommGetAsyncError) &&
      Find(library, "ncclGetErrorString", &api.GetErrorString) &&
      Find(library, "ncclGetLastError", &api.GetLastError) && Find(library, "ncclAllReduce", &api.AllReduce) &&
      Find(library, "ncclReduce", &api.Reduce) && Find(library, "ncclBroadcast", &api.Broadcast) &&
      Find(library, "ncclAllGather", &api.AllGather) && Find(library, "ncclReduceScatter", &api.ReduceScatter) &&
      Find(library, "ncclSend", &api.Send) && Find(library, "ncclRecv", &api.Recv) &&
      Find(library, "ncclGroupStart", &api.GroupStart) && Find(library, "ncclGroupEnd", &api.GroupEnd) &&
      Find(library, "ncclRedOpCreatePreMulSum", &api.RedOpCreatePreMulSum) &&
      Find(library, "ncclRedOpDestroy", &api.RedOpDestroy);
  if (!complete) {
    if (api.GetVersion != nullptr) {
      if (absl::StatusOr<Features> features = FeaturesOf(api); !features.ok()) return features.status();
    }
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is no NCCL library: it lacks functions that NCCL 2.18 has; set DDP_NCCL_LIBRARY to one"));
  }
  Find(library, "ncclMemAlloc", &api.MemAlloc);
  Find(library, "ncclMemFree", &api.MemFree);
  Find(library, "ncclCommWindowRegister", &api.CommWindowRegister);
  Find(library, "ncclCommWindowDeregister", &api.CommWindowDeregister);
  return api;
}

}  // namespace ddp::nccl
