// SPDX-License-Identifier: Apache-2.0
// The client of a TCP store, and on the rank that serves also the owner of the server.
//
// Open connects in the caller's thread, again and again until the server is there. From then on a thread of the store's
// own reads answers and writes requests; a call puts its request in line and waits until the answer is there or its
// deadline has passed.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/store.h"
#include "libddp/base/env.h"
#include "libddp/launch/asio.h"
#include "libddp/launch/launch_store.h"
#include "libddp/launch/store_protocol.h"
#include "libddp/launch/store_secret.h"
#include "libddp/launch/store_server.h"
#include "libddp/launch/store_socket.h"

namespace ddp {
namespace {

using asio::ip::tcp;

// One try to connect and prove oneself; a server that is busy with many ranks needs a moment.
constexpr absl::Duration kTryTimeout = absl::Seconds(10);
// How long after its deadline a call waits for an answer that is certainly on its way from a server that works.
constexpr absl::Duration kAnswerGrace = absl::Seconds(2);

class TcpStore final : public Store {
 public:
  // `next`: an earlier store's server may still be at the port.
  TcpStore(TcpStoreOptions options, bool next) : options_(std::move(options)), next_(next), socket_(io_) {}
  ~TcpStore() override;

  absl::Status Open();

  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) override;

 private:
  absl::Status CheckOptions();
  absl::Status Connect(absl::Time deadline);
  absl::Status Try(absl::Time deadline);
  absl::StatusOr<std::vector<tcp::endpoint>> Resolve(absl::Time deadline);
  std::error_code ConnectTo(const tcp::endpoint& endpoint, absl::Time deadline);
  absl::StatusOr<std::string> Secret() const;
  absl::StatusOr<std::string> ReceiveFrame(absl::Time deadline);
  template <typename Start>
  std::error_code Await(absl::Time deadline, const Start& start);

  absl::StatusOr<StoreAnswer> Call(StoreOp op, absl::string_view key, absl::string_view value, absl::Time deadline);
  absl::Status Late(StoreOp op, absl::string_view key) const;
  std::string Where() const;

  // In the thread.
  void Read();
  void Received(size_t size);
  void Write(std::string frame);
  void WriteNext();
  void Fail(const absl::Status& why);

  TcpStoreOptions options_;
  const bool next_;
  const pid_t pid_ = getpid();
  std::unique_ptr<StoreServer> server_;  // on one rank; ends after this client has left
  asio::io_context io_{1};
  tcp::socket socket_;
  FrameReader reader_{kMaxHandshakeFrame};
  std::array<char, size_t{16} << 10> in_;
  std::deque<std::string> out_;  // in the thread alone

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  uint64_t last_id_ = 0;
  std::map<uint64_t, std::optional<StoreAnswer>> calls_;  // that wait, by request
  bool responsive_ = true;                                // false: the server let the last call wait in vain
  absl::Status broken_;

  std::thread thread_;
};

TcpStore::~TcpStore() {
  if (!thread_.joinable()) {
    HangUp(&socket_);
    return;
  }
  asio::post(io_, [this] { HangUp(&socket_); });
  thread_.join();
}

std::string TcpStore::Where() const {
  return absl::StrCat("TCP store at ", options_.host.empty() ? "127.0.0.1" : options_.host, ":", options_.port);
}

absl::Status TcpStore::CheckOptions() {
  if (options_.port < 1 || options_.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("TCP store: ", options_.port, " is no port; give one from 1 to 65535"));
  }
  if (options_.run_id.size() > kMaxStoreKey) {
    return absl::InvalidArgumentError(absl::StrCat(Where(), ": the run id has ", options_.run_id.size(),
                                                   " bytes, more than ", kMaxStoreKey, "; choose a shorter one"));
  }
  if (options_.secret.empty()) options_.secret = ReadEnv(Env::kStoreSecret).value_or("");
  if (options_.secret.empty() && !options_.host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(),
                     ": ranks of several hosts need a secret that they all know; set DDP_STORE_SECRET to the "
                     "same random text on all ranks (openssl rand -hex 32 makes one)"));
  }
  return absl::OkStatus();
}

