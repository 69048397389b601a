// SPDX-License-Identifier: Apache-2.0
#include "ddp/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "tests/unit/store_contract.h"

namespace ddp {
namespace {

std::shared_ptr<Store> OpenOrNull(const std::string& path, const std::string& run_id = "run", int world_size = 0) {
  auto store = CreateFileStore({path, run_id, world_size});
  return store.ok() ? *store : nullptr;
}

std::shared_ptr<Store> Open(const std::string& path, const std::string& run_id = "run", int world_size = 0) {
  auto store = CreateFileStore({path, run_id, world_size});
  INFO(store.status().ToString());
  REQUIRE(store.ok());
  return *store;
}

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void Write(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
}

TEST_CASE("the in-memory store keeps the contract") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  CheckContract([&] { return store; });
  CheckThreads([&] { return store; });
}

TEST_CASE("the file store keeps the contract") {
  const Folder folder;
  SECTION("through one object") {
    const std::shared_ptr<Store> store = Open(folder.File());
    CheckContract([&] { return store; });
    CheckThreads([&] { return store; });
  }
  SECTION("through several") {
    CheckContract([&] { return Open(folder.File()); });
    CheckThreads([&] { return Open(folder.File()); });
  }
}

TEST_CASE("processes add at once: every total appears exactly once") {
  constexpr int kProcesses = 8;
  constexpr int kAdds = 150;
  const Folder folder;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&] {
      const auto store = OpenOrNull(folder.File());
      if (store == nullptr) return false;
      for (int i = 0; i < kAdds; ++i) {
        const auto total = store->Add("count", 1, Soon());
        // A total that another process got too would be set twice; the key tells by its own counter.
        if (!total.ok() || store->Add(absl::StrCat("total/", *total), 1, Soon()).value_or(0) != 1) return false;
      }
      return true;
    }));
  }
  for (pid_t child : children) CHECK(Succeeded(child));
  CHECK(Open(folder.File())->Add("count", 0, Soon()).value() == kProcesses * kAdds);
}

TEST_CASE("writers killed at any moment leave a store that works, with all that they finished") {
  const Folder folder;
  const std::string big(size_t{16} << 20, 'x');
  const auto reader = Open(folder.File());
  int torn = 0;
  for (int round = 0; round < 12; ++round) {
    const off_t before = static_cast<off_t>(std::filesystem::file_size(folder.File()));
    const pid_t child = Spawn([&] {
      const auto store = OpenOrNull(folder.File());
      for (int i = 0; store != nullptr; ++i) {
        if (i == 20) pause();  // until it is killed: a disk is not to fill where that takes its time
        if (!store->Set(absl::StrCat("big/", round), big, Soon()).ok()) return false;
        if (!store->Set(absl::StrCat("small/", round), absl::StrCat(i), Soon()).ok()) return false;
      }
      return false;
    });
    while (static_cast<off_t>(std::filesystem::file_size(folder.File())) < before + (round % 4) * 5'000'000 + 100) {
      absl::SleepFor(absl::Microseconds(200));
    }
    kill(child, SIGKILL);
    CHECK_FALSE(Succeeded(child));
    torn += (std::filesystem::file_size(folder.File()) - static_cast<uintmax_t>(before)) % big.size() > 10'000;

    CHECK(reader->Set(absl::StrCat("after/", round), "fine", Soon()).ok());
    for (const auto& store : {reader, Open(folder.File())}) {
      CHECK(store->Get(absl::StrCat("after/", round), Soon()).value() == "fine");
      const auto complete = store->Get(absl::StrCat("big/", round), absl::InfinitePast());
      CHECK((!complete.ok() || *complete == big));
      if (store->Get(absl::StrCat("small/", round), absl::InfinitePast()).ok()) CHECK(complete.ok());
    }
  }
  CHECK(torn > 0);  // else this test has tested nothing
}

