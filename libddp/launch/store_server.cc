// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/store_server.h"

#include <array>
#include <deque>
#include <list>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/base/log.h"
#include "libddp/launch/asio.h"
#include "libddp/launch/store_protocol.h"
#include "libddp/launch/store_secret.h"
#include "libddp/launch/store_socket.h"

namespace ddp {
namespace {

using asio::ip::tcp;

// A rank proves itself in milliseconds; on a loaded machine, with many ranks that start at once, in a second or two.
constexpr auto kProveTimeout = std::chrono::seconds(5);
constexpr int kListenTries = 10;
constexpr size_t kMaxUnproved = 256;
// What a client has not yet fetched, before its next requests are read.
constexpr size_t kMaxQueued = size_t{32} << 20;

class StoreServerImpl;

// One connection; lives as long as an operation on its socket is under way.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(StoreServerImpl& server, tcp::socket socket)
      : server_(server), socket_(std::move(socket)), timer_(socket_.get_executor()) {}
  ~Session() { HangUp(&socket_); }

  void Start(StoreService& service, std::string nonce);
  void Close();
  bool authenticated() const { return connection_.has_value() && connection_->authenticated(); }

  std::list<std::shared_ptr<Session>>::iterator place;  // in the server's list

 private:
  void Read();
  void Received(size_t size);
  void Send(std::string bytes);
  void Write();

  StoreServerImpl& server_;
  tcp::socket socket_;
  asio::steady_timer timer_;  // for the proof
  std::optional<StoreService::Connection> connection_;
  std::array<char, size_t{16} << 10> in_;
  std::deque<std::string> out_;
  size_t queued_ = 0;  // bytes in out_
  bool reading_ = false;
  bool last_words_ = false;  // closes when out_ is empty
  bool came_ = false;        // the client has read the verdict, and stays
};

class StoreServerImpl final : public StoreServer {
 public:
  explicit StoreServerImpl(StoreServerOptions options)
      : options_(std::move(options)), acceptor_(io_), pause_(io_), end_(io_) {}
  ~StoreServerImpl() override;

  absl::Status Start();

  void Authenticated(const std::shared_ptr<Session>& session);
  void Came();
  void Left(const std::shared_ptr<Session>& session);
  void Refused(const absl::Status& why);

 private:
  absl::Status Open();
  std::error_code Listen();
  std::error_code TryToListen(const tcp::endpoint& endpoint);
  absl::Status PortError(const std::error_code& error) const;
  void Accept();
  void Finish();
  void Welcome(tcp::socket socket);

