// SPDX-License-Identifier: Apache-2.0
#include "libddp/observe/flight_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "libddp/base/spin.h"
#include "libddp/comm/host/operation.h"
#include "libddp/observe/json.h"

namespace ddp {
namespace {

constexpr size_t kShownOperations = 4;  // of each rank
constexpr size_t kShownRanks = 8;

constexpr const char* kStateNames[] = {"queued", "announced", "ready", "done", "failed"};

const FlightRecord* Find(const std::vector<FlightRecord>& records, uint64_t sequence) {
  const auto found = std::lower_bound(records.begin(), records.end(), sequence,
                                      [](const FlightRecord& r, uint64_t s) { return r.sequence < s; });
  return found == records.end() || found->sequence != sequence ? nullptr : &*found;
}

const FlightRecord* FirstPending(const std::vector<FlightRecord>& records) {
  const auto found =
      std::find_if(records.begin(), records.end(), [](const auto& r) { return r.state != FlightState::kDone; });
  return found == records.end() ? nullptr : &*found;
}

std::string Call(const FlightRecord& r) {
  return absl::StrCat(OperationKey::Unpack(r.what).Describe(r.count),
                      r.bucket < 0 ? "" : absl::StrCat(", bucket ", r.bucket));
}
std::string Operation(const FlightRecord& r) { return absl::StrCat("operation ", r.sequence, ", ", Call(r)); }

// "rank 2", "ranks 0, 1, 3"
std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

// How far the operation has come; one that failed is where it was then.
FlightState Reached(const FlightRecord& r) {
  if (r.state == FlightState::kDone) return r.state;
  if (r.ns[2] != 0) return FlightState::kReady;
  return r.ns[1] != 0 ? FlightState::kAnnounced : FlightState::kQueued;
}

// When it entered the state that it is in, or was in when it failed.
int64_t Since(const FlightRecord& r) { return r.ns[static_cast<int>(Reached(r))]; }

double Ago(const FlightLog& log, int64_t ns) {
  return static_cast<double>(std::max<int64_t>(0, log.now_ns - ns)) / 1e9;
}

bool IsDead(const FlightLog& log, size_t rank) {
  return std::find(log.dead.begin(), log.dead.end(), static_cast<int>(rank)) != log.dead.end();
}

// What a rank is at, without who it is and for how long: what several ranks do is said once.
std::string Doing(const FlightLog& log, size_t rank, int64_t* since) {
  const std::vector<FlightRecord>& records = log.ranks[rank];
  const std::string died = IsDead(log, rank) ? "dead; " : "";
  if (records.empty()) return died + "no operation called yet";
  const FlightRecord* const pending = FirstPending(records);
  if (pending == nullptr) {
    *since = Since(records.back());
    return absl::StrCat(died, "no operation called since ", Operation(records.back()), ", was done");
  }
  *since = Since(*pending);
  switch (Reached(*pending)) {
    case FlightState::kQueued:
      return absl::StrCat(died, Operation(*pending), ": held back until an earlier one is done everywhere");
    case FlightState::kReady:
      return absl::StrCat(died, Operation(*pending), ": all ranks have come, its data is being exchanged");
    default:
      break;
  }
  std::vector<int> missing;
  for (size_t r = 0; r < log.ranks.size(); ++r) {
    const FlightRecord* const theirs = Find(log.ranks[r], pending->sequence);
    if (theirs == nullptr || Reached(*theirs) == FlightState::kQueued) missing.push_back(log.NameOf(r));
  }
  return absl::StrCat(died, Operation(*pending), ": ",
                      !missing.empty() ? absl::StrCat("waits for ", Ranks(missing))
                      : log.node < 0   ? "all ranks have come"
                                       : "all ranks of this node have come, waits for other nodes");
}

// "called by ranks 0, 2; not by rank 1", or the different calls.
std::string Parting(const FlightLog& log, uint64_t sequence) {
  std::map<std::string, std::vector<int>> callers;
  std::vector<int> missing;
  for (size_t r = 0; r < log.ranks.size(); ++r) {
    const FlightRecord* const record = Find(log.ranks[r], sequence);
    (record == nullptr ? missing : callers[Call(*record)]).push_back(log.NameOf(r));
  }
  const std::string calls = absl::StrJoin(
      callers, "; ", [](std::string* out, const auto& c) { absl::StrAppend(out, c.first, " by ", Ranks(c.second)); });
  return absl::StrCat("the ranks part at operation ", sequence, ": ", calls,
                      missing.empty() ? "" : absl::StrCat("; not called by ", Ranks(missing)));
}

std::string LastOperations(const FlightLog& log, size_t rank) {
  const std::vector<FlightRecord>& records = log.ranks[rank];
  std::string text = absl::StrCat("  last of rank ", log.NameOf(rank), ":");
  for (size_t i = records.size() - std::min(records.size(), kShownOperations); i < records.size(); ++i) {
    const FlightRecord& r = records[i];
    absl::StrAppendFormat(&text, "%s %d %s %s %.1f s ago", text.back() == ':' ? "" : ";", r.sequence, Call(r),
                          kStateNames[static_cast<int>(Reached(r))], Ago(log, Since(r)));
  }
  return text;
}

}  // namespace

FlightLog ReadFlightLog(const FlightIncident& incident) {
  FlightLog log;
  for (const FlightRing* ring : incident.rings) log.ranks.push_back(ring->Read());
  log.dead = incident.dead;
  log.node = incident.node;
  log.names = incident.names;
  log.now_ns = NowNs();
  return log;
}

std::optional<uint64_t> PartingOperation(const FlightLog& log) {
  uint64_t begin = 0, end = 0;
  for (const std::vector<FlightRecord>& records : log.ranks) {
    if (records.empty()) continue;
    begin = std::max(begin, records.front().sequence);
    end = std::max(end, records.back().sequence + 1);
  }
  for (uint64_t s = begin; s < end; ++s) {
    const FlightRecord* first = nullptr;
    for (const std::vector<FlightRecord>& records : log.ranks) {
      if (records.empty() || records.back().sequence < s) return s;
      const FlightRecord* const record = Find(records, s);
      if (record == nullptr) continue;  // was being written when it was read
      if (first == nullptr) first = record;
      if (record->what != first->what || record->count != first->count) return s;
    }
  }
  return std::nullopt;
}

std::string FlightText(const FlightLog& log) {
  std::vector<std::string> lines;
  const std::optional<uint64_t> parting = PartingOperation(log);
  const std::string whose = log.node < 0 ? "all ranks" : absl::StrCat("all ranks of node ", log.node);
  lines.push_back(absl::StrCat(
      "  ", parting.has_value() ? Parting(log, *parting) : whose + " have called the same operations up to here"));
  std::vector<std::pair<std::string, std::vector<int>>> doings;
  std::map<std::string, int64_t> longest;
  for (size_t r = 0; r < log.ranks.size(); ++r) {
    int64_t since = 0;
    std::string doing = Doing(log, r, &since);
    auto same = std::find_if(doings.begin(), doings.end(), [&](const auto& d) { return d.first == doing; });
    if (same == doings.end()) same = doings.insert(doings.end(), {doing, {}});
    same->second.push_back(log.NameOf(r));
    int64_t& earliest = longest.try_emplace(doing, since).first->second;
    earliest = std::min(earliest, since);
  }
  for (const auto& [doing, ranks] : doings) {
    const double seconds = Ago(log, longest[doing]);
    lines.push_back(absl::StrCat("  ", Ranks(ranks), ": ", doing,
                                 longest[doing] == 0 ? "" : absl::StrFormat(" (%.1f s)", seconds)));
  }
  for (size_t r = 0; r < std::min(log.ranks.size(), kShownRanks); ++r) {
    if (!log.ranks[r].empty()) lines.push_back(LastOperations(log, r));
  }
  return absl::StrJoin(lines, "\n");
}

std::string FlightJson(const FlightIncident& incident, const FlightLog& log) {
  const auto operation = [&](std::string* out, const FlightRecord& r) {
    const auto ago = [&](int64_t ns) { return ns == 0 ? std::string("null") : absl::StrFormat("%.3f", Ago(log, ns)); };
    absl::StrAppend(
        out, "{\"sequence\": ", r.sequence, ", \"call\": ", JsonQuote(OperationKey::Unpack(r.what).Describe(r.count)),
        ", \"bucket\": ", r.bucket < 0 ? std::string("null") : absl::StrCat(r.bucket), ", \"state\": \"",
        kStateNames[static_cast<int>(r.state)], "\", \"queued\": ", ago(r.ns[0]), ", \"announced\": ", ago(r.ns[1]),
        ", \"ready\": ", ago(r.ns[2]), ", \"ended\": ", ago(r.ns[3]), "}");
  };
  std::vector<std::string> ranks;
  for (size_t r = 0; r < log.ranks.size(); ++r) {
    int64_t since = 0;
    const std::string doing = Doing(log, r, &since);
    ranks.push_back(absl::StrCat("{\"rank\": ", log.NameOf(r), ", \"dead\": ", IsDead(log, r) ? "true" : "false",
                                 ", \"doing\": ", JsonQuote(doing), ", \"operations\": [\n    ",
                                 absl::StrJoin(log.ranks[r], ",\n    ", operation), "]}"));
  }
  const std::optional<uint64_t> parting = PartingOperation(log);
  return absl::StrCat("{\"incident\": \"", incident.failure ? "failure" : "stall", "\", \"told_by\": ", incident.rank,
                      ", \"message\": ", JsonQuote(incident.what),
                      ", \"parting\": ", parting.has_value() ? absl::StrCat(*parting) : std::string("null"),
                      ",\n \"ranks\": [\n  ", absl::StrJoin(ranks, ",\n  "), "]}\n");
}

}  // namespace ddp