TEST_CASE("a record cut off anywhere does not count, and the next writer removes it") {
  const Folder folder;
  const auto writer = Open(folder.File());
  CHECK(writer->Set("first", "1", Soon()).ok());
  const size_t whole = Contents(folder.File()).size();
  CHECK(writer->Set("second", "a value that is longer than the third", Soon()).ok());
  const std::string contents = Contents(folder.File());
  for (size_t length = whole; length < contents.size(); ++length) {
    INFO("cut to " << length << " of " << contents.size());
    Write(folder.File(), contents.substr(0, whole));
    const auto early = Open(folder.File());  // appends its opening
    const std::string prefix = Contents(folder.File());
    Write(folder.File(), prefix + contents.substr(whole, length - whole));
    CHECK(early->Get("first", Soon()).ok());
    CHECK(early->Get("second", absl::InfinitePast()).status().code() == absl::StatusCode::kDeadlineExceeded);
    const auto late = Open(folder.File());
    CHECK(late->Set("third", "3", Soon()).ok());
    CHECK(early->Get("third", Soon()).value() == "3");
    CHECK(early->Get("second", absl::InfinitePast()).status().code() == absl::StatusCode::kDeadlineExceeded);
  }
}

TEST_CASE("a store in which an earlier run left keys is as good as new") {
  const Folder folder;
  {
    const auto earlier = Open(folder.File(), "monday", 3);
    CHECK(earlier->Set("key", "stale", Soon()).ok());
    CHECK(earlier->Add("count", 7, Soon()).ok());
  }
  const auto a = Open(folder.File(), "tuesday", 2);
  CHECK(a->Get("key", absl::InfinitePast()).status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(a->Add("count", 1, Soon()).value() == 1);
  CHECK(std::filesystem::exists(folder.File()));
  const auto b = Open(folder.File(), "tuesday", 2);
  CHECK_FALSE(std::filesystem::exists(folder.File()));
  CHECK(b->Set("key", "fresh", Soon()).ok());
  CHECK(a->Get("key", Soon()).value() == "fresh");
}

TEST_CASE("a forked child of a rank that has ended keeps its run's place, which the next run is told") {
  const Folder folder;
  int stay[2];
  REQUIRE(pipe(stay) == 0);
  CHECK(Succeeded(Spawn([&] {
    const auto store = CreateFileStore({folder.File(), "monday", 2});
    if (store.ok() && fork() == 0) {
      char nothing = 0;
      close(stay[1]);
      _exit(read(stay[0], &nothing, 1) == 0 ? 0 : 1);  // until the test lets go
    }
    return store.ok();
  })));
  CheckStatus(CreateFileStore({folder.File(), "tuesday", 2}).status(), absl::StatusCode::kFailedPrecondition,
              {folder.File(), "another run", "forked child", "fuser"});
  close(stay[1]);
  close(stay[0]);
  absl::StatusOr<std::shared_ptr<Store>> next = absl::UnknownError("");
  for (const absl::Time until = Soon(); !next.ok() && absl::Now() < until; absl::SleepFor(absl::Milliseconds(10))) {
    next = CreateFileStore({folder.File(), "tuesday", 2});
  }
  INFO(next.status().ToString());
  CHECK(next.ok());
}

TEST_CASE("ranks of another run are refused while the first is under way, and welcome afterwards") {
  const Folder folder;
  {
    const auto monday = Open(folder.File(), "monday", 3);
    for (const char* run : {"tuesday", "", "wednesday"}) {
      CheckStatus(CreateFileStore({folder.File(), run, 2}).status(), absl::StatusCode::kFailedPrecondition,
                  {folder.File(), absl::StrCat("not run '", run, "'"), "path of its own"});
    }
    CHECK(Open(folder.File(), "monday", 3)->Set("key", "value", Soon()).ok());
    CHECK(monday->Get("key", Soon()).value() == "value");
  }
  const pid_t child = Spawn([&] {
    std::shared_ptr<Store> store;
    while (store == nullptr) store = OpenOrNull(folder.File(), "tuesday", 2);
    while (true) pause();
    return false;
  });
  while (!absl::IsFailedPrecondition(CreateFileStore({folder.File(), "wednesday", 0}).status())) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  kill(child, SIGKILL);
  CHECK_FALSE(Succeeded(child));
  CHECK(OpenOrNull(folder.File(), "wednesday", 0) != nullptr);  // a dead run keeps nothing locked
}

TEST_CASE("the last of world_size processes to open removes the name, run after run") {
  constexpr int kWorld = 4;
  const Folder folder;
  for (int run = 0; run < 15; ++run) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < kWorld; ++rank) {
      children.push_back(Spawn([&] {
        const auto store = OpenOrNull(folder.File(), absl::StrCat("run ", run), kWorld);
        if (store == nullptr || !store->Set(absl::StrCat(rank), absl::StrCat(run), Soon()).ok()) return false;
        for (int other = 0; other < kWorld; ++other) {
          if (store->Get(absl::StrCat(other), Soon()).value_or("") != absl::StrCat(run)) return false;
        }
        return true;
      }));
    }
    for (pid_t child : children) CHECK(Succeeded(child));
    CHECK(std::filesystem::is_empty(folder.path()));
  }
}