absl::Status TcpStore::Open() {
  if (absl::Status s = CheckOptions(); !s.ok()) return s;
  const absl::Time deadline = absl::Now() + options_.timeout;
  if (options_.serve) {
    auto server = StoreServer::Start({options_.port, options_.host.empty(), options_.secret, options_.run_id,
                                      options_.world_size, options_.shutdown_timeout});
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
  }
  if (absl::Status s = Connect(deadline); !s.ok()) return s;
  io_.restart();
  // Tells the server that this rank is there: of a connection whose verdict came too late it hears nothing more. There
  // is no answer.
  Write(EncodeRequest({StoreOp::kCancel, 0, "", ""}));
  Read();
  thread_ = std::thread([this] { io_.run(); });
  return absl::OkStatus();
}

absl::Status TcpStore::Connect(absl::Time deadline) {
  for (absl::Duration pause = absl::Milliseconds(2);; pause = std::min(2 * pause, absl::Milliseconds(100))) {
    const absl::Status s = Try(std::min(deadline, absl::Now() + kTryTimeout));
    if (s.ok()) return s;
    // The earlier server is another run's, or its secret file is gone.
    const bool earlier = next_ && absl::IsFailedPrecondition(s);
    if (!absl::IsUnavailable(s) && !earlier) return absl::Status(s.code(), absl::StrCat(Where(), ": ", s.message()));
    if (absl::Now() + pause >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(Where(), ": did not appear within ", absl::FormatDuration(options_.timeout), " (", s.message(),
                       "); is the rank that serves it started, on that host, and with the same port on all ranks?"));
    }
    absl::SleepFor(pause);
  }
}

// Starts an operation and waits for its end; timed_out closes the socket. What has happened by the deadline counts,
// also where this rank was too busy to look before.
template <typename Start>
std::error_code TcpStore::Await(absl::Time deadline, const Start& start) {
  std::optional<std::error_code> result;
  io_.restart();
  start([&](std::error_code error, const auto&... /*rest*/) { result = error; });
  io_.run_until(absl::ToChronoTime(deadline));
  if (!result.has_value()) io_.poll();
  if (result.has_value()) return *result;
  HangUp(&socket_);
  // Returns at once, except that a look-up of a name cannot be interrupted: it has time-outs of its own.
  io_.run();
  return asio::error::timed_out;
}

absl::StatusOr<std::vector<tcp::endpoint>> TcpStore::Resolve(absl::Time deadline) {
  const auto port = static_cast<asio::ip::port_type>(options_.port);
  if (options_.host.empty()) return std::vector<tcp::endpoint>{{asio::ip::address_v4::loopback(), port}};
  std::vector<tcp::endpoint> endpoints;
  tcp::resolver resolver(io_);
  const std::error_code error = Await(deadline, [&](auto done) {
    resolver.async_resolve(options_.host, absl::StrCat(options_.port),
                           [&endpoints, done](std::error_code result, const tcp::resolver::results_type& found) {
                             for (const auto& entry : found) endpoints.push_back(entry.endpoint());
                             done(result);
                           });
  });
  if (!error) return endpoints;
  return absl::UnavailableError(absl::StrCat("looking up the host: ", error.message()));
}

absl::StatusOr<std::string> TcpStore::Secret() const {
  if (!options_.secret.empty()) return options_.secret;
  absl::StatusOr<std::string> secret = SecretFile::Read(options_.port);
  if (!absl::IsNotFound(secret.status())) return secret;
  // Our server makes the file before it greets anybody, and removes it after all ranks have come.
  return absl::FailedPreconditionError(
      absl::StrCat("a program listens there, but it is not this run's store: ", secret.status().message()));
}

absl::StatusOr<std::string> TcpStore::ReceiveFrame(absl::Time deadline) {
  while (true) {
    const absl::StatusOr<std::optional<absl::string_view>> frame = reader_.Next();
    if (!frame.ok()) return absl::InvalidArgumentError("what answers there is not a store; choose another port");
    if (frame->has_value()) return std::string(**frame);
    size_t size = 0;
    const std::error_code error = Await(deadline, [&](auto done) {
      socket_.async_read_some(asio::buffer(in_), [&size, done](std::error_code result, size_t n) {
        size = n;
        done(result);
      });
    });
    if (error)
      return absl::UnavailableError(absl::StrCat("it accepts connections but does not answer: ", error.message()));
    reader_.Append({in_.data(), size});
  }
}

