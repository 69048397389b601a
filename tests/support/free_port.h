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
// time. No other process gets it from here while this one lives, which keeps the UDP port of the same number.
inline int FreePort() {
  static std::mt19937 random(std::random_device{}());
  const auto take = [](int type, const sockaddr_in& address) {
    const int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
    close(fd);
    return -1;
  };
  while (true) {
    const int port = 15000 + static_cast<int>(random() % 5000);
    const int kept = take(SOCK_DGRAM, LoopbackAddress(port));
    const int tried = kept < 0 ? -1 : take(SOCK_STREAM, LoopbackAddress(port));
    close(tried < 0 ? kept : tried);
    if (tried >= 0) return port;
  }
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FREE_PORT_H_