TEST_CASE("what is no store is refused by name and left alone") {
  const Folder folder;
  const std::string path = folder.File();
  const auto foreign = [&](const std::string& contents) {
    Write(path, contents);
    CheckStatus(CreateFileStore({path, "run", 0}).status(), absl::StatusCode::kDataLoss, {path, "delete it"});
    CHECK(Contents(path) == contents);
  };
  SECTION("text") { foreign("These are my notes, not a store.\n"); }
  SECTION("a few bytes") { foreign("hi"); }
  SECTION("zeros") { foreign(std::string(100, '\0')); }
  SECTION("sizes out of bounds") {
    (void)Open(path);
    std::string contents = Contents(path);
    for (size_t at : {4, 8, 12, 16}) {
      std::string bad = contents;
      bad[at + 3] = '\x7f';
      foreign(bad);
    }
  }
  SECTION("garbage after good records") {
    (void)Open(path);
    foreign(Contents(path) + "garbage that nobody wrote as a record");
  }
  SECTION("a file cut while in use") {
    const auto store = Open(path);
    Write(path, "");
    CheckStatus(store->Set("key", "value", Soon()), absl::StatusCode::kDataLoss, {path, "delete it"});
    CheckStatus(store->Get("key", Soon()).status(), absl::StatusCode::kDataLoss, {path, "delete it"});
  }
}

TEST_CASE("a path that cannot be used is refused by name") {
  const Folder folder;
  const auto refused = [](const std::string& path, absl::StatusCode code) {
    CheckStatus(CreateFileStore({path, "run", 0}).status(), code, {"'" + path + "'", "name a"});
  };
  SECTION("a folder") { refused(folder.path(), absl::StatusCode::kInvalidArgument); }
  SECTION("in no folder") { refused(folder.path() + "/none/store", absl::StatusCode::kInvalidArgument); }
  SECTION("no name") { refused("", absl::StatusCode::kInvalidArgument); }
  SECTION("a pipe") {
    REQUIRE(mkfifo(folder.File().c_str(), 0600) == 0);
    refused(folder.File(), absl::StatusCode::kInvalidArgument);
  }
  SECTION("not ours") {
    (void)Open(folder.File());
    CHECK(Succeeded(Spawn([&] {
      // Permissions do not bind root: become nobody, who may pass through the folder.
      if (chmod(folder.path().c_str(), 0755) != 0 || (geteuid() == 0 && setuid(65534) != 0)) return false;
      if (geteuid() != 65534 && chmod(folder.File().c_str(), 0) != 0) return false;
      const auto store = CreateFileStore({folder.File(), "run", 0});
      return absl::IsPermissionDenied(store.status()) && absl::StrContains(store.status().message(), folder.File());
    })));
  }
}

