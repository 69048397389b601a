// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/rendezvous.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libddp/base/failed_ranks.h"

namespace ddp {
namespace {

// How long one look at the store may block: bounds how late a rank learns that another one has failed. More ranks look
// more rarely, so that the store has time for other things.
constexpr absl::Duration kSlice = absl::Milliseconds(20);
constexpr int kRanksPerSlice = 8;
// Enough for a store to answer about a key that is there.
constexpr absl::Duration kLook = absl::Milliseconds(2);
// Where all have come by the deadline, how long rank 0 may take to say so.
constexpr absl::Duration kGrace = absl::Seconds(2);

std::string ListRanks(const std::vector<int>& ranks) {
  constexpr size_t kMostShown = 16;
  const size_t shown = std::min(ranks.size(), kMostShown);
  std::string list = absl::StrJoin(ranks.begin(), ranks.begin() + shown, ", ");
  if (shown < ranks.size()) absl::StrAppend(&list, " and ", ranks.size() - shown, " more");
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", list);
}

std::string KeyOf(absl::string_view name, absl::string_view step) { return absl::StrCat(name, "/", step); }

std::string FailureKey(absl::string_view name) { return KeyOf(name, "failed"); }

constexpr absl::string_view kFailures = "failures";  // counted, by which the first is known

// What a rank has set under FailureKey.
absl::Status Reported(absl::string_view key, absl::string_view report) {
  const std::vector<absl::string_view> parts = absl::StrSplit(report, absl::MaxSplits(' ', 2));
  int code = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &code)) {
    return absl::InternalError(absl::StrCat("key '", key, "' of the store holds no report"));
  }
  return WithPackedFailedRanks(absl::Status(static_cast<absl::StatusCode>(code), parts[2]), parts[1]);
}

// Each value after its size and a space.
std::string Join(const std::vector<std::string>& values) {
  std::string joined;
  for (const std::string& value : values) absl::StrAppend(&joined, value.size(), " ", value);
  return joined;
}

// Undoes Join; false if that is not what Join made of so many values.
bool Split(absl::string_view joined, std::vector<std::string>& values) {
  for (std::string& value : values) {
    const size_t space = joined.find(' ');
    size_t size = 0;
    if (space == absl::string_view::npos || !absl::SimpleAtoi(joined.substr(0, space), &size)) return false;
    joined.remove_prefix(space + 1);
    if (size > joined.size()) return false;
    value = std::string(joined.substr(0, size));
    joined.remove_prefix(size);
  }
  return joined.empty();
}

