// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/store_contract.h"

#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <set>
#include <thread>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"

namespace ddp {

pid_t Spawn(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  REQUIRE(child > 0);
  return child;
}

bool Succeeded(pid_t child) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void CheckStatus(const absl::Status& status, absl::StatusCode code, const std::vector<std::string>& parts) {
  INFO(status.ToString());
  CHECK(status.code() == code);
  for (const std::string& part : parts) {
    INFO("lacks " << part);
    CHECK(absl::StrContains(status.message(), part));
  }
}

// Through both of these, what one rank uses each.
void CheckCounters(Store& a, Store& b) {
  // Counters start at 0, go down too, and are no values.
  CHECK(a.Add("count", 5, Soon()).value() == 5);
  CHECK(b.Add("count", -7, Soon()).value() == -2);
  CHECK(a.Add("count", 0, Soon()).value() == -2);

  // They stay as they are where a sum is no int64_t.
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max(), kLowest = std::numeric_limits<int64_t>::min();
  for (const auto& [key, end, step] : {std::tuple("high", kHighest, 1), std::tuple("low", kLowest, -1)}) {
    CHECK(a.Add(key, end, Soon()).value() == end);
    for (const int64_t delta : {int64_t{step}, end}) {
      CheckStatus(b.Add(key, delta, Soon()).status(), absl::StatusCode::kOutOfRange,
                  {"store", absl::StrCat("'", key, "' is ", end), absl::StrCat("plus ", delta)});
      CHECK(a.Add(key, 0, Soon()).value() == end);
    }
    CHECK(b.Add(key, -step, Soon()).value() == end - step);
  }
}

void CheckContract(const std::function<std::shared_ptr<Store>()>& open) {
  const std::shared_ptr<Store> a = open();
  const std::shared_ptr<Store> b = open();

  // Any bytes, and the last value counts.
  const std::string bytes("\0\n\xff", 3);
  CHECK(a->Set("key", "old", Soon()).ok());
  CHECK(a->Set("key", bytes, Soon()).ok());
  CHECK(a->Set(bytes, "", Soon()).ok());
  CHECK(b->Get("key", Soon()).value() == bytes);
  CHECK(b->Get(bytes, Soon()).value().empty());

  // Keys and values have bounds.
  const std::string key(1024, 'k'), value(size_t{16} << 20, 'v');
  CHECK(a->Set(key, value, Soon()).ok());
  CHECK(b->Get(key, Soon()).value() == value);
  CheckStatus(a->Set(key + "k", "", Soon()), absl::StatusCode::kInvalidArgument, {"1025", "1024"});
  CheckStatus(a->Set("k", value + "v", Soon()), absl::StatusCode::kInvalidArgument, {"16777217", "16777216"});
  CheckStatus(a->Get(key + "k", Soon()).status(), absl::StatusCode::kInvalidArgument, {"1025"});
  CheckStatus(a->Add(key + "k", 1, Soon()).status(), absl::StatusCode::kInvalidArgument, {"1025"});

  CheckCounters(*a, *b);

  // What is there is given even when the deadline has passed; what is not costs no time then.
  CHECK(b->Get("key", absl::InfinitePast()).ok());
  CheckStatus(a->Get("nobody", absl::InfinitePast()).status(), absl::StatusCode::kDeadlineExceeded, {"'nobody'"});
  const absl::Time start = absl::Now();
  CheckStatus(a->Get("nobody", start + absl::Milliseconds(50)).status(), absl::StatusCode::kDeadlineExceeded,
              {"'nobody'"});
  CHECK(absl::Now() - start >= absl::Milliseconds(50));

  // A Get that waits sees a later Set, with no deadline too.
  absl::StatusOr<std::string> late = absl::UnknownError("did not run");
  std::thread reader([&] { late = b->Get("late", absl::InfiniteFuture()); });
  absl::SleepFor(absl::Milliseconds(20));
  CHECK(a->Set("late", "came", Soon()).ok());
  reader.join();
  CHECK(late.value() == "came");
}

void CheckThreads(const std::function<std::shared_ptr<Store>()>& open) {
  constexpr int kThreads = 4;
  constexpr int kAdds = 100;
  const std::shared_ptr<Store> stores[2] = {open(), open()};
  std::vector<int64_t> totals[kThreads];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Store& store = *stores[t % 2];
      for (int i = 0; i < kAdds; ++i) totals[t].push_back(store.Add("hits", 1, Soon()).value_or(-1));
      (void)store.Set(absl::StrCat("done/", t), "", Soon());
      for (int other = 0; other < kThreads; ++other) {
        if (!store.Get(absl::StrCat("done/", other), Soon()).ok()) totals[t].push_back(-1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> all;
  for (const auto& mine : totals) all.insert(mine.begin(), mine.end());
  CHECK(all.size() == kThreads * kAdds);
  CHECK(*all.begin() == 1);
  CHECK(*all.rbegin() == kThreads * kAdds);
}

}  // namespace ddp