std::error_code TcpStore::ConnectTo(const tcp::endpoint& endpoint, absl::Time deadline) {
  HangUp(&socket_);
  std::error_code error;
  OpenSocket(endpoint.protocol(), &socket_, &error);
  if (error) return error;
  return Await(deadline, [&](auto done) { socket_.async_connect(endpoint, done); });
}

// Unavailable: may work when tried again.
absl::Status TcpStore::Try(absl::Time deadline) {
  const absl::StatusOr<std::vector<tcp::endpoint>> endpoints = Resolve(deadline);
  if (!endpoints.ok()) return endpoints.status();
  std::error_code error = asio::error::host_not_found;
  for (auto endpoint = endpoints->begin(); error && endpoint != endpoints->end(); ++endpoint) {
    error = ConnectTo(*endpoint, deadline);
  }
  if (error) return absl::UnavailableError(error.message());
  reader_ = FrameReader(kMaxHandshakeFrame);
  // A port of the range from which the kernel takes a client's own: with nobody listening, TCP may connect it to
  // itself.
  if (socket_.local_endpoint(error) == socket_.remote_endpoint(error)) return absl::UnavailableError("nobody listens");
  socket_.set_option(tcp::no_delay(true), error);

  const absl::StatusOr<std::string> greeting = ReceiveFrame(deadline);
  if (!greeting.ok()) return greeting.status();
  // Not before we are greeted: then the file is no longer an earlier run's.
  absl::StatusOr<std::string> secret = Secret();
  if (!secret.ok()) return secret.status();
  absl::StatusOr<std::string> nonce = RandomBytes(kNonceSize);
  if (!nonce.ok()) return nonce.status();
  ClientHandshake handshake(*std::move(secret), options_.run_id, *std::move(nonce));
  const absl::StatusOr<std::string> hello = handshake.Answer(*greeting);
  if (!hello.ok()) return hello.status();
  error = Await(deadline, [&](auto done) { asio::async_write(socket_, asio::buffer(*hello), done); });
  if (error) return absl::UnavailableError(error.message());
  const absl::StatusOr<std::string> verdict = ReceiveFrame(deadline);
  if (!verdict.ok()) return verdict.status();
  reader_.set_limit(kMaxStoreFrame);
  return handshake.Check(*verdict);
}

void TcpStore::Read() {
  socket_.async_read_some(asio::buffer(in_), [this](std::error_code error, size_t size) {
    if (!error) {
      Received(size);
    } else {
      Fail(absl::UnavailableError(absl::StrCat(Where(), ": the server has gone (", error.message(),
                                               "); look at the output of the rank that ran it, usually rank 0")));
    }
  });
}

void TcpStore::Received(size_t size) {
  reader_.Append({in_.data(), size});
  while (true) {
    const absl::StatusOr<std::optional<absl::string_view>> frame = reader_.Next();
    absl::Status s = frame.status();
    if (s.ok() && !frame->has_value()) break;
    absl::StatusOr<StoreAnswer> answer = s.ok() ? DecodeAnswer(**frame) : s;
    if (!answer.ok()) {
      Fail(absl::DataLossError(absl::StrCat(Where(), ": ", answer.status().message(), "; restart the job")));
      return;
    }
    std::lock_guard lock(mutex_);
    responsive_ = true;
    // Who no longer waits has been told that the deadline passed.
    if (const auto call = calls_.find(answer->id); call != calls_.end()) call->second = *std::move(answer);
    changed_.notify_all();
  }
  Read();
}

void TcpStore::Write(std::string frame) {
  out_.push_back(std::move(frame));
  if (out_.size() == 1) WriteNext();
}

void TcpStore::WriteNext() {
  asio::async_write(socket_, asio::buffer(out_.front()), [this](std::error_code error, size_t /*size*/) {
    if (error) return;  // reading fails too, and tells
    out_.pop_front();
    if (!out_.empty()) WriteNext();
  });
}

void TcpStore::Fail(const absl::Status& why) {
  HangUp(&socket_);
  std::lock_guard lock(mutex_);
  broken_ = why;
  changed_.notify_all();
}

absl::Status TcpStore::Late(StoreOp op, absl::string_view key) const {
  return absl::DeadlineExceededError(absl::StrCat(Where(), ": the server did not answer in time to ",
                                                  op == StoreOp::kGet   ? "getting"
                                                  : op == StoreOp::kSet ? "setting"
                                                                        : "adding to",
                                                  " key '", key, "'; is the rank that serves it stopped, or hung?"));
}