// Every rank sets "<name>/<round>/<rank>". Rank 0 reads them all and sets "<name>/<round>/all", which the others read:
// 2n calls, where everybody reading everybody's would be n^2, which 64 ranks on few processors feel. Whoever finds an
// error, and is the first to count it in "<name>/failures", sets "<name>/failed". Everybody looks at that while
// waiting, so that all ranks fail at once and with the first cause.
class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(std::shared_ptr<Store> store, int rank, int size, std::string name, std::vector<int> called,
                  std::function<std::vector<int>()> find_dead)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        name_(std::move(name)),
        called_(std::move(called)),
        find_dead_(std::move(find_dead)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view mine, absl::string_view what,
                                                     absl::Time deadline) override {
    std::vector<std::string> all(size_);
    all[rank_] = std::string(mine);
    if (size_ == 1) return all;
    // To the millisecond, so that ten seconds read "10s" and not "9.999998s".
    const absl::Duration allowed = absl::Floor(deadline - absl::Now() + absl::Microseconds(500), absl::Milliseconds(1));
    absl::Status s = Failed();
    if (s.ok() && round_ == 0) s = Claim(deadline);
    if (s.ok()) s = store_->Set(Key(round_, rank_), mine, deadline);
    if (s.ok()) s = Collect(all, allowed, deadline);
    ++round_;
    if (s.ok()) return all;
    return Describe(s, what);
  }

  absl::StatusOr<std::unique_ptr<Wire>> OpenWire() override {
    return absl::UnimplementedError(
        "between nodes libddp sends its messages by MPI; start the program with mpirun, and a libddp that was built "
        "with "
        "MPI (libopenmpi-dev)");
  }

 private:
  std::string Key(absl::string_view step) const { return KeyOf(name_, step); }
  int Called(int rank) const { return called_.empty() ? rank : called_[static_cast<size_t>(rank)]; }
  std::string Key(int64_t round, int rank) const { return absl::StrCat(name_, "/", round, "/", rank); }

  absl::Status Describe(const absl::Status& s, absl::string_view what) const {
    return WithPackedFailedRanks(
        absl::Status(s.code(), absl::StrCat("rank ", Called(rank_), ": ", what, ": ", s.message())),
        PackFailedRanks(s));
  }

  // Tells the others, then returns the error; or what another rank has reported before. That they cannot be told is no
  // news: they will time out.
  absl::Status Fail(absl::StatusCode code, absl::string_view message, const std::vector<int>& ranks = {}) {
    const absl::Status error = WithFailedRanks(absl::Status(code, message), ranks);
    const absl::Time deadline = absl::Now() + absl::Seconds(1);
    const absl::StatusOr<int64_t> failures = store_->Add(Key(kFailures), 1, deadline);
    if (failures.ok() && *failures > 1) {
      const absl::StatusOr<std::string> first = store_->Get(FailureKey(name_), deadline);
      return first.ok() ? Reported(FailureKey(name_), *first) : error;
    }
    (void)store_->Set(FailureKey(name_),
                      absl::StrCat(static_cast<int>(code), " ", PackFailedRanks(error), " rank ", Called(rank_),
                                   " reports: ", message),
                      deadline);
    return error;
  }

  // What another rank reported, if any did.
  absl::Status Failed() {
    const std::string key = FailureKey(name_);
    const absl::StatusOr<std::string> report = store_->Get(key, absl::Now() + kLook);
    if (report.ok()) return Reported(key, *report);
    return absl::IsDeadlineExceeded(report.status()) ? absl::OkStatus() : report.status();
  }

  // Nobody needs to wait until the deadline for a rank that will never come.
  absl::Status FailOfDeaths() {
    std::vector<int> dead;
    if (find_dead_ != nullptr) dead = find_dead_();
    const auto elsewhere = [&](int r) { return std::find(called_.begin(), called_.end(), r) == called_.end(); };
    dead.erase(std::remove_if(dead.begin(), dead.end(), elsewhere), dead.end());
    if (dead.empty()) return absl::OkStatus();
    return Fail(absl::StatusCode::kUnavailable,
                absl::StrCat(ListRanks(dead), " of ", size_, dead.size() == 1 ? " has" : " have",
                             " died before they came; see their own output for the reason"),
                dead);
  }

  // Nobody else may have this rank, and the first to come says how large the world is.
  absl::Status Claim(absl::Time deadline) {
    const absl::StatusOr<int64_t> claims = store_->Add(Key(absl::StrCat("claim/", rank_)), 1, deadline);
    if (!claims.ok()) return claims.status();
    if (*claims > 1) {
      return Fail(
          absl::StatusCode::kFailedPrecondition,
          absl::StrCat("another process, or an earlier Context, has come as rank ", Called(rank_), " of ", size_,
                       " before; give each process a rank of its own, each run a store or run_id of its own, and each "
                       "Context a store of its own"));
    }
    const absl::StatusOr<int64_t> place = store_->Add(Key("arrivals"), 1, deadline);
    if (!place.ok()) return place.status();
    if (*place == 1) return store_->Set(Key("size"), absl::StrCat(size_, " ", rank_), deadline);
    const absl::StatusOr<std::string> first = store_->Get(Key("size"), deadline);
    if (!first.ok()) return first.status();
    if (const size_t space = first->find(' '); first->substr(0, space) != absl::StrCat(size_)) {
      return Fail(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("rank ", rank_, " has world size ", size_, " but rank ", first->substr(space + 1),
                               " has world size ", first->substr(0, space), "; start all ranks with the same one"));
    }
    return absl::OkStatus();
  }

  absl::Status Collect(std::vector<std::string>& all, absl::Duration allowed, absl::Time deadline) {
    const std::string everything = absl::StrCat(name_, "/", round_, "/all");
    if (rank_ != 0) {
      const absl::StatusOr<std::string> joined = Await(everything, 0, allowed, deadline);
      if (!joined.ok()) return joined.status();
      if (Split(*joined, all)) return absl::OkStatus();
      return absl::InternalError(absl::StrCat("key '", everything, "' of the store does not hold ", size_, " values"));
    }
    for (int rank = 1; rank < size_; ++rank) {
      absl::StatusOr<std::string> value = Await(Key(round_, rank), rank, allowed, deadline);
      if (!value.ok()) return value.status();
      all[static_cast<size_t>(rank)] = *std::move(value);
    }
    return store_->Set(everything, Join(all), std::max(deadline, absl::Now() + kGrace));
  }

  // Waits for a key, in slices, and asks between two slices whether somebody failed or died. At the deadline, a last
  // look tells which ranks from `first` on did not come: those after the one we waited for may well be there. If all
  // are, the key is there, too, or rank 0 is about to set it.
  absl::StatusOr<std::string> Await(const std::string& key, int first, absl::Duration allowed, absl::Time deadline) {
    const absl::Duration slice = kSlice * std::max(1, size_ / kRanksPerSlice);
    for (absl::Time until = deadline;;) {
      absl::StatusOr<std::string> value = store_->Get(key, std::min(until, absl::Now() + slice));
      if (value.ok() || !absl::IsDeadlineExceeded(value.status())) return value;
      if (absl::Status s = Failed(); !s.ok()) return s;
      if (absl::Status s = FailOfDeaths(); !s.ok()) return s;
      if (absl::Now() < until) continue;
      if (absl::Status s = CheckAllCame(first, allowed); !s.ok()) return s;
      if (until > deadline) return Silent(allowed);
      until = absl::Now() + kGrace;
    }
  }

  absl::Status CheckAllCame(int first, absl::Duration allowed) {
    std::vector<int> missing;
    for (int rank = first; rank < size_; ++rank) {
      if (rank != rank_ && !store_->Get(Key(round_, rank), absl::Now() + kLook).ok()) missing.push_back(Called(rank));
    }
    if (missing.empty()) return absl::OkStatus();
    return Fail(absl::StatusCode::kDeadlineExceeded,
                absl::StrCat(ListRanks(missing), " of ", size_, " did not come within ", absl::FormatDuration(allowed),
                             "; is every rank started, and with the same store?"),
                missing);
  }

  // Of rank 0, or of a store that has a key and does not give it.
  absl::Status Silent(absl::Duration allowed) {
    return Fail(absl::StatusCode::kDeadlineExceeded,
                absl::StrCat("all ", size_, " ranks came within ", absl::FormatDuration(allowed), ", but rank ",
                             Called(0), ", which was to tell them, is silent; is it stopped, or stuck?"),
                {Called(0)});
  }

  const std::shared_ptr<Store> store_;
  const int rank_;
  const int size_;
  const std::string name_;
  const std::vector<int> called_;
  const std::function<std::vector<int>()> find_dead_;
  int64_t round_ = 0;
};

}  // namespace

std::unique_ptr<Rendezvous> CreateStoreRendezvous(std::shared_ptr<Store> store, int rank, int size, std::string name,
                                                  std::vector<int> called,
                                                  std::function<std::vector<int>()> find_dead) {
  return std::make_unique<StoreRendezvous>(std::move(store), rank, size, std::move(name), std::move(called),
                                           std::move(find_dead));
}

absl::Status StoreRendezvousFailure(Store& store, absl::string_view name) {
  const std::string key = FailureKey(name);
  const absl::StatusOr<std::string> report = store.Get(key, absl::Now() + kLook);
  return report.ok() ? Reported(key, *report) : absl::OkStatus();
}

}  // namespace ddp
