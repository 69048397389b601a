// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/probe_nccl.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ddp/collectives.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/nccl/nccl_group.h"
#include "libddp/comm/probe/helper_process.h"
#include "libddp/comm/probe/probe.h"

namespace ddp {
namespace {

constexpr absl::Duration kRoundEvery = absl::Milliseconds(10);
// What the others get to fail by themselves, or to pass, once one has failed.
constexpr absl::Duration kAfterFailure = absl::Seconds(1);
// All runs of one collective take far less between healthy GPUs.
constexpr absl::Duration kSlowStep = absl::Milliseconds(500);

using Results = std::vector<ProbeResult>;

// The ranks tell each other again and again how their probes stand, so that all end together, and soon after the first
// failure. NCCL's id travels along.
class Rounds {
 public:
  explicit Rounds(ProcessGroup& control) : control_(control) {}

  absl::Status Next(ProbeState mine, const std::optional<nccl::UniqueId>& id) {
    Standing mine_now;
    mine_now.state = mine;
    mine_now.waited_ms = failed() ? absl::ToInt64Milliseconds(absl::Now() - failed_at_) : 0;
    mine_now.has_id = id.has_value();
    if (id.has_value()) mine_now.id = *id;
    const absl::StatusOr<std::vector<Standing>> all = Exchange(control_, mine_now);
    if (!all.ok()) return all.status();
    if (all->front().has_id) id_ = all->front().id;
    const auto count = [&](auto&& which) { return std::count_if(all->begin(), all->end(), which); };
    const auto running = count([](const Standing& n) { return n.state == ProbeState::kRunning; });
    const auto passed = count([](const Standing& n) { return n.state == ProbeState::kPassed; });
    if (running + passed < control_.size() && !failed()) failed_at_ = absl::Now();
    // By the clock of one rank, so that all agree.
    over_ = running == 0 || absl::Milliseconds(all->front().waited_ms) >= kAfterFailure;
    return absl::OkStatus();
  }
  bool over() const { return over_; }
  bool failed() const { return failed_at_ != absl::InfiniteFuture(); }
  const std::optional<nccl::UniqueId>& id() const { return id_; }

 private:
  struct Standing {
    ProbeState state = ProbeState::kRunning;
    bool has_id = false;
    int64_t waited_ms = 0;  // since it learnt of a failure
    nccl::UniqueId id = {};
  };
  ProcessGroup& control_;
  absl::Time failed_at_ = absl::InfiniteFuture();
  bool over_ = false;
  std::optional<nccl::UniqueId> id_;
};

AttemptTime TimeNow(const ProbeNcclOptions& options) {
  return TimeOfAttempt(options.limit, options.end, options.least);
}

bool IsCollective(const ProbeResult& result) {
  return kProbeSteps[static_cast<size_t>(result.step)].kind >= ProbeStep::Kind::kAllReduce;
}

// Notes how long a hang was watched, where that was short.
void NoteShortTime(AttemptTime time, ProbeResult* result) {
  if (result->state != ProbeState::kHang) return;
  if (IsCollective(*result)) time.time = TimeOfCollective(time.time);
  result->short_ms = time.short_ms();
}

constexpr char kStoppedText[] = "another rank had failed";

bool AnyHelperFailed(const Results& results) {
  return std::any_of(results.begin(), results.end(), [](const ProbeResult& r) {
    // A GPU that admits one process only may be this process's already.
    const bool occupied =
        r.state == ProbeState::kError && kProbeSteps[static_cast<size_t>(r.step)].kind == ProbeStep::Kind::kDevice;
    return HelperFailed(r.state) || occupied;
  });
}

// One attempt by helpers: this rank's part. Its helper starts at once, and ends with this object; NCCL begins in Run.
class HelperAttempt {
 public:
  HelperAttempt(ProcessGroup& control, const ProbeNcclOptions& options, const std::string& program, bool without_p2p)
      : control_(control),
        time_(TimeNow(options)),
        helper_(HelperProcess::Start({.program = program,
                                      .environment = HelperEnvironment(AllVariables(), without_p2p),
                                      .rank = control.rank(),
                                      .size = control.size(),
                                      .device = options.device.index,
                                      .limit = time_.time,
                                      .timing = without_p2p})) {}

  // Whether nothing has gone wrong so far, before Run.
  bool usable() const { return helper_.ok() && (*helper_)->Poll().state <= ProbeState::kPassed; }

