// SPDX-License-Identifier: Apache-2.0
// The heart of a group of several nodes: takes operations in the order of the calls, and moves their chunks.
#ifndef LIBDDP_COMM_NODES_NODE_PIPELINE_H_
#define LIBDDP_COMM_NODES_NODE_PIPELINE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/owner_process.h"
#include "libddp/comm/base/driver.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/health/flight_notes.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/nodes/chunk.h"
#include "libddp/comm/nodes/control_messages.h"
#include "libddp/comm/nodes/node_messages.h"
#include "libddp/comm/nodes/node_operation.h"
#include "libddp/comm/nodes/node_scratch.h"
#include "libddp/comm/nodes/node_wire.h"
#include "libddp/comm/nodes/node_work.h"

namespace ddp {

struct NodePipelineOptions {
  int rank = 0;
  NodeLayout layout;
  std::vector<std::string> host_names;  // by rank
  bool oversubscribed = false;
  absl::Duration stall_warning;            // zero: none
  ContextObserver* observer = nullptr;     // may be null
  uint64_t group = 0;                      // tells this process's groups apart
  EngineOptions reducing, spreading;       // of the ranks of this node
  AllocationTable* allocations = nullptr;  // theirs
  std::shared_ptr<SharedSegment> segment;  // holds, among others, the scratch memory
  size_t scratch_offset = 0;               // of local rank 0's; each has NodeScratch::kBytes
  std::unique_ptr<NodeWire> wire;
};

// Thread-safe.
class NodePipeline final : public Driver {
 public:
  NodePipeline(NodePipelineOptions options, ProgressThread* progress);
  // Leaves the group: what is unfinished ends with Aborted.
  ~NodePipeline() override;

  // Takes over the operation (both its references), which is complete but for its sequence.
  Work Launch(NodeOperation* operation);
  Work Send(NodeMessageSpec spec);
  Work Recv(NodeMessageSpec spec);

  // `background`: by a thread of the library's own.
  void Fail(const absl::Status& why, bool background);
  absl::Status status() const;
  AbsentRanks AskNodes();

  Observer* listener() const { return notes_.listener(); }
  const NodePipelineOptions& options() const { return options_; }

 private:
  template <typename Call>
  Work StartMessage(Call call);

  // The following are called with mutex_ held. `background`: by a thread of the library's own.
  bool Poll(Lock&, const Pass& pass) override { return Drive(pass.background, pass.steal); }
  void CheckHealth(int64_t now, bool background) override;
  bool InExchange() const override { return !flight_.empty() || messages_.Pending(); }
  bool Drive(bool background, bool steal);
  void TakeLaunched();
  void NotePending();
  bool BeginChunks();
  bool AdvanceChunks();
  bool MustWaitForEarlier(const NodeOperation& operation) const;
  bool Retire();

  // Failures; in node_failure.cc.
  bool Healthy();
  void FailAndReport(const absl::Status& why, bool tell_nodes = true);
  void FailLocked(const absl::Status& why, bool tell_nodes = true);
  bool EndPending();
  absl::Status Detach(const NodeOperation& operation);
  absl::Status CheckOldest(NodeOperation* oldest, int64_t now);
  std::set<int> Missing(const NodeOperation& operation, bool* arrived) const;
  absl::Status TimedOut(const NodeOperation& operation) const;
  std::string NodesOf(const std::set<int>& ranks) const;
  void Tell(bool background);
  void TellAndEnd(bool background);
  void Leave();
  FlightIncident Incident(bool failure, absl::string_view what) const;
  void ReportStall(const NodeOperation& oldest, int64_t waited_ns);
  void ReportFailure(const absl::Status& why);

  int node() const { return options_.layout.node_of(options_.rank); }
  const WorldRanks& world_ranks() const { return reducing_.options().world_ranks; }
  int local() const { return options_.layout.local_of(options_.rank); }

  NodePipelineOptions options_;
  Engine reducing_, spreading_;
  // The ring of the first engine: the engines note nothing of the parts that they do.
  const FlightNotes notes_{options_.observer, options_.group, reducing_.options().control.flight(local())};
  NodeWire& wire_ = *options_.wire;
  const ChunkContext context_{options_.layout, options_.rank,         reducing_, spreading_,
                              wire_,           *options_.allocations, notes_};

  const OwnerProcess owner_;
  std::deque<NodeOperation*> queue_;  // not yet finished, in order; one reference each
  size_t begun_ = 0;                  // of the queue: how many have all their chunks begun
  uint64_t finished_ = 0;             // operations
  std::deque<Chunk*> flight_;         // in order
  uint64_t chunks_begun_ = 0;
  // What the wire works on; given up, not freed, where it may still do so.
  struct InFlight {
    NodeScratch scratch;
    std::deque<Chunk> chunks;
    ControlMessages control;
    NodeMessages messages;
  };
  std::unique_ptr<InFlight> in_flight_;
  ControlMessages& control_messages_;
  NodeMessages& messages_;
  std::vector<NodeOperation*> ended_;  // by a failure; one reference each

  bool told_ = true;               // this rank's failure is on its way to the other nodes
  bool observer_flushed_ = false;  // what it had only in memory is written, as the group has failed

  mutable std::mutex launch_mutex_;  // taken after mutex_
  std::vector<NodeOperation*> launched_;
  uint64_t next_sequence_ = 0;
  absl::Status failure_;  // written with both mutexes held
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_PIPELINE_H_
