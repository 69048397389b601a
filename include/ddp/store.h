// Key-value stores by which ranks find each other when no launcher carries messages for them.
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

// A small shared dictionary used for rendezvous, never for data. Keys have up to 1 KiB, values up to 16 MiB.
//
// Every call has a deadline and returns DeadlineExceeded, naming the key, when it passes. A key is set once by one rank
// and then read by others; setting it again replaces the value. Thread-safe: any thread of any rank may call at any
// time.
class DDP_EXPORT Store {
 public:
  virtual ~Store() = default;

  // Makes `value` (any bytes) visible under `key` to all ranks.
  virtual absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) = 0;

  // The value of `key`; waits until some rank has set it.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) = 0;

  // Adds `delta` to the integer at `key` (0 at first) as one indivisible step and returns the new value. Keys used with
  // Add are not used with Set or Get.
  virtual absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) = 0;
};

// A store for ranks that are threads of one process. Share one object among them.
DDP_EXPORT std::shared_ptr<Store> CreateMemoryStore();

struct FileStoreOptions {
  // The file; created if missing, in a folder that exists and that all ranks see. Not on NFS: it relies on flock.
  std::string path;
  // Tells one run from the next: keys of other runs found in the file are not seen. The same on all ranks.
  std::string run_id;
  // When so many stores have opened the file, its name is removed, so that nothing is left behind whatever becomes of
  // the ranks; those stores go on using it. 0: the name is left in place.
  int world_size = 0;
};

// A store in one append-only file, for ranks of one host. One run at a time uses a path; each process opens the file
// for itself (after fork, not before). InvalidArgument or PermissionDenied (naming the path) if the file cannot be
// used, DataLoss if it holds something else.
//
// Ranks of two runs that are under way at once do not share a path: the later ones get FailedPrecondition.
DDP_EXPORT absl::StatusOr<std::shared_ptr<Store>> CreateFileStore(FileStoreOptions options);

struct TcpStoreOptions {
  // Name or address of the host whose rank serves, as all ranks reach it. Empty: all ranks are on this host, and the
  // store is reached through the loopback interface only.
  std::string host;
  // 1 to 65535; the same on all ranks, and free on the serving host.
  int port = 0;
  // Whether this process runs the server: true on exactly one rank, usually rank 0.
  bool serve = false;
  // Tells one run from the next. The same on all ranks; ranks of another run are refused.
  std::string run_id;
  // What all ranks know and nobody else. Empty: DDP_STORE_SECRET; without that, on one host, the server puts a random
  // one into a file that only this user can read, and on several hosts InvalidArgument says what to set.
  std::string secret;
  // The number of ranks: when all have come the secret's file is removed. 0: it stays until the server ends.
  int world_size = 0;
  // How long the server may take to appear.
  absl::Duration timeout = absl::Minutes(10);
  // How long the server's destructor goes on serving ranks that have not left yet.
  absl::Duration shutdown_timeout = absl::Seconds(10);
};

// A store served by one of the ranks over TCP, for ranks that have no folder in common. Each rank makes its own; the
// object owns a thread. Not after fork.
//
// Client and server prove to each other that they know the secret (HMAC-SHA256 over fresh random numbers), so a
// stranger who connects gets nothing and cannot take a rank's place. What follows is neither encrypted nor signed: use
// it on a network whose wires you trust. A server that does not answer is given up two seconds after a call's deadline.
//
// Errors, also of calls later on: InvalidArgument (an option; or the port is in use, or served by something else),
// DeadlineExceeded (no server within `timeout`), PermissionDenied (another secret), FailedPrecondition (another run),
// Unavailable (the server has gone).
DDP_EXPORT absl::StatusOr<std::shared_ptr<Store>> CreateTcpStore(TcpStoreOptions options);

}  // namespace ddp

#endif  // DDP_STORE_H_
