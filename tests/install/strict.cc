// SPDX-License-Identifier: Apache-2.0
// Public structs as programs fill them, naming only the members that they need. Compiled with strict warnings.
#include "ddp/ddp.h"

namespace {

[[maybe_unused]] const ddp::Device kDevice{.index = 1};
[[maybe_unused]] const ddp::Stream kStream{.native = nullptr};
[[maybe_unused]] const ddp::Buffer kBuffer{.count = 1};
[[maybe_unused]] const ddp::ContextOptions kContext{.world_size = 2};
[[maybe_unused]] const ddp::FileStoreOptions kFileStore{.path = "file"};
[[maybe_unused]] const ddp::TcpStoreOptions kTcpStore{.port = 1};
[[maybe_unused]] const ddp::ReduceOptions kReduce{.op = ddp::ReduceOp::kAvg};
[[maybe_unused]] const ddp::Parameter kParameter{.name = "weight"};
[[maybe_unused]] const ddp::ModelBuffer kModelBuffer{.name = "mean"};
[[maybe_unused]] const ddp::DdpOptions kOptions{.bucket_bytes = 1};
[[maybe_unused]] const ddp::DdpStatistics kStatistics{.steps = 1};
[[maybe_unused]] const ddp::JoinOptions kJoin{.throw_on_early = true};
[[maybe_unused]] const ddp::GradBucket kBucket{.index = 1};
[[maybe_unused]] const ddp::GradBucket::Gradient kGradient{.parameter = 1};
[[maybe_unused]] const ddp::PowerSgdOptions kPowerSgd{.rank = 2};
[[maybe_unused]] const ddp::GradScalerOptions kScaler{.enabled = false};
[[maybe_unused]] const ddp::GradScalerState kScalerState{.scale = 1};
[[maybe_unused]] const ddp::StepOptions kStep{.stream = {}};
[[maybe_unused]] const ddp::OperationEvent kOperation{.count = 1};
[[maybe_unused]] const ddp::BucketEvent kBucketEvent{.bytes = 1};
[[maybe_unused]] const ddp::ScopeEvent kScope{.begin_ns = 1};
[[maybe_unused]] const ddp::BucketTimes kTimes{};

}  // namespace