absl::StatusOr<StoreAnswer> TcpStore::Call(StoreOp op, absl::string_view key, absl::string_view value,
                                           absl::Time deadline) {
  if (absl::Status s = CheckStoreLimits(Where(), key, value.size()); !s.ok()) return s;
  if (getpid() != pid_) {
    return absl::FailedPreconditionError(absl::StrCat(Where(), ": was opened before fork; open one in each process"));
  }
  std::unique_lock lock(mutex_);
  const uint64_t id = ++last_id_;
  const auto call = calls_.emplace(id, std::nullopt).first;
  const auto post = [&](const StoreRequest& request) {
    asio::post(io_, [this, frame = EncodeRequest(request)]() mutable { Write(std::move(frame)); });
  };
  // On the system clock: see MemoryStore::Get.
  const auto wait = [&](absl::Time until) {
    while (broken_.ok() && !call->second.has_value() && absl::Now() < until) {
      changed_.wait_until(lock, absl::ToChronoTime(until));
    }
    return call->second.has_value();
  };
  if (broken_.ok()) post({op, id, key, value});
  bool answered = wait(deadline);
  if (!answered && broken_.ok()) {
    if (op == StoreOp::kGet) post({StoreOp::kCancel, id, "", ""});
    answered = wait(responsive_ ? std::max(deadline, absl::Now()) + kAnswerGrace : deadline);
    if (!answered) responsive_ = false;
  }
  absl::StatusOr<StoreAnswer> result = broken_.ok() ? Late(op, key) : broken_;
  if (answered) result = *std::move(call->second);
  calls_.erase(call);
  return result;
}

absl::Status TcpStore::Set(absl::string_view key, absl::string_view value, absl::Time deadline) {
  return Call(StoreOp::kSet, key, value, deadline).status();
}

absl::StatusOr<std::string> TcpStore::Get(absl::string_view key, absl::Time deadline) {
  absl::StatusOr<StoreAnswer> answer = Call(StoreOp::kGet, key, "", deadline);
  if (!answer.ok()) return answer.status();
  if (answer->outcome == StoreOutcome::kOk) return std::move(answer->value);
  return absl::DeadlineExceededError(
      absl::StrCat(Where(), ": no rank has set key '", key, "' in time; is every rank started?"));
}

absl::StatusOr<int64_t> TcpStore::Add(absl::string_view key, int64_t delta, absl::Time deadline) {
  const absl::StatusOr<StoreAnswer> answer = Call(StoreOp::kAdd, key, EncodeNumber(delta), deadline);
  if (!answer.ok()) return answer.status();
  const std::optional<int64_t> total = DecodeNumber(answer->value);
  if (total.has_value()) {
    return answer->outcome == StoreOutcome::kOutOfRange ? CounterAfterAdd(Where(), key, *total, delta) : *total;
  }
  return absl::DataLossError(absl::StrCat(Where(), ": the server's answer to key '", key, "' is no number"));
}

absl::StatusOr<std::shared_ptr<Store>> OpenTcpStore(TcpStoreOptions options, bool next) {
  // Asio throws where the system gives it no descriptor to wait with, and std::thread where it gives none.
  try {
    // A child of fork has neither the thread nor the right to speak for its parent: there nothing is destroyed.
    const std::shared_ptr<TcpStore> store(new TcpStore(std::move(options), next), [pid = getpid()](TcpStore* pointer) {
      if (getpid() == pid) delete pointer;
    });
    if (absl::Status s = store->Open(); !s.ok()) return s;
    return store;
  } catch (const std::system_error& e) {
    return absl::ResourceExhaustedError(absl::StrCat("TCP store: cannot be opened: ", e.what(),
                                                     "; allow more threads and open files (ulimit -u, ulimit -n)"));
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> CreateTcpStore(TcpStoreOptions options) {
  return OpenTcpStore(std::move(options), /*next=*/false);
}

absl::StatusOr<std::shared_ptr<Store>> CreateNextTcpStore(TcpStoreOptions options) {
  return OpenTcpStore(std::move(options), /*next=*/true);
}

}  // namespace ddp
