// SPDX-License-Identifier: Apache-2.0
// Ports of this host's loopback interface.
#ifndef TESTS_SUPPORT_FREE_PORT_H_
#define TESTS_SUPPORT_FREE_PORT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <random>

namespace ddp::testing {

inline sockaddr_in LoopbackAddress(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// That nobody has now. Below the range from which the system gives ports to those who ask for any: theirs come at any
// time.
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

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FREE_PORT_H_
