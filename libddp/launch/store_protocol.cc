// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/store_protocol.h"

#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "libddp/launch/store_secret.h"

namespace ddp {
namespace {

constexpr absl::string_view kGreeting = "ddp store 1";
constexpr size_t kMaxWaiting = 1024;  // Gets that one connection may have open

enum class Verdict : uint8_t { kWelcome = 0, kWrongSecret = 1, kOtherRun = 2 };

void Put(std::string& out, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(number >> (8 * i)));
}

// Takes fields off the front of a message; once one is missing, ok() is false and what is taken is empty.
class Fields {
 public:
  explicit Fields(absl::string_view bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  absl::string_view rest() { return std::exchange(bytes_, {}); }

  absl::string_view Bytes(size_t size) {
    if (size > bytes_.size()) {
      ok_ = false;
      bytes_ = {};
      return {};
    }
    const absl::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  uint64_t Number(size_t size) {
    uint64_t number = 0;
    const absl::string_view taken = Bytes(size);
    for (size_t i = taken.size(); i-- > 0;) number = number << 8 | static_cast<uint8_t>(taken[i]);
    return number;
  }

 private:
  absl::string_view bytes_;
  bool ok_ = true;
};

std::string Frame(absl::string_view body) {
  std::string frame;
  frame.reserve(4 + body.size());
  Put(frame, body.size(), 4);
  frame.append(body.data(), body.size());
  return frame;
}

// A run id as errors show it: it came from elsewhere.
std::string Shown(absl::string_view run_id) { return absl::StrCat("'", absl::CHexEscape(run_id), "'"); }

}  // namespace

std::string EncodeNumber(int64_t number) {
  std::string bytes;
  Put(bytes, static_cast<uint64_t>(number), 8);
  return bytes;
}

std::optional<int64_t> DecodeNumber(absl::string_view bytes) {
  if (bytes.size() != 8) return std::nullopt;
  return static_cast<int64_t>(Fields(bytes).Number(8));
}

std::string EncodeRequest(const StoreRequest& request) {
  std::string body;
  body.reserve(13 + request.key.size() + request.value.size());
  Put(body, static_cast<uint8_t>(request.op), 1);
  Put(body, request.id, 8);
  Put(body, request.key.size(), 4);
  body.append(request.key.data(), request.key.size());
  body.append(request.value.data(), request.value.size());
  return Frame(body);
}

std::string EncodeAnswer(const StoreAnswer& answer) {
  std::string body;
  body.reserve(9 + answer.value.size());
  Put(body, static_cast<uint8_t>(answer.outcome), 1);
  Put(body, answer.id, 8);
  body.append(answer.value);
  return Frame(body);
}

absl::StatusOr<StoreRequest> DecodeRequest(absl::string_view frame) {
  Fields fields(frame);
  StoreRequest request;
  const uint64_t op = fields.Number(1);
  request.id = fields.Number(8);
  const uint64_t key_size = fields.Number(4);
  request.key = fields.Bytes(key_size);
  request.value = fields.rest();
  if (!fields.ok()) return absl::InvalidArgumentError("a request that ends too early");
  if (op < 1 || op > 4) return absl::InvalidArgumentError(absl::StrCat("a request with the operation ", op));
  request.op = static_cast<StoreOp>(op);
  if (request.key.size() > kMaxStoreKey || request.value.size() > kMaxStoreValue) {
    return absl::InvalidArgumentError("a request with a key or a value that is too long");
  }
  const bool takes_value = request.op == StoreOp::kSet || request.op == StoreOp::kAdd;
  const bool bad_number = request.op == StoreOp::kAdd && request.value.size() != 8;
  if (bad_number || (!takes_value && !request.value.empty())) {
    return absl::InvalidArgumentError("a request with a value of the wrong size");
  }
  return request;
}

absl::StatusOr<StoreAnswer> DecodeAnswer(absl::string_view frame) {
  Fields fields(frame);
  StoreAnswer answer;
  const uint64_t outcome = fields.Number(1);
  answer.id = fields.Number(8);
  answer.value = std::string(fields.rest());
  if (!fields.ok() || outcome > 2) return absl::InvalidArgumentError("an answer that makes no sense");
  answer.outcome = static_cast<StoreOutcome>(outcome);
  return answer;
}

absl::StatusOr<std::optional<absl::string_view>> FrameReader::Next() {
  const absl::string_view left = absl::string_view(bytes_).substr(taken_);
  const uint64_t size = left.size() < 4 ? 0 : Fields(left).Number(4);
  if (size > limit_) {
    return absl::InvalidArgumentError(absl::StrCat("a message of ", size, " bytes, more than ", limit_));
  }
  if (left.size() < 4 || left.size() < 4 + size) {
    bytes_.erase(0, std::exchange(taken_, 0));
    return std::nullopt;
  }
  taken_ += 4 + size;
  return left.substr(4, size);
}

absl::StatusOr<std::string> ClientHandshake::Answer(absl::string_view greeting) {
  if (greeting.size() != kGreeting.size() + kNonceSize || greeting.substr(0, kGreeting.size()) != kGreeting) {
    return absl::InvalidArgumentError("what answers there is not a store of this version of libddp");
  }
  server_nonce_ = std::string(greeting.substr(kGreeting.size()));
  return Frame(absl::StrCat(nonce_, Proof(secret_, {"client", server_nonce_, nonce_, run_id_}), run_id_));
}

absl::Status ClientHandshake::Check(absl::string_view verdict) const {
  Fields fields(verdict);
  const absl::string_view code = fields.Bytes(1);
  const absl::string_view proof = fields.Bytes(kProofSize);
  const absl::string_view server_run_id = fields.rest();
  if (!fields.ok()) return absl::InvalidArgumentError("the store's verdict makes no sense");
  const absl::Status wrong_secret = absl::PermissionDeniedError(
      "this rank and the store have different secrets; set DDP_STORE_SECRET to the same text on all ranks, or on none, "
      "and a DDP_STORE_PORT of its own for each job");
  if (static_cast<Verdict>(code[0]) == Verdict::kWrongSecret) return wrong_secret;
  if (!SameProof(proof, Proof(secret_, {"server", server_nonce_, nonce_, code, server_run_id}))) return wrong_secret;
  if (static_cast<Verdict>(code[0]) == Verdict::kWelcome) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the store is that of run ", Shown(server_run_id),
                                                    ", this rank belongs to run ", Shown(run_id_),
                                                    "; give each job a port of its own (DDP_STORE_PORT)"));
}