TEST_CASE("what others could have put there is not believed") {
  const Folder folder;
  const std::string path = folder.File();
  const auto refused = [&](const std::string& what) {
    CheckStatus(CreateFileStore({path, "run", 0}).status(), absl::StatusCode::kPermissionDenied, {path, what});
  };
  SECTION("a file of another user") {
    if (geteuid() != 0) return;
    (void)Open(path);
    REQUIRE(chown(path.c_str(), 12345, 12345) == 0);
    refused("belongs to user 12345");
  }
  SECTION("a file that others may write") {
    (void)Open(path);
    for (const mode_t mode : {0620, 0602}) {
      REQUIRE(chmod(path.c_str(), mode) == 0);
      refused("can be written by other users");
    }
    REQUIRE(chmod(path.c_str(), 0644) == 0);
    (void)Open(path);
  }
  SECTION("a symbolic link") {
    (void)Open(folder.File("other"));
    REQUIRE(symlink(folder.File("other").c_str(), path.c_str()) == 0);
    refused("symbolic link");
  }
}

TEST_CASE("a run id has a bound") {
  const Folder folder;
  CheckStatus(CreateFileStore({folder.File(), std::string(1025, 'r'), 0}).status(), absl::StatusCode::kInvalidArgument,
              {"run id", "1025"});
}

TEST_CASE("a deadline holds while somebody keeps the file locked") {
  const Folder folder;
  const auto store = Open(folder.File());
  const int fd = open(folder.File().c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(flock(fd, LOCK_EX) == 0);
  const absl::Time start = absl::Now();
  const absl::Time deadline = start + absl::Milliseconds(50);
  CheckStatus(store->Set("key", "", deadline), absl::StatusCode::kDeadlineExceeded, {folder.File(), "'key'", "locked"});
  CheckStatus(store->Add("n", 1, deadline).status(), absl::StatusCode::kDeadlineExceeded, {"'n'", "locked"});
  CheckStatus(store->Get("key", deadline).status(), absl::StatusCode::kDeadlineExceeded, {"'key'"});
  CHECK(absl::Now() - start < absl::Seconds(20));
  std::thread release([&] {
    absl::SleepFor(absl::Milliseconds(30));
    close(fd);
  });
  CHECK(store->Set("key", "", Soon()).ok());
  release.join();
}

TEST_CASE("a write that finds no room fails, and a later one that fits succeeds") {
  const Folder folder;
  CHECK(Succeeded(Spawn([&] {
    const auto store = OpenOrNull(folder.File());
    const rlimit limit = {10'000, 10'000};
    signal(SIGXFSZ, SIG_IGN);
    if (store == nullptr || setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    const absl::Status s = store->Set("big", std::string(20'000, 'x'), Soon());
    return absl::IsResourceExhausted(s) && absl::StrContains(s.message(), folder.File()) &&
           store->Set("small", "y", Soon()).ok();
  })));
  const auto store = Open(folder.File());
  CHECK(store->Get("small", Soon()).value() == "y");
  CHECK(store->Get("big", absl::InfinitePast()).status().code() == absl::StatusCode::kDeadlineExceeded);
}

TEST_CASE("a store opened before fork is refused after it, in the child only") {
  const Folder folder;
  const auto store = Open(folder.File());
  CHECK(Succeeded(Spawn([&] {
    const absl::Status s = store->Set("key", "child", Soon());
    return absl::IsFailedPrecondition(s) && absl::StrContains(s.message(), "open one in each process");
  })));
  CHECK(store->Set("key", "parent", Soon()).ok());
}

TEST_CASE("programs that this one executes do not inherit the file") {
  const Folder folder;
  const auto store = Open(folder.File());
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).string() != folder.File()) continue;
    ++found;
    CHECK((fcntl(std::stoi(entry.path().filename().string()), F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK(found == 1);
}

}  // namespace
}  // namespace ddp
