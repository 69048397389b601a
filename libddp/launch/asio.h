// SPDX-License-Identifier: Apache-2.0
// Asio in a namespace of the library's own. Asio is headers only, exports its symbols, and gives them the same names in
// every version: a program that uses another version would call the library's functions with its own types, or the
// reverse.
#ifndef LIBDDP_LAUNCH_ASIO_H_
#define LIBDDP_LAUNCH_ASIO_H_

#define asio ddp_asio
#define asio_detail_posix_thread_function ddp_asio_detail_posix_thread_function
#define asio_signal_handler ddp_asio_signal_handler
#include <asio.hpp>
#undef asio_signal_handler
#undef asio_detail_posix_thread_function
#undef asio

namespace ddp {
namespace asio = ::ddp_asio;
}

#endif  // LIBDDP_LAUNCH_ASIO_H_
