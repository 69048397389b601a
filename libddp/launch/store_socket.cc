// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/store_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace ddp {
namespace {

using asio::ip::tcp;

template <typename Socket>
void AdoptSocket(int fd, tcp protocol, Socket* socket, std::error_code* error) {
  if (fd < 0) {
    error->assign(errno, asio::error::get_system_category());
    return;
  }
  socket->assign(protocol, fd, *error);
  if (*error) close(fd);
}

int NewSocket(tcp protocol) { return ::socket(protocol.family(), SOCK_STREAM | SOCK_CLOEXEC, protocol.protocol()); }

}  // namespace

void OpenSocket(tcp protocol, tcp::socket* socket, std::error_code* error) {
  AdoptSocket(NewSocket(protocol), protocol, socket, error);
}

void OpenAcceptor(tcp protocol, tcp::acceptor* acceptor, std::error_code* error) {
  AdoptSocket(NewSocket(protocol), protocol, acceptor, error);
}

tcp::socket AcceptSocket(tcp::acceptor* acceptor, std::error_code* error) {
  tcp::socket socket(acceptor->get_executor());
  const tcp::endpoint endpoint = acceptor->local_endpoint(*error);
  if (*error) return socket;
  int fd = -1;
  do {
    fd = accept4(acceptor->native_handle(), nullptr, nullptr, SOCK_CLOEXEC);
    // A connection that has ended before we came is no reason to stop.
  } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED || errno == EPROTO));
  AdoptSocket(fd, endpoint.protocol(), &socket, error);
  return socket;
}

void HangUp(tcp::socket* socket) {
  if (!socket->is_open()) return;
  std::error_code ignored;
  socket->shutdown(tcp::socket::shutdown_both, ignored);
  socket->close(ignored);
}

void HangUp(tcp::acceptor* acceptor) {
  if (!acceptor->is_open()) return;
  std::error_code ignored;
  (void)shutdown(acceptor->native_handle(), SHUT_RDWR);  // Asio has no call for it
  acceptor->close(ignored);
}

}  // namespace ddp
