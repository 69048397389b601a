// SPDX-License-Identifier: Apache-2.0
// Where a test's TCP store is: a free port, and a folder of the test's own where secrets are kept.
#ifndef TESTS_UNIT_STORE_PLACE_H_
#define TESTS_UNIT_STORE_PLACE_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <random>

#include "absl/time/time.h"
#include "ddp/store.h"
#include "tests/unit/store_contract.h"

namespace ddp {

inline sockaddr_in LoopbackAddress(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Below the range from which the system gives ports to those who ask for any.
inline int FreePort() {
  static std::mt19937 random(std::random_device{}());
  while (true) {
    const int port = 15000 + static_cast<int>(random() % 15000);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = LoopbackAddress(port);
    const bool free = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (free) return port;
  }
}

struct Place {
  Place() { setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1); }
  ~Place() { unsetenv("XDG_RUNTIME_DIR"); }

  TcpStoreOptions Options(bool serve) const {
    TcpStoreOptions options;
    options.port = port;
    options.serve = serve;
    options.run_id = "run";
    options.timeout = absl::Seconds(60);
    return options;
  }
  TcpStoreOptions Hurried() const {
    TcpStoreOptions options = Options(false);
    options.timeout = absl::Milliseconds(300);
    return options;
  }

  const Folder folder;
  const int port = FreePort();
};

}  // namespace ddp

#endif  // TESTS_UNIT_STORE_PLACE_H_
