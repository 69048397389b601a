// SPDX-License-Identifier: Apache-2.0
// The server of a TCP store: sockets and time-outs around StoreService.
#ifndef LIBDDP_LAUNCH_STORE_SERVER_H_
#define LIBDDP_LAUNCH_STORE_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp {

struct StoreServerOptions {
  int port = 0;
  bool loopback_only = true;
  std::string secret;  // empty: a random one in a SecretFile
  std::string run_id;
  int world_size = 0;  // when so many clients have come, the SecretFile is removed; 0: at the end
  absl::Duration shutdown_timeout;
};

// Serves in a thread of its own. Who does not prove that it knows the secret is dropped after a few seconds; when many
// such connections are open, the oldest is dropped for each new one, so that they cannot keep out a rank.
class StoreServer {
 public:
  // InvalidArgument, with the remedy, if the port is in use or may not be used.
  static absl::StatusOr<std::unique_ptr<StoreServer>> Start(StoreServerOptions options);

  // Goes on serving the clients that are connected until they have left, at most for shutdown_timeout.
  virtual ~StoreServer() = default;
};

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_STORE_SERVER_H_
