// SPDX-License-Identifier: Apache-2.0
// Key-value stores through which ranks find each other if there is no MPI.
#ifndef DDP_STORE_H_
#define DDP_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ddp/types.h"

namespace ddp {

// A small shared dictionary for rendezvous, never for data. Keys have up to 1 KiB, values up to 16 MiB: else a call
// returns InvalidArgument.
//
// Every call has a deadline. When it passes, the call returns DeadlineExceeded, which names the key. Usually one rank
// sets a key once and the others read it; setting it again replaces the value. Thread-safe: any thread of any rank may
// call at any time.
class DDP_EXPORT Store {
 public:
  virtual ~Store() = default;

  // Sets `key` to `value` (any bytes), visible to all ranks.
  virtual absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) = 0;

  // Returns the value of `key`. Waits until some rank has set it.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) = 0;

  // Atomically adds `delta` to the integer at `key` (initially 0) and returns the new value. OutOfRange, which
  // names the key, if the sum is no int64_t: then the integer stays as it is. Do not use the same key with Set or Get.
  virtual absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) = 0;
};

// A store for ranks that are threads of one process. All ranks share one object.
DDP_EXPORT std::shared_ptr<Store> CreateMemoryStore();

// Where a file store is, and whose.
struct FileStoreOptions {
  // The file. It is created if missing; its folder must exist and be visible to all ranks. Not on NFS, because the
  // store relies on flock.
  std::string path = {};
  // Identifies the run; the same on all ranks. Keys that other runs left in the file are ignored.
  std::string run_id = {};
  // The number of ranks. When this many stores have opened the file, its name is removed, so that nothing is left
  // behind however the ranks end. The open stores keep working. 0: the name is not removed.
  int world_size = 0;
};

// A store in one append-only file, for ranks of one host. Each process opens the file itself, after fork, not before.
// Only one run at a time may use a path.
//
// Errors: InvalidArgument or PermissionDenied (naming the path) if the file cannot be used; PermissionDenied also if it
// belongs to another user, if others may write it, or if the path is a symbolic link; DataLoss if it contains other
// data; FailedPrecondition if another run is using the path.
DDP_EXPORT absl::StatusOr<std::shared_ptr<Store>> CreateFileStore(FileStoreOptions options);

// Where a TCP store is, who serves it, and who may use it.
struct TcpStoreOptions {
  // The name or address under which all ranks reach the host of the serving rank. Empty: all ranks are on this host,
  // and the store listens only on the loopback interface.
  std::string host = {};
  // 1 to 65535; the same on all ranks. The port must be free on the serving host.
  int port = 0;
  // True if this process runs the server. Set it on exactly one rank, usually rank 0.
  bool serve = false;
  // Identifies the run; the same on all ranks. The server rejects ranks of another run.
  std::string run_id = {};
  // A text that only the ranks know. Empty: DDP_STORE_SECRET. If that is unset too: with an empty `host`, the server
  // writes a random secret to a file that only this user can read; otherwise InvalidArgument says what to set.
  std::string secret = {};
  // The number of ranks. When all have connected, the file with the secret is removed. 0: it stays until the server
  // ends.
  int world_size = 0;
  // How long to wait for the server to start.
  absl::Duration timeout = absl::Minutes(10);
  // How long the server's destructor keeps serving ranks that have not left yet.
  absl::Duration shutdown_timeout = absl::Seconds(10);
};

// A store that one of the ranks serves over TCP, for ranks without a common folder. Each rank creates its own object,
// which owns a thread. Do not use it after fork.
//
// Client and server prove to each other that they know the secret (HMAC-SHA256 over fresh random numbers). So a
// stranger who connects gets nothing and cannot take a rank's place. Later traffic is neither encrypted nor signed: use
// the store only on a network that you trust. If the server does not answer, a call returns two seconds after its
// deadline.
//
// Errors, also of later calls: InvalidArgument (an option is wrong, or the port is used by another program),
// DeadlineExceeded (no server within `timeout`), PermissionDenied (different secret), FailedPrecondition (different
// run), Unavailable (the server is gone).
DDP_EXPORT absl::StatusOr<std::shared_ptr<Store>> CreateTcpStore(TcpStoreOptions options);

}  // namespace ddp

#endif  // DDP_STORE_H_