  // Collective. `when_slow` is called once if this rank's helper stays in a collective for longer than usual.
  absl::StatusOr<Results> Run(const std::function<void()>& when_slow) {
    ProbeResult mine;
    if (!helper_.ok()) mine.Fail(ProbeState::kNoHelper, helper_.status().message());
    bool id_sent = control_.rank() == 0, slow = false;
    absl::Time step_begin = absl::Now();
    for (Rounds rounds(control_); !rounds.over();) {
      if (helper_.ok()) {
        const int step = mine.step;
        mine = (*helper_)->Poll();
        if (mine.step != step) step_begin = absl::Now();
      }
      if (absl::Status s = rounds.Next(mine.state, helper_.ok() ? (*helper_)->id() : std::nullopt); !s.ok()) return s;
      if (helper_.ok() && !id_sent && rounds.id().has_value()) {
        (*helper_)->SendId(*rounds.id());
        id_sent = true;
      }
      const bool waits = mine.state == ProbeState::kRunning && IsCollective(mine) && !rounds.failed();
      if (waits && !slow && absl::Now() - step_begin >= kSlowStep) {
        slow = true;
        when_slow();
      }
      if (!rounds.over()) absl::SleepFor(kRoundEvery);
    }
    if (mine.state == ProbeState::kRunning) mine.Fail(ProbeState::kStopped, kStoppedText);
    NoteShortTime(time_, &mine);
    return Exchange(control_, mine);  // before this rank's helper ends
  }

