// The heart of a group of several nodes: takes operations in the order of the calls and moves their chunks through
// three stages, of which those of different chunks overlap:
//
//   reducing    on each node the ranks sum their data; each comes to own the node's sum of its slice
//   exchanging  the owner of a block on each node sends its node's sum to the rank where the block is at home, which
//               adds them in node order, scales, checks and rounds once, and sends the result to the other owners
//   spreading   on each node the ranks gather each other's slices
//
// The first and the last stage are operations of two engines over memory that the ranks of a node share; the second
// goes over a wire. Two engines, because the operations of one must be launched in the same order on all ranks: each
// sees the chunks in their order, while the third stage of one chunk and the first of a later one come as they come.
#ifndef LIBDDP_COMM_NODES_NODE_PIPELINE_H_
#define LIBDDP_COMM_NODES_NODE_PIPELINE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/driver.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/health/flight_notes.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/nodes/node_messages.h"
#include "libddp/comm/nodes/node_operation.h"
#include "libddp/launch/wire.h"

namespace ddp {

// Chunks under way at a time.
inline constexpr size_t kChunksInFlight = 4;

struct NodePipelineOptions {
  int rank = 0;
  NodeLayout layout;
  std::vector<std::string> host_names;  // by rank
  std::vector<int> wire_ranks;          // by rank: what the wire calls it
  bool oversubscribed = false;
  absl::Duration timeout;
  absl::Duration stall_warning;            // zero: none
  ContextObserver* observer = nullptr;     // may be null
  uint64_t group = 0;                      // tells this process's groups apart
  EngineOptions reducing, spreading;       // of the ranks of this node
  AllocationTable* allocations = nullptr;  // theirs
  std::shared_ptr<SharedSegment> segment;  // holds, among others, the scratch memory
  size_t scratch_offset = 0;               // of local rank 0's; each has kChunksInFlight * kScratchBytes
  std::unique_ptr<Wire> wire;
};

// Thread-safe.
class NodePipeline final : public Driver {
 public:
  NodePipeline(NodePipelineOptions options, ProgressThread* progress);
  // Leaves the group: what is unfinished ends with Aborted.
  ~NodePipeline() override;

  // Takes over the operation (both its references), which is complete but for its sequence.
  absl::StatusOr<Work> Launch(NodeOperation* operation);
  absl::StatusOr<Work> Send(NodeMessageSpec spec);
  absl::StatusOr<Work> Recv(NodeMessageSpec spec);

  // `background`: by a thread of the library's own.
  void Fail(const absl::Status& why, bool background);
  absl::Status status() const;

  Observer* listener() const { return notes_.listener(); }
  const NodePipelineOptions& options() const { return options_; }

 private:
  friend class NodeMessages;
  enum Tag { kHeader, kPartial, kResult, kNews, kEnvelope, kPayload };
  enum class Stage { kReducing, kExchanging, kSpreading, kFinished };

  // Where something lies: for this rank, and for the wire.
  struct Spot {
    char* here = nullptr;
    char* wire = nullptr;
  };

  // A chunk under way.
  struct Step {
    NodeOperation* operation = nullptr;
    size_t chunk = 0, room = 0;
    NodeOperation::Areas areas;
    char* scratch = nullptr;
    Stage stage = Stage::kReducing;
    // Of the blocks of this rank's slice, in their order.
    absl::InlinedVector<Spot, 4> sums, finals;
    bool exposed = false;    // the wire works on the user's memory
    bool listening = false;  // results can come
    bool summed = false;     // exchanging: the blocks that are at home here have their final values
    Work reducing, spreading;
    std::deque<Transfer> partials, results, sends;  // partials and results: what is to come
  };

  // What a rank tells those of other nodes when it fails or leaves.
  struct News {
    int32_t rank = 0;
    uint64_t finished = 0;  // how many operations are finished there
    uint64_t messages = 0;  // how many envelopes it has sent to the receiver of this
    PackedError failure;    // OK: it leaves in good order. Travels only as far as a group of this size needs.
  };
  struct Mail {
    News in;
    std::deque<News> out;
    Transfer listening;
    std::deque<Transfer> telling;
  };

  using Kind = OperationKey::Kind;

  // The following are called with mutex_ held. `background`: by a thread of the library's own.
  bool Poll(Lock&, const Pass& pass) override { return Drive(pass.background, pass.steal); }
  void CheckHealth(Lock& lock, bool background) override;
  bool InExchange() const override { return !flight_.empty() || messages_->Pending(); }
  bool Drive(bool background, bool steal);
  void TakeLaunched();
  void NotePending();
  bool BeginChunks();
  bool MustWaitForEarlier(const NodeOperation& operation) const;
  void Begin(NodeOperation* operation);
  bool Advance(Step* step, const Step* earlier);
  bool Exchange(Step* step, const Step* earlier);
  void Compare(NodeOperation* operation);
  bool Retire();
  void Transmit(std::deque<Transfer>* list, bool send, int peer, Tag tag, void* data, size_t bytes);

