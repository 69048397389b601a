// SPDX-License-Identifier: Apache-2.0
// An operation or a message of a group of several nodes, which its pipeline does.
#ifndef LIBDDP_COMM_NODES_NODE_WORK_H_
#define LIBDDP_COMM_NODES_NODE_WORK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libddp/comm/base/counted_work.h"

namespace ddp {

class NodePipeline;

class NodeWork : public CountedWork {
 public:
  absl::Status Wait(absl::Time deadline) final;
  virtual std::string Describe() const = 0;

  int64_t noticed_ns = 0;  // when its time-out began: it was first seen to be the oldest that is not done

 protected:
  explicit NodeWork(NodePipeline* pipeline) : pipeline_(pipeline) {}
  ~NodeWork() override = default;

 private:
  NodePipeline* const pipeline_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_WORK_H_