 private:
  ProcessGroup& control_;
  const AttemptTime time_;
  absl::StatusOr<std::unique_ptr<HelperProcess>> helper_;
};

// NCCL in helpers, as it is configured and, where it fails so, without P2P. No helper is left when it returns.
struct HelperResults {
  Results configured;
  Results without_p2p;  // empty if that was not tried
};
absl::StatusOr<HelperResults> TryInHelpers(ProcessGroup& control, const ProbeNcclOptions& options,
                                           const std::string& program, bool p2p_disabled) {
  const auto start = [&](bool without_p2p) {
    return std::make_unique<HelperAttempt>(control, options, program, without_p2p);
  };
  // CUDA takes a second or two to start, so where a collective seems to hang the next helper starts meanwhile.
  std::unique_ptr<HelperAttempt> next;
  std::unique_ptr<HelperAttempt> attempt = start(false);
  absl::StatusOr<Results> configured = attempt->Run([&] {
    if (!p2p_disabled) next = start(true);
  });
  attempt.reset();
  if (!configured.ok()) return configured.status();
  HelperResults results{*std::move(configured), {}};
  if (AnyHelperFailed(results.configured) || !WorthTryingWithoutP2p(results.configured, p2p_disabled)) return results;
  // A GPU that admits one process only has refused it.
  if (next == nullptr || !next->usable()) next = start(true);
  absl::StatusOr<Results> without_p2p = next->Run([] {});
  if (!without_p2p.ok()) return without_p2p.status();
  results.without_p2p = *std::move(without_p2p);
  return results;
}

// One attempt in this process.
absl::StatusOr<Results> TryHere(ProcessGroup& control, const ProbeNcclOptions& options,
                                const absl::StatusOr<nccl::Api>& api) {
  struct Mail {
    std::mutex mutex;
    std::optional<nccl::UniqueId> id;
    bool closed = false;
  };
  const auto mail = std::make_shared<Mail>();
  nccl::MarkStarted();
  Rounds rounds(control);
  absl::Status control_status;
  absl::Time next = absl::InfinitePast();
  const auto take_turn = [&](ProbeState mine) {
    if (absl::Now() < next || rounds.over() || !control_status.ok()) return;
    next = absl::Now() + kRoundEvery;
    std::optional<nccl::UniqueId> id;
    {
      const std::lock_guard<std::mutex> lock(mail->mutex);
      id = mail->id;
    }
    control_status = rounds.Next(mine, id);
    const std::lock_guard<std::mutex> lock(mail->mutex);
    if (rounds.id().has_value()) mail->id = rounds.id();
  };
  ProbeOptions probe;
  probe.rank = control.rank();
  probe.size = control.size();
  probe.device = options.device;
  const AttemptTime time = TimeNow(options);
  probe.limit = time.time;
  const bool first = control.rank() == 0;
  probe.exchange_id = [mail, first](nccl::UniqueId* id) -> absl::Status {
    while (true) {
      {
        const std::lock_guard<std::mutex> lock(mail->mutex);
        if (first) mail->id = *id;
        if (mail->closed) return absl::AbortedError(kStoppedText);
        if (mail->id.has_value()) {
          *id = *mail->id;
          return absl::OkStatus();
        }
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  };
  probe.interrupted = [&]() -> absl::Status {
    take_turn(ProbeState::kRunning);
    if (!control_status.ok()) return control_status;
    return rounds.over() ? absl::AbortedError(kStoppedText) : absl::OkStatus();
  };
  ProbeRun run = RunProbe(*options.runtime, api, probe);
  {
    const std::lock_guard<std::mutex> lock(mail->mutex);
    mail->closed = true;
  }
  while (!rounds.over() && control_status.ok()) {
    take_turn(run.result.state);
    absl::SleepFor(absl::Milliseconds(1));
  }
  if (!control_status.ok()) return control_status;
  NoteShortTime(time, &run.result);
  return Exchange(control, run.result);  // before this rank lets its communicator go
}

bool P2pDisabled() {
  const std::optional<std::string> disabled = ReadEnv(Env::kNcclP2pDisable), level = ReadEnv(Env::kNcclP2pLevel);
  return (disabled.has_value() && *disabled != "0") ||
         (level.has_value() && (absl::EqualsIgnoreCase(*level, "LOC") || *level == "0"));
}

// What a rank brings along.
struct Preparation {
  absl::StatusOr<nccl::Api> api;
  std::string version;  // of NCCL
  absl::StatusOr<std::string> gpu;
  absl::StatusOr<std::string> helper;
  std::string key;  // empty: nothing can be remembered

  // As the first steps of a probe: kStopped if there is nothing to object to.
  ProbeResult FirstSteps() const {
    ProbeResult result;
    result.state = ProbeState::kStopped;
    if (!api.ok()) {
      result.Fail(ProbeState::kError, api.status().message());
    } else if (!gpu.ok()) {
      result.step = FirstStepOf(ProbeStep::Kind::kDevice);
      result.Fail(ProbeState::kError, gpu.status().message());
    }
    return result;
  }
};

Preparation Prepare(const ProbeNcclOptions& options) {
  Preparation mine;
  mine.api = options.api.has_value() ? absl::StatusOr<nccl::Api>(*options.api) : nccl::Load();
  mine.gpu = options.runtime->Identity(options.device);
  mine.helper = FindProbeHelper(options.helper);
  if (!mine.api.ok()) return mine;
  const absl::StatusOr<nccl::Features> features = nccl::FeaturesOf(*mine.api);
  if (!features.ok()) {
    mine.api = features.status();
    return mine;
  }
  mine.version = features->version_text();
  if (!options.cache.empty()) {
    mine.key = ProbeKey(*options.runtime, options.device, features->version, AllVariables(), options.root);
  }
  return mine;
}

// All ranks' keys together; empty on all if one has none.
absl::StatusOr<std::string> KeyOfAll(ProcessGroup& control, const std::string& mine) {
  const absl::StatusOr<std::vector<std::string>> keys = GatherStrings(control, mine);
  if (!keys.ok()) return keys.status();
  const bool complete = std::none_of(keys->begin(), keys->end(), [](const std::string& key) { return key.empty(); });
  return complete ? absl::StrJoin(*keys, "\n\n") : "";
}

// What is remembered of these ranks and GPUs, if every rank remembers the same.
absl::StatusOr<std::optional<ProbeReport>> Recall(ProcessGroup& control, const ProbeNcclOptions& options,
                                                  const std::string& key) {
  const std::optional<ProbeReport> mine = options.fresh ? std::nullopt : ProbeCache(options.cache).Load(key);
  const auto join = [](const auto& micros) { return absl::StrJoin(micros, ","); };
  const absl::StatusOr<std::vector<std::string>> all = GatherStrings(
      control, mine.has_value() ? absl::StrCat(static_cast<int>(mine->verdict), Describe(*mine), join(mine->micros),
                                               join(mine->micros_without_p2p), join(mine->micros_hierarchical))
                                : "");
  if (!all.ok()) return all.status();
  const bool same =
      mine.has_value() && std::all_of(all->begin(), all->end(), [&](const auto& t) { return t == all->front(); });
  return same ? mine : std::nullopt;
}

// What does not work may work again at the next start: a GPU that was full, a peer that was late. NCCL without P2P that
// was compared with nothing would win every later comparison, and where time was short P2P may be blamed for nothing.
bool WorthRemembering(const ProbeReport& report, const ProbeNcclOptions& options) {
  return report.verdict == ProbeVerdict::kWorks ||
         (report.verdict == ProbeVerdict::kWorksWithoutP2p && options.complete != nullptr && !report.hurried);
}

absl::StatusOr<ProbeReport> Probe(ProcessGroup& control, const ProbeNcclOptions& options, const Preparation& mine,
                                  bool p2p_disabled, const std::string& why_here) {
  std::string note = why_here;
  if (note.empty()) {
    const absl::StatusOr<HelperResults> results = TryInHelpers(control, options, *mine.helper, p2p_disabled);
    if (!results.ok()) return results.status();
    if (!AnyHelperFailed(results->configured))
      return Judge(results->configured, results->without_p2p, p2p_disabled, options.more_time);
    const int rank = FirstFailure(results->configured);
    note =
        absl::StrCat("the helper of rank ", rank, " failed: ", results->configured[static_cast<size_t>(rank)].text());
  }
  const absl::StatusOr<Results> here = TryHere(control, options, mine.api);
  if (!here.ok()) return here.status();
  ProbeReport report = Judge(*here, {}, p2p_disabled, options.more_time);
  report.note = absl::StrCat("checked without ddp_probe, since ", note);
  return report;
}

}  // namespace

AttemptTime TimeOfAttempt(absl::Duration usual, absl::Time end, absl::Duration least) {
  const absl::Duration most = std::max((end - absl::Now()) / 2, least);
  return {std::min(usual, most), most < usual / 2};
}

absl::StatusOr<ProbeReport> ProbeNccl(ProcessGroup& control, const ProbeNcclOptions& options) {
  const Preparation mine = Prepare(options);
  struct Start {
    bool p2p_disabled = false;
    Note helper;
    ProbeResult first_steps;
  } start;
  start.p2p_disabled = P2pDisabled();
  start.helper = Note(mine.helper.status(), "");
  start.first_steps = mine.FirstSteps();
  const absl::StatusOr<std::vector<Start>> all = Exchange(control, start);
  if (!all.ok()) return all.status();

  Results first_steps;
  std::string why_here;
  bool p2p_disabled = true;
  for (const Start& s : *all) {
    first_steps.push_back(s.first_steps);
    p2p_disabled = p2p_disabled && s.p2p_disabled;
    if (why_here.empty() && s.helper.code != 0) {
      why_here = absl::StrCat("rank ", first_steps.size() - 1, " has none: ", s.helper.text);
    }
  }
  const bool failed = std::any_of(first_steps.begin(), first_steps.end(),
                                  [](const ProbeResult& r) { return r.state == ProbeState::kError; });
  if (failed) return Judge(first_steps, {}, p2p_disabled);
  if (absl::Status s = CheckNcclRanks(control, mine.version, *mine.gpu, options.host); !s.ok()) {
    if (!absl::IsFailedPrecondition(s)) return s;
    ProbeReport report;
    report.failed_step = "comparing the ranks";
    report.how = absl::StrCat("failed (", s.message(), ")");
    return report;
  }

  const absl::StatusOr<std::string> key = KeyOfAll(control, mine.key);
  if (!key.ok()) return key.status();
  if (!key->empty()) {
    absl::StatusOr<std::optional<ProbeReport>> known = Recall(control, options, *key);
    if (!known.ok()) return known.status();
    if (known->has_value()) {
      (**known).key = *key;
      return **known;
    }
  }
  absl::StatusOr<ProbeReport> report = Probe(control, options, mine, p2p_disabled, why_here);
  if (!report.ok()) return report;
  if (report->verdict == ProbeVerdict::kWorksWithoutP2p && options.complete) {
    if (absl::Status s = options.complete(*report); !s.ok()) return s;
  }
  if (options.remember && WorthRemembering(*report, options)) {
    if (absl::Status s = ProbeCache(options.cache).Store(*key, *report); !s.ok()) {
      LogInfo("rank ", control.rank(), ": the probe's result is not remembered: ", s.message());
    }
    report->key = *key;
  }
  return report;
}

absl::StatusOr<std::optional<ProbeReport>> RecallProbe(ProcessGroup& control, const ProbeNcclOptions& options) {
  const absl::StatusOr<std::string> key = KeyOfAll(control, Prepare(options).key);
  if (!key.ok()) return key.status();
  return key->empty() ? std::optional<ProbeReport>() : Recall(control, options, *key);
}

}  // namespace ddp
