// SPDX-License-Identifier: Apache-2.0
// Sockets that stay with the process that made them. Asio's own are passed on to every program that the process starts:
// a child that outlives its rank would keep the port in use, and the peers in the belief that the rank is still there.
#ifndef LIBDDP_LAUNCH_STORE_SOCKET_H_
#define LIBDDP_LAUNCH_STORE_SOCKET_H_

#include <system_error>

#include "libddp/launch/asio.h"

namespace ddp {

// Opens `socket`, which is closed. Close-on-exec from the start, so that no other thread's child can have it.
void OpenSocket(asio::ip::tcp protocol, asio::ip::tcp::socket* socket, std::error_code* error);
void OpenAcceptor(asio::ip::tcp protocol, asio::ip::tcp::acceptor* acceptor, std::error_code* error);

// The next connection of an acceptor that does not block; would_block if there is none (any more).
asio::ip::tcp::socket AcceptSocket(asio::ip::tcp::acceptor* acceptor, std::error_code* error);

// Ends what is open for all who have it. A child by fork has the descriptors too, and closing ours alone would not end
// the connection, nor free the port.
void HangUp(asio::ip::tcp::socket* socket);
void HangUp(asio::ip::tcp::acceptor* acceptor);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_STORE_SOCKET_H_
