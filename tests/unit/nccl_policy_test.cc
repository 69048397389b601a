// SPDX-License-Identifier: Apache-2.0
// What the nccl backend decides before it calls NCCL, and what it says after.
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "libddp/comm/nccl/advice.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/comm/nccl/reduce_plan.h"
#include "tests/support/catch.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

// Our declarations are NCCL's.
namespace ddp::nccl {
static_assert(kSuccess == int{ncclSuccess} && kUnhandledCudaError == int{ncclUnhandledCudaError});
static_assert(kSystemError == int{ncclSystemError} && kInternalError == int{ncclInternalError});
static_assert(kInvalidArgument == int{ncclInvalidArgument} && kInvalidUsage == int{ncclInvalidUsage});
static_assert(kRemoteError == int{ncclRemoteError} && kInProgress == int{ncclInProgress});
static_assert(kInt8 == int{ncclInt8} && kUint8 == int{ncclUint8} && kInt32 == int{ncclInt32});
static_assert(kInt64 == int{ncclInt64} && kFloat16 == int{ncclFloat16} && kFloat32 == int{ncclFloat32});
static_assert(kFloat64 == int{ncclFloat64} && kBfloat16 == int{ncclBfloat16});
static_assert(kSum == int{ncclSum} && kProd == int{ncclProd} && kMax == int{ncclMax} && kMin == int{ncclMin});
static_assert(kAvg == int{ncclAvg} && kScalarHostImmediate == int{ncclScalarHostImmediate});
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(DataType) == sizeof(ncclDataType_t));
#ifdef NCCL_WIN_COLL_SYMMETRIC
static_assert(kWinCollSymmetric == NCCL_WIN_COLL_SYMMETRIC);
#endif
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));

// The same parameters in the same order, each as large as NCCL's: Theirs converts to Ours but for names of types.
template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct SameCall<R (*)(A...), S (*)(B...)> : std::bool_constant<sizeof...(A) == sizeof...(B) && sizeof(R) == sizeof(S)> {
  static_assert(((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>)&&...));
};
#define DDP_SAME(name) static_assert(SameCall<decltype(Api::name), decltype(&nccl##name)>::value, #name)
DDP_SAME(GetVersion);
DDP_SAME(GetUniqueId);
DDP_SAME(CommInitRankConfig);
DDP_SAME(CommCount);
DDP_SAME(CommUserRank);
DDP_SAME(CommCuDevice);
DDP_SAME(CommDestroy);
DDP_SAME(CommAbort);
DDP_SAME(CommGetAsyncError);
DDP_SAME(GetErrorString);
DDP_SAME(GetLastError);
DDP_SAME(AllReduce);
DDP_SAME(Reduce);
DDP_SAME(Broadcast);
DDP_SAME(AllGather);
DDP_SAME(ReduceScatter);
DDP_SAME(Send);
DDP_SAME(Recv);
DDP_SAME(GroupStart);
DDP_SAME(GroupEnd);
DDP_SAME(RedOpCreatePreMulSum);
DDP_SAME(RedOpDestroy);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
DDP_SAME(MemAlloc);
DDP_SAME(MemFree);
DDP_SAME(CommWindowRegister);
DDP_SAME(CommWindowDeregister);
#endif
#undef DDP_SAME
}  // namespace ddp::nccl
#endif

