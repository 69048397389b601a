// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/auto_group.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/nccl/advice.h"
#include "libddp/comm/probe/hierarchical_trial.h"
#include "libddp/comm/probe/probe_cache.h"
#include "libddp/comm/staged/staged_group.h"

namespace ddp {
namespace {

enum class Way { kNccl, kNcclWithoutP2p, kHierarchical };

// What the ranks' trials of the hierarchical backend say against it; empty if all have passed.
std::string Objection(const std::vector<ProbeResult>& trials, absl::string_view more_time) {
  const int failed = FirstFailure(trials);
  if (failed < 0) return "";
  const ProbeResult& result = trials[static_cast<size_t>(failed)];
  return absl::StrCat("on rank ", failed, " ", StepName(result.step), " ", HowItFailed(result),
                      result.short_ms > 0 ? "; " : "", result.short_ms > 0 ? more_time : "");
}

// What a trial of the hierarchical backend gets in any case.
constexpr absl::Duration kLeastTrial = absl::Seconds(1);

class Chooser {
 public:
  Chooser(std::unique_ptr<ProcessGroup> control, const AutoGroupOptions& options)
      : control_(std::move(control)), options_(options), trial_(options), end_(absl::Now() + options.timeout) {
    trial_.stall_warning = absl::ZeroDuration();
    trial_.observer = nullptr;
  }

  absl::StatusOr<AutoGroup> Choose() {
    const absl::StatusOr<Way> way = FindWay();
    if (!way.ok()) return way.status();
    return *way == Way::kHierarchical ? OverHostMemory() : OverNccl(*way == Way::kNcclWithoutP2p);
  }

  absl::StatusOr<AutoPrediction> Predict() {
    const absl::StatusOr<Way> way = FindWay();
    if (!way.ok()) return way.status();
    if (*way != Way::kHierarchical) return AutoPrediction{ChoiceOf("nccl", *way == Way::kNcclWithoutP2p), report_};
    const absl::StatusOr<std::string> objection = AgainstHierarchical();
    if (!objection.ok()) return objection.status();
    AutoPrediction prediction{ChoiceOf("hierarchical", false), report_};
    if (!objection->empty()) {
      prediction.choice.backend.clear();
      prediction.choice.text = NoBackendWorks(*objection);
    }
    return prediction;
  }

 private:
  // What the check of the ranks' GPUs and of NCCL comes to.
  absl::StatusOr<Way> FindWay() {
    if (absl::Status s = CheckGpus(); !s.ok()) return s;
    absl::StatusOr<ProbeReport> report = Probe();
    if (!report.ok()) return report.status();
    report_ = *std::move(report);
    return Pick();
  }

  absl::StatusOr<AutoGroup> OverNccl(bool without_p2p) {
    if (without_p2p) {
      if (absl::Status s = DisableP2p(); !s.ok()) return s;
    }
    // NCCL's failure would take `control_` along.
    absl::StatusOr<std::unique_ptr<ProcessGroup>> spare = control_->Split(0, control_->rank());
    if (!spare.ok()) return spare.status();
    NcclGroupOptions nccl = options_;
    nccl.always_abortable = true;
    if (without_p2p) nccl.peer_copies = {};
    nccl.start_limit =
        TimeOfAttempt(4 * options_.probe.limit, end_, std::min(options_.probe.least, options_.timeout)).time;
    absl::StatusOr<std::unique_ptr<ProcessGroup>> group = CreateNcclGroup(std::move(control_), nccl);
    if (group.ok()) return Chosen(*std::move(group), without_p2p);

    ProbeCache(options_.probe.cache).Forget(report_.key);
    report_ = AfterCheck(group.status(), report_);
    control_ = *std::move(spare);
    return OverHostMemory();
  }