  const StoreServerOptions options_;
  SecretFile file_;
  std::optional<StoreService> service_;
  asio::io_context io_{1};  // may hold the last handle to a session, which needs the service
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;  // after a failed accept
  asio::steady_timer end_;
  // In the thread alone.
  std::list<std::shared_ptr<Session>> unproved_;  // the oldest first
  std::list<std::shared_ptr<Session>> clients_;
  int came_ = 0;
  bool warned_ = false;
  bool ending_ = false;
  std::thread thread_;
};

void Session::Start(StoreService& service, std::string nonce) {
  std::error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  timer_.expires_after(kProveTimeout);
  timer_.async_wait([self = shared_from_this()](std::error_code error) {
    if (!error && !self->authenticated()) self->Close();
  });
  connection_.emplace(service, std::move(nonce), [this](std::string bytes) { Send(std::move(bytes)); });
  Read();
}

void Session::Close() {
  if (!socket_.is_open()) return;
  HangUp(&socket_);
  timer_.cancel();
  server_.Left(shared_from_this());
  connection_.reset();  // nobody answers its Gets any more
}

void Session::Read() {
  if (reading_ || last_words_ || queued_ > kMaxQueued) return;
  reading_ = true;
  socket_.async_read_some(asio::buffer(in_), [self = shared_from_this()](std::error_code error, size_t size) {
    self->reading_ = false;
    if (error) {
      self->Close();
    } else if (self->connection_.has_value()) {
      self->Received(size);
    }
  });
}

void Session::Received(size_t size) {
  const bool before = authenticated();
  // First, since what it sets may be what another rank waits for, which then finds no secret file any more.
  if (before && !std::exchange(came_, true)) server_.Came();
  const absl::Status s = connection_->Receive({in_.data(), size});
  if (!before && authenticated()) {
    timer_.cancel();
    server_.Authenticated(shared_from_this());
  }
  if (s.ok()) {
    Read();
    return;
  }
  server_.Refused(s);
  last_words_ = true;
  if (out_.empty()) Close();
}

void Session::Send(std::string bytes) {
  queued_ += bytes.size();
  out_.push_back(std::move(bytes));
  if (out_.size() == 1) Write();
}

void Session::Write() {
  asio::async_write(socket_, asio::buffer(out_.front()),
                    [self = shared_from_this()](std::error_code error, size_t /*n*/) {
                      if (error) {
                        self->Close();
                        return;
                      }
                      self->queued_ -= self->out_.front().size();
                      self->out_.pop_front();
                      if (!self->out_.empty()) {
                        self->Write();
                      } else if (self->last_words_) {
                        self->Close();
                      }
                      if (self->socket_.is_open()) self->Read();
                    });
}

StoreServerImpl::~StoreServerImpl() {
  if (thread_.joinable()) Finish();
  file_.Remove();  // while we have the port: then it is the next run's to make one
  HangUp(&acceptor_);
}

// Until all clients have left.
void StoreServerImpl::Finish() {
  asio::post(io_, [this] {
    ending_ = true;
    if (clients_.empty()) {
      io_.stop();
      return;
    }
    end_.expires_after(absl::ToChronoNanoseconds(options_.shutdown_timeout));
    end_.async_wait([this](std::error_code /*error*/) {
      LogWarn("store: ", clients_.size(), " ranks have not left in time; the store ends without them");
      io_.stop();
    });
  });
  thread_.join();
}

absl::Status StoreServerImpl::PortError(const std::error_code& error) const {
  return absl::InvalidArgumentError(
      absl::StrCat("TCP store: cannot listen on port ", options_.port, ": ", error.message(),
                   "; set DDP_STORE_PORT to a free port, the same on all ranks (ss -ltnp shows who has it)"));
}

// try_again if another server is about to listen on the port, too; address_in_use if one does.
std::error_code StoreServerImpl::TryToListen(const tcp::endpoint& endpoint) {
  std::error_code error, ignored;
  acceptor_.close(ignored);
  OpenAcceptor(endpoint.protocol(), &acceptor_, &error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error && endpoint.protocol() == tcp::v6()) acceptor_.set_option(asio::ip::v6_only(false), error);
  if (!error) acceptor_.non_blocking(true, error);
  if (!error) acceptor_.bind(endpoint, error);
  if (error) return error;
  // Two that want to listen at the same moment can be in each other's way, so that neither does.
  acceptor_.listen(tcp::acceptor::max_listen_connections, error);
  return error == asio::error::address_in_use ? make_error_code(asio::error::try_again) : error;
}

std::error_code StoreServerImpl::Listen() {
  const auto port = static_cast<asio::ip::port_type>(options_.port);
  if (options_.loopback_only) return TryToListen({asio::ip::address_v4::loopback(), port});
  const std::error_code error = TryToListen({tcp::v6(), port});
  const bool taken = error == asio::error::address_in_use || error == asio::error::try_again;
  return !error || taken ? error : TryToListen({tcp::v4(), port});  // a host without IPv6
}

// The order matters. An address may be bound by several servers, but one of them listens: that one may replace the
// secret file of an earlier run. Connections are accepted only afterwards, and a client reads the file only after it
// has been greeted: so it finds the new one.
absl::Status StoreServerImpl::Open() {
  std::error_code error = Listen();
  for (int tries = 1; error == asio::error::try_again && tries < kListenTries; ++tries) {
    const absl::StatusOr<std::string> random = RandomBytes(1);
    if (!random.ok()) return random.status();
    absl::SleepFor(absl::Milliseconds(1 + static_cast<unsigned char>(random->front()) % 32));
    error = Listen();
  }
  if (error == asio::error::try_again) error = asio::error::address_in_use;
  if (error) return PortError(error);
  std::string secret = options_.secret;
  if (secret.empty()) {
    absl::StatusOr<SecretFile> file = SecretFile::Create(options_.port);
    if (!file.ok()) return file.status();
    file_ = *std::move(file);
    secret = file_.secret();
  }
  service_.emplace(std::move(secret), options_.run_id);
  return absl::OkStatus();
}

absl::Status StoreServerImpl::Start() {
  if (absl::Status s = Open(); !s.ok()) return s;
  Accept();
  thread_ = std::thread([this] { io_.run(); });
  return absl::OkStatus();
}

void StoreServerImpl::Accept() {
  acceptor_.async_wait(tcp::acceptor::wait_read, [this](std::error_code error) {
    if (!error) {
      tcp::socket socket = AcceptSocket(&acceptor_, &error);
      if (!error) Welcome(std::move(socket));
    }
    if (!error || error == asio::error::would_block) {
      Accept();
      return;
    }
    // No file descriptors left, say: better soon than never.
    LogWarn("store: accept: ", error.message());
    pause_.expires_after(std::chrono::milliseconds(100));
    pause_.async_wait([this](std::error_code /*error*/) { Accept(); });
  });
}

void StoreServerImpl::Welcome(tcp::socket socket) {
  absl::StatusOr<std::string> nonce = RandomBytes(kNonceSize);
  if (!nonce.ok()) {
    LogError("store: ", nonce.status().message());
    return;
  }
  if (unproved_.size() >= kMaxUnproved) unproved_.front()->Close();
  const auto session = std::make_shared<Session>(*this, std::move(socket));
  session->place = unproved_.insert(unproved_.end(), session);
  session->Start(*service_, *std::move(nonce));
}

void StoreServerImpl::Authenticated(const std::shared_ptr<Session>& session) {
  clients_.splice(clients_.end(), unproved_, session->place);
}

// A client that has proved itself may still give up and try again.
void StoreServerImpl::Came() {
  if (++came_ == options_.world_size) file_.Remove();
}

// A rank with a wrong secret is told so; whoever waits for it here, at the server, would only see that it does not
// come. Once: strangers come in crowds.
void StoreServerImpl::Refused(const absl::Status& why) {
  const bool warn = absl::IsPermissionDenied(why) && !std::exchange(warned_, true);
  LogAt(warn ? LogLevel::kWarn : LogLevel::kInfo, "store: refused a connection: ", why.message(),
        warn ? "; if that was a rank of this job, give it the DDP_STORE_SECRET of the rank that serves the store" : "");
}

void StoreServerImpl::Left(const std::shared_ptr<Session>& session) {
  (session->authenticated() ? clients_ : unproved_).erase(session->place);
  if (ending_ && clients_.empty()) io_.stop();
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreServer>> StoreServer::Start(StoreServerOptions options) {
  // Asio throws where the system gives it no thread, or no descriptor to wait with.
  try {
    auto server = std::make_unique<StoreServerImpl>(std::move(options));
    if (absl::Status s = server->Start(); !s.ok()) return s;
    return server;
  } catch (const std::system_error& e) {
    return absl::ResourceExhaustedError(absl::StrCat("TCP store: cannot start its server: ", e.what(),
                                                     "; allow more threads and open files (ulimit -u, ulimit -n)"));
  }
}

}  // namespace ddp