  // The stages of a chunk; in node_stages.cc.
  void Place(Step* step);
  Spot PlaceSum(Step* step, int block, char* scratch);
  Spot PlaceFinal(Step* step, int block, char* scratch);
  void ExpectSums(Step* step);
  void ExpectResults(Step* step, const Step* earlier);
  void LaunchReducing(Step* step);
  void SendSums(Step* step);
  void Greet(Step* step);
  void SendResults(Step* step);
  void Sum(const Step& step, int block, const char* received, size_t stride, char* result) const;
  bool alone() const { return options_.layout.width(node()) == 1; }
  void SendParts(Step* step);
  void TakeParts(Step* step) const;
  void LaunchSpreading(Step* step);
  void TakeFinals(const Step& step) const;
  void AddSlices(const Step& step, const RangeList& from, size_t size, bool scatter, RangeList* to) const;
  void CollectFlags(const Step& step) const;
  const Spot& SumOf(const Step& step, int block) const { return step.sums[step.operation->SlicePlace(block)]; }
  char* ResultOf(const Step& step, int block) const {
    return step.scratch + step.areas.result + step.operation->ResultPlace(block) * step.operation->Stride(step.room);
  }
  char* View(Step* step, char* data, size_t bytes);

  template <typename Call>
  absl::StatusOr<Work> StartMessage(Call call);

  // What is told of stalls and failures; in node_flight.cc.
  FlightIncident Incident(bool failure, absl::string_view what) const;
  void TellStall(const NodeOperation& oldest, int64_t waited_ns);
  void TellFailure(const absl::Status& why);

  // Failures; in node_failure.cc.
  void FailAndTell(const absl::Status& why, bool tell_nodes = true);
  void FailLocked(const absl::Status& why, bool tell = true);
  void EndPending();
  absl::Status KeepLateWritersOut(const NodeOperation& operation);
  std::set<int> Missing(const NodeOperation& operation) const;
  absl::Status TimedOut(const NodeOperation& operation) const;
  std::string NodesOf(const std::set<int>& ranks) const;
  void ListenForNews();
  void HearNews();
  size_t NewsBytes() const;
  void Tell(bool background);
  void Leave();

  int node() const { return options_.layout.node_of(options_.rank); }
  int local() const { return options_.layout.local_of(options_.rank); }
  bool IsElsewhere(int rank) const { return options_.layout.node_of(rank) != node(); }

  NodePipelineOptions options_;
  Engine reducing_, spreading_;
  // The ring of the first engine: the engines note nothing of the parts that they do.
  const FlightNotes notes_{options_.observer, options_.group, reducing_.options().control.flight(local())};
  Wire& wire_ = *options_.wire;
  char* scratch_ = nullptr;  // this rank's
  std::vector<int> header_to_, header_from_;
  const size_t mail_stride_;
  std::vector<std::unique_ptr<char[]>> spare_mail_;

  const OwnerProcess owner_;
  std::deque<NodeOperation*> queue_;  // not yet finished, in order; one reference each
  size_t begun_ = 0;                  // of the queue: how many have all their chunks begun
  uint64_t finished_ = 0;             // operations
  std::deque<Step*> flight_;          // in order
  uint64_t steps_begun_ = 0;
  // What the wire works on; given up, not freed, where it may still do so.
  std::unique_ptr<std::array<Step, kChunksInFlight>> steps_;
  std::unique_ptr<Mail> mail_;
  std::vector<NodeOperation*> ended_;  // by a failure; one reference each

  std::unique_ptr<NodeMessages> messages_;

  static constexpr uint64_t kHere = ~uint64_t{0};
  std::vector<uint64_t> finished_by_gone_;  // by rank: how many operations one that has left had finished, or kHere
  std::vector<NodeMessages::Gone> gone_;    // by rank
  bool told_ = true;                        // this rank's failure is on its way to the other nodes
  bool written_ = false;                    // what is only in memory has been, as the group has failed
  int64_t next_look_ns_ = 0;

  mutable std::mutex launch_mutex_;  // taken after mutex_
  std::vector<NodeOperation*> launched_;
  uint64_t next_sequence_ = 0;
  absl::Status failure_;  // written with both mutexes held
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_PIPELINE_H_