StoreService::Connection::Connection(StoreService& service, std::string nonce, Send send)
    : service_(service), nonce_(std::move(nonce)), send_(std::move(send)), reader_(kMaxHandshakeFrame) {
  send_(Frame(absl::StrCat(kGreeting, nonce_)));
}

StoreService::Connection::~Connection() {
  while (!waiting_.empty()) {
    const auto [first, last] = service_.waiters_.equal_range(waiting_.begin()->second);
    for (auto it = first; it != last;) {
      it = it->second.connection == this ? service_.waiters_.erase(it) : std::next(it);
    }
    waiting_.erase(waiting_.begin());
  }
}

absl::Status StoreService::Connection::Receive(absl::string_view bytes) {
  reader_.Append(bytes);
  while (true) {
    const absl::StatusOr<std::optional<absl::string_view>> frame = reader_.Next();
    if (!frame.ok()) return frame.status();
    if (!frame->has_value()) return absl::OkStatus();
    absl::Status s;
    if (!authenticated_) {
      s = Authenticate(**frame);
    } else if (const absl::StatusOr<StoreRequest> request = DecodeRequest(**frame); request.ok()) {
      s = Serve(*request);
    } else {
      s = request.status();
    }
    if (!s.ok()) return s;
  }
}

absl::Status StoreService::Connection::Authenticate(absl::string_view hello) {
  Fields fields(hello);
  const absl::string_view client_nonce = fields.Bytes(kNonceSize);
  const absl::string_view proof = fields.Bytes(kProofSize);
  const absl::string_view run_id = fields.rest();
  if (!fields.ok() || run_id.size() > kMaxStoreKey) {
    return absl::InvalidArgumentError("what it says is not the hello of a rank");
  }
  if (!SameProof(proof, Proof(service_.secret_, {"client", nonce_, client_nonce, run_id}))) {
    send_(Frame(absl::StrCat(std::string(1, static_cast<char>(Verdict::kWrongSecret)), std::string(kProofSize, '\0'))));
    return absl::PermissionDeniedError("it does not know the secret");
  }
  const Verdict verdict = run_id == service_.run_id_ ? Verdict::kWelcome : Verdict::kOtherRun;
  const std::string code(1, static_cast<char>(verdict));
  send_(Frame(absl::StrCat(code, Proof(service_.secret_, {"server", nonce_, client_nonce, code, service_.run_id_}),
                           service_.run_id_)));
  if (verdict == Verdict::kOtherRun) {
    return absl::FailedPreconditionError(
        absl::StrCat("it belongs to run ", Shown(run_id), ", the store is that of ", Shown(service_.run_id_)));
  }
  authenticated_ = true;
  reader_.set_limit(kMaxStoreFrame);
  return absl::OkStatus();
}

