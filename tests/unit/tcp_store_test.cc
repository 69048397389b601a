// SPDX-License-Identifier: Apache-2.0
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/store.h"
#include "libddp/launch/launch_store.h"
#include "libddp/launch/store_protocol.h"
#include "libddp/launch/store_secret.h"
#include "tests/support/catch.h"
#include "tests/unit/store_contract.h"
#include "tests/unit/store_place.h"

namespace ddp {
namespace {

// A socket that nobody but the test knows. Bound to a port of this host's loopback interface, or not.
class RawSocket {
 public:
  RawSocket() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  explicit RawSocket(int fd) : fd_(fd) {}
  RawSocket(RawSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RawSocket& operator=(RawSocket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~RawSocket() {
    if (fd_ >= 0) close(fd_);
  }

  bool Bind(int port) {
    const sockaddr_in address = testing::LoopbackAddress(port);
    return bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  bool Listen() { return listen(fd_, 16) == 0; }
  RawSocket Accept() { return RawSocket(accept(fd_, nullptr, nullptr)); }
  bool Connect(int port) {
    const sockaddr_in address = testing::LoopbackAddress(port);
    return connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  void Send(const std::string& bytes) { (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  // Wakes who is in Accept, which then has nothing.
  void Shutdown() { shutdown(fd_, SHUT_RDWR); }
  bool open() const { return fd_ >= 0; }

  // What a frame holds: its length comes first, in four bytes.
  std::string ReceiveFrame() {
    const auto receive = [this](size_t size) {
      std::string bytes(size, '\0');
      size_t all = 0;
      for (ssize_t n = 1; n > 0 && all < size; all += static_cast<size_t>(std::max<ssize_t>(n, 0))) {
        n = recv(fd_, bytes.data() + all, size - all, 0);
      }
      bytes.resize(all);
      return bytes;
    };
    const std::string size = receive(4);
    return size.size() == 4 ? receive(static_cast<unsigned char>(size[0])) : "";
  }
  // What arrives until the other side closes, or `patience` is over; `closed` tells which.
  std::string ReceiveAll(absl::Duration patience, bool* closed) {
    const absl::Time deadline = absl::Now() + patience;
    std::string all;
    *closed = false;
    while (absl::Now() < deadline) {
      pollfd readable = {fd_, POLLIN, 0};
      if (poll(&readable, 1, 10) <= 0) continue;
      char text[4096];
      const ssize_t n = recv(fd_, text, sizeof(text), 0);
      *closed = n <= 0;
      if (*closed) break;
      all.append(text, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int fd_;
};

std::shared_ptr<Store> Open(TcpStoreOptions options) {
  auto store = CreateTcpStore(std::move(options));
  INFO(store.status().ToString());
  REQUIRE(store.ok());
  return *store;
}

TEST_CASE("the TCP store keeps the contract") {
  const Place place;
  const auto server = Open(place.Options(true));
  SECTION("through one object") {
    CheckContract([&] { return server; });
    CheckThreads([&] { return server; });
  }
  SECTION("through several") {
    CheckContract([&] { return Open(place.Options(false)); });
    CheckThreads([&] { return Open(place.Options(false)); });
  }
}

TEST_CASE("processes meet, run after run on one port, and leave nothing behind") {
  constexpr int kWorld = 4;
  const Place place;
  for (int run = 0; run < 5; ++run) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < kWorld; ++rank) {
      children.push_back(Spawn([&] {
        // Any may be the first; the one that serves, 0 or another, may be the last.
        absl::SleepFor(absl::Milliseconds((rank + run) % kWorld * 10));
        TcpStoreOptions options = place.Options(rank == run % kWorld);
        options.run_id = absl::StrCat("run ", run);
        options.world_size = kWorld;
        const auto store = CreateTcpStore(options);
        if (!store.ok() || !(*store)->Set(absl::StrCat(rank), absl::StrCat(run), Soon()).ok()) return false;
        for (int other = 0; other < kWorld; ++other) {
          if ((*store)->Get(absl::StrCat(other), Soon()).value_or("") != absl::StrCat(run)) return false;
        }
        return std::filesystem::is_empty(place.folder.path());
      }));
    }
    for (pid_t child : children) CHECK(Succeeded(child));
  }
}

// Whoever gives up a connection on which it has proved itself already, and tries again, is one rank.
TEST_CASE("a rank that tries again is counted once") {
  const Place place;
  TcpStoreOptions options = place.Options(true);
  options.world_size = 3;
  const auto first = Open(options);
  const absl::StatusOr<std::string> secret = SecretFile::Read(place.port);
  REQUIRE(secret.ok());
  for (int i = 0; i < 3; ++i) {
    RawSocket given_up;
    REQUIRE(given_up.Connect(place.port));
    const std::string greeting = given_up.ReceiveFrame();
    ClientHandshake handshake(*secret, "run", std::string(kNonceSize, 'n'));
    const absl::StatusOr<std::string> hello = handshake.Answer(greeting);
    REQUIRE(hello.ok());
    given_up.Send(*hello);
    REQUIRE(handshake.Check(given_up.ReceiveFrame()).ok());
  }
  options.serve = false;
  const auto second = Open(options), third = Open(options);
  CHECK(third->Set("key", "value", Soon()).ok());
  CHECK(SecretFile::Read(place.port).status().code() == absl::StatusCode::kNotFound);
}

TEST_CASE("on several hosts a secret is needed, and is enough") {
  const Place place;
  TcpStoreOptions options = place.Options(true);
  options.host = "localhost";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kInvalidArgument,
              {"several hosts", "set DDP_STORE_SECRET"});
  setenv("DDP_STORE_SECRET", "everybody knows it", 1);
  const auto server = Open(options);
  options.serve = false;
  CHECK(Open(options)->Set("key", "value", Soon()).ok());
  unsetenv("DDP_STORE_SECRET");
  options.secret = "everybody knows it";
  CHECK(Open(options)->Get("key", Soon()).value() == "value");
  CHECK(std::filesystem::is_empty(place.folder.path()));
}

TEST_CASE("a wrong or missing secret is refused at once") {
  const Place place;
  TcpStoreOptions options = place.Options(true);
  options.secret = "one";
  const auto server = Open(options);
  options.serve = false;
  options.secret = "another";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kPermissionDenied,
              {absl::StrCat(":", place.port), "different secrets", "DDP_STORE_SECRET"});
  options.secret = "";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kFailedPrecondition,
              {"secret file", "DDP_STORE_SECRET"});
  options.secret = "one";
  CHECK(CreateTcpStore(options).ok());
}

TEST_CASE("ranks that have a secret do not believe a server that has another") {
  const Place place;
  const auto server = Open(place.Options(true));
  TcpStoreOptions options = place.Options(false);
  options.secret = "set here, but not where the server was started";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kPermissionDenied, {"different secrets"});
}

TEST_CASE("ranks of another run are refused, with the names of both") {
  const Place place;
  const auto server = Open(place.Options(true));
  TcpStoreOptions options = place.Options(false);
  options.run_id = "another\n";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kFailedPrecondition,
              {"'run'", "'another\\n'", "DDP_STORE_PORT"});
  CHECK(server->Set("key", "", Soon()).ok());
}

TEST_CASE("a port in use is named, and the secret of the store that has it stays") {
  const Place place;
  SECTION("by a store") {
    const auto server = Open(place.Options(true));
    CheckStatus(CreateTcpStore(place.Options(true)).status(), absl::StatusCode::kInvalidArgument,
                {absl::StrCat("port ", place.port), "in use", "DDP_STORE_PORT"});
    CHECK(CreateTcpStore(place.Options(false)).ok());
  }
  SECTION("by another program") {
    RawSocket other;
    REQUIRE((other.Bind(place.port) && other.Listen()));
    CheckStatus(CreateTcpStore(place.Options(true)).status(), absl::StatusCode::kInvalidArgument,
                {absl::StrCat("port ", place.port), "in use", "DDP_STORE_PORT"});
    CHECK(std::filesystem::is_empty(place.folder.path()));
  }
}

TEST_CASE("impossible options are refused by name") {
  const Place place;
  for (const int port : {0, -1, 65536}) {
    TcpStoreOptions options = place.Options(false);
    options.port = port;
    CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kInvalidArgument, {absl::StrCat(port), "65535"});
  }
  TcpStoreOptions options = place.Options(false);
  options.run_id = std::string(1025, 'r');
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kInvalidArgument, {"run id", "1025"});
}

TEST_CASE("a store that never appears is missed in time") {
  const Place place;
  const absl::Time start = absl::Now();
  CheckStatus(CreateTcpStore(place.Hurried()).status(), absl::StatusCode::kDeadlineExceeded,
              {absl::StrCat("127.0.0.1:", place.port), "did not appear within 1s", "Connection refused", "port"});
  TcpStoreOptions options = place.Hurried();
  options.host = "no.such.host.invalid";
  options.secret = "secret";
  CheckStatus(CreateTcpStore(options).status(), absl::StatusCode::kDeadlineExceeded, {"no.such.host.invalid", "host"});
  CHECK(absl::Now() - start < absl::Seconds(50));
}

TEST_CASE("under a launcher a rank that did not find the store meets the others when it tries again") {
  const Place place;
  LaunchInfo info;
  info.world_size = info.local_world_size = 2;
  info.store_port = place.port;
  info.run_id = "run";
  LaunchInfo other = info;
  other.rank = 1;
  CheckStatus(OpenLaunchStore(other, absl::Milliseconds(100)).status(), absl::StatusCode::kDeadlineExceeded,
              {"rank 1"});
  absl::StatusOr<LaunchStore> served, found;
  std::thread server([&] { served = OpenLaunchStore(info, absl::Seconds(20)); });
  found = OpenLaunchStore(other, absl::Seconds(20));
  server.join();
  REQUIRE(served.ok());
  REQUIRE(found.ok());
  found = LaunchStore();  // the server stays until all ranks have left
}

TEST_CASE("a port with something else behind it is no store") {
  const Place place;
  RawSocket other;
  REQUIRE((other.Bind(place.port) && other.Listen()));
  SECTION("that says something else") {
    std::thread server([&] { other.Accept().Send("HTTP/1.1 400 Bad Request\r\n\r\n"); });
    CheckStatus(CreateTcpStore(place.Options(false)).status(), absl::StatusCode::kInvalidArgument,
                {absl::StrCat(":", place.port), "not a store"});
    server.join();
  }
  SECTION("that says nothing") {
    CheckStatus(CreateTcpStore(place.Hurried()).status(), absl::StatusCode::kDeadlineExceeded, {"does not answer"});
  }
  SECTION("that hangs up") {
    std::thread server([&] {
      while (other.Accept().open()) continue;
    });
    CheckStatus(CreateTcpStore(place.Hurried()).status(), absl::StatusCode::kDeadlineExceeded, {"does not answer"});
    other.Shutdown();
    server.join();
  }
}

TEST_CASE("strangers get nothing, are shown out, and keep nobody waiting") {
  const Place place;
  const auto server = Open(place.Options(true));
  bool closed = false;

  RawSocket loud, huge;
  REQUIRE((loud.Connect(place.port) && huge.Connect(place.port)));
  loud.Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  CHECK(loud.ReceiveAll(absl::Seconds(30), &closed).size() == 4 + 11 + 32);  // a greeting, which is no secret
  CHECK(closed);
  huge.Send(std::string("\xff\xff\xff\x7f", 4));
  huge.ReceiveAll(absl::Seconds(30), &closed);
  CHECK(closed);

  // More than the server keeps; those it cannot keep it hangs up on.
  std::vector<RawSocket> crowd(600);
  for (RawSocket& stranger : crowd) REQUIRE(stranger.Connect(place.port));
  // These came last, so that they do not have to make room.
  RawSocket late, slow;
  REQUIRE((late.Connect(place.port) && slow.Connect(place.port)));
  late.Send(std::string("\x40\0\0\0half a hel", 14));
  slow.Send(std::string("\0\x04\0\0", 4));  // 1024 bytes will follow, one after the other
  std::atomic<bool> sending = true;
  std::thread sender([&] {
    for (; sending; absl::SleepFor(absl::Milliseconds(50))) slow.Send("x");
  });
  const auto rank = Open(place.Options(false));
  CHECK(rank->Set("key", "value", Soon()).ok());
  CHECK(server->Get("key", Soon()).value() == "value");
  crowd.front().ReceiveAll(absl::Seconds(30), &closed);
  CHECK(closed);

  // Nobody stays for long without a proof: neither who stopped in the middle of a sentence, nor who never said a word,
  // nor who goes on and on.
  for (RawSocket* stranger : {&late, &crowd.back(), &slow}) {
    stranger->ReceiveAll(absl::Seconds(30), &closed);
    CHECK(closed);
  }
  sending = false;
  sender.join();
  CHECK(rank->Add("count", 1, Soon()).value() == 1);
}

// The server in a process of its own that a test can stop and kill.
pid_t SpawnServer(const Place& place) {
  return Spawn([&] {
    const auto server = CreateTcpStore(place.Options(true));
    while (server.ok()) pause();
    return false;
  });
}

TEST_CASE("calls end when the server's process does") {
  const Place place;
  const pid_t child = SpawnServer(place);
  const auto store = Open(place.Options(false));
  std::thread killer([&] {
    absl::SleepFor(absl::Milliseconds(50));
    kill(child, SIGKILL);
  });
  CheckStatus(store->Get("key", absl::InfiniteFuture()).status(), absl::StatusCode::kUnavailable,
              {absl::StrCat(":", place.port), "has gone", "rank 0"});
  killer.join();
  CHECK_FALSE(Succeeded(child));
  CheckStatus(store->Set("key", "", absl::InfiniteFuture()), absl::StatusCode::kUnavailable, {"has gone"});
  // The file that the killed one left is no hindrance.
  CHECK(Open(place.Options(true))->Set("key", "", Soon()).ok());
}

TEST_CASE("calls end in time when the server is stopped, and work again when it goes on") {
  const Place place;
  const pid_t child = SpawnServer(place);
  const auto store = Open(place.Options(false));
  CHECK(store->Set("key", "value", Soon()).ok());
  kill(child, SIGSTOP);
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);  // until its threads have all noticed
  const absl::Time start = absl::Now();
  CheckStatus(store->Set("other", "", start + absl::Milliseconds(50)), absl::StatusCode::kDeadlineExceeded,
              {"'other'", "did not answer in time", "stopped"});
  for (int i = 0; i < 50; ++i) {
    CHECK(absl::IsDeadlineExceeded(store->Get("key", absl::Now() + absl::Milliseconds(2)).status()));
  }
  CHECK(absl::Now() - start < absl::Seconds(40));  // not 50 times the two seconds that the first call waits longer
  kill(child, SIGCONT);
  CHECK(store->Get("key", Soon()).value() == "value");
  kill(child, SIGKILL);
  CHECK_FALSE(Succeeded(child));
}

TEST_CASE("the server stays until all ranks have left") {
  const Place place;
  auto server = Open(place.Options(true));
  auto rank = Open(place.Options(false));
  std::atomic<bool> left = false;
  bool stayed = false;
  std::thread first([&] {
    server.reset();
    stayed = left;
  });
  absl::SleepFor(absl::Milliseconds(100));
  CHECK(rank->Set("key", "still there", Soon()).ok());
  CHECK(rank->Get("key", Soon()).value() == "still there");
  left = true;
  rank.reset();
  first.join();
  CHECK(stayed);
  CHECK(std::filesystem::is_empty(place.folder.path()));
}

TEST_CASE("the server does not stay for ever") {
  const Place place;
  TcpStoreOptions options = place.Options(true);
  options.shutdown_timeout = absl::Milliseconds(100);
  auto server = Open(options);
  const auto rank = Open(place.Options(false));
  server.reset();
  CheckStatus(rank->Get("key", Soon()).status(), absl::StatusCode::kUnavailable, {"has gone"});
}

TEST_CASE("a store opened before fork is refused after it, in the child only") {
  const Place place;
  auto store = Open(place.Options(true));
  CHECK(Succeeded(Spawn([&] {
    const absl::Status s = store->Set("key", "child", Soon());
    store.reset();
    return absl::IsFailedPrecondition(s) && absl::StrContains(s.message(), "open one in each process");
  })));
  CHECK(store->Set("key", "parent", Soon()).ok());
  CHECK(Open(place.Options(false))->Get("key", Soon()).value() == "parent");
}

}  // namespace
}  // namespace ddp
