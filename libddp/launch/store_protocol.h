// SPDX-License-Identifier: Apache-2.0
// What a TCP store's clients and its server say to each other, without the sockets: bytes in, bytes out.
//
// Every message is a frame: its length (4 bytes), then so many bytes. Numbers are little-endian. In turn:
//
//   greeting  server  "ddp store 1", nonce
//   hello     client  nonce, proof over ("client", both nonces, run id), run id
//   verdict   server  1 byte, proof over ("server", both nonces, verdict, run id), run id of the server
//
// The client proves first that it knows the secret, so a stranger gets nothing out of the server that was made of the
// secret; then the server proves it, so that who takes the server's port gets no requests. After the verdict the client
// sends requests and gets one answer to each, in any order:
//
//   request   op (1), id (8), key size (4), key, value     Add: the value is 8 bytes; Cancel: id of a Get, no key
//   answer    outcome (1), id (8), value                   to Add: 8 bytes
//
// A Get of a key that nobody has set is answered when somebody sets it, or with kNotFound when it is cancelled. An
// Add whose sum is no int64_t is answered with kOutOfRange and the counter as it is. A frame longer than its place
// allows is refused before it is read.
#ifndef LIBDDP_LAUNCH_STORE_PROTOCOL_H_
#define LIBDDP_LAUNCH_STORE_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libddp/launch/store_limits.h"

namespace ddp {

// The longest frame before the verdict, and after it.
inline constexpr size_t kMaxHandshakeFrame = size_t{2} << 10;
inline constexpr size_t kMaxStoreFrame = kMaxStoreKey + kMaxStoreValue + 16;

enum class StoreOp : uint8_t { kSet = 1, kGet = 2, kAdd = 3, kCancel = 4 };
enum class StoreOutcome : uint8_t { kOk = 0, kNotFound = 1, kOutOfRange = 2 };

struct StoreRequest {
  StoreOp op;
  uint64_t id;
  absl::string_view key;
  absl::string_view value;
};

struct StoreAnswer {
  StoreOutcome outcome;
  uint64_t id;
  std::string value;
};

// 8 bytes, as the value of an Add and of its answer.
std::string EncodeNumber(int64_t number);
std::optional<int64_t> DecodeNumber(absl::string_view bytes);

// With their length.
std::string EncodeRequest(const StoreRequest& request);
std::string EncodeAnswer(const StoreAnswer& answer);

// Of a frame without its length. InvalidArgument says what is wrong with it.
absl::StatusOr<StoreRequest> DecodeRequest(absl::string_view frame);  // refers to `frame`
absl::StatusOr<StoreAnswer> DecodeAnswer(absl::string_view frame);

// Cuts what arrives into frames.
class FrameReader {
 public:
  explicit FrameReader(size_t limit) : limit_(limit) {}

  void set_limit(size_t limit) { limit_ = limit; }
  void Append(absl::string_view bytes) { bytes_.append(bytes.data(), bytes.size()); }

  // The next frame without its length, good until the next call; nullopt if it is not complete. InvalidArgument if it
  // is longer than the limit.
  absl::StatusOr<std::optional<absl::string_view>> Next();

 private:
  size_t limit_;
  std::string bytes_;
  size_t taken_ = 0;
};

// A client's part up to the verdict.
class ClientHandshake {
 public:
  ClientHandshake(std::string secret, std::string run_id, std::string nonce)
      : secret_(std::move(secret)), run_id_(std::move(run_id)), nonce_(std::move(nonce)) {}

  // The hello to send, with its length. InvalidArgument if that was no store's greeting.
  absl::StatusOr<std::string> Answer(absl::string_view greeting);

  // PermissionDenied: the secrets differ. FailedPrecondition: the server is another run's. InvalidArgument: that was no
  // verdict.
  absl::Status Check(absl::string_view verdict) const;

 private:
  const std::string secret_;
  const std::string run_id_;
  const std::string nonce_;
  std::string server_nonce_;
};

// The server: a dictionary, and who waits for which key. Used by one thread; outlives its connections.
class StoreService {
 public:
  StoreService(std::string secret, std::string run_id) : secret_(std::move(secret)), run_id_(std::move(run_id)) {}

  class Connection {
   public:
    using Send = std::function<void(std::string)>;

    // Sends the greeting. `nonce`: kNonceSize fresh random bytes.
    Connection(StoreService& service, std::string nonce, Send send);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    // Takes what has arrived, and sends what it calls for. On an error the connection is to be closed, after what was
    // sent has gone.
    absl::Status Receive(absl::string_view bytes);

    bool authenticated() const { return authenticated_; }

   private:
    friend class StoreService;

    absl::Status Authenticate(absl::string_view hello);
    absl::Status Serve(const StoreRequest& request);
    absl::Status Get(const StoreRequest& request);
    void Cancel(uint64_t id);

    StoreService& service_;
    const std::string nonce_;
    const Send send_;
    FrameReader reader_;
    bool authenticated_ = false;
    std::map<uint64_t, std::string> waiting_;  // keys by request
  };

 private:
  struct Waiter {
    Connection* connection;
    uint64_t id;
  };

  void Set(absl::string_view key, absl::string_view value);

  const std::string secret_;
  const std::string run_id_;
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, int64_t, std::less<>> counters_;
  std::multimap<std::string, Waiter, std::less<>> waiters_;  // by key
};

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_STORE_PROTOCOL_H_
