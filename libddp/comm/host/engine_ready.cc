// When all ranks have announced an operation: whether they agree, where its data lies, and so how it is done.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/read_process.h"

namespace ddp {

// Whether all ranks have announced it.
bool Engine::HasArrived(Operation* operation) const {
  while (operation->arrived < options_.size && HasAnnounced(*operation, operation->arrived)) ++operation->arrived;
  return operation->arrived == options_.size;
}

// All ranks have announced it: do they agree, and how is it done?
void Engine::MakeReady(Operation* operation) {
  absl::InlinedVector<Placement, 16> placements;
  for (int r = 0; r < options_.size; ++r) {
    if (r > 0 && !Agrees(*operation, 0, r)) return;
    placements.push_back(control_.slot(operation->sequence, r).announcement.placement);
  }
  operation->ready = true;
  notes_.Entered(*operation, FlightState::kReady);
  operation->route = ChooseRoute(placements, operation->IsBroadcast() ? operation->key().root : -1);
  if (operation->route == Route::kFetched) PrepareToFetch(operation);
  if (operation->TakesTurns()) {
    operation->first_round = staged_rounds_;
    staged_rounds_ += operation->Rounds(options_.size);
  }
  if (operation->route != Route::kDirect) return;
  const bool single =
      std::all_of(placements.begin(), placements.end(), [](Placement p) { return p == Placement::kSharedRange; });
  for (int r = 0; r < options_.size; ++r) {
    if (!(single ? ResolveSingle(operation, r) : ResolveList(operation, r))) {
      FailAndTell(absl::FailedPreconditionError(absl::StrCat(
          operation->Describe(), ": rank ", options_.NameOf(r), " uses an Allocation that rank ",
          options_.NameOf(options_.rank), " has freed; all ranks must keep an Allocation while one of them uses it")));
      return;
    }
  }
}

void Engine::PrepareToFetch(Operation* operation) const {
  for (int r = 0; r < options_.size; ++r) {
    const Announcement& a = control_.slot(operation->sequence, r).announcement;
    operation->in_bases.push_back(reinterpret_cast<char*>(static_cast<uintptr_t>(a.in)));
    operation->out_bases.push_back(reinterpret_cast<char*>(static_cast<uintptr_t>(a.out)));
  }
  operation->phase = Operation::Phase::kReduce;
}

// Whether every peer is another process whose memory this one may read, which it tries once it is asked.
bool Engine::CanReadPeers() {
  if (can_read_peers_.has_value()) return *can_read_peers_;
  if (peers_in_this_process_ || !MayReadProcesses()) return *(can_read_peers_ = false);
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank) continue;
    if (!options_.peers.Visible(r)) return *(can_read_peers_ = false);
    const PeerLine& line = control_.peer(r);
    const uint64_t address = line.token_address.load(std::memory_order_acquire);
    if (address == 0) return false;  // not said yet
    uint64_t token = 0;
    RangeList from, to;
    from.Add(reinterpret_cast<char*>(static_cast<uintptr_t>(address)), sizeof(token));
    to.Add(reinterpret_cast<char*>(&token), sizeof(token));
    const bool read = ReadProcess(r, options_.peers.pid(r), from, to).ok() && token == line.token;
    if (!read) return *(can_read_peers_ = false);
  }
  return *(can_read_peers_ = true);
}

// Whether `peer` calls what `rank` calls.
bool Engine::Agrees(const Operation& operation, int rank, int peer) {
  const Announcement& first = control_.slot(operation.sequence, rank).announcement;
  const Announcement& a = control_.slot(operation.sequence, peer).announcement;
  if (a.what == first.what && a.count == first.count && a.parameters == first.parameters) return true;
  const auto describe = [](const Announcement& x) { return OperationKey::Unpack(x.what).Describe(x.count); };
  const bool only_parameters = a.what == first.what && a.count == first.count;
  const char* const with = operation.called().kind == OperationKey::Kind::kAllGatherV
                               ? " with other counts of the single ranks"
                               : " with another prescale or postscale";
  FailAndTell(absl::FailedPreconditionError(
      absl::StrCat("ranks disagree about operation ", operation.sequence, ": rank ", options_.NameOf(rank), " calls ",
                   describe(first), ", rank ", options_.NameOf(peer), " calls ", describe(a),
                   only_parameters ? with : "", "; all ranks must make the same calls in the same order")));
  return false;
}

bool Engine::ResolveSingle(Operation* operation, int peer) const {
  const Announcement& a = control_.slot(operation->sequence, peer).announcement;
  char* const in = allocations_.Resolve(peer, a.in, operation->in_bytes(peer));
  char* const out = a.out == a.in ? in : allocations_.Resolve(peer, a.out, operation->out.bytes());
  operation->in_bases.push_back(in);
  operation->out_bases.push_back(out);
  return in != nullptr && out != nullptr;
}

bool Engine::ResolveList(Operation* operation, int peer) const {
  const Announcement& a = control_.slot(operation->sequence, peer).announcement;
  RangeList& in = operation->ins.emplace_back();
  RangeList& out = operation->outs.emplace_back();
  const auto add = [&](RangeList& list, uint64_t address, size_t bytes) {
    char* const data = allocations_.Resolve(peer, address, bytes);
    if (data != nullptr) list.Add(data, bytes);
    return data != nullptr;
  };
  if (a.placement == Placement::kSharedRange) {
    if (!add(in, a.in, operation->in_bytes(peer)) || !add(out, a.out, operation->out.bytes())) return false;
  } else {
    const ListedRange* entry = control_.listed(operation->sequence, peer);
    for (uint64_t i = 0; i < a.in + a.out; ++i, ++entry) {
      if (!add(i < a.in ? in : out, entry->address, entry->bytes)) return false;
    }
  }
  return true;
}

}  // namespace ddp