absl::Status StoreService::Connection::Serve(const StoreRequest& request) {
  switch (request.op) {
    case StoreOp::kSet:
      service_.Set(request.key, request.value);
      send_(EncodeAnswer({StoreOutcome::kOk, request.id, ""}));
      return absl::OkStatus();
    case StoreOp::kGet:
      return Get(request);
    case StoreOp::kAdd: {
      int64_t& counter = service_.counters_[std::string(request.key)];
      const absl::StatusOr<int64_t> sum =
          CounterAfterAdd("", request.key, counter, DecodeNumber(request.value).value_or(0));
      counter = sum.value_or(counter);
      const StoreOutcome outcome = sum.ok() ? StoreOutcome::kOk : StoreOutcome::kOutOfRange;
      send_(EncodeAnswer({outcome, request.id, EncodeNumber(counter)}));
      return absl::OkStatus();
    }
    case StoreOp::kCancel:
      Cancel(request.id);
      return absl::OkStatus();
  }
  return absl::InternalError("unreachable");
}

absl::Status StoreService::Connection::Get(const StoreRequest& request) {
  if (const auto found = service_.values_.find(request.key); found != service_.values_.end()) {
    send_(EncodeAnswer({StoreOutcome::kOk, request.id, found->second}));
    return absl::OkStatus();
  }
  if (waiting_.size() >= kMaxWaiting || !waiting_.emplace(request.id, request.key).second) {
    return absl::InvalidArgumentError("it waits for too many keys, or twice by one number");
  }
  service_.waiters_.emplace(request.key, Waiter{this, request.id});
  return absl::OkStatus();
}

// A Get that has been answered is no longer waiting: the cancellation crossed the answer.
void StoreService::Connection::Cancel(uint64_t id) {
  const auto mine = waiting_.find(id);
  if (mine == waiting_.end()) return;
  const auto [first, last] = service_.waiters_.equal_range(mine->second);
  for (auto it = first; it != last; ++it) {
    if (it->second.connection != this || it->second.id != id) continue;
    service_.waiters_.erase(it);
    break;
  }
  waiting_.erase(mine);
  send_(EncodeAnswer({StoreOutcome::kNotFound, id, ""}));
}

void StoreService::Set(absl::string_view key, absl::string_view value) {
  values_.insert_or_assign(std::string(key), std::string(value));
  const auto [first, last] = waiters_.equal_range(key);
  const std::vector<std::pair<std::string, Waiter>> served(first, last);
  waiters_.erase(first, last);
  for (const auto& [unused, waiter] : served) {
    waiter.connection->waiting_.erase(waiter.id);
    waiter.connection->send_(EncodeAnswer({StoreOutcome::kOk, waiter.id, std::string(value)}));
  }
}

}  // namespace ddp