  // What is to be said of NCCL that has passed its check, and then failed. What the check had found against P2P still
  // holds.
  static ProbeReport AfterCheck(const absl::Status& status, const ProbeReport& check) {
    ProbeReport report;
    report.failed_step = "making the group, after the check had passed,";
    report.how = absl::StrCat("failed (", status.message(), ")");
    const nccl::CauseAndRemedy known = nccl::Recognise(status.message(), nccl::kInternalError, 0);
    report.cause = known.cause;
    report.remedy = known.remedy;
    if (report.cause.empty() && absl::IsDataLoss(status)) report.cause = "GPUs read each other's memory wrongly";
    if (report.cause.empty() && absl::IsDeadlineExceeded(status)) report.cause = "a rank is stuck, or had no time left";
    if (report.remedy.empty() && absl::IsDeadlineExceeded(status)) report.remedy = kMoreTime;
    if (report.remedy.empty()) report.remedy = "start again, which repeats the check; NCCL_DEBUG=INFO says more";
    if (check.how.empty()) return report;
    absl::StrAppend(&report.how, ", and with P2P, before, on rank ", check.failed_rank, " ", check.failed_step, " ",
                    check.how);
    absl::StrAppend(&report.cause, report.cause.empty() ? "" : "; with P2P: ", check.cause);
    absl::StrAppend(&report.remedy, "; ", check.remedy);
    return report;
  }

  // No backend helps where a GPU is missing, or where hosts cannot tell each other of failures.
  absl::Status CheckGpus() {
    absl::Status mine = options_.runtime->Identity(options_.device).status();
    if (!mine.ok()) {
      const absl::Status better = options_.runtime->Check(options_.device);
      if (!better.ok()) mine = better;
    }
    if (mine.ok()) mine = CheckBackground(*control_);
    return Agree(*control_, mine);
  }

  absl::StatusOr<std::vector<ProbeResult>> Try(bool timing) {
    const AttemptTime time = TimeOfAttempt(options_.probe.limit, end_, std::min(kLeastTrial, options_.timeout));
    return TryHierarchical(*control_, trial_, time, timing);
  }

  absl::StatusOr<ProbeReport> Probe() {
    ProbeNcclOptions probe = options_.probe;
    probe.end = end_;
    probe.device = options_.device;
    probe.runtime = options_.runtime;
    probe.api = options_.api;
    probe.host = options_.host;
    // NCCL without P2P has to be faster than what comes next.
    probe.complete = [this](ProbeReport& report) -> absl::Status {
      const absl::StatusOr<std::vector<ProbeResult>> trials = Try(/*timing=*/true);
      if (!trials.ok()) return trials.status();
      if (FirstFailure(*trials) < 0) report.micros_hierarchical = Slowest(*trials);
      for (const ProbeResult& trial : *trials) report.hurried = report.hurried || trial.short_ms > 0;
      return absl::OkStatus();
    };
    return ProbeNccl(*control_, probe);
  }

  absl::StatusOr<Way> Pick() {
    struct Facts {
      bool nccl_started = false;
      double nccl = 0, hierarchical = 0;  // microseconds
    };
    const absl::StatusOr<std::vector<Facts>> all =
        Exchange(*control_, Facts{options_.nccl_started, ComparisonTime(report_.micros_without_p2p),
                                  ComparisonTime(report_.micros_hierarchical)});
    if (!all.ok()) return all.status();
    if (report_.verdict == ProbeVerdict::kWorks) return Way::kNccl;
    if (report_.verdict != ProbeVerdict::kWorksWithoutP2p) return Way::kHierarchical;
    if (std::any_of(all->begin(), all->end(), [](const Facts& f) { return f.nccl_started; })) {
      reason_ = "this process has used NCCL with P2P before, and NCCL does not give that up";
      return Way::kHierarchical;
    }
    const Facts& facts = all->front();
    if (facts.hierarchical == 0 || facts.nccl <= facts.hierarchical) return Way::kNcclWithoutP2p;
    reason_ = absl::StrFormat(
        "hierarchical is faster than that: %.0f us instead of %.0f us, the geometric mean of all-reduces of 64 KiB, 1, "
        "16 and 64 MiB",
        facts.hierarchical, facts.nccl);
    nccl_is_next_ = true;
    return Way::kHierarchical;
  }