namespace ddp::nccl {
namespace {

using Op = ReducePlan::Op;

ReducePlan Plan(DType in, DType out, ReduceOptions options, ReducePath path = ReducePath::kPlain,
                bool avg_keeps = false) {
  return PlanReduce(in, out, options, {.ranks = 4, .path = path, .avg_keeps_symmetric = avg_keeps});
}

TEST_CASE("what NCCL does by itself costs no kernel of ours") {
  for (DType t : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    CHECK(Plan(t, t, {.op = ReduceOp::kSum}) == ReducePlan{.op = Op::kSum, .type = t});
    CHECK(Plan(t, t, {.op = ReduceOp::kAvg}) == ReducePlan{.op = Op::kAvg, .type = t});
    CHECK(Plan(t, t, {.op = ReduceOp::kMax}) == ReducePlan{.op = Op::kMax, .type = t});
    CHECK(Plan(t, t, {.op = ReduceOp::kMin}) == ReducePlan{.op = Op::kMin, .type = t});
    CHECK(Plan(t, t, {.op = ReduceOp::kProduct}) == ReducePlan{.op = Op::kProduct, .type = t});
    CHECK(Plan(t, t, {.op = ReduceOp::kSum, .prescale = 3}) ==
          ReducePlan{.op = Op::kPremultiplied, .factor = 3, .type = t});
  }
  const DType f32 = DType::kFloat32;
  CHECK(Plan(f32, f32, {.op = ReduceOp::kAvg, .prescale = 3, .postscale = 2}) ==
        ReducePlan{.op = Op::kPremultiplied, .factor = 1.5, .type = f32});
  for (DType t : {DType::kInt64, DType::kInt32, DType::kInt8, DType::kUInt8}) {
    for (ReducePath path : {ReducePath::kPlain, ReducePath::kSymmetric, ReducePath::kNotSymmetric}) {
      CHECK(Plan(t, t, {.op = ReduceOp::kAvg}, path) == ReducePlan{.op = Op::kAvg, .type = t});
      CHECK(Plan(t, t, {.op = ReduceOp::kSum}, path) == ReducePlan{.op = Op::kSum, .type = t});
    }
  }
}

TEST_CASE("16-bit floats are not divided before they are added") {
  for (DType t : {DType::kFloat16, DType::kBFloat16}) {
    CHECK(Plan(t, t, {.op = ReduceOp::kSum, .postscale = 0.5}) ==
          ReducePlan{.op = Op::kSum, .type = t, .after_scale = 0.5});
    CHECK(Plan(t, t, {.op = ReduceOp::kAvg, .prescale = 2, .postscale = 0.5}) ==
          ReducePlan{.op = Op::kPremultiplied, .factor = 2, .type = t, .after_scale = 0.125});
  }
}

TEST_CASE("what float16 cannot hold is multiplied before, and by no transport") {
  const DType f16 = DType::kFloat16, bf16 = DType::kBFloat16;
  for (const double prescale : {1e-8, 1e6, -1e6}) {
    CHECK(Plan(f16, f16, {.op = ReduceOp::kSum, .prescale = prescale, .postscale = 2}) ==
          ReducePlan{.convert_in = true, .before_scale = prescale, .op = Op::kSum, .type = f16, .after_scale = 2});
    CHECK(Plan(bf16, bf16, {.op = ReduceOp::kSum, .prescale = prescale}) ==
          ReducePlan{.op = Op::kPremultiplied, .factor = prescale, .type = bf16});
  }
}

TEST_CASE("conversions go by way of the wider type") {
  const DType f32 = DType::kFloat32, f16 = DType::kFloat16, bf16 = DType::kBFloat16;
  CHECK(Plan(f16, f32, {.op = ReduceOp::kAvg, .prescale = 2}) ==
        ReducePlan{.convert_in = true, .before_scale = 2, .op = Op::kAvg, .type = f32});
  CHECK(Plan(f32, bf16, {.op = ReduceOp::kAvg}) == ReducePlan{.op = Op::kAvg, .type = f32, .convert_out = true});
  CHECK(Plan(f16, bf16, {.op = ReduceOp::kMax}) ==
        ReducePlan{.convert_in = true, .op = Op::kMax, .type = f32, .convert_out = true});
}

TEST_CASE("registered memory gets the kernels that are faster for it") {
  const DType t = DType::kFloat32;
  const ReduceOptions sum{.op = ReduceOp::kSum}, avg{.op = ReduceOp::kAvg};
  CHECK(Plan(t, t, sum, ReducePath::kSymmetric).op == Op::kSum);
  CHECK(Plan(t, t, avg, ReducePath::kSymmetric) == ReducePlan{.op = Op::kSum, .type = t, .after_scale = 0.25});
  CHECK(Plan(t, t, avg, ReducePath::kSymmetric, true) == ReducePlan{.op = Op::kAvg, .type = t});
  CHECK(Plan(t, t, sum, ReducePath::kNotSymmetric).op == Op::kPremultiplied);
  for (const bool avg_keeps : {false, true}) {
    CHECK(Plan(t, t, avg, ReducePath::kNotSymmetric, avg_keeps) ==
          ReducePlan{.op = Op::kPremultiplied, .factor = 0.25, .type = t});
  }
  CHECK(Plan(t, t, {.op = ReduceOp::kMax, .prescale = 2, .postscale = 3}, ReducePath::kSymmetric) ==
        ReducePlan{.convert_in = true, .before_scale = 2, .op = Op::kMax, .type = t, .after_scale = 3});
}

TEST_CASE("features go by the version at run time") {
  const auto features = [](int version) {
    static int told = 0;
    told = version;
    Api api;
    api.GetVersion = [](int* v) {
      *v = told;
      return kSuccess;
    };
    api.MemAlloc = [](void**, size_t) { return kSuccess; };
    api.MemFree = [](void*) { return kSuccess; };
    api.CommWindowRegister = [](Comm, void*, size_t, Window*, int) { return kSuccess; };
    api.CommWindowDeregister = [](Comm, Window) { return kSuccess; };
    return FeaturesOf(api);
  };
  CHECK_FALSE(features(2808).ok());
  CHECK_FALSE(features(21704).ok());
  struct Row {
    int version;
    const char* text;
    bool windows, avg_keeps_symmetric, groups_of_sums, symmetric_abort;
  };
  for (const Row& row :
       {Row{21800, "2.18.0", false, false, true, false}, Row{21903, "2.19.3", false, false, true, false},
        Row{22005, "2.20.5", false, false, true, false}, Row{22105, "2.21.5", false, false, true, false},
        Row{22203, "2.22.3", false, false, true, false}, Row{22304, "2.23.4", false, false, true, false},
        Row{22403, "2.24.3", false, false, true, false}, Row{22501, "2.25.1", false, false, true, false},
        Row{22602, "2.26.2", false, false, true, false}, Row{22703, "2.27.3", true, false, true, false},
        Row{22803, "2.28.3", true, false, false, false}, Row{22807, "2.28.7", true, false, true, false},
        Row{22809, "2.28.9", true, false, true, false}, Row{22902, "2.29.2", true, false, true, true},
        Row{23003, "2.30.3", true, true, true, true}, Row{23100, "2.31.0", true, true, true, true},
        Row{23200, "2.32.0", true, true, true, true}}) {
    INFO(row.text);
    const absl::StatusOr<Features> found = features(row.version);
    REQUIRE(found.ok());
    CHECK(found->version_text() == row.text);
    CHECK(found->windows == row.windows);
    CHECK(found->avg_keeps_symmetric == row.avg_keeps_symmetric);
    CHECK(found->groups_of_sums == row.groups_of_sums);
    CHECK(found->symmetric_abort == row.symmetric_abort);
  }
}

TEST_CASE("a doubtful variable is named with what is legal") {
  const auto problems = [](Env env, const std::string& value) {
    return CheckEnvironment([&](Env e) { return e == env ? std::optional<std::string>(value) : std::nullopt; });
  };
  const std::pair<Env, const char*> bad[] = {
      {Env::kNcclNthreads, "4"},       {Env::kNcclNthreads, "x"},    {Env::kNcclP2pLevel, "PIXX"},
      {Env::kNcclP2pLevel, "NVL"},     {Env::kNcclAlgo, "Ring,Foo"}, {Env::kNcclAlgo, "allreduce:bush"},
      {Env::kNcclProto, "LL128"},      {Env::kNcclProto, "simpel"},  {Env::kNcclSocketIfname, "^"},
      {Env::kNcclBuffsize, "3000000"}, {Env::kNcclBuffsize, "4M"},   {Env::kNcclMinCtas, "0"},
      {Env::kNcclMaxCtas, "65"},       {Env::kNcclIbDisable, "yes"}, {Env::kNcclDebug, "verbose"},
  };
  for (const auto& [env, value] : bad) {
    INFO(value);
    const std::vector<std::string> found = problems(env, value);
    REQUIRE(found.size() == 1);
    CHECK(absl::StartsWith(found[0], std::string(EnvTable()[static_cast<size_t>(env)].name) + "=" + value));
  }
  const std::pair<Env, const char*> good[] = {
      {Env::kNcclNthreads, "512"},
      {Env::kNcclP2pLevel, "sys"},
      {Env::kNcclAlgo, "Ring,tree"},
      {Env::kNcclAlgo, "^NVLS"},
      {Env::kNcclAlgo, "allreduce:ring;broadcast:tree"},
      {Env::kNcclProto, "^LL128"},
      {Env::kNcclProto, "Simple,LL"},
      {Env::kNcclSocketIfname, "=eth0"},
      {Env::kNcclBuffsize, "8388608"},
      {Env::kNcclMinCtas, "1"},
      {Env::kNcclMaxCtas, "64"},
      {Env::kNcclIbDisable, "1"},
      {Env::kNcclDebug, "warn"},
  };
  for (const auto& [env, value] : good) {
    INFO(value);
    CHECK(problems(env, value).empty());
  }
}

TEST_CASE("known breakages are recognised by NCCL's own words") {
  const auto advises = [](const char* words, const char* remedy, Result result = kUnhandledCudaError,
                          int version = 22809) {
    INFO(words << " -> " << Advice(words, result, version));
    return absl::StrContains(Advice(words, result, version), remedy);
  };
  CHECK(advises("Duplicate GPU detected : rank 1 and rank 0", "same GPU", kInvalidUsage));
  CHECK(advises("ncclMaxSharedMem 82240 exceeds device/fn maxSharedMem 79856", "2.26.2", kUnhandledCudaError, 22501));
  CHECK(advises(
      "Error while creating shared memory segment /dev/shm/nccl-x (size 9637892), error: No space left on device",
      "--shm-size", kSystemError));
  CHECK(advises("CUDA failure 209 'no kernel image is available for execution on the device'", "newer NCCL"));
  CHECK(advises("CUDA driver version is insufficient for CUDA runtime version", "update the driver"));
  CHECK(advises("an illegal memory access was encountered", "update NCCL"));
  CHECK(advises("Connect to 10.0.0.1<3000> failed : Connection refused", "NCCL_SOCKET_IFNAME", kSystemError));
  CHECK(advises("something else", "peer", kRemoteError));
  CHECK(advises("something else", "NCCL_DEBUG=WARN"));
  CHECK(Advice("something else", kInternalError, 22809).empty());
}

}  // namespace
}  // namespace ddp::nccl
