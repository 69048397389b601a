// SPDX-License-Identifier: Apache-2.0
// Memory common to processes: what one of them makes its own, and what it maps elsewhere.
#include "libddp/comm/memory/shared_segment.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/memory/share_segment.h"
#include "tests/support/catch.h"

namespace {

// What stands in for signals that come whenever the kernel has reserved so many bytes: a call for more is undone.
std::atomic<size_t> bytes_between_signals{SIZE_MAX};
std::atomic<size_t> reservations{0}, largest_reservation{0};

}  // namespace

// In place of the C library's.
extern "C" int posix_fallocate(int fd, off_t offset, off_t length) {
  const size_t bytes = static_cast<size_t>(length);
  largest_reservation = std::max(largest_reservation.load(), bytes);
  if (++reservations > 100'000) return ENOSPC;  // it would never end
  if (bytes > bytes_between_signals) return EINTR;
  return fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}

namespace ddp {
namespace {

constexpr size_t kPage = 4096;

std::shared_ptr<SharedSegment> MakeSegment(size_t bytes, SharedSegment::Kind kind = SharedSegment::Kind::kAuto) {
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = SharedSegment::Create(bytes, kind);
  REQUIRE(segment.ok());
  REQUIRE((*segment)->Reserve(0, bytes).ok());
  (*segment)->Seal();
  return *std::move(segment);
}

TEST_CASE("all of what is reserved in huge pages has memory, zeros for everybody") {
  constexpr size_t kHuge = size_t{2} << 20, kBytes = 4 * kHuge, kBegin = 3 * kPage, kReserved = kBytes - 5 * kPage;
  const absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
      SharedSegment::Create(kBytes, SharedSegment::Kind::kMemfd);
  REQUIRE(segment.ok());
  REQUIRE((*segment)->ReserveHugePages(kBegin, kReserved).ok());
  const std::vector<std::string> fields = absl::StrSplit((*segment)->handle(), ',');
  struct stat file = {};
  REQUIRE(stat(fields.back().c_str(), &file) == 0);
  CHECK(static_cast<size_t>(file.st_blocks) * 512 >= kReserved);
  const absl::StatusOr<std::shared_ptr<char>> view = (*segment)->ViewAgain(0, kBytes);
  REQUIRE(view.ok());
  const char* const data = view->get();
  CHECK((data[kBegin] == 0 && std::memcmp(data + kBegin, data + kBegin + 1, kReserved - 1) == 0));
}

TEST_CASE("memory is reserved although signals undo what the kernel has not completed") {
  constexpr size_t kHuge = size_t{2} << 20, kBytes = 4 * kHuge, kBegin = 3 * kPage, kReserved = kBytes - 5 * kPage;
  for (const bool huge : {false, true}) {
    for (const size_t bytes : {SIZE_MAX, 100 * kPage, kPage}) {
      INFO("signals after " << bytes << " bytes" << (huge ? ", huge pages" : ""));
      const absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
          SharedSegment::Create(kBytes, SharedSegment::Kind::kMemfd);
      REQUIRE(segment.ok());
      reservations = largest_reservation = 0;
      bytes_between_signals = bytes;
      const absl::Status status =
          huge ? (*segment)->ReserveHugePages(kBegin, kReserved) : (*segment)->Reserve(kBegin, kReserved);
      bytes_between_signals = SIZE_MAX;
      INFO(status.ToString() << " after " << reservations << " calls");
      REQUIRE(status.ok());
      // Few signals come while a kernel reserves so much.
      CHECK(largest_reservation <= kHuge);
      const std::vector<std::string> fields = absl::StrSplit((*segment)->handle(), ',');
      struct stat file = {};
      REQUIRE(stat(fields.back().c_str(), &file) == 0);
      CHECK(static_cast<size_t>(file.st_blocks) * 512 >= kReserved);
    }
  }
}

// Runs `body` in another process, which sees the segment where we do, and shares it.
template <typename Body>
void InAnotherProcess(Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  REQUIRE(status == 0);
}

bool AllAre(const char* data, size_t n, char value) { return std::string_view(data, n) == std::string(n, value); }

// What Create says under a limit, in another process: the program may not get it back.
std::string ErrorUnder(decltype(RLIMIT_FSIZE) resource, rlim_t limit, size_t bytes, SharedSegment::Kind kind) {
  int ends[2] = {};
  REQUIRE(pipe(ends) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit tight = {limit, limit};
    if (setrlimit(resource, &tight) != 0) _exit(1);
    const std::string text = SharedSegment::Create(bytes, kind).status().ToString();
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 2);
  }
  close(ends[1]);
  std::string text(4096, ' ');
  const ssize_t n = read(ends[0], text.data(), text.size());
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  INFO("status " << status);
  REQUIRE(status == 0);
  return text.substr(0, static_cast<size_t>(std::max<ssize_t>(0, n)));
}

TEST_CASE("a file that is larger than the process may make is an error, and not the end by a signal") {
  const SharedSegment::Kind kind = GENERATE(SharedSegment::Kind::kMemfd, SharedSegment::Kind::kPosix);
  constexpr size_t kHuge = size_t{2} << 20;
  CHECK(ErrorUnder(RLIMIT_FSIZE, 3 * kHuge, 3 * kHuge, kind) == "OK");
  const std::string error = ErrorUnder(RLIMIT_FSIZE, 3 * kHuge, 3 * kHuge + 1, kind);
  INFO(error);
  CHECK(absl::StartsWith(error, "RESOURCE_EXHAUSTED: "));
  CHECK(absl::StrContains(error, "may be, 6291456 bytes; raise ulimit -f"));
}

// The number that the next file of this process gets: with that as the limit it gets none.
rlim_t NextDescriptor() {
  const int fd = dup(STDIN_FILENO);
  REQUIRE(fd >= 0);
  close(fd);
  return static_cast<rlim_t>(fd);
}

void CheckOutOfDescriptors(const absl::Status& status, const char* call) {
  INFO(status.ToString());
  CHECK(absl::IsResourceExhausted(status));
  CHECK(absl::StrContains(status.message(), call));
  CHECK(absl::StrContains(status.message(), "Too many open files; raise ulimit -n, or keep fewer groups and alloc"));
  CHECK_FALSE(absl::StrContains(status.message(), "/dev/shm"));
}

TEST_CASE("a process that may open no more files says so, and asks for no other kind of memory") {
  const SharedSegment::Kind kind =
      GENERATE(SharedSegment::Kind::kAuto, SharedSegment::Kind::kMemfd, SharedSegment::Kind::kPosix);
  const bool memfd = kind != SharedSegment::Kind::kPosix;
  const absl::StatusOr<std::shared_ptr<SharedSegment>> theirs = SharedSegment::Create(kPage, kind);
  REQUIRE(theirs.ok());
  // As another process opens it.
  std::vector<std::string> fields = absl::StrSplit((*theirs)->handle(), ',');
  fields[0] = "1";
  const std::string host = HostId();
  rlimit before = {};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none = {NextDescriptor(), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const absl::Status made = SharedSegment::Create(kPage, kind).status();
  const absl::Status opened = SharedSegment::Open(absl::StrJoin(fields, ",")).status();
  const bool same_host = HostId() == host;
  // One exchange: the others learn of it, and nobody tries again.
  int exchanges = 0;
  setenv("DDP_SHARED_MEMORY", memfd ? "auto" : "posix", 1);
  const absl::Status shared = ShareSegment(ControlShare(0, {0}, kPage), [&](const Note& mine) {
                                ++exchanges;
                                return std::vector<Note>{mine};
                              }).status();
  unsetenv("DDP_SHARED_MEMORY");
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(same_host);
  CheckOutOfDescriptors(made, memfd ? "memfd_create: " : "shm_open: ");
  CheckOutOfDescriptors(opened, memfd ? "open: " : "shm_open: ");
  CheckOutOfDescriptors(shared, memfd ? "rank 0: memfd_create: " : "rank 0: shm_open: ");
  CHECK(exchanges == 1);
}

TEST_CASE("what a process makes its own keeps its contents and is out of the others' reach") {
  const SharedSegment::Kind kind = GENERATE(SharedSegment::Kind::kMemfd, SharedSegment::Kind::kPosix);
  for (const size_t bytes : {8 * kPage, size_t{5} << 20}) {
    INFO((kind == SharedSegment::Kind::kMemfd ? "memfd" : "posix"));
    const std::shared_ptr<SharedSegment> segment = MakeSegment(bytes, kind);
    char* const data = segment->data();
    std::memset(data, 'a', bytes);
    // From the middle of one page to the middle of another: these two become private as a whole.
    const size_t begin = kPage + 100, end = 4 * kPage + 7;
    REQUIRE(segment->MakePrivate(data + begin, begin, end - begin).ok());
    REQUIRE(AllAre(data, bytes, 'a'));
    InAnotherProcess([&] {
      // The child of a fork has its own copy of what is private; through the segment it sees the common pages.
      if (!segment->MapAt(data, 0, bytes).ok()) _exit(1);
      if (!AllAre(data, bytes, 'a')) _exit(2);
      std::memset(data, 'b', bytes);
    });
    const auto pages = [&](char outside, char inside) {
      return AllAre(data, kPage, outside) && AllAre(data + kPage, 4 * kPage, inside) &&
             AllAre(data + 5 * kPage, bytes - 5 * kPage, outside);
    };
    REQUIRE(pages('b', 'a'));
    // And the other way round.
    std::memset(data, 'c', bytes);
    REQUIRE(segment->MapAt(data, 0, bytes).ok());
    REQUIRE(pages('c', 'b'));
  }
}

TEST_CASE("a page becomes a process's own once, and a second view goes on showing the common one") {
  const std::shared_ptr<SharedSegment> segment = MakeSegment(8 * kPage);
  char* const data = segment->data();
  std::memset(data, 'a', 8 * kPage);
  absl::StatusOr<std::shared_ptr<char>> view = segment->ViewAgain(kPage, 4 * kPage);
  REQUIRE(view.ok());
  char* const second = view->get();
  CHECK(std::string(second, 4 * kPage) == std::string(4 * kPage, 'a'));
  data[2 * kPage] = 'b';
  CHECK(second[kPage] == 'b');
  REQUIRE(segment->MakePrivate(data + 2 * kPage, 2 * kPage, 1).ok());
  data[2 * kPage] = 'c';                                               // ours, not in the segment
  REQUIRE(segment->MakePrivate(data + kPage, kPage, 3 * kPage).ok());  // among others that page
  CHECK(data[2 * kPage] == 'c');
  CHECK(second[kPage] == 'b');
  std::memset(second, 'd', 4 * kPage);  // a late writer
  CHECK(std::string(data, 4 * kPage) ==
        std::string(2 * kPage, 'a') + 'c' + std::string(kPage - 1, 'a') + std::string(kPage, 'a'));
  CHECK(data[4 * kPage] == 'd');  // nobody made it private
}

TEST_CASE("a segment that the thread that made it has given up cannot be opened") {
  std::shared_ptr<SharedSegment> segment = MakeSegment(kPage);
  const std::string handle = segment->handle();
  segment.reset();
  CHECK(absl::IsAborted(SharedSegment::Open(handle).status()));
  segment = MakeSegment(kPage);  // perhaps in the same place
  CHECK(absl::IsAborted(SharedSegment::Open(handle).status()));
  CHECK(SharedSegment::Open(segment->handle()).value() == segment);
}

TEST_CASE("a child of fork opens its parent's segment by its own means") {
  const std::shared_ptr<SharedSegment> segment = MakeSegment(kPage);
  segment->data()[0] = 'a';
  CHECK(SharedSegment::Open(segment->handle()).value() == segment);
  InAnotherProcess([&] {
    const absl::StatusOr<std::shared_ptr<SharedSegment>> ours = SharedSegment::Open(segment->handle());
    if (!ours.ok() || *ours == segment || (*ours)->data()[0] != 'a') _exit(1);
    (*ours)->data()[0] = 'b';
  });
  CHECK(segment->data()[0] == 'b');
}

TEST_CASE("a file of another size than the handle says is not opened") {
  const SharedSegment::Kind kind = GENERATE(SharedSegment::Kind::kMemfd, SharedSegment::Kind::kPosix);
  // Not sealed: the child opens it by its name. The child that succeeds removes the name, so its turn is last.
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = SharedSegment::Create(kPage, kind);
  REQUIRE(segment.ok());
  const size_t bytes = (*segment)->bytes();
  for (const size_t other : {bytes - kPage, bytes + kPage, 2 * bytes, bytes}) {
    INFO((kind == SharedSegment::Kind::kMemfd ? "memfd" : "posix") << ", " << other << " instead of " << bytes);
    std::vector<std::string> fields = absl::StrSplit((*segment)->handle(), ',');
    REQUIRE(fields[2] == absl::StrCat(bytes));
    fields[2] = absl::StrCat(other);
    InAnotherProcess([&] {
      const absl::Status status = SharedSegment::Open(absl::StrJoin(fields, ",")).status();
      if (status.ok() != (other == bytes)) _exit(1);
      if (other != bytes && !absl::IsUnavailable(status)) _exit(2);
    });
  }
}

// The blocks of memory behind each segment of this process that has a name.
std::vector<int64_t> NamedBlocks() {
  std::vector<int64_t> blocks;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    struct stat file = {};
    const std::string name = entry.path().filename().string();
    if (absl::StartsWith(name, absl::StrCat("ddp-", getpid(), "-")) && stat(entry.path().c_str(), &file) == 0) {
      blocks.push_back(file.st_blocks);
    }
  }
  return blocks;
}

TEST_CASE("a segment has no memory while it has a name, whoever is killed meanwhile") {
  setenv("DDP_SHARED_MEMORY", "posix", 1);
  std::vector<std::vector<int64_t>> seen;
  const absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
      ShareSegment(ControlShare(0, {0}, 3 * kPage), [&](const Note& mine) {
        seen.push_back(NamedBlocks());
        return std::vector<Note>{mine};
      });
  unsetenv("DDP_SHARED_MEMORY");
  REQUIRE(segment.ok());
  // Made, opened by all, reserved.
  CHECK(seen == std::vector<std::vector<int64_t>>{{0}, {0}, {}});
}

TEST_CASE("DDP_SHARED_MEMORY is checked") {
  setenv("DDP_SHARED_MEMORY", "shm", 1);
  const absl::Status status = SharedSegment::KindFromEnv().status();
  unsetenv("DDP_SHARED_MEMORY");
  CHECK(status.message() == "DDP_SHARED_MEMORY is 'shm'; it must be auto, memfd or posix, or unset");
}

TEST_CASE("no write of the process's own threads is lost while memory becomes private") {
  constexpr size_t kPages = 512;
  for (int round = 0; round < 20; ++round) {
    const std::shared_ptr<SharedSegment> segment = MakeSegment(kPages * kPage);
    std::atomic<bool> stop{false};
    // Each thread has a counter of its own in every page.
    std::vector<uint64_t> counted(2, 0);
    std::vector<std::thread> writers;
    for (size_t t = 0; t < counted.size(); ++t) {
      writers.emplace_back([&, t] {
        while (!stop.load(std::memory_order_relaxed)) {
          for (size_t page = 0; page < kPages; ++page) {
            volatile uint64_t& counter = reinterpret_cast<volatile uint64_t*>(segment->data() + page * kPage)[t];
            counter = counter + 1;
          }
          ++counted[t];
        }
      });
    }
    for (size_t page = 0; page < kPages; page += 8) {
      CHECK(segment->MakePrivate(segment->data() + page * kPage, page * kPage, 8 * kPage).ok());
    }
    stop = true;
    for (std::thread& writer : writers) writer.join();
    for (size_t page = 0; page < kPages; ++page) {
      for (size_t t = 0; t < counted.size(); ++t) {
        REQUIRE(reinterpret_cast<const uint64_t*>(segment->data() + page * kPage)[t] == counted[t]);
      }
    }
  }
}

}  // namespace
}  // namespace ddp