  // Ranks that are threads share their variables: between the exchange before and the barrier behind nobody reads them.
  absl::Status DisableP2p() {
    {
      static auto* const mutex = new std::mutex;
      const std::lock_guard<std::mutex> lock(*mutex);
      SetEnv(Env::kNcclP2pDisable, "1");
    }
    return control_->Barrier().Wait();
  }

  // What speaks against the hierarchical backend; it is tried out where it has not been yet, or not at this start.
  absl::StatusOr<std::string> AgainstHierarchical() {
    if (!report_.from_cache && ComparisonTime(report_.micros_hierarchical) != 0) return "";
    const absl::StatusOr<std::vector<ProbeResult>> trials = Try(/*timing=*/false);
    if (!trials.ok()) return trials.status();
    return Objection(*trials, options_.probe.more_time);
  }

  std::string NoBackendWorks(absl::string_view objection) const {
    return absl::StrCat("no backend works on these GPUs. nccl: ", Describe(report_), ". hierarchical: ", objection);
  }

  absl::StatusOr<AutoGroup> OverHostMemory() {
    const absl::StatusOr<std::string> objection = AgainstHierarchical();
    if (!objection.ok()) return objection.status();
    if (!objection->empty()) {
      if (std::exchange(nccl_is_next_, false)) {
        ProbeCache(options_.probe.cache).Forget(report_.key);
        reason_ = absl::StrCat("hierarchical was faster than that, but now fails: ", *objection);
        return OverNccl(/*without_p2p=*/true);
      }
      return absl::FailedPreconditionError(absl::StrCat("rank ", control_->rank(), ": ", NoBackendWorks(*objection)));
    }
    absl::StatusOr<std::unique_ptr<ProcessGroup>> group = CreateStagedGroup(std::move(control_), options_);
    if (!group.ok()) return group.status();
    return Chosen(*std::move(group), false);
  }

  BackendChoice ChoiceOf(absl::string_view backend, bool without_p2p) const {
    BackendChoice choice;
    choice.backend = std::string(backend);
    choice.without_p2p = without_p2p;
    choice.from_cache = report_.from_cache;
    choice.failed_rank = report_.failed_rank;
    choice.failed_step = report_.failed_step;
    choice.failure = report_.how;
    choice.cause = report_.cause;
    choice.remedy = report_.remedy;
    choice.text = absl::StrCat("backend ", choice.backend, without_p2p ? " without P2P" : "", ": ", Describe(report_),
                               reason_.empty() ? "" : "; ", reason_);
    return choice;
  }

  AutoGroup Chosen(std::unique_ptr<ProcessGroup> group, bool without_p2p) const {
    BackendChoice choice = ChoiceOf(group->backend(), without_p2p);
    if (group->rank() == 0) Report(choice);
    return {std::move(group), std::move(choice),
            [cache = options_.probe.cache, key = report_.key] { ProbeCache(cache).Forget(key); }};
  }

  void Report(const BackendChoice& choice) const {
    // A build without NCCL is nobody's mistake.
    const bool expected = choice.failure.empty()
                              ? report_.warning.empty()
                              : !options_.api.has_value() && absl::IsUnimplemented(nccl::Load().status());
    if (expected) {
      LogInfo("rank 0: ", choice.text);
    } else {
      LogWarn("rank 0: ", choice.text);
    }
  }

  std::unique_ptr<ProcessGroup> control_;
  const AutoGroupOptions& options_;
  DeviceGroupOptions trial_;
  const absl::Time end_;
  ProbeReport report_;
  std::string reason_;         // beyond the report
  bool nccl_is_next_ = false;  // without P2P, if what is faster fails
};

}  // namespace

absl::StatusOr<AutoGroup> CreateAutoGroup(std::unique_ptr<ProcessGroup> control, const AutoGroupOptions& options) {
  return Chooser(std::move(control), options).Choose();
}

absl::StatusOr<AutoPrediction> PredictAutoGroup(std::unique_ptr<ProcessGroup> control,
                                                const AutoGroupOptions& options) {
  return Chooser(std::move(control), options).Predict();
}

}  // namespace ddp
