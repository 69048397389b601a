// SPDX-License-Identifier: Apache-2.0
// A program that uses an Asio of its own, another version than libddp's: the scheduler has another layout. The program
// and the library must each call their own.
#include <asio.hpp>
#include <chrono>
#include <cstdio>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "ddp/store.h"

int main() {
  const asio::detail::scheduler* const scheduler = nullptr;
  static_assert(sizeof(scheduler->layout_of_another_version) > 0, "this is not the modified Asio");

  asio::io_context io;
  int fired = 0;
  asio::steady_timer timer(io, std::chrono::milliseconds(1));
  timer.async_wait([&fired](const std::error_code&) { ++fired; });
  io.run();

  // The first free port of a range that no other test uses.
  for (int port = 24100; port < 24150; ++port) {
    const absl::StatusOr<std::shared_ptr<ddp::Store>> store =
        ddp::CreateTcpStore({.port = port, .serve = true, .secret = "of this test", .world_size = 1});
    if (absl::IsInvalidArgument(store.status())) continue;  // in use
    absl::Status status = store.status();
    if (status.ok()) status = (*store)->Set("key", "value", absl::Now() + absl::Seconds(10));
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok() && fired == 1 ? 0 : 1;
  }
  std::fprintf(stderr, "no free port\n");
  return 1;
}
