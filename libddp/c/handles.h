// SPDX-License-Identifier: Apache-2.0
// What the handles of ddp/ddp_c.h refer to.
#ifndef LIBDDP_C_HANDLES_H_
#define LIBDDP_C_HANDLES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/ddp_c.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "ddp/process_group.h"
#include "ddp/store.h"

struct ddp_store {
  std::shared_ptr<ddp::Store> store;
};

struct ddp_group {
  explicit ddp_group(ddp::ProcessGroup& borrowed) : group(&borrowed), backend(borrowed.backend()) {}
  explicit ddp_group(std::unique_ptr<ddp::ProcessGroup> owned) : ddp_group(*owned) { owner = std::move(owned); }

  ddp::ProcessGroup* group;
  std::unique_ptr<ddp::ProcessGroup> owner;  // null for a world
  std::string backend;
};

struct ddp_work {
  ddp::Work work;
};

struct ddp_memory {
  ddp::Allocation allocation;
};

struct ddp_hook {
  std::shared_ptr<ddp::CommHook> hook;
};

struct ddp_model {
  // The device of all of its parameters.
  ddp::Device device() const { return model->value(0).device; }

  std::unique_ptr<ddp::DistributedDataParallel> model;
  std::vector<std::unique_ptr<ddp::DistributedDataParallel::NoSync>> no_sync = {};
  std::unique_ptr<ddp::DistributedDataParallel::Join> join = {};
};

struct ddp_scaler {
  std::unique_ptr<ddp::GradScaler> scaler;
  ddp::Device device;
};

#endif  // LIBDDP_C_HANDLES_H_
